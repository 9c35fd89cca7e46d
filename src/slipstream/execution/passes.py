"""The inputs of a forward pass, and the protocol of everything that runs one: `Pass`, `Cross`, `Mode`, `Execution`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from slipstream.cache.stores import Store, Stores, store_format
from slipstream.execution.graphs import equate
from slipstream.execution.names import with_cache
from slipstream.kernels.quantization import Precision

Parts = tuple[Stores, Tensor, Tensor | None] | None  # the fields of a `Cross`, as graphs take them

EAGERLY = "eagerly, it"
MOST_WIDTH = 64  # wider passes are prefills, which are bound by arithmetic, so that a graph gains nothing


@dataclass(frozen=True)
class Cross:
    """The inputs of a decoder's cross-attention: keys and values of the rows' sources, and their mask.

    `stores` are those of every layer; the additive `mask` (rows, 1, 1, source) is for the
    first of the slots, the others are empty. `back` (rows, n, end) is how many positions every cached token lies before
    each new one, for models with a bias for it. The empty slots are cut off within the pass: a view of a tensor has
    strides of its own, which Python would pass to a graph at every call, as it does sizes.
    """

    stores: Stores
    mask: Tensor
    back: Tensor | None = None

    @property
    def seen(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of the slots that the mask covers, by layer."""
        return [store.read(self.mask.shape[-1]) for store in self.stores]

    def to(self, device: torch.device) -> Cross:
        return replace(self, mask=self.mask.to(device), back=None if self.back is None else self.back.to(device))


