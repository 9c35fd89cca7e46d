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

Ways = tuple[str, str, str]  # to decode plainly, to look up the prompt, to draft with a model


def export(plan: Plan, engine: str) -> str:
    """Return the plan for one of `ENGINES`, as text. Raises ValueError for others, and for drafts they do not have."""
    check_export(engine, plan.models.target)
    if plan.models.adapter:
        raise ValueError(f"{engine} would need a model with its adapter merged: save one, and plan for that.")
    draft = plan.models.draft
    term = DrafterTerm("model") if draft is None else parse(draft)
    if not isinstance(term, DrafterTerm) or term.kind not in THEIRS:
        raise ValueError(f"a draft like {draft} is ours alone: {engine} drafts with models and by prompt lookup.")
    # Engines take a single gamma: the greatest that is planned, usually that of the fewest rows.
    plain, lookup, model = ENGINES[engine](plan, max(plan.gammas.values()), term.value)
    if not plan.speculates:
        return f"{plain}  # do not speculate"
    return lookup if term.kind == LOOKUP else model


def check_export(engine: str, target: str | None) -> None:
    if engine not in ENGINES:
        raise ValueError(f"--export {engine} is not known: use {', '.join(ENGINES)}.")
    if target is None:
        raise ValueError("the embedded pair lives in this package: plan for models of your own to export them.")


def _transformers(plan: Plan, gamma: int, draft: str) -> Ways:
    """Return Python code for assisted generation, whose batch size is 1; the draft's own config sets the gamma."""
    sampling = "do_sample=False"
    if plan.temperature:
        sampling = f"do_sample=True, temperature={plan.temperature:g}, top_k=0, top_p=1.0"
    loaded = f'AutoModelForCausalLM.from_pretrained({{!r}}, dtype="{plan.models.dtype}")'
    head = f"from transformers import AutoModelForCausalLM\n\ntarget = {loaded.format(plan.models.target)}\n"
    assistant = (
        f"draft = {loaded.format(draft)}\n"
        f"draft.generation_config.num_assistant_tokens = {gamma}\n"
        'draft.generation_config.num_assistant_tokens_schedule = "constant"\n'
        "draft.generation_config.assistant_confidence_threshold = 0.0\n"
    )
    return (
        f"{head}target.generate(**inputs, {sampling})",
        f"{head}target.generate(**inputs, prompt_lookup_num_tokens={gamma}, {sampling})",
        f"{head}{assistant}target.generate(**inputs, assistant_model=draft, {sampling})",
    )


def _vllm(plan: Plan, gamma: int, draft: str) -> Ways:
    command = f"vllm serve {_quoted(plan.models.target)} --dtype {plan.models.dtype}"
    numbers: dict[str, Any] = {"num_speculative_tokens": gamma}
    if len(set(plan.gammas.values())) > 1:
        starts = pairwise([0, *sorted(plan.gammas)])
        table = [[last + 1, rows, plan.gammas[rows]] for last, rows in starts]
        numbers["num_speculative_tokens_per_batch_size"] = table
    sampled = {"draft_sample_method": "probabilistic"} if plan.temperature else {}
    configs = ({"method": "ngram"}, {"method": "draft_model", "model": draft, **sampled})
    lookup, model = (shlex.quote(json_text({**config, **numbers})) for config in configs)
    return command, f"{command} --speculative-config {lookup}", f"{command} --speculative-config {model}"


def _sglang(plan: Plan, gamma: int, draft: str) -> Ways:
    """Return the command for SGLang: gamma steps of one candidate each; its draft tokens include the pending token."""
    command = f"python -m sglang.launch_server --model-path {_quoted(plan.models.target)} --dtype {plan.models.dtype}"
    size = f"--speculative-num-draft-tokens {gamma + 1}"
    chain = f"--speculative-num-steps {gamma} --speculative-eagle-topk 1 {size}"
    model = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {_quoted(draft)}"
    exact = " --speculative-use-rejection-sampling" if plan.temperature else ""
    return command, f"{command} --speculative-algorithm NGRAM {size}", f"{command} {model} {chain}{exact}"


def _llama_cpp(plan: Plan, gamma: int, draft: str) -> Ways:
    """Return the command for llama.cpp, with both models as GGUF files, made by its convert_hf_to_gguf.py."""
    command = f"llama-server -m {_quoted(f'{plan.models.target}.gguf')}"
    lookup = f"--spec-type ngram-simple --spec-ngram-simple-size-m {gamma}"
    model = f"--spec-type draft-simple --spec-draft-model {_quoted(f'{draft}.gguf')} --spec-draft-n-max {gamma}"
    sampling = " --spec-draft-sampling probabilistic" if plan.temperature else ""
    return command, f"{command} {lookup}", f"{command} {model} --spec-draft-p-min 0.0{sampling}"


def _quoted(text: str | None) -> str:
    return shlex.quote(text or "")


ENGINES: dict[str, Callable[[Plan, int, str], Ways]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
}
