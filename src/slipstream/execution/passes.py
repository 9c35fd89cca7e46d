"""What a forward pass reads, and the protocol of everything that runs one: `Pass`, `Cross`, `Mode`, `Execution`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from slipstream.kernels.quantization import Precision

Stores = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, (rows, heads, slots, head_dim)."""

Parts = tuple[Stores, Tensor, Tensor | None] | None
"""The fields of a `Cross`, as graphs take them."""

EAGERLY = "eagerly, it"
MOST_WIDTH = 64  # wider passes are prefills, where arithmetic counts and a graph gains nothing


@dataclass(frozen=True)
class Cross:
    """What a decoder reads beside its text: keys and values of its rows' sources, (rows, heads, slots, head_dim) by
    layer, and an additive mask (rows, 1, 1, source) for the first of the slots; the others are empty. `back`
    (rows, n, end) is how many positions back everything in the cache lies, where a model has a bias for it.

    The slots are cut off in the pass, for graphs: a part of a tensor has steps of its own, which Python hands over at
    every call, as it does sizes.
    """

    stores: Stores
    mask: Tensor
    back: Tensor | None = None

    @property
    def seen(self) -> Stores:
        """Keys and values of what the mask is for."""
        source = self.mask.shape[-1]
        return [(keys[:, :, :source], values[:, :, :source]) for keys, values in self.stores]


@dataclass(frozen=True)
class Pass:
    """What one forward pass reads: tokens, positions and slots (rows, n), and additive masks (rows, 1, n, end) by
    layer kind. Slots are where the new keys and values go. `cross` is for decoders that have an encoder."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    masks: dict[str, Tensor]
    cross: Cross | None = None

    @property
    def mask(self) -> Tensor | dict[str, Tensor]:
        """As models take it: one tensor if all layers see the same."""
        return self.masks if len(self.masks) > 1 else next(iter(self.masks.values()))

    @property
    def beside(self) -> dict[str, Cross]:
        """The keyword arguments for cross-attention; empty for a model without an encoder."""
        return {} if self.cross is None else {"cross": self.cross}


@dataclass(frozen=True)
class Mode:
    """How models run.

    `packed` None packs the weights of models that are loaded by name, where that is possible; a loaded model would need
    its weights twice. Compiled, a draft makes chains of the sizes `ahead` by one graph each and others by a graph per
    step; None is no draft. `progress` is called when a graph is being made. A `precision` quantizes the weights, which
    makes another model.
    """

    compiled: bool = False
    packed: bool | None = None
    ahead: tuple[int, ...] | None = None
    progress: Callable[[str], object] | None = None
    precision: Precision | None = None

    def of_draft(self, ahead: tuple[int, ...]) -> Mode:
        """The mode of a draft beside a target in this one: with chains of these sizes, and weights as they are."""
        return replace(self, ahead=ahead, precision=None)


EAGER = Mode()


@dataclass(frozen=True)
class PassResult:
    """What a pass gives: logits (rows, n, vocab), and the hidden states (rows, n, width) at the places asked for."""

    logits: Tensor
    states: dict[int, Tensor]


Places = tuple[int, ...]
"""Places of hidden states as in transformers' `hidden_states`: 0 goes into the first layer, i comes out of the i-th,
and -1 out of the norm behind the last."""


class Execution(Protocol):
    """A faster way for passes of few tokens. None means that this pass has to run eagerly."""

    def width(self, rows: int, count: int) -> int:
        """How many columns a pass of `count` tokens for each of so many texts should have; the others are padding."""
        ...

    def run(self, work: Pass, stores: Stores, places: Places = ()) -> PassResult | None:
        """The logits, and the hidden states at some places, with the new keys and values written to the stores."""
        ...

    def of(self, model: PreTrainedModel, name: str) -> Execution:
        """Return an execution of the same kind for another model over the same stores."""
        ...


# ---- compiled passes --------------------------------------------------------------------------------------------


class GivenSlots(Cache):
    """transformers' Cache interface over given stores and slots: what a traced pass can do."""

    def __init__(self, stores: Stores, slots: Tensor, end: int) -> None:
        super().__init__(layers=[])
        self.stores, self.slots, self.end = stores, slots, end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
        keys, values = self.stores[layer_idx]
        keys[rows, :, self.slots] = key_states.transpose(1, 2)
        values[rows, :, self.slots] = value_states.transpose(1, 2)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0


def forward(model: PreTrainedModel, work: Pass, stores: Stores) -> Tensor:
    """One pass over stores, without any state of Python: eager, traced or captured -> logits (rows, n, vocab)."""
    return forward_showing(model, work, stores, ())[0]


def forward_showing(model: PreTrainedModel, work: Pass, stores: Stores, places: Places) -> list[Tensor]:
    """`forward` that shows hidden states -> logits (rows, n, vocab), and the states (rows, n, width) at each place."""
    end = next(iter(work.masks.values())).shape[-1]
    out = model(
        input_ids=work.tokens,
        attention_mask=work.mask,
        position_ids=work.positions,
        past_key_values=GivenSlots(stores, work.slots, end),
        use_cache=True,
        **work.beside,
        **({"output_hidden_states": True} if places else {}),
    )
    return [out.logits, *(out.hidden_states[place] for place in places)]


def sizes_of_stores(stores: Stores, slots: str) -> list[tuple[Tensor, dict[int, str]]]:
    """Name the dimensions of keys and values whose sizes vary, by what they count."""
    return [(store, {0: "rows", 2: slots}) for pair in stores for store in pair]


def compare(eager: Tensor, compiled: Tensor, what: str = "logits") -> None:
    """Raises ValueError if logits (or `what`) differ by more than another order of summation explains."""
    possible = int((eager != -math.inf).sum(-1).min())  # a head that was cut gives all other tokens no chance
    best, places = eager.float().topk(max(1, min(64, possible)))
    gap = float((best - compiled.float().gather(-1, places)).abs().max() / best.std(-1).max().clamp(min=1e-6))
    allowed = 0.02 if eager.dtype in {torch.float32, torch.float64} else 1.0
    if not gap <= allowed:
        raise ValueError(f"the compiled pass gives other {what} (by {gap:.2g} of their spread; {allowed} is rounding)")
