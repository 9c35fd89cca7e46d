"""Keeping the codes that calibration chose for a model's weights in files, since choosing them takes up to minutes.

A file holds the codes for one set of weights in one precision. Codes of 4 bits lie in it two to a byte, the first of
them in the lower half.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.files import TensorFileKind, cache_folder, delete_oldest, load_tensors, save_tensors
from slipstream.kernels.calibrated_rounding import ALGORITHM, DAMPING
from slipstream.kernels.quantization import Codes, Precision
from slipstream.models.loading.calibration import LENGTH, ROWS, calibrated_codes, own_text

PLACE = "SLIPSTREAM_CODES"  # the environment variable with the folder; "off" keeps nothing
MOST_FILES = 16  # of half a byte or a byte for each weight; the least recently used are deleted first
KIND = TensorFileKind("codes of rounded weights", "slipstream rounded codes", "1", "the codes are chosen again")


def codes_of(
    model: PreTrainedModel,
    name: str,
    precision: Precision,
    progress: Callable[[str], object] | None,
    layers: Sequence[str],
) -> Iterator[tuple[str, Codes]]:
    """Yield the calibrated codes of the named layers, in their order: those that were kept for these weights, or new
    ones, which are then kept.

    `progress` is called with a line that says which. Raises ValueError for a model that cannot be calibrated.
    """
    file = file_for(model, precision)
    if file and (kept := find(file, layers)) is not None:
        if progress:
            progress(f"loading the codes of {name} in {precision}")
        for layer in layers:  # one after another: the codes of all layers may not fit in memory as they are used
            yield layer, Codes(precision, _unpacked(kept[f"{layer}.codes"], precision), kept[f"{layer}.scales"])
        return
    if progress:
        progress(f"choosing the codes of {name} in {precision} by a text that it writes")
    tensors = dict[str, Tensor]()
    for layer, codes in calibrated_codes(model, precision, own_text(model), layers):
        if file:
            tensors |= {f"{layer}.codes": _packed(codes), f"{layer}.scales": codes.scales}
        yield layer, codes
    if file:
        keep(file, tensors)


def file_for(model: PreTrainedModel, precision: Precision) -> Path | None:
    """Return the file for the codes of a model; None if none are kept.

    Its name is a digest of all that they depend on: the model's tensors and configuration, the precision, and how the
    calibration works. Which processor and library calculate is left out, since codes serve any of them equally well.
    """
    folder = cache_folder("codes", PLACE)
    if folder is None:
        return None
    settings = (ALGORITHM, DAMPING, ROWS, LENGTH, precision, type(model).__name__, model.config.to_json_string())
    digest = hashlib.sha256(repr(settings).encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        plain = tensor.detach().to_dense().contiguous()
        digest.update(repr((name, plain.dtype, tuple(plain.shape))).encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return folder / f"{digest.hexdigest()[:40]}.codes"


def find(file: Path, layers: Sequence[str]) -> dict[str, Tensor] | None:
    """Return the tensors of a file, which are to be those of the named layers, mapped into memory.

    Returns None if there is no such file, or, with a warning, if it is damaged.
    """
    if not file.exists():
        return None
    try:
        tensors, about = load_tensors(file, KIND)
        if about.get("key") != file.stem or {name.rpartition(".")[0] for name in tensors} != set(layers):
            raise KIND.damaged(file, "it holds the codes of other weights")
    except (OSError, ValueError) as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return None
    with suppress(OSError):  # a folder that may only be read
        os.utime(file)
    return tensors


def keep(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of codes, and delete the least recently used ones beyond MOST_FILES."""
    with suppress(OSError):  # for example a full disk: the codes still serve this process
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, KIND, tensors, {"key": file.stem})
        delete_oldest(file.parent, "*.codes*", MOST_FILES)  # part files of processes that were killed, too


def _packed(codes: Codes) -> Tensor:
    """Return codes as they are stored: those of 4 bits (features, n) two to a byte, (features, n / 2)."""
    return codes.codes if codes.precision.bits == 8 else codes.codes[:, ::2] | (codes.codes[:, 1::2] << 4)


def _unpacked(stored: Tensor, precision: Precision) -> Tensor:
    """Return the codes that were stored, the inverse of `_packed`."""
    return stored if precision.bits == 8 else torch.stack((stored & 15, stored >> 4), -1).flatten(1)
