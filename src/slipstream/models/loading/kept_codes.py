"""Choosing the codes of a model's weights by calibration, and keeping them in files, since it takes up to minutes.

Their rounding is chosen by the inputs of layers while the model reads text that it wrote itself, one input after
another (GPTQ, arXiv 2210.17323): the error of a rounded weight is compensated by those that are not rounded yet, as far
as their inputs are correlated. Such text needs no data set, and is like what the model is going to read: rows that
begin with a random token and are continued by it at temperature 1 (self-calibration, arXiv 2410.17170).

A file holds the codes for one set of weights in one precision. Codes of 4 bits lie in it two to a byte, the first of
them in the lower half.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from slipstream.files import TensorFileKind, cache_folder, delete_oldest, load_tensors, save_tensors
from slipstream.kernels.packing import plain_weight
from slipstream.kernels.quantization import Codes, Precision, quantize
from slipstream.models.families import longest_text, vocabulary_of
from slipstream.models.recurrent.calls import calls_of

ROWS, LENGTH, TOGETHER = 32, 256, 4
"""The number of texts, the tokens of each, and the number of texts that are read in one pass."""
MOST_BYTES = 1 << 30
"""The most bytes of products of inputs held at a time: a model that needs more reads the text several times."""

ALGORITHM = 1  # the version of the codes that come out; those that were kept by another version are chosen again
DAMPING = 0.01
"""The number added to each input's product with itself, as a part of their mean, since no text shows all inputs."""


def spreading(products: Tensor) -> Tensor:
    """Return the factor (inputs, inputs) by which later inputs compensate the errors of earlier ones.
    It is the upper Cholesky factor of the inverse of `products`, the sum of x x^T over the tokens of a text."""
    full, diagonal = products.clone(), products.diagonal()
    full.diagonal().add_(DAMPING * float(diagonal.mean()) + (diagonal == 0).to(full.dtype))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(full))
    return torch.linalg.cholesky(inverse, upper=True)


@torch.no_grad()
def quantize_for(weight: Tensor, precision: Precision, factor: Tensor) -> Codes:
    """Quantize a weight (features, inputs) group by group, with the `factor` of `spreading`."""
    left = pad(weight.float(), (0, -weight.shape[1] % precision.group))
    if more := left.shape[1] - len(factor):  # inputs that fill up the last group are zero, and compensate nothing
        factor = torch.block_diag(factor, torch.eye(more))
    parts, scales = list[Tensor](), list[Tensor]()
    for start in range(0, left.shape[1], precision.group):
        end = start + precision.group
        inside, group = factor[start:end, start:end], left[:, start:end].clone()
        scale = quantize(group, precision).scales
        codes, errors = _rounded(group, scale.float(), inside, precision.middle)
        left[:, end:] -= errors @ factor[start:end, end:]
        parts, scales = [*parts, codes], [*scales, scale]
    return Codes(precision, torch.cat(parts, 1), torch.cat(scales, 1))


def _rounded(group: Tensor, scale: Tensor, factor: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Return the codes (features, inputs) of a `group`, which is changed, and the errors that later ones compensate."""
    codes, errors = torch.empty(group.shape, dtype=torch.uint8), torch.empty_like(group)
    inverse = torch.where(scale == 0, 0, 1 / scale)[:, 0]
    for place in range(group.shape[1]):
        number = (group[:, place] * inverse).round().clamp_(-middle, middle - 1)
        errors[:, place] = (group[:, place] - number * scale[:, 0]) / factor[place, place]
        group[:, place + 1 :] -= errors[:, place, None] * factor[place, place + 1 :]
        codes[:, place] = (number + middle).to(torch.uint8)
    return codes, errors


@torch.inference_mode()
def own_text(model: PreTrainedModel, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Generate text (rows, length) by a causal model. Raises ValueError for an encoder-decoder."""
    calls, draws = calls_of(model), torch.Generator().manual_seed(0)
    if calls.form is not None:
        raise ValueError(f"{type(model).__name__} reads sources, so its rounding cannot be calibrated: leave that out.")
    vocab, length = vocabulary_of(model), min(length, longest_text(model.config.get_text_config()) or length)
    tokens, state = torch.randint(vocab, (rows, 1), generator=draws), None
    while tokens.shape[1] < length:
        out = calls(tokens[:, -1:], state, None)
        state = calls.state(out)
        law = out.logits[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(law, 1, generator=draws)], 1)
    return tokens


def calibrated_codes(
    model: PreTrainedModel, precision: Precision, text: Tensor, names: Sequence[str]
) -> Iterator[tuple[str, Codes]]:
    """Yield the codes of the named layers, in their order, rounded for their inputs in a text (rows, n)."""
    known: tuple[Tensor, Tensor] | None = None
    for some in _portions(model, names):
        for name, products in input_products(model, some, text).items():
            if known is None or known[0] is not products:  # projections of queries, keys and values share their input
                known = products, spreading(products)
            yield name, quantize_for(plain_weight(model.get_submodule(name)), precision, known[1])


@torch.inference_mode()
def input_products(model: PreTrainedModel, names: Sequence[str], text: Tensor) -> dict[str, Tensor]:
    """Return the sum of x x^T (inputs, inputs) over the tokens of a text, for the inputs x of each named layer."""
    products: dict[str, Tensor] = {}
    last: list[Any] = [None, ""]

    def watched(name: str) -> Callable[..., None]:
        def watch(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            if inputs[0] is last[0]:
                products[name] = products[last[1]]
                return
            seen = inputs[0].flatten(0, -2).float()
            products[name] = products.get(name, 0) + seen.T @ seen
            last[:] = inputs[0], name

        return watch

    hooks = [model.get_submodule(name).register_forward_pre_hook(watched(name)) for name in names]
    try:
        for rows in text.split(TOGETHER):
            model(rows, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    size = {name: plain_weight(model.get_submodule(name)).shape[1] for name in names}
    return {name: products.get(name, torch.zeros(size[name], size[name])) for name in names}


def _portions(model: PreTrainedModel, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names in parts whose products take at most MOST_BYTES together; one layer's alone may take more."""
    part, room = list[str](), MOST_BYTES
    for name in names:
        layer: Any = model.get_submodule(name)
        needed = 4 * plain_weight(layer).shape[1] ** 2
        if part and needed > room:
            yield part
            part, room = [], MOST_BYTES
        part, room = [*part, name], room - needed
    yield part


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
            stored = kept[f"{layer}.codes"]  # those of 4 bits two to a byte
            whole = stored if precision.bits == 8 else torch.stack((stored & 15, stored >> 4), -1).flatten(1)
            yield layer, Codes(precision, whole, kept[f"{layer}.scales"])
        return
    if progress:
        progress(f"choosing the codes of {name} in {precision} by a text that it writes")
    tensors = dict[str, Tensor]()
    for layer, codes in calibrated_codes(model, precision, own_text(model), layers):
        if file:
            whole = codes.codes
            stored = whole if precision.bits == 8 else whole[:, ::2] | (whole[:, 1::2] << 4)
            tensors |= {f"{layer}.codes": stored, f"{layer}.scales": codes.scales}
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
    Returns None if there is no such file, or, with a warning, if it is damaged."""
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
    with suppress(OSError):  # for example a full disk: the codes still serve this process
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, KIND, tensors, {"key": file.stem})
        delete_oldest(file.parent, "*.codes*", MOST_FILES)  # part files of processes that were killed, too
