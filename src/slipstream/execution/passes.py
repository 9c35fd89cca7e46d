"""The inputs of a forward pass (`Pass`, `Cross`, `PassMasks`), and the protocol of everything that runs one."""

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
from slipstream.core.draft import Tree
from slipstream.execution.graphs import equate
from slipstream.execution.names import with_cache
from slipstream.kernels.quantization import Precision


@dataclass(frozen=True)
class Sight:
    """What a layer attends to: all, the last `window` and first `sinks` tokens, or those in a chunk of size `chunk`."""

    window: int | None = None
    chunk: int | None = None
    sinks: int = 0

    @property
    def limited(self) -> bool:
        return bool(self.window or self.chunk)

    def within(self, window: int, sinks: int) -> Sight:
        """Return the sight within the last `window` tokens and first `sinks` ones; a window of its own has no sinks."""
        if self.window:
            return replace(self, window=min(self.window, window))
        return replace(self, window=window, sinks=sinks)


@dataclass(frozen=True)
class PassMasks:
    """The positions of a pass, and which slots its new tokens may attend to before any window.

    `own` (rows, n) are positions of the new tokens, `others` (rows or 1, slots) those of the slots in the cache, and
    `allowed` is (rows, n, slots).
    """

    own: Tensor
    others: Tensor
    allowed: Tensor

    @staticmethod
    def chain(slots: Tensor, end: int) -> PassMasks:
        """Make the masks of chains: every token attends to the slots up to its own, and its position is its slot."""
        others = torch.arange(end, device=slots.device)[None]
        return PassMasks(slots, others, others[:, None] <= slots[:, :, None])

    @staticmethod
    def tree(slots: Tensor, end: int, tree: Tree) -> PassMasks:
        """Make the masks of a tree: a token attends to the text before the tree, its ancestors and itself."""
        rows, new = slots.shape
        held, depths, seen = (part.to(slots.device) for part in (tree.held, tree.depths, tree.seen))
        depths, seen = depths.expand(rows, -1), seen.expand(rows, -1, -1)
        count = depths.shape[1]
        base = slots[:, :1] - held  # (rows, 1): where the tree begins
        places = torch.arange(end, device=slots.device) - base  # (rows, slots)
        inside = places.clamp(0, count - 1)
        others = torch.where(places < 0, places + base, base + depths.gather(1, inside))
        line = seen.gather(2, inside[:, None].expand(-1, new, -1)) & ((places >= 0) & (places < count))[:, None]
        own = base + depths.gather(1, held + torch.arange(new, device=slots.device).expand(rows, -1))
        return PassMasks(own, others, (places < 0)[:, None] | line)

    @property
    def back(self) -> Tensor:
        """The number of positions (rows, n, slots) from each slot's token to each new one; negative for later slots."""
        return self.own[:, :, None] - self.others[:, None]

    def mask(self, sight: Sight, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (rows, 1, n, slots) of a layer with this sight."""
        own, others, seen = self.own[:, :, None], self.others[:, None], self.allowed
        if sight.window:
            seen = seen & ((others > own - sight.window) | (others < sight.sinks))
        if sight.chunk:
            seen = seen & (others // sight.chunk == own // sight.chunk)
        return additive(seen, dtype).unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the scores of attention, and leaves those of what is seen."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def causal_mask(slots: Tensor, past: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask (rows, 1, n, end) of chains at slots (rows, n) behind texts of `past` tokens each."""
    rows, new = slots.shape
    return torch.full((rows, 1, new, end), torch.finfo(dtype).min, dtype=dtype, device=slots.device).triu_(past + 1)


def mask_kinds(config: Any) -> dict[str, Sight]:
    """Return the sight of each type of layers in a configuration; one entry if it names no types."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    named = getattr(config, "layer_types", None) or ()
    types = list(dict.fromkeys(kind for kind in named if kind not in {"mlp", "moe"}))  # layers without attention
    if not types:
        return {"all": Sight(window)}
    rules = {
        "full_attention": Sight(),
        "indexed_attention": Sight(),
        "attention": Sight(window),
        "sliding_attention": Sight(window),
        "chunked_attention": Sight(chunk=chunk),
    }
    return {kind: rules[kind] for kind in types}


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
