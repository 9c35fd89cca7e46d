"""Scorers of small networks that draft from a target's hidden states: heads that ship with checkpoints, and EAGLE-3.

At the place of every token such a network reads the token and the target's state of the token before it, and it has a
KV cache of its own. After the text there are no states of the target yet: there it reads its own output states. Once
the target has verified those tokens, they are read again with the target's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from slipstream.core.draft import Tree, padded
from slipstream.core.law import Law
from slipstream.core.protocols import HasModel, Shape
from slipstream.core.source import Source
from slipstream.execution.backends import draft_graphs
from slipstream.execution.draft_graphs import FED, DraftGraphs, Room, Seat, Wish, fed_slots
from slipstream.execution.passes import GivenSlots, PassMasks, Sight
from slipstream.kernels.packing import pack_layers
from slipstream.models.heads.hidden_states import HiddenStates
from slipstream.models.memory import HFCache, Memory, OnMemory

PREFILL_TOKENS = 512
"""The columns of one prefill pass, which bounds the memory of masks and activations for long prompts."""


@dataclass(frozen=True)
class Behind:
    """The context of the new tokens of a pass: `positions` (rows, n), `masks`, and the `cache` (None: no cache)."""

    positions: Tensor
    cache: Any
    masks: PassMasks

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (rows, 1, n, slots) of a layer with this window (None: no window)."""
        return self.masks.mask(Sight(window), dtype)

    @staticmethod
    def within(slots: Tensor, end: int, cache: Any) -> Behind:
        """Return the context of tokens at slots (rows, n).

        There is no state before a text's first token: its slot is kept, so that slots count as the text's places do,
        but no other token attends to it.
        """
        masks = PassMasks.chain(slots, end)
        assert masks.allowed is not None
        seen = masks.allowed & ((masks.others > 0)[:, None] | (slots == 0)[:, :, None])
        return Behind((slots - 1).clamp(min=0), cache, replace(masks, allowed=seen))


class Head(Protocol):
    """A network of `depth` layers that take turns: each drafts one token from the previous layer's states.
    For tokens after those, the last layer goes on with its own states. `places` are those of `HiddenStates`."""

    @property
    def depth(self) -> int: ...

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the target's hidden states that it reads."""

    @property
    def vocab(self) -> int: ...

    def combine(self, states: Tensor) -> Tensor:
        """Combine the target's states (rows, n, width of all places) -> the network's input (rows, n, width)."""

    @property
    def targets(self) -> Tensor | None:
        """The ids in the target's vocabulary of the tokens that it drafts, in rising order; None for all."""

    def __call__(self, step: int, tokens: Tensor, hidden: Tensor, behind: Behind) -> Tensor:
        """Run layer `step` on tokens (rows, n) and the states before them -> states (rows, n, width)."""

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, n, drafted tokens) of the next tokens."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, n, vocabulary of the target) of the next tokens."""


@dataclass(frozen=True)
class HeadNetwork:
    """A network on hidden states that drafts in a graph: step one reads the target's states, later ones its own.
    The target's are (rows, fed, places, width), its own are (rows, 1, width)."""

    head: Head

    @property
    def known(self) -> Tensor | None:
        return self.head.targets

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, Tensor]:
        assert states is not None
        if states.ndim == 4:
            states = self.head.combine(states.flatten(2))
        slots, end = seat.slots(tokens.shape[1]), seat.places.shape[0]
        made = self.head(0, tokens, states, Behind.within(slots, end, GivenSlots(seat.stores, slots, end)))
        last = made[:, -1:]
        return self.head.own_logits(last)[:, 0], last


@runtime_checkable
class RecordsStates(Protocol):
    """A target that can record its hidden states for drafts."""

    @property
    def device(self) -> torch.device: ...

    def record(self, places: Sequence[int]) -> HiddenStates:
        """Record the hidden states at some places of every token, as long as the result lives."""


