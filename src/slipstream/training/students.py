"""Students: new draft models of a target's own architecture and tokenizer, and saving them with a model card."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from slipstream.core.values import check_least, first_sentence
from slipstream.files import JsonObject, Name, atomic_folder
from slipstream.text.jsontext import json_text
from slipstream.training.distill import TEMPERATURES, DistillSettings, DraftCosts, Measurement

INNER = dict.fromkeys(
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size", "d_ff"), 8
)
INNER |= dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_d_ssm"), 1)
"""The names of sizes inside layers in configurations, which follow the width, and what they are multiples of."""

OUTER = ("hidden_size", "word_embed_proj_dim", "embedding_size", "attention_hidden_size")
"""The names of a model's width in configurations; those after the first are changed only if they equal it."""

HEADS = ("num_attention_heads", "num_heads")  # the names of the number of heads, the second in Mamba-2
COUNTS = ("max_window_layers", "num_kv_shared_layers")  # numbers of layers that shrink with the number of all
WHOLE = ("full_attention", "attention")  # the kinds of layers that see the whole text

SHALLOW = 0.75
"""The power of the share of parameters by which the number of layers shrinks; the width makes up the rest.

Drafting steps run one after the other, so few wide layers are faster than many narrow ones of as many parameters.
"""


@dataclass(frozen=True)
class Size:
    """The size of a student: the number of `layers` and their `width`, to which heads are in proportion."""

    layers: int
    width: int

    def __post_init__(self) -> None:
        check_least(self, layers=1, width=1)

    def __str__(self) -> str:
        return f"{self.layers} layer{'s' * (self.layers > 1)} of width {self.width}"


def _copy_of(target: PreTrainedConfig) -> tuple[Any, str | None, int]:
    """Return a copy of the configuration of a target's texts, the name of its number of heads (None: it has no heads),
    and the size of one. Its layers differ only as the constructor makes them differ (Gemma 4)."""
    own: Any = target.get_text_config()
    config: Any = type(own).from_dict(own.to_dict())  # without the attention implementation of the target's packed twin
    if getattr(config, "is_heterogeneous", False):
        config.per_layer_config = None
    heads = next((name for name in HEADS if getattr(config, name, None)), None)
    return config, heads, getattr(config, "head_dim", None) or config.hidden_size // getattr(config, heads or "", 8)


def student_config(target: PreTrainedConfig, size: Size) -> PreTrainedConfig:
    """Return the configuration of a target at another size. Raises ValueError if no model of it can be made."""
    config, heads, unit = _copy_of(target)
    layers, width = config.num_hidden_layers, config.hidden_size
    for name in OUTER:
        if getattr(config, name, None) == width:
            setattr(config, name, size.width)
    for name, part in INNER.items():
        if isinstance(inner := getattr(config, name, None), int):
            setattr(config, name, max(part, round(inner * size.width / width / part) * part))
    if heads is not None:
        many = getattr(config, heads)
        fewer = max(1, round(size.width / width * many))
        if size.width % fewer:
            raise ValueError(f"width={size.width} is not possible with {fewer} heads: take a multiple of {unit}.")
        setattr(config, heads, fewer)
        if shared := getattr(config, "num_key_value_heads", None):
            most = max(1, fewer * shared // many)
            config.num_key_value_heads = next(some for some in range(most, 0, -1) if fewer % some == 0)
    config.num_hidden_layers = size.layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers and name.endswith(("types", "block_type")):
            # Some models do not run without a layer that sees the whole text: the first one comes first.
            first = next((place for place, kind in enumerate(value) if kind in WHOLE), 0)
            setattr(config, name, [*value[first:], *value[:first]][: size.layers])
    for name in COUNTS:
        if isinstance(some := getattr(config, name, None), int):
            setattr(config, name, some * size.layers // layers)
    config.name_or_path = ""
    return config


def _made(config: PreTrainedConfig, **how: Any) -> Any:
    """Return a model of a configuration, as it will be saved and loaded. Raises ValueError if there is none."""
    try:
        return AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()), **how)
    except Exception as error:  # sizes that do not fit each other raise errors of any type
        kind = config.model_type
        raise ValueError(
            f"no {kind} model of this size can be made ({first_sentence(error)}): give --layers and --width that fit, "
            "or an existing draft."
        ) from error


def parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return int(_made(config).num_parameters())


