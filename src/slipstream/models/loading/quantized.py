"""Loading quantized checkpoints on a CPU from their stored codes.

The package of the quantization method is not needed, and nothing is dequantized.
"""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from slipstream.core.values import true_or_false
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import PACKED_DTYPES, QuantizedEmbedding, QuantizedLinear, can_embed
from slipstream.kernels.stored_codes import StoredFormat, StoredLinear, UnreadFormat, stored_format
from slipstream.models.loading.dropped_tensors import read_tensors
from slipstream.models.loading.origin import Origin, source_name

PLACED_OTHERWISE = {"device_map", "quantization_config", "distributed_config"}
"""Options of `from_pretrained` by which transformers places or quantizes weights itself."""

PACKAGES = {  # the packages that transformers needs for each method: the names to install, with the names to import
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "awq": {"accelerate": "accelerate", "gptqmodel": "gptqmodel"},
    "compressed-tensors": {"compressed-tensors": "compressed_tensors"},
}
INT8, FLOAT = ACTIVATIONS = ("int8", "float")
"""How inputs of layers in codes are multiplied: rounded to 8 bits, group by group, or as they are."""


@dataclass(frozen=True)
class Reading:
    """How weights in codes are read: the inputs that they multiply, or whether they become plain numbers."""

    activations: str = INT8
    dequantize: bool = False

    def __post_init__(self) -> None:
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations={self.activations!r} is not possible: use {' or '.join(ACTIVATIONS)}.")
        true_or_false("dequantize", self.dequantize)


Loaded = tuple[PreTrainedModel, dict[str, Any]]  # a model, and transformers' loading report (`output_loading_info`)


def stored_quantization(origin: Origin, place: torch.device, options: dict[str, Any]) -> StoredFormat | None:
    """Return the format of a checkpoint's quantized weights if our kernel can read them, on a CPU; otherwise None.
    Raises UnreadFormat, whose message is only the fault, for variants of a method that are not read."""
    if place.type != "cpu" or kernel_missing() or options.keys() & PLACED_OTHERWISE:
        return None
    config = origin.config()
    settings = getattr(config, "quantization_config", None)
    own_code = getattr(config, "auto_map", None)  # only transformers can find its classes
    return stored_format(settings) if isinstance(settings, dict) and not own_code else None


def leave_to_transformers(origin: Origin, unread: UnreadFormat) -> None:
    """Warn that transformers, not our kernel, reads a checkpoint.
    Raises ValueError, whose message is only the fault, if the packages that transformers needs are not installed."""
    config = origin.config()
    packages = PACKAGES[config.quantization_config["quant_method"]]
    names = " ".join(packages)
    if not all(map(find_spec, packages.values())):
        raise ValueError(f"{unread}; transformers reads it with other packages: pip install {names}")
    warnings.warn(
        f"{source_name(origin.source)} is read by transformers, with {names}: {unread}.", RuntimeWarning, stacklevel=6
    )


@torch.no_grad()
def load_quantized(
    kind: Any, origin: Origin, form: StoredFormat, dtype: str | torch.dtype, reading: Reading, options: dict[str, Any]
) -> Loaded:
    """Load a model of quantized weights -> the model and a loading report, as `kind.from_pretrained` returns them.

    A model in float16 runs in bfloat16 unless `dtype` is given. Raises ValueError, whose message is only the fault, if
    a layer cannot be read.
    """
    config = origin.config()
    del config.quantization_config
    wanted = compute_dtype(config, dtype)
    tensors = read_tensors(origin.place, lambda name: True)
    quantized = [name.removesuffix(f".{form.mark}") for name in tensors if name.endswith(f".{form.mark}")]
    stored = {name: _read(form, tensors, name) for name in quantized}
    if not stored:
        raise ValueError("its config.json describes quantized weights, but none are stored: the files do not fit")
    with torch.device("meta"):
        model_class = type(kind.from_config(config))
    model, about = assembled(model_class, config, tensors, stored, wanted, reading, options)
    model.config.name_or_path = str(origin.place)
    if reading.dequantize:
        model.notes = [f"the quantized weights of {origin.place} were dequantized."]
    with suppress(OSError):  # a checkpoint without a generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(origin.place)
    return model, about


@torch.no_grad()
def assembled(
    model_class: Any,
    config: Any,
    tensors: dict[str, Tensor],
    stored: dict[str, StoredLinear],
    dtype: torch.dtype,
    reading: Reading,
    options: dict[str, Any],
) -> Loaded:
    """Make a model of tensors and of layers `stored` in codes, both by name -> the model and a loading report.

    A head that is tied to embeddings in codes reads the same codes. Raises ValueError, whose message is only the fault,
    if a layer is not among the model's linear layers and embeddings.
    """
    if reading.dequantize:
        tensors, stored = tensors | {f"{name}.weight": layer.weight() for name, layer in stored.items()}, {}
    # Weights of the layers' shapes that take no memory, which mark the layers' places in the model.
    blanks = {name: torch.zeros((), dtype=dtype).expand(layer.shape) for name, layer in stored.items()}
    weights = tensors | {f"{name}.weight": blank for name, blank in blanks.items()}
    model, about = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, **options
    )
    by_address = {blank.data_ptr(): stored[name] for name, blank in blanks.items()}
    left = set(by_address)
    for name, layer in [*model.named_modules()]:
        linear = type(layer) is nn.Linear
        codes = by_address.get(layer.weight.data_ptr()) if linear or can_embed(layer) else None
        if codes is None:
            continue
        left.discard(layer.weight.data_ptr())
        made = (
            QuantizedLinear(codes.precision, codes.panels, layer, codes.order, reading.activations == INT8)
            if linear
            else QuantizedEmbedding(codes.precision, codes.panels, layer)
        )
        model.set_submodule(name, made)
    if left:
        raise ValueError(
            f"{len(left)} of its quantized layers are merged with others by transformers, as experts are: take an "
            "unquantized copy of the model, and quantize='int4' if it is to be small"
        )
    return model, about


def compute_dtype(config: Any, dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype that a model of quantized weights computes in. Raises ValueError for an impossible one."""
    if dtype == "auto":
        config_dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        return torch.float32 if config_dtype in (None, torch.float32) else torch.bfloat16
    if dtype not in PACKED_DTYPES:
        raise ValueError(f"quantized weights compute in float32 or bfloat16 on a CPU, not in {dtype}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _read(form: StoredFormat, tensors: dict[str, Tensor], name: str) -> StoredLinear:
    taken = {part: tensors.pop(f"{name}.{part}") for part in form.names if f"{name}.{part}" in tensors}
    try:
        return form.read(taken, form.bits)
    except KeyError as error:
        raise ValueError(f"{name} has no {error.args[0]}: the files do not belong together") from error
    except RuntimeError as error:
        raise ValueError(f"the tensors of {name} have other shapes than they should have") from error
