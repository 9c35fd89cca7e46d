"""Messages to and from frames, all checked: rows that are opened, requests for drafts, and drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from slipstream.core.draws import inverse
from slipstream.core.options import SHAPES
from slipstream.core.request import Sampler
from slipstream.core.values import is_finite
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.remote.frames import Frame, FrameError, FrameType, array

MOST_GAMMA, MOST_CANDIDATES = 256, 4096
SUM_TOLERANCE = 1e-4  # the greatest deviation from one of the sum of a law that was sent, whose weights are float32


class DraftMode(StrEnum):
    """How the server drafts a row.

    `GUESS`: the most probable tokens, for greedy texts and where the server's law is not used. `COUPLED`: by the random
    numbers that the coupled rule shares. `LAW`: drawn from a law that is sent with the tokens.
    """

    GUESS = "guess"
    COUPLED = "coupled"
    LAW = "law"


@dataclass(frozen=True)
class OpenRow:
    """The message that opens a row at the server: its whole text, of which the first `prompt` tokens are the prompt.

    `seed` and `key` determine the random numbers of coupled draws; in other modes they are 0, to keep them from the
    server. `top` is the number of most probable tokens sent of a law.
    """

    row: int
    mode: DraftMode
    sampling: Mapping[str, Any]
    text: tuple[int, ...]
    prompt: int
    source: tuple[int, ...] = ()
    seed: int = 0
    key: int = 0
    top: int = 64

    def frame(self) -> Frame:
        values = {name: getattr(self, name) for name in ("row", "mode", "prompt", "seed", "key", "top")}
        return Frame(
            FrameType.OPEN,
            0,
            {**values, "sampling": dict(self.sampling)},
            [array("i", self.text), array("i", self.source)],
        )

    @staticmethod
    def read(frame: Frame, vocab: int) -> OpenRow:
        text, source = (tuple(_ids(frame.array(place, "i"), vocab)) for place in (0, 1))
        sampling = frame.values.get("sampling")
        if not text or not isinstance(sampling, dict):
            raise FrameError("a row has no text, or no settings")
        if (mode := frame.text("mode")) not in list(DraftMode):
            raise FrameError(f"there is no mode {mode!r}")
        opened = OpenRow(
            frame.number("row", 0, 2**31),
            DraftMode(mode),
            sampling,
            text,
            frame.number("prompt", 1, len(text)),
            source,
            frame.number("seed", 0, 2**128),
            frame.number("key", 0, 2**128),
            frame.number("top", 1, MOST_CANDIDATES),
        )
        opened.sampler()
        return opened

    def sampler(self) -> Sampling:
        known = {name: self.sampling[name] for name in SHAPES if name in self.sampling}
        known["temperature"] = 0.0 if self.mode == DraftMode.GUESS else known.get("temperature", 0)
        bias, eos = self.sampling.get("logit_bias", []), self.sampling.get("eos", [])
        try:
            biases = {int(token): float(value) for token, value in bias}
            return Sampling(logit_bias=biases, eos=frozenset(map(int, eos)), **known)
        except (ValueError, TypeError, OverflowError) as error:
            raise FrameError(f"the settings of a row are not possible: {error}") from None


def settings_of(sampler: Sampler) -> dict[str, Any]:
    """Return the settings of a sampler that are sent to the server; its processors, words and grammar are not."""
    settings = {name: getattr(sampler, name) for name in SHAPES if hasattr(sampler, name)}
    bias: Mapping[int, float] = getattr(sampler, "logit_bias", {})
    settings["logit_bias"] = [[int(token), float(value)] for token, value in bias.items() if is_finite(value)]
    settings["eos"] = sorted(getattr(sampler, "eos", ()))
    return settings


@dataclass(frozen=True)
class AskRow:
    """The request for one row: its committed text, and the number of tokens to draft behind it.

    The text is the first `keep` tokens of the text that the server has, followed by `tail`; the server drafts up to
    `gamma` tokens. In mode `LAW`, `numbers` in [0, 1) draw those tokens, and `later` those of the next round if all are
    accepted.
    """

    row: int
    keep: int
    tail: tuple[int, ...]
    gamma: int
    numbers: tuple[float, ...] = ()
    later: tuple[float, ...] = ()


def ask_frame(sequence: int, asks: Sequence[AskRow], ahead: bool) -> Frame:
    """Return the requests of a batch of rows as a frame; `ahead`: draft on afterwards as if all were accepted."""
    lists = {name: [getattr(ask, name) for ask in asks] for name in ("row", "keep", "gamma")}
    parts = [("i", "tail"), ("d", "numbers"), ("d", "later")]
    counts = [array("i", [len(getattr(ask, name)) for ask in asks]) for _, name in parts]
    flat = [array(code, [each for ask in asks for each in getattr(ask, name)]) for code, name in parts]
    return Frame(FrameType.PROPOSE, sequence, {**lists, "ahead": int(ahead)}, [*counts, *flat])


def read_ask(frame: Frame, vocab: int) -> tuple[list[AskRow], bool]:
    rows, keeps, gammas = (frame.numbers(name) for name in ("row", "keep", "gamma"))
    if not len(rows) == len(keeps) == len(gammas) == len(set(rows)) or max(gammas, default=0) > MOST_GAMMA:
        raise FrameError("what is asked for does not fit together")
    tails, numbers, later = (
        _split(frame.array(place + 3, code), frame.array(place, "i"), len(rows)) for place, code in enumerate("idd")
    )
    for each in (*numbers, *later):
        if not all(0 <= number < 1 for number in each):
            raise FrameError("numbers to draw with lie outside [0, 1)")
    for tail in tails:
        _ids(np.array(tail, dtype=np.int64), vocab)
    asks = [AskRow(*each) for each in zip(rows, keeps, tails, gammas, numbers, later, strict=True)]
    return asks, bool(frame.number("ahead", 0, 1))


@dataclass(frozen=True)
class SentLaw:
    """A law cut to its most probable tokens, from which tokens are really drawn: `ids` ascending, `weights` float32,
    summing to one."""

    ids: np.ndarray
    weights: np.ndarray

    @staticmethod
    def cut(probs: torch.Tensor, top: int) -> SentLaw:
        """Cut weights (vocab,) to the `top` most probable tokens, renormalised in float64."""
        wide = probs.detach().cpu().double()
        best = wide.topk(min(top, len(wide)))
        order = best.indices.sort()
        weights = best.values[order.indices]
        kept = weights > 0
        total = weights[kept] / weights[kept].sum()
        return SentLaw(array("i", order.values[kept].numpy()), array("f", total.numpy()))

    @staticmethod
    def point(token: int) -> SentLaw:
        return SentLaw(array("i", [token]), array("f", [1.0]))

    def draw(self, number: float) -> int:
        """Return the token at which the cumulative weights pass a number in [0, 1)."""
        weights = torch.from_numpy(self.weights.copy())[None, None]
        return int(self.ids[int(inverse(weights, torch.tensor([[number]], dtype=torch.float64)))])

    @property
    def best(self) -> int:
        return int(self.ids[int(self.weights.argmax())])


@dataclass(frozen=True)
class DraftRow:
    """The draft for one row; `laws` has one entry per token in mode `LAW`, and is empty in other modes."""

    row: int
    tokens: tuple[int, ...]
    laws: tuple[SentLaw, ...] = field(default_factory=tuple)


def draft_frame(sequence: int, drafts: Sequence[DraftRow]) -> Frame:
    laws = [law for draft in drafts for law in draft.laws]
    values = {"row": [draft.row for draft in drafts], "length": [len(draft.tokens) for draft in drafts]}
    ids, weights = ([getattr(law, name) for law in laws] for name in ("ids", "weights"))
    arrays = [
        array("i", [token for draft in drafts for token in draft.tokens]),
        array("i", [len(draft.laws) for draft in drafts]),
        array("i", [len(law.ids) for law in laws]),
        np.concatenate([array("i", []), *ids]).astype("<i4"),
        np.concatenate([array("f", []), *weights]).astype("<f4"),
    ]
    return Frame(FrameType.DRAFT, sequence, values, arrays)


def read_drafts(frame: Frame, vocab: int) -> list[DraftRow]:
    rows, lengths = frame.numbers("row"), frame.numbers("length")
    if len(rows) != len(lengths):
        raise FrameError("drafts do not fit together")
    tokens = _split(frame.array(0, "i"), np.array(lengths), len(rows))
    per_row, sizes = frame.array(1, "i"), frame.array(2, "i")
    ids, weights = (_split(frame.array(place, code), sizes, len(sizes)) for place, code in ((3, "i"), (4, "f")))
    laws = [SentLaw(array("i", i), array("f", w)) for i, w in zip(ids, weights, strict=True)]
    for law in laws:
        if not len(law.ids) or not (np.diff(law.ids) > 0).all():
            raise FrameError("the ids of a distribution do not ascend")
        _ids(law.ids, vocab)
        if not (np.isfinite(law.weights).all() and (law.weights > 0).all()):
            raise FrameError("a distribution has weights that are not above 0")
        if abs(math.fsum(law.weights.tolist()) - 1) > SUM_TOLERANCE:
            raise FrameError("the weights of a distribution do not sum to one")
    drafts, start = list[DraftRow](), 0
    if len(per_row) != len(rows) or int(per_row.sum()) != len(laws) or (per_row < 0).any():
        raise FrameError("distributions do not fit their tokens")
    for row, drafted, count in zip(rows, tokens, per_row.tolist(), strict=True):
        _ids(np.array(drafted, dtype=np.int64), vocab)
        if count not in (0, len(drafted)):
            raise FrameError("distributions do not fit their tokens")
        drafts.append(DraftRow(row, drafted, tuple(laws[start : start + count])))
        start += count
    return drafts


def _ids(values: np.ndarray, vocab: int) -> list[int]:
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < vocab):
        raise FrameError(f"token ids lie outside 0..{vocab - 1}")
    return values.tolist()


def _split(flat: np.ndarray, counts: np.ndarray, rows: int) -> list[tuple[Any, ...]]:
    if len(counts) != rows or (rows and int(counts.min()) < 0) or int(counts.sum()) != len(flat):
        raise FrameError("the lengths of a frame do not add up")
    ends = counts.cumsum().tolist()
    values = flat.tolist()
    return [tuple(values[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]
