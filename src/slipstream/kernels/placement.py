"""The placement of a model of transformers: in one piece, with layers on several devices, or divided among ranks."""

from typing import Any

import torch


def input_device(model: Any) -> torch.device:
    """Return the device that takes the tokens, and to which logits come back.

    Layers that accelerate keeps elsewhere until they run have no device of their own; then it is the device on which
    the input embeddings run.
    """
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None) if getattr(model, "hf_device_map", None) else None
    place = getattr(hook, "execution_device", None)
    return model.device if place is None else torch.device(place)


def is_sharded(model: Any) -> bool:
    """Whether the weights are divided among ranks, as `tp_plan` does."""
    return (getattr(model, "tp_size", None) or 1) > 1


def why_in_parts(model: Any) -> str | None:
    """Return why a model is not in one piece, as a clause to follow a comma or a colon; None if it is."""
    if is_sharded(model):
        return f"its weights are divided among {model.tp_size} ranks"
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        return f"its layers are spread over {', '.join(sorted(places))}"
    return "its layers are placed by device_map" if places else None
