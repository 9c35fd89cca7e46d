"""Finding a model's decoder layers, naming some of them, and running a model with only those."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slipstream.core.protocols import HasModel


def kept_layers(layers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return the layers to run, in order; a number stands for the first ones. Raises ValueError for impossible ones."""
    if isinstance(layers, int):
        if not 1 <= layers < count:
            raise ValueError(f"an exit after {layers} layers is not possible: the target has {count}, leave some out.")
        return tuple(range(layers))
    kept = tuple(layers)
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < count or len(kept) == count:
        raise ValueError(
            f"layers {spell(kept)!r} are not possible: name some of 0..{count - 1} in their order, each once, not all."
        )
    return kept


def spell(layers: Sequence[int]) -> str:
    kept = tuple(layers)
    if kept and kept == tuple(range(len(kept))):
        return str(len(kept))
    runs: list[list[int]] = []
    for layer in kept:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + ("," if len(kept) == 1 else "")


MOST_LAYERS = 100_000  # a greater number is a slip, and would take memory to list


def read_layers(text: str) -> int | tuple[int, ...]:
    try:
        if text.isdecimal():
            return int(text)
        ends = [part.split("-") for part in text.removesuffix(",").split(",")]
        runs = [range(int(first), int(*last or [first]) + 1) for first, *last in ends]
        if max(run.stop for run in runs) > MOST_LAYERS or not all(runs):
            raise ValueError(text)
        return tuple(layer for run in runs for layer in run)
    except (ValueError, TypeError):
        raise ValueError(f"layers {text!r} cannot be read: write 4 for the first four, or 0-2,5,9-11.") from None


def part_of(target: HasModel, kept: Sequence[int]) -> HasModel:
    """Return a Scorer over the target's own weights and cache that runs only the layers `kept`.

    Its lengths are the target's: what it adds has to be rolled back before the target goes on.
    Raises ValueError if the model does not run without the other layers.
    """
    path, layers = find_layers(target.model, target.name)
    config = copy.deepcopy(target.model.config.get_text_config())
    for entry in ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types"):
        if isinstance(values := getattr(config, entry, None), list):
            setattr(config, entry, [values[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    top = parent = _twin(target.model, config, target.name)
    for step in path[:-1]:
        child = _twin(getattr(parent, step), config, target.name)
        setattr(parent, step, child)
        parent = child
    setattr(parent, path[-1], nn.ModuleList([layers[layer] for layer in kept]))
    part = target.sharing_rows(top.eval(), f"{target.name} with layers {spell(kept)}")
    try:
        with torch.inference_mode():
            part.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=target.device), use_cache=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ValueError(f"{target.name} does not run with layers {spell(kept)} alone: {reason}") from error
    return part


def find_layers(model: Any, name: str) -> tuple[list[str], nn.ModuleList]:
    """Return the path to the list of the model's layers, and the list. Raises ValueError if there is no such list."""
    config: Any = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: only causal models can draft with some of their layers.")
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (path.split("."), module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        # Other lists (of norms, of experts) may be as long, but do not attend.
        and all(any(hasattr(part, "layer_idx") for part in layer.modules()) for layer in module)
    ]
    if len(lists) != 1:
        raise ValueError(
            f"{name} does not keep its {count} layers in one list, as Llama does: it cannot draft with some of them."
        )
    return lists[0]


def _twin(module: Any, config: Any, name: str) -> Any:
    """Return a copy of a module with the same children. Raises ValueError if its `forward` was replaced."""
    if "forward" in vars(module):
        raise ValueError(
            f"{name} is spread over devices or compiled, which ties it to all of its layers: load it in one piece."
        )
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    if hasattr(module, "config"):
        own = config
        if not hasattr(module.config, "num_hidden_layers"):  # it has several parts, one of them for the text
            own = copy.copy(module.config)
            own.text_config = config
        twin.config = own
    return twin
