"""A plan as code, options or a command line for other engines, ready to paste.

Names are those of transformers 5, vLLM (`--speculative-config`), SGLang (`--speculative-*`) and llama.cpp
(`--spec-*`). Their engines draft with models and by looking up the prompt; all other drafts only exist here.
"""

import shlex
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from slipstream.drafters.specification import DrafterTerm, parse
from slipstream.engine.plan_file import Plan
from slipstream.text.jsontext import json_text

LOOKUP = "lookup"
THEIRS = ("model", LOOKUP)  # the kinds of drafts that other engines have too


def export(plan: Plan, engine: str) -> str:
    """Return the plan for one of `ENGINES`, as text. Raises ValueError for others, and for drafts they do not have."""
    check_export(engine, plan.models.target)
    if plan.models.adapter:
        raise ValueError(f"{engine} would need a model with its adapter merged: save one, and plan for that.")
    if plan.models.draft is not None and _part(plan.models.draft).kind not in THEIRS:
        raise ValueError(
            f"a draft like {plan.models.draft} is ours alone: {engine} drafts with models and by prompt lookup."
        )
    return ENGINES[engine](plan)


def check_export(engine: str, target: str | None) -> None:
    if engine not in ENGINES:
        raise ValueError(f"--export {engine} is not known: use {', '.join(ENGINES)}.")
    if target is None:
        raise ValueError("the embedded pair lives in this package: plan for models of your own to export them.")


def _gamma(plan: Plan) -> int:
    """Return the greatest planned gamma, usually that of the fewest rows, for engines that take a single one."""
    return max(plan.gammas.values())


def _is_lookup(plan: Plan) -> bool:
    return plan.models.draft is not None and _part(plan.models.draft).kind == LOOKUP


def _model(plan: Plan) -> str:
    return _part(plan.models.draft or "").value


def _part(draft: str) -> DrafterTerm:
    """Return the draft's part of the specification; chains and choices become a kind that no other engine has."""
    syntax = parse(draft)
    return syntax if isinstance(syntax, DrafterTerm) else DrafterTerm(type(syntax).__name__)


def _transformers(plan: Plan) -> str:
    """Return Python code for assisted generation, whose batch size is 1; the draft's own config sets the gamma."""
    sampling = "do_sample=False"
    if plan.temperature:
        sampling = f"do_sample=True, temperature={plan.temperature:g}, top_k=0, top_p=1.0"
    head = [
        "from transformers import AutoModelForCausalLM",
        "",
        f'target = AutoModelForCausalLM.from_pretrained({plan.models.target!r}, dtype="{plan.models.dtype}")',
    ]
    if not plan.speculates:
        return "\n".join([*head, f"target.generate(**inputs, {sampling})  # do not speculate"])
    if _is_lookup(plan):
        return "\n".join([*head, f"target.generate(**inputs, prompt_lookup_num_tokens={_gamma(plan)}, {sampling})"])
    return "\n".join(
        [
            *head,
            f'draft = AutoModelForCausalLM.from_pretrained({_model(plan)!r}, dtype="{plan.models.dtype}")',
            f"draft.generation_config.num_assistant_tokens = {_gamma(plan)}",
            'draft.generation_config.num_assistant_tokens_schedule = "constant"',
            "draft.generation_config.assistant_confidence_threshold = 0.0",
            f"target.generate(**inputs, assistant_model=draft, {sampling})",
        ]
    )


def _vllm(plan: Plan) -> str:
    command = f"vllm serve {_quoted(plan.models.target)} --dtype {plan.models.dtype}"
    if not plan.speculates:
        return f"{command}  # do not speculate"
    config: dict[str, Any] = {"method": "draft_model", "model": _model(plan)}
    if _is_lookup(plan):
        config = {"method": "ngram"}
    elif plan.temperature:
        config["draft_sample_method"] = "probabilistic"
    config["num_speculative_tokens"] = _gamma(plan)
    if len(set(plan.gammas.values())) > 1:
        starts = pairwise([0, *sorted(plan.gammas)])
        table = [[last + 1, rows, plan.gammas[rows]] for last, rows in starts]
        config["num_speculative_tokens_per_batch_size"] = table
    return f"{command} --speculative-config {shlex.quote(json_text(config))}"


def _sglang(plan: Plan) -> str:
    """Return the command for SGLang: gamma steps of one candidate each; its draft tokens include the pending token."""
    command = f"python -m sglang.launch_server --model-path {_quoted(plan.models.target)} --dtype {plan.models.dtype}"
    if not plan.speculates:
        return f"{command}  # do not speculate"
    size = f"--speculative-num-draft-tokens {_gamma(plan) + 1}"
    if _is_lookup(plan):
        return f"{command} --speculative-algorithm NGRAM {size}"
    chain = f"--speculative-num-steps {_gamma(plan)} --speculative-eagle-topk 1 {size}"
    draft = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {_quoted(_model(plan))}"
    exact = " --speculative-use-rejection-sampling" if plan.temperature else ""
    return f"{command} {draft} {chain}{exact}"


def _llama_cpp(plan: Plan) -> str:
    """Return the command for llama.cpp, with both models as GGUF files, made by its convert_hf_to_gguf.py."""
    command = f"llama-server -m {_quoted(f'{plan.models.target}.gguf')}"
    if not plan.speculates:
        return f"{command}  # do not speculate"
    if _is_lookup(plan):
        return f"{command} --spec-type ngram-simple --spec-ngram-simple-size-m {_gamma(plan)}"
    draft = f"--spec-type draft-simple --spec-draft-model {_quoted(f'{_model(plan)}.gguf')}"
    sampling = " --spec-draft-sampling probabilistic" if plan.temperature else ""
    return f"{command} {draft} --spec-draft-n-max {_gamma(plan)} --spec-draft-p-min 0.0{sampling}"


def _quoted(text: str | None) -> str:
    return shlex.quote(text or "")


ENGINES: dict[str, Callable[[Plan], str]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
}
