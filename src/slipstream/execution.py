"""How a model's pass runs: eagerly, compiled for the CPU, or captured for CUDA.

A compiled pass reads and writes the same stores of a RowCache as an eager one, so passes of both kinds can follow each
other, and the model's code stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from slipstream.tracing import LEAST, Frozen, equate, vary, warn

Stores = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, (rows, heads, slots, head_dim)."""

Parts = tuple[Stores, Tensor, Tensor | None] | None
"""The fields of a `Cross`, as graphs take them."""

BUCKET = 64  # slots of captured passes are rounded up to this
INPUTS = ("tokens", "positions", "slots", "masks", "stores", "cross")
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
        """What a model takes beside its text."""
        return {} if self.cross is None else {"cross": self.cross}


@dataclass(frozen=True)
class Mode:
    """How models run. `packed` None packs the weights of models that are loaded by name, where that is possible;
    a loaded model would need its weights twice. Compiled, a draft makes chains of the sizes `ahead` by one graph each
    and others by a graph per step; None is no draft. `progress` is told when a graph is being made."""

    compiled: bool = False
    packed: bool | None = None
    ahead: tuple[int, ...] | None = None
    progress: Callable[[str], object] | None = None


EAGER = Mode()


class Execution(Protocol):
    """A faster way for passes of few tokens. None means that this pass has to run eagerly."""

    def width(self, rows: int, count: int) -> int:
        """How many columns a pass of `count` tokens for each of so many texts should have; the others are padding."""
        ...

    def run(self, work: Pass, stores: Stores) -> Tensor | None:
        """The logits (rows, n, vocab), with the new keys and values written to the stores."""
        ...

    def of(self, model: PreTrainedModel, name: str) -> Execution:
        """The same way for another model over the same stores."""
        ...


def execution(model: PreTrainedModel, name: str, mode: Mode) -> Execution | None:
    """What makes passes of few tokens faster in this mode; None is eager. A device without one gives a warning."""
    if not mode.compiled:
        return None
    if model.device.type in KINDS and not (model.device.type == "cuda" and model.config.is_encoder_decoder):
        return KINDS[model.device.type](model, name, mode.progress)
    warnings.warn(f"{name} runs eagerly: passes on {model.device} are not compiled.", RuntimeWarning, stacklevel=3)
    return None


# ---- compiled passes --------------------------------------------------------------------------------------------


class _GivenSlots(Cache):
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
    end = next(iter(work.masks.values())).shape[-1]
    return model(
        input_ids=work.tokens,
        attention_mask=work.mask,
        position_ids=work.positions,
        past_key_values=_GivenSlots(stores, work.slots, end),
        use_cache=True,
        **work.beside,
    ).logits


@dataclass
class Compiled:
    """Passes as graphs made by inductor, with the weights frozen into them and a C++ wrapper (CPU).

    The numbers of rows, new tokens and slots are symbols, so one graph serves every batch, another batches of one new
    token per text, and a third single texts. A graph is made when it is first needed (some ten seconds; `progress` is
    told), compared with the eager pass, and given up for good, with one warning, if it cannot be made or gives other
    logits.
    """

    model: PreTrainedModel
    name: str
    progress: Callable[[str], object] | None = None
    _graphs: dict[str, Any] = field(default_factory=dict)  # by what they serve, in words
    _failed: bool = False

    def width(self, rows: int, count: int) -> int:
        """At least two columns for a single text, which cost no more than one there."""
        return count if self._failed or rows > 1 else max(count, LEAST)

    def run(self, work: Pass, stores: Stores) -> Tensor | None:
        """See `Execution`."""
        rows, width = work.tokens.shape
        if self._failed or not stores or not self.width(rows, 1) <= width <= MOST_WIDTH:
            return None
        work = _settled(work)
        served = "one text" if rows == 1 else "batches" if width > 1 else "batches, a token each"
        if served not in self._graphs:
            return self._make(served, work, stores)
        try:
            return self._graphs[served](work.tokens, work.positions, work.slots, work.masks, stores, _parts(work))
        except Exception as error:  # dynamo has met something it had not seen when the graph was made
            self._give_up(error)
            return None

    def of(self, model: PreTrainedModel, name: str) -> Compiled:
        """See `Execution`."""
        return Compiled(model, name, self.progress)

    def _make(self, served: str, work: Pass, stores: Stores) -> Tensor:
        if self.progress:
            self.progress(f"compiling {self.name} for {served}")
        eager = forward(self.model, work, stores)
        graph = Frozen(_function(self.model), INPUTS)
        try:
            constant = {what for what, size in zip(("rows", "new"), work.tokens.shape, strict=True) if size == 1}
            vary(_sizes(work, stores), constant)
            logits = graph(work.tokens, work.positions, work.slots, work.masks, stores, _parts(work))
            compare(eager, logits)
        except Exception as error:  # whatever dynamo, inductor or the machine's C++ compiler object to
            self._give_up(error)
            return eager
        self._graphs[served] = graph
        return logits

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        warn(self.name, f"runs {EAGERLY}", error)


def _function(model: PreTrainedModel) -> Callable[..., Tensor]:
    """The pass as a function of tensors alone."""

    def function(
        tokens: Tensor, positions: Tensor, slots: Tensor, masks: dict[str, Tensor], stores: Stores, cross: Parts
    ) -> Tensor:
        work = Pass(tokens, positions, slots, masks, cross and Cross(*cross))
        equate(_sizes(work, stores))
        return forward(model, work, stores)

    return function


