"""Finding a model's decoder layers, and running a model with the first of them only."""

import copy
from typing import Any

import torch
from torch import nn

from slipstream.core.protocols import HasModel


def part_of(target: HasModel, count: int) -> HasModel:
    """Return a Scorer over the target's own weights and cache that runs only its first `count` layers.

    Its lengths are the target's: what it adds has to be rolled back before the target goes on. Raises ValueError for an
    impossible number, and if the model does not run without the other layers.
    """
    path, layers = find_layers(target.model, target.name)
    if not target.shares_rows:
        target.sharing_rows(target.model, target.name)  # it says why not
    if not 1 <= count < len(layers):
        raise ValueError(f"an exit after {count} layers is not possible: the target has {len(layers)}, leave some out.")
    config = copy.deepcopy(target.model.config.get_text_config())
    for entry in ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types"):
        if isinstance(values := getattr(config, entry, None), list):
            setattr(config, entry, values[:count])
    config.num_hidden_layers = count
    top = parent = _twin(target.model, config, target.name)
    for step in path[:-1]:
        child = _twin(getattr(parent, step), config, target.name)
        setattr(parent, step, child)
        parent = child
    setattr(parent, path[-1], layers[:count])
    part = target.sharing_rows(top.eval(), f"{target.name} with its first {count} layers")
    try:
        with torch.inference_mode():
            part.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=target.device), use_cache=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ValueError(f"{target.name} does not run with its first {count} layers alone: {reason}") from error
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
        raise ValueError(f"{name} is spread over devices or compiled, which ties it to all layers: load it whole.")
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    if hasattr(module, "config"):
        own = config
        if not hasattr(module.config, "num_hidden_layers"):  # it has several parts, one of them for the text
            own = copy.copy(module.config)
            own.text_config = config
        twin.config = own
    return twin