class OnTargetStates(OnMemory):
    """A Scorer with a cache of its own that drafts from the target's hidden states; its rows are the target's first."""

    source_form = None
    context = None

    def __init__(self, target: HasModel, places: Sequence[int], vocab: int, name: str) -> None:
        if not isinstance(target, RecordsStates):
            raise ValueError(f"{target.name} shows no hidden states of its tokens: use another draft.")
        self.name, self.vocab, self.device = name, vocab, target.device
        self._states = target.record(places)
        self._memory = Memory()
        self._cache = HFCache(self._memory)

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move nothing: drafted tokens are read again."""

    def fix_shape(self, shape: Shape | None) -> None:
        """Do nothing: the shape of a draft's passes leaves the target's bits as they are."""


@dataclass
class _RoundTokens:
    """The tokens (rows, n) that a round began with, of which `counts` are real.
    `made` are the states that the last of the `layers` layers run so far made of them."""

    tokens: Tensor
    counts: list[int]
    made: Tensor
    layers: int = 1


class HeadScorer(OnTargetStates):
    """A `Head` and its cache (see `core.protocols.Scorer` for the contract and the shapes). Chains only.
    `rollback` also drops what was not read with the target's states."""

    def __init__(self, target: HasModel, head: Head, name: str) -> None:
        super().__init__(target, head.places, head.vocab, name)
        self.head = head
        self._sure: list[int] = []  # per row: the tokens that all layers have read with the target's states
        self._fed: _RoundTokens | None = None
        self._last = torch.empty(0)  # the states (rows, 1, width) made at each row's last token
        self.draft_graphs: DraftGraphs | None = None

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        super().add(rows)
        self._sure += [0] * rows

    def fork(self, rows: Sequence[int]) -> None:
        super().fork(rows)
        self._sure += [self._sure[row] for row in rows]

    def free(self, rows: Sequence[int]) -> None:
        freed = set(rows)
        super().free(rows)
        self._sure = [sure for row, sure in enumerate(self._sure) if row not in freed]

    def rollback(self, lengths: Sequence[int]) -> None:
        kept = [min(pair) for pair in zip(lengths, self._sure, strict=False)]
        super().rollback(kept)
        self._sure[: len(kept)] = kept

    @torch.inference_mode()
    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed texts whose tokens the target has read.
        Layer k reads the token k places later; places where that token is not known yet are not kept."""
        assert first == 0, "a draft has the rows that run, and no others"
        ahead = self.head.depth - 1
        for start in range(0, max(map(len, texts), default=0), PREFILL_TOKENS):
            parts = [text[start : start + PREFILL_TOKENS + ahead] for text in texts]
            width = min(PREFILL_TOKENS, max(map(len, parts)))
            tokens = pad(padded(parts, self.device), (0, width))
            slots = self._memory.texts.place(width, 0, len(parts)).to(self.device)
            hidden, behind = self._target_states(slots), Behind.within(slots, self._memory.texts.end, self._cache)
            for step in range(self.head.depth):
                hidden = self.head(step, tokens[:, step : step + width], hidden, behind)
            self._memory.texts.advance([max(0, min(PREFILL_TOKENS, len(part) - ahead)) for part in parts])
        self._sure[: len(texts)] = self.lengths[: len(texts)]

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens; only the logits after each row's last one are computed, and repeated at all its places."""
        assert first == 0 and tree is None, "heads draft chains for the rows that run"
        held = self._states.lengths
        if any(count and have > read for count, have, read in zip(counts, self.lengths, held, strict=False)):
            # Drafted tokens (rows, 1) go to the next layer, or to the last one with its own states.
            fed = self._fed
            assert fed is not None, "a round begins with the pending token"
            if fed.layers == self.head.depth:
                self._feed(self.head.depth - 1, tokens, self._last, counts)
            else:
                last = (torch.tensor(fed.counts, device=tokens.device) - 1).clamp(min=0)[:, None]
                fed.tokens = fed.tokens.roll(-1, 1).scatter(1, last, tokens)
                have = zip(self.lengths, fed.counts, strict=True)
                self._memory.texts.rollback([length - count for length, count in have])
                fed.made = self._feed(fed.layers, fed.tokens, fed.made, fed.counts)
                fed.layers += 1
        else:  # a round begins: tokens that the target has read, and the pending one, go with the target's states
            made = self._feed(0, tokens, None, counts)
            ahead = self.head.depth - 1
            self._sure = [
                max(0, have - ahead) if count else sure
                for have, count, sure in zip(self.lengths, counts, self._sure, strict=True)
            ]
            self._fed = _RoundTokens(tokens, list(counts), made)
        return self.head.logits(self._last).expand(-1, tokens.shape[1], -1)

    def _feed(self, step: int, tokens: Tensor, hidden: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Run a layer on tokens and the states before them (None: the target's) -> its states (rows, n, width)."""
        slots = self._memory.texts.place(tokens.shape[1]).to(self.device)
        behind = Behind.within(slots, self._memory.texts.end, self._cache)
        made = self.head(step, tokens, self._target_states(slots) if hidden is None else hidden, behind)
        self._memory.texts.advance(counts)
        last = (torch.tensor(list(counts), device=self.device) - 1).clamp(min=0)
        self._last = made[torch.arange(len(made), device=self.device), last].unsqueeze(1)
        return made

    def make_draft_graphs(self, sizes: Sequence[int], progress: Callable[[str], object] | None = None) -> None:
        """Pack the network's weights on CPUs, and draft by graphs; layers that take turns have none."""
        if self.head.depth == 1:
            if isinstance(self.head, nn.Module) and self.device.type == "cpu":
                pack_layers(self.head)
            # In every round the network reads the tokens that the previous one kept again, and the pending token.
            most_fed = max(FED, *sizes) + 1
            self.draft_graphs = draft_graphs(HeadNetwork(self.head), self.name, self.device, sizes, most_fed, progress)
            self._memory.texts.least = self.draft_graphs.least

    @torch.inference_mode()
    def chain(self, wish: Wish) -> tuple[Tensor, Law] | None:
        graphs, texts = self.draft_graphs, self._memory.texts
        if graphs is not None and max(map(len, wish.fed)) > graphs.most_fed:
            self.prefill([fed[:-1] for fed in wish.fed])
            wish = replace(wish, fed=[fed[-1:] for fed in wish.fed])
        if graphs is None or not texts.stores:
            return None
        rows, width = len(wish.fed), graphs.width(wish)
        texts.reserve(width + graphs.length(wish), 0, rows)
        last = torch.tensor([max(len(fed) - 1, 0) for fed in wish.fed])
        slots = fed_slots(torch.tensor(texts.lengths[:rows]), last, width).to(self.device)
        states = self._states.of(slots - 1).unflatten(-1, (len(self.head.places), -1))
        room = Room(texts.lengths[:rows], texts.end, texts.taking_part, None, states)
        if (drafted := graphs.run(wish, room)) is None:
            return None
        read = [have + len(fed) for have, fed in zip(texts.lengths, wish.fed, strict=False)]
        self._sure[:rows] = [have if fed else sure for have, fed, sure in zip(read, wish.fed, self._sure, strict=False)]
        texts.advance(
            [len(fed) + max(gamma, 1) - 1 if fed else 0 for fed, gamma in zip(wish.fed, wish.gammas, strict=True)]
        )
        return drafted

    def _target_states(self, slots: Tensor) -> Tensor:
        return self.head.combine(self._states.of(slots - 1))
