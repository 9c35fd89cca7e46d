"""LoRA adapters: the base models that they name, and merging them into weights, which peft does."""

import copy
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from slipstream.core.values import first_sentence
from slipstream.models.loading.dropped_tensors import read_record
from slipstream.models.loading.faults import ADAPTER, refuse_missing

LORA = "LORA"
SHAPES = "its tensors have other shapes than its base model has"

NOT_ADDED = ("layer_replication", "alora_invocation_tokens", "arrow_config")
"""The settings of LoRA by which it does something else than to add to each weight the same numbers for every token."""


def base_of(source: str | Path) -> str | None:
    """Return the name of an adapter's base model; None if the source is a model."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        is_model = (folder / "config.json").is_file() or not (folder / ADAPTER).is_file()
    else:
        is_model = isinstance(source, Path) or not _is_adapter(source)
    if is_model:
        return None
    base = (read_record(folder if folder.is_dir() else source, ADAPTER) or {}).get("base_model_name_or_path")
    try:
        if not base:
            raise ValueError(f"its {ADAPTER} names none.")
        refuse_missing(base)
        if base_of(base):
            raise ValueError(f"{base} is an adapter too: merge that into its own base first.")
    except ValueError as error:
        raise ValueError(
            f"cannot load the base of the adapter {str(source)!r}: {str(error).removesuffix('.')}; or name the base, "
            f"and beside it adapter={str(source)!r} (--adapter)."
        ) from error
    return str(base)


@cache
def _is_adapter(name: str) -> bool:
    try:
        return read_record(name, "config.json") is None and read_record(name, ADAPTER) is not None
    except (ValueError, OSError):  # no hub name, or one that the hub does not have: it fails when it is loaded
        return False


def read_adapter(adapter: Any) -> str:
    """Return the place of an adapter. Raises ValueError in one sentence if it is none, or not LoRA."""
    if not isinstance(adapter, str | Path):
        raise ValueError(f"adapter={adapter!r} is not possible: give the folder or hub name of one.")
    if not find_spec("peft"):
        raise ValueError("an adapter needs another package: pip install 'slipstream[adapters]'.")
    folder = Path(adapter).expanduser()
    place = folder if folder.is_dir() else adapter
    record = None if place is adapter and isinstance(adapter, Path) else read_record(place, ADAPTER)
    if record is None:
        raise ValueError(f"{str(adapter)!r} is no adapter: it has no {ADAPTER}.")
    _refuse_others(str(adapter), record)
    return str(place)


def with_adapter(model: PreTrainedModel, adapter: str | Path) -> PreTrainedModel:
    """Merge an adapter, by its folder or hub name, into the model's own weights, and return the model.
    What peft has to say about it becomes `model.notes`. Raises ValueError in one sentence if it cannot be merged."""
    place, notes = read_adapter(adapter), list(getattr(model, "notes", ()))
    from peft import PeftConfig, PeftModel, load_peft_weights

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            # The model gets as many tokens as the embeddings have that an adapter comes with, if any.
            embeddings = model.get_input_embeddings()
            name = next(name for name, module in model.named_modules() if module is embeddings)
            weights = load_peft_weights(place, device="cpu")
            for part in ("weight", "base_layer.weight", "token_adapter.base_layer.weight"):
                saved = weights.get(f"base_model.model.{name}.{part}")
                if saved is not None and len(saved) != len(embeddings.weight):
                    model.resize_token_embeddings(len(saved), mean_resizing=False)
            wrapped = PeftModel(model, PeftConfig.from_pretrained(place, inference_mode=True))
            names = getattr(model, "_checkpoint_conversion_mapping", {})
            report = wrapped.load_adapter(place, "default", key_mapping=names)
            # Of modules to save that hold new tokens peft stores every weight twice.
            twice = {each.replace(".weight", ".modules_to_save.weight") for each in weights}
            if strange := [*report.missing_keys, *(each for each in report.unexpected_keys if each not in twice)]:
                raise ValueError(f"it is for another model: {len(strange)} of its tensors do not fit ({strange[0]})")
            done: Any = wrapped.merge_and_unload()
        except Exception as error:  # of any type, depending on the files
            fault = SHAPES if "size mismatch" in str(error) else first_sentence(error).removesuffix(".")
            raise ValueError(f"cannot merge the adapter {str(adapter)!r}: {fault}.") from error
    done.adapter = adapter
    said = [each for each in said if each.category is UserWarning]  # not those on deprecated names
    done.notes = [*notes, *(f"the adapter {adapter}: {first_sentence(Exception(each.message))}" for each in said)]
    return done


def merged(source: Any) -> Any:
    """Return a model of peft as one of transformers, its LoRA adapters merged into a copy of the weights that they
    change; all else is returned as it is. Raises ValueError in one sentence for other adapters."""
    if not isinstance(source, nn.Module) or isinstance(source, PreTrainedModel) or not hasattr(source, "peft_config"):
        return source
    from peft.tuners.tuners_utils import BaseTunerLayer

    model: Any = source
    for name in model.active_adapters:
        _refuse_others(name, model.peft_config[name].to_dict())
    adapted = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    changed = {id(weight) for layer in adapted for weight in layer.parameters()}
    tensors = (each for each in (*model.parameters(), *model.buffers()) if id(each) not in changed)
    return copy.deepcopy(model, {id(each): each for each in tensors}).merge_and_unload().eval()


def _refuse_others(name: str, settings: Mapping[str, Any]) -> None:
    if (kind := settings.get("peft_type")) != LORA:
        kind = getattr(kind, "value", kind)
        raise ValueError(f"the adapter {name!r} is of the kind {kind}, and only {LORA} can be merged into weights.")
    if odd := [each for each in NOT_ADDED if settings.get(each)]:
        raise ValueError(f"the adapter {name!r} has {odd[0]}, which cannot be merged into weights.")