@dataclass(frozen=True)
class Pass:
    """The inputs of one forward pass.

    `tokens`, `positions` and `slots` are (rows, n), additive `masks` (rows, 1, n, end) by kind of layer. New keys and
    values go to the slots. `cross` is for decoders that have an encoder. What is counted (all but tokens) may lie on
    the host until the model runs.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    masks: dict[str, Tensor]
    cross: Cross | None = None

    @property
    def mask(self) -> Tensor | dict[str, Tensor]:
        """The mask as models take it: one tensor if all layers attend to the same tokens, else one per kind."""
        return self.masks if len(self.masks) > 1 else next(iter(self.masks.values()))

    @property
    def end(self) -> int:
        return next(iter(self.masks.values())).shape[-1]

    @property
    def cross_arguments(self) -> dict[str, Cross]:
        """The keyword arguments for cross-attention; empty for a model without an encoder."""
        return {} if self.cross is None else {"cross": self.cross}

    def to(self, device: torch.device) -> Pass:
        if self.slots.device == device:
            return self
        positions, slots = self.positions.to(device), self.slots.to(device)
        masks = {kind: mask.to(device) for kind, mask in self.masks.items()}
        return Pass(self.tokens.to(device), positions, slots, masks, self.cross and self.cross.to(device))


@dataclass(frozen=True)
class Mode:
    """The settings of how models run.

    `packed` None packs the weights of models that are loaded by name, where that is possible; a loaded model would need
    its weights twice. If `compiled`, a draft makes chains of the sizes `ahead` by one graph each and others by a graph
    per step; `ahead` is None for a model that is not a draft. `progress` is called when a graph is being made. A
    `precision` quantizes the weights, a `kv_dtype` the cache; each makes another model. ValueError for an unknown one.
    """

    compiled: bool = False
    packed: bool | None = None
    ahead: tuple[int, ...] | None = None
    progress: Callable[[str], object] | None = None
    precision: Precision | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        store_format(self.kv_dtype)

    def of_draft(self, ahead: tuple[int, ...]) -> Mode:
        """Return the mode for the draft of a target in this mode: chains of these sizes, and nothing quantized."""
        return replace(self, ahead=ahead, precision=None, kv_dtype=None)


EAGER = Mode()


@dataclass(frozen=True)
class PassResult:
    """The outputs of a pass: logits (rows, n, vocab), and hidden states (rows, n, width) at the requested places."""

    logits: Tensor
    states: dict[int, Tensor]


Places = tuple[int, ...]
"""Places of hidden states as in transformers' `hidden_states`: 0 is the input of the first layer, i the output of the
i-th, and -1 the output of the norm after the last layer."""


Watching = Callable[[], AbstractContextManager[Mapping[int, Tensor]]]
"""A function that lets the model show the states of the passes in a block, by place."""


class Execution(Protocol):
    """A faster way to run passes of few tokens."""

    @property
    def least(self) -> int:
        """The number of slots that a pass reads at least, even if fewer are in use."""

    def run(
        self, work: Pass, stores: Stores, places: Places = (), watching: Watching | None = None, logits: bool = True
    ) -> PassResult | None:
        """Run a pass, and write new keys and values to the stores -> logits, and hidden states at some places.

        `watching` shows them, if there are any. Without `logits`, the pass only fills the cache. None if this pass has
        to run eagerly.
        """

    def of(self, model: PreTrainedModel, name: str) -> Execution:
        """Return an execution of the same kind for another model over the same stores."""


# ---- compiled passes --------------------------------------------------------------------------------------------


class GivenSlots(Cache):
    """A transformers Cache over given stores and slots, for use in a traced pass."""

    def __init__(self, stores: Stores, slots: Tensor, end: int) -> None:
        super().__init__(layers=[])
        self.stores, self.slots, self.end = stores, slots, end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.stores[layer_idx].write(self.slots, key_states, value_states)
        return self.stores[layer_idx].read(self.end)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0


def forward(model: Callable[..., Any], work: Pass, stores: Stores, **options: Any) -> Tensor:
    """Run a pass over stores, without state in Python, of a model `with_cache` -> logits (rows, n, vocab)."""
    return forward_showing(model, work, stores, (), **options)[0]


def forward_showing(
    model: Callable[..., Any], work: Pass, stores: Stores, places: Places, **options: Any
) -> list[Tensor]:
    """Run `forward` -> logits (rows, n, vocab), then the hidden states (rows, n, width) at each place."""
    out = model(
        input_ids=work.tokens,
        attention_mask=work.mask,
        position_ids=work.positions,
        cache=GivenSlots(stores, work.slots, work.end),
        use_cache=True,
        **work.cross_arguments,
        **({"output_hidden_states": True} if places else {}),
        **options,
    )
    return [out.logits, *(out.hidden_states[place] for place in places)]


def sizes_of_stores(stores: Iterable[Store], slots: str) -> list[tuple[Tensor, dict[int, str]]]:
    return [(tensor, {0: "rows", 2: slots}) for store in stores for tensor in store]


def compare(eager: Tensor, compiled: Tensor, what: str = "logits", unrounded: Tensor | None = None) -> None:
    """Raise ValueError if logits (or `what`) differ by more than another order of summation explains.

    Layers that round their inputs to 8 bits turn its last bits into whole steps. `unrounded` are logits without that:
    however those steps fall, a pass is about as far from them as the eager one, so that two are at most twice as far
    from each other.
    """
    possible = int((eager != -math.inf).sum(-1).min())  # a cut head gives -inf to all other tokens
    best, places = eager.float().topk(max(1, min(64, possible)))

    def gap(other: Tensor) -> float:
        return float((best - other.float().gather(-1, places)).abs().max() / best.std(-1).max().clamp(min=1e-6))

    allowed = 0.02 if eager.dtype in {torch.float32, torch.float64} else 1.0
    allowed = allowed if unrounded is None else max(allowed, min(1.0, 2 * gap(unrounded)))
    if not gap(compiled) <= allowed:
        raise ValueError(
            f"the compiled pass gives other {what} (by {gap(compiled):.2g} of their spread; {allowed:.2g} is rounding)"
        )


# ---- traced passes -----------------------------------------------------------------------------------------------


def tensors_of_pass(work: Pass, stores: Stores) -> tuple[Any, ...]:
    cross = (work.cross.stores, work.cross.mask, work.cross.back) if work.cross else None
    return work.tokens, work.positions, work.slots, work.masks, stores, cross


def traced_pass(
    model: PreTrainedModel, places: Places, watching: Watching | None = None
) -> Callable[..., list[Tensor]]:
    """Return `forward_showing` as a function of tensors; `watching` shows the states, if the model does not."""
    call = with_cache(model)

    def function(
        tokens: Tensor, positions: Tensor, slots: Tensor, masks: dict[str, Tensor], stores: Stores, cross: Parts
    ) -> list[Tensor]:
        work = Pass(tokens, positions, slots, masks, cross and Cross(*cross))
        equate(sizes_of_pass(work, stores))
        if watching is None:
            return forward_showing(call, work, stores, places)
        with watching() as seen:
            logits = forward(call, work, stores)
        return [logits, *(seen[place] for place in places)]

    return function


def constant_sizes(work: Pass) -> frozenset[str]:
    """Return the names of the sizes of one, which do not vary: torch takes them for constants."""
    return frozenset(what for what, size in zip(("rows", "new"), work.tokens.shape, strict=True) if size == 1)


def sizes_of_pass(work: Pass, stores: Stores) -> list[tuple[Tensor, dict[int, str]]]:
    cross = [(work.cross.mask, {0: "rows", 3: "source"})] if work.cross else []
    if work.cross and work.cross.back is not None:
        cross.append((work.cross.back, {0: "rows", 1: "new", 2: "end"}))
    return [
        *((tensor, {0: "rows", 1: "new"}) for tensor in (work.tokens, work.positions, work.slots)),
        *((mask, {0: "rows", 2: "new", 3: "end"}) for mask in work.masks.values()),
        *sizes_of_stores(stores, "slots"),
        *cross,
        *sizes_of_stores(work.cross.stores if work.cross else [], "source slots"),
    ]
