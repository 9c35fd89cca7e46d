"""Calibrated rounding of a model's weights, by the inputs of its layers while it reads text that it wrote itself.

A model's own text needs no data set, and is like what it is going to read: rows that begin with a random token and are
continued by the model at temperature 1 (self-calibration, arXiv 2410.17170).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.kernels.calibrated_rounding import quantize_for, spreading
from slipstream.kernels.packing import plain_weight
from slipstream.kernels.quantization import Codes, Precision
from slipstream.models.facts import vocabulary_of
from slipstream.models.families import longest_text
from slipstream.models.recurrent.calls import calls_of

ROWS, LENGTH, TOGETHER = 32, 256, 4
"""The number of texts, the tokens of each, and the number of texts that are read in one pass."""
MOST_BYTES = 1 << 30
"""The most bytes of products of inputs held at a time: a model that needs more reads the text several times."""


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