def size_for(target: PreTrainedConfig, share: float) -> Size:
    """Return a size with about this share of a target's parameters. Raises ValueError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ValueError(f"size={share:g} is not possible: it is a share of the target, between 0 and 1.")
    config, _, unit = _copy_of(target)
    layers = max(1, round(config.num_hidden_layers * share**SHALLOW))
    widths = range(unit, config.hidden_size + 1, unit) or (config.hidden_size,)
    goal = share * parameters(target.get_text_config())
    return min(
        (Size(layers, width) for width in widths), key=lambda size: abs(parameters(student_config(target, size)) - goal)
    )


def new_student(target: PreTrainedModel, size: Size, seed: int = 0) -> PreTrainedModel:
    """Make an untrained student in float32 on the target's device.

    Its embeddings, the slowest part to learn, begin as the target's projected to their main directions. Raises
    ValueError if no model of this size can be made.
    """
    torch.manual_seed(seed)
    student: PreTrainedModel = _made(student_config(target.config, size), dtype=torch.float32)
    ours, wide = student.get_input_embeddings().weight, target.get_input_embeddings().weight.detach().float().cpu()
    if ours.shape[0] == wide.shape[0] and ours.shape[1] <= wide.shape[1]:
        directions = torch.linalg.svd(wide, full_matrices=False).Vh[: ours.shape[1]]
        with torch.no_grad():
            ours.copy_(wide @ directions.T)
    return student.to(target.device)


REPORT = "distillation.json"
"""The file in a draft's folder that describes its training, and marks the folder as written by us."""

FORMAT = "slipstream distilled draft"
KIND = JsonObject("distilled draft", {"format": FORMAT})

_CARD = """\
---
base_model: {target}
library_name: transformers
tags: [speculative-decoding, draft]
---
# A draft for {target}

A small model that guesses what `{target}` says next, for speculative decoding. It was trained for that alone, by
`slipstream distill`, and is of little use by itself.

    slipstream generate "..." --target {target} --draft {name}

{parameters:,} parameters ({size}), {origin}. {steps:,} steps, {tokens:,} tokens read, {seconds:,.0f} seconds; objective
`{objective}`; texts: {data}, and {written:,} tokens that the target wrote.

| temperature | alpha | kept at least 1, 2, ... tokens | best gamma | speed-up by Theorem 3.8 |
|---|---|---|---|---|
{rows}

Measured on {prompts} prompts kept aside, {new_tokens} new tokens each. The speed-ups follow from costs on the machine
that trained it: a drafting step takes {c:.3f} of a step of the target.
"""


@dataclass(frozen=True)
class Distilled:
    """The facts of a distilled draft for its report and card: target, data, size, training and measurements."""

    target: str
    data: tuple[str, ...]
    size: str
    origin: str
    parameters: int
    steps: int
    tokens: int
    seconds: float
    written: int
    prompts: int
    costs: DraftCosts
    settings: DistillSettings
    measured: tuple[Measurement, ...]

    def as_dict(self) -> dict[str, Any]:
        last = self.measured[-1]
        gain = dict(zip(map(str, TEMPERATURES), last.gains, strict=True))
        alpha = dict(zip(map(str, TEMPERATURES), last.alpha, strict=True))
        return {"format": FORMAT, **asdict(self), "alpha": alpha, "speed_up": gain}

    def card(self, name: str) -> str:
        last = self.measured[-1]
        columns = zip(TEMPERATURES, last.alpha, last.kept, last.gammas, last.gains, strict=True)
        rows = [
            f"| {temperature:g} | {alpha:.3f} | {' '.join(f'{one:.2f}' for one in kept)} | {gamma} | {gain:.2f} |"
            for temperature, alpha, kept, gamma, gain in columns
        ]
        facts = {**asdict(self), "data": ", ".join(f"`{one}`" for one in self.data), "rows": "\n".join(rows)}
        how = {"objective": self.settings.objective, "new_tokens": self.settings.new_tokens, "c": self.costs.c}
        return _CARD.format(**{**facts, **how}, name=name)


def check_draft_folder(out: Name) -> None:
    """Check, before any work, that a draft may be written there: to an empty folder, or over a distilled draft."""
    folder, report = Path(out), Path(out) / REPORT
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot write {out}: it is a file; give a folder for the draft.")
    if folder.is_dir() and any(folder.iterdir()) and not (report.is_file() and KIND.recognises(report)):
        raise ValueError(f"cannot write {out}: it holds files and no draft of `slipstream distill`; give a new folder.")


def save_draft(model: PreTrainedModel, tokenizer: Any, about: Distilled, out: Name) -> None:
    """Write the draft, its tokenizer, its card and its report, all or nothing. Raises ValueError if it may not."""
    check_draft_folder(out)
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(about.card(Path(out).name), encoding="utf-8")
        (folder / REPORT).write_text(json_text(about.as_dict()), encoding="utf-8")
