"""Messages to and from frames, all checked: rows that are opened, requests for drafts, and drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from slipstream.core.draws import inverse
from slipstream.core.options import SHAPES
from slipstream.core.request import Sampler
from slipstream.core.values import is_finite
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.remote.frames import Frame, FrameError, FrameType

MOST_GAMMA, MOST_CANDIDATES = 256, 4096
SUM_TOLERANCE = 1e-4  # the greatest deviation from one of the sum of a law that was sent, whose weights are rounded


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
        return Frame(FrameType.OPEN, 0, vars(self))

    @staticmethod
    def read(frame: Frame, vocab: int) -> OpenRow:
        text, source = (frame.ids(name, vocab) for name in ("text", "source"))
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
    return Frame(FrameType.PROPOSE, sequence, {"asks": list(map(vars, asks)), "ahead": int(ahead)})


def read_ask(frame: Frame, vocab: int) -> tuple[list[AskRow], bool]:
    asks = [
        AskRow(
            part.number("row"),
            part.number("keep"),
            part.ids("tail", vocab),
            part.number("gamma", 0, MOST_GAMMA),
            part.shares("numbers"),
            part.shares("later"),
        )
        for part in frame.parts("asks")
    ]
    if len({ask.row for ask in asks}) < len(asks):
        raise FrameError("a row is asked for twice")
    if any(number == 1 for ask in asks for number in (*ask.numbers, *ask.later)):
        raise FrameError("numbers to draw with lie outside [0, 1)")
    return asks, bool(frame.number("ahead", 0, 1))


@dataclass(frozen=True)
class SentLaw:
    """A law cut to its most probable tokens, from which tokens are really drawn: `ids` ascending, `weights` that sum to
    one."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]

    @staticmethod
    def cut(probs: torch.Tensor, top: int) -> SentLaw:
        """Cut weights (vocab,) to the `top` most probable tokens, renormalised, with as many digits as are sent."""
        wide = probs.detach().cpu().double()
        best = wide.topk(min(top, len(wide)))
        shares = zip(best.indices.tolist(), (best.values / best.values.sum()).tolist(), strict=True)
        ids, weights = zip(*sorted((token, sent) for token, share in shares if (sent := round(share, 9))), strict=True)
        return SentLaw(ids, weights)

    @staticmethod
    def read(frame: Frame, vocab: int) -> SentLaw:
        law = SentLaw(frame.ids("ids", vocab), frame.shares("weights"))
        if not law.ids or not all(one < other for one, other in pairwise(law.ids)):
            raise FrameError("the ids of a distribution do not ascend")
        if len(law.ids) != len(law.weights) or not min(law.weights) > 0:
            raise FrameError("a distribution has weights that are not above 0, or not one for each id")
        if abs(math.fsum(law.weights) - 1) > SUM_TOLERANCE:
            raise FrameError("the weights of a distribution do not sum to one")
        return law

    def draw(self, number: float) -> int:
        """Return the token at which the cumulative weights pass a number in [0, 1)."""
        weights = torch.tensor(self.weights)[None, None]
        return self.ids[int(inverse(weights, torch.tensor([[number]], dtype=torch.float64)))]

    @property
    def best(self) -> int:
        return self.ids[self.weights.index(max(self.weights))]


@dataclass(frozen=True)
class DraftRow:
    """The draft for one row; `laws` has one entry per token in mode `LAW`, and is empty in other modes."""

    row: int
    tokens: tuple[int, ...]
    laws: tuple[SentLaw, ...] = field(default_factory=tuple)


def draft_frame(sequence: int, drafts: Sequence[DraftRow]) -> Frame:
    sent = [{**vars(draft), "laws": list(map(vars, draft.laws))} for draft in drafts]
    return Frame(FrameType.DRAFT, sequence, {"drafts": sent})


def read_drafts(frame: Frame, vocab: int) -> list[DraftRow]:
    drafts = list[DraftRow]()
    for part in frame.parts("drafts"):
        laws = tuple(SentLaw.read(each, vocab) for each in part.parts("laws"))
        drafts.append(DraftRow(part.number("row"), part.ids("tokens", vocab), laws))
        if len(laws) not in (0, len(drafts[-1].tokens)):
            raise FrameError("distributions do not fit their tokens")
    return drafts