def _settled(work: Pass) -> Pass:
    """The same with integers that were made in inference mode, whoever made the given ones: graphs are strict here."""
    if work.tokens.is_inference() and work.positions.is_inference() and work.slots.is_inference():
        return work
    return Pass(work.tokens.clone(), work.positions.clone(), work.slots.clone(), work.masks, work.cross)


def _parts(work: Pass) -> Parts:
    """What a decoder reads beside its text, as graphs take it."""
    return (work.cross.stores, work.cross.mask, work.cross.back) if work.cross else None


def _sizes(work: Pass, stores: Stores) -> list[tuple[Tensor, dict[int, str]]]:
    """What sizes count."""
    cross = [(work.cross.mask, {0: "rows", 3: "source"})] if work.cross else []
    if work.cross and work.cross.back is not None:
        cross.append((work.cross.back, {0: "rows", 1: "new", 2: "end"}))
    return [
        *((tensor, {0: "rows", 1: "new"}) for tensor in (work.tokens, work.positions, work.slots)),
        *((mask, {0: "rows", 2: "new", 3: "end"}) for mask in work.masks.values()),
        *sizes_of_stores(stores, "slots"),
        *sizes_of_stores(work.cross.stores if work.cross else [], "source slots"),
        *cross,
    ]


def sizes_of_stores(stores: Stores, slots: str) -> list[tuple[Tensor, dict[int, str]]]:
    """What sizes of keys and values count."""
    return [(store, {0: "rows", 2: slots}) for pair in stores for store in pair]


def compare(eager: Tensor, compiled: Tensor, what: str = "logits") -> None:
    """Raises ValueError if logits (or `what`) differ by more than another order of summation explains."""
    best, places = eager.float().topk(min(64, eager.shape[-1]))
    gap = float((best - compiled.float().gather(-1, places)).abs().max() / best.std(-1).max().clamp(min=1e-6))
    allowed = 0.02 if eager.dtype in {torch.float32, torch.float64} else 1.0
    if not gap <= allowed:
        raise ValueError(f"the compiled pass gives other {what} (by {gap:.2g} of their spread; {allowed} is rounding)")


# ---- captured passes --------------------------------------------------------------------------------------------


@dataclass
class Graph:
    """A captured pass: the tensors it reads, the logits it writes, and how to run it."""

    work: Pass
    logits: Tensor
    replay: Callable[[], None]


@dataclass
class Captured:
    """Passes as CUDA graphs, one per number of rows, of new tokens, and of slots rounded up to `BUCKET`.

    A replay has no cost of Python and of launches. Graphs know addresses: when the stores have moved, they are dropped.
    A model that cannot be captured runs eagerly, with one warning.
    """

    model: PreTrainedModel
    name: str
    progress: Callable[[str], object] | None = None
    _graphs: dict[tuple[int, ...], Graph] = field(default_factory=dict)
    _stores: int = 0  # where the stores of the graphs lie
    _failed: bool = False

    def width(self, rows: int, count: int) -> int:
        """As many as there are."""
        return count

    def of(self, model: PreTrainedModel, name: str) -> Captured:
        """See `Execution`."""
        return Captured(model, name, self.progress)

    def run(self, work: Pass, stores: Stores) -> Tensor | None:
        """See `Execution`."""
        if self._failed or work.cross or not stores or work.tokens.shape[1] > MOST_WIDTH:
            return None
        if self._stores != (address := stores[0][0].data_ptr()):
            self._stores, self._graphs = address, {}
        end = next(iter(work.masks.values())).shape[-1]
        end = min(-(-end // BUCKET) * BUCKET, stores[0][0].shape[2])
        key = (*work.tokens.shape, end)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(_widened(work, end), stores)
            except Exception as error:  # a synchronization in the model's code, too little memory, ...
                self._failed = True
                warn(self.name, f"runs {EAGERLY}", error)
                return None
        graph = self._graphs[key]
        _fill(graph.work, work)
        graph.replay()
        return graph.logits.clone()

    def _capture(self, work: Pass, stores: Stores) -> Graph:
        if self.progress:
            rows, width, end = *work.tokens.shape, next(iter(work.masks.values())).shape[-1]
            self.progress(f"capturing {self.name} for {rows} x {width} tokens and {end} slots")
        logits, replay = record(lambda: forward(self.model, work, stores))
        return Graph(work, logits, replay)


def record(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture what a function does on the GPU -> the tensor it returns, and what does the same again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first runs choose kernels and allocate, which cannot be captured
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = function()
    return logits, graph.replay


def _widened(work: Pass, end: int) -> Pass:
    """Tensors of its own with masks over `end` slots; nobody sees the added ones."""

    def wide(mask: Tensor) -> Tensor:
        return nn.functional.pad(mask, (0, end - mask.shape[-1]), value=torch.finfo(mask.dtype).min)

    masks = {kind: wide(mask) for kind, mask in work.masks.items()}
    return Pass(work.tokens.clone(), work.positions.clone(), work.slots.clone(), masks)


def _fill(fixed: Pass, work: Pass) -> None:
    """Copy a pass into the tensors that a graph reads; slots beyond it stay masked."""
    for name in ("tokens", "positions", "slots"):
        getattr(fixed, name).copy_(getattr(work, name))
    for kind, mask in work.masks.items():
        end = mask.shape[-1]
        fixed.masks[kind][..., :end].copy_(mask)
        fixed.masks[kind][..., end:] = torch.finfo(mask.dtype).min


KINDS: dict[str, type[Compiled] | type[Captured]] = {"cpu": Compiled, "cuda": Captured}
"""What compiles a pass, by the type of the device."""
