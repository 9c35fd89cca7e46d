"""`ModelOptions`: how models are loaded, each option declared once, as those of a call are in `options`.

To add one, write it here, and use it where it acts, such as in `models/loading/load.py`, which gets those of the group
"target" that were given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from typing import Any, Literal

from slipstream.core.options import declared, option

DEVICES = str | dict[str, Any]  # the kind of `device_map`
RANKS = Literal["auto"] | dict[str, str]  # the kind of `tp_plan`
FLOATS = Literal["float32", "bfloat16", "float16"]
DTYPES = Literal["auto", "float32", "bfloat16", "float16"]

DRAFTS = (  # the forms of drafts besides names of models, for users; the table is `drafters.kinds.KINDS`
    *("int4", "int8", "window:N", "lookup", "ngram:FILE", "datastore:DIR", "exit:LAYERS", "eagle3:NAME", "dflash:NAME"),
    *("phrases:FILE", "mtp", "tcp://HOST:PORT", "embedded", "plain"),
)
MORE = "(docs/drafts.md). Or --draft-model. Without: the one declared for the target, else plain."


def model_option(default: Any, group: str, help: str, metavar: str = "", kind: Any = str, **rest: Any) -> Any:
    return option(default, help, metavar=metavar, kind=kind, group=group, **rest)


@dataclass(frozen=True)
class ModelOptions:
    """A target, a draft, and how they are loaded; `from_pretrained` are further arguments of transformers."""

    target: Any = model_option(
        *(None, "pair"),
        "Hub name, folder, .gguf file, or smollm2 (or --model). Without: the embedded pair (chat, serve: smollm2).",
        "MODEL",
    )
    draft: Any = model_option(
        *(
            None,
            "pair",
            f"Hub name or folder, {', '.join(DRAFTS)}; chains 'a>b', choices 'a|b' and 'a||b' {MORE}",
            "DRAFT",
        ),
        changes=False,
    )
    gamma: Any = model_option(
        *(None, "rounds", "Tokens drafted per round (or --num-speculative-tokens); auto: as many as pay.", "N|auto"),
        kind=int | str,
        changes=False,
    )
    tree: Sequence[int] | None = model_option(
        *(None, "tree", "Candidates per level instead of a chain, e.g. 3,2,1.", "K,K,..", tuple[int, ...]),
        changes=False,
    )
    verify: Any = model_option(
        *(None, "rounds"),
        "token, block, match, coupled (a seed's text is the same with any draft), gbv:K (K paths a round), lenient:L.",
        "RULE",
    )
    plan: Any = model_option(None, "plan", "A plan of `slipstream plan`; options given here come first.", "FILE")
    exact_shape: bool = model_option(
        *(False, "shape", "Run the target in one shape: same bits with and without a draft.", "", bool), changes=False
    )
    task: Any = model_option(
        *(None, "task"),
        "Of an encoder-decoder: translation_en_to_de, 'eng_Latn>deu_Latn', or text before each source, 'summarize: '.",
        "TASK",
    )
    compile: bool = model_option(
        *(False, "compile", "Capture passes as graphs first (GPU); pack a loaded model (CPU).", "", bool), changes=False
    )
    batch_size: int = model_option(
        *(8, "rows", "Prompts that run together.", "N", int), words="at least 1", bounds="[1, inf)", changes=False
    )
    threads: int | None = model_option(
        *(None, "threads", "Threads on CPUs. Without: as many as this process has cores for.", "N", int),
        words="at least 1",
        bounds="[1, inf)",
        changes=False,
    )
    dtype: Any = model_option("auto", "target", "Of the weights: auto, float32, bfloat16 or float16.", "NAME", DTYPES)
    device: str | None = model_option(
        *(None, "target", "cpu, cuda, cuda:1, mps ... Without: a GPU if there is one.", "NAME"),
        changes=False,
        one_piece="every rank takes the device of its own number",
    )
    quantize: Any = model_option(
        *(
            None,
            "target",
            "int8 or int4: the target's weights, which makes another model (or --draft int4, exact).",
            "NAME",
        ),
        one_piece="its kernels are for models in one piece",
    )
    activations: str | None = model_option(
        *(None, "target"),
        "Of a quantized checkpoint: int8 rounds the inputs of its layers (as llama.cpp does), float leaves them.",
        "NAME",
        Literal["int8", "float"],
    )
    dequantize: bool = model_option(
        False, "target", "Load the weights of a quantized checkpoint as plain numbers.", "", bool
    )
    adapter: Any = model_option(
        None, "target", "A LoRA adapter, merged into the target's weights: a folder or hub name.", "DIR"
    )
    kv_dtype: str | None = model_option(
        *(None, "target", "Of the target's cache: int8 halves it, which makes another model.", "NAME", Literal["int8"]),
        one_piece="every rank keeps the type of its part",
    )
    encoder_dtype: Any = model_option(
        *(None, "target", "Of an encoder-decoder's encoder alone. Without: as --dtype.", "NAME", FLOATS),
        one_piece="every rank reads its part in one dtype",
    )
    device_map: Any = model_option(
        *(None, "target", "Spread the target's layers over devices: auto, balanced, or {layers: device}.", "NAME|JSON"),
        kind=DEVICES,
        changes=False,
        one_piece="a model is either divided or spread",
    )
    tp_plan: Any = model_option(
        *(None, "target", "Divide the target among the processes that torchrun starts."),
        kind=RANKS,
        flag="--tensor-parallel",
        changes=False,
    )
    generation_config: Any = model_option(
        None, "target", "Of the model, for what a call leaves out: auto (its own), none or a folder.", "auto|none|DIR"
    )
    trust_remote_code: bool = model_option(
        *(False, "target", "Run Python code that comes with the target: read it first.", "", bool), changes=False
    )
    tokenizer: Any = None
    processor: Any = None
    from_pretrained: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(target: Any = None, draft: Any = None, **given: Any) -> ModelOptions:
        """Return the options for the arguments of `load`: what none of them is goes to `from_pretrained`."""
        names = [each.name for each in fields(ModelOptions)]
        known = {name: value for name, value in given.items() if name in names}
        more = {name: value for name, value in given.items() if name not in names}
        return ModelOptions(target, draft, **known, from_pretrained=more)

    def given(self, *groups: str) -> dict[str, Any]:
        """Return the options of these groups, or of all, that differ from their defaults."""
        chosen = [each for each in MODEL_OPTIONS.values() if not groups or each.group in groups]
        return {each.name: value for each in chosen if (value := getattr(self, each.name)) != each.default}

    def over(self, plan: ModelOptions) -> ModelOptions:
        """Return these options, where they are not given with those of a plan."""
        return replace(self, **{**plan.given(), **self.given()})

    def for_target(self) -> dict[str, Any]:
        """Return the further arguments of `load_model` for the target."""
        # Without those that the draft has too, or that others than `load_model` read.
        apart = ("dtype", "device", "quantize", "kv_dtype", "tp_plan", "generation_config")
        target = {name: value for name, value in self.given("target").items() if name not in apart}
        return {**target, **self.from_pretrained}


MODEL_OPTIONS = declared(ModelOptions)  # all options of models, by their names


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of a function with the options by their names in place of `**options`."""
    given = signature(function, eval_str=True).parameters.values()
    own = [each for each in given if each.kind != Parameter.VAR_KEYWORD]
    more = [each for each in fields(ModelOptions) if each.name not in ("target", "draft", "from_pretrained")]
    named = [Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default) for each in more]
    return Signature([*own, *named, Parameter("from_pretrained", Parameter.VAR_KEYWORD)])
