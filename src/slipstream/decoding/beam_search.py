"""Beam search as a function of the conditionals p(. | prefix) and, if it is sampled, of noise that belongs to prefixes.

It has the semantics of transformers. The search reads a table of scored prefixes, and stops where it needs a prefix
that is not in the table. Additional prefixes cannot change the result, so any draft is exact. (In appendix A.4 of arXiv
2211.17192 the draft's own beams are the proposal; its condition, top_w(p) within top_u(q), means that the needed prefix
is in the table.)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import inf
from operator import attrgetter, itemgetter

from slipstream.core.beams import Beams, Candidates, Hypothesis, Prefix
from slipstream.core.law import Fault
from slipstream.core.request import Request
from slipstream.core.stats import Stats

RANKED_BY_SCORE = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)
"""Whether the installed transformers ranks what a sampled step has drawn by score; before, in the order of draws."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A live prefix and its summed log-probability."""

    prefix: Prefix
    score: float


Continuation = tuple[float, Prefix, int]
"""The summed log-probability of a prefix and one more token, the prefix, and that token."""


def best_continuations(
    beams: Iterable[Beam], count: int, law: Callable[[Prefix], Candidates | None]
) -> list[Continuation]:
    """Return the first `count` continuations of all beams by their ranks; ties keep the order of the beams.

    Without noise these are the best ones, the best first; with noise they come as `RANKED_BY_SCORE` says. Forbidden
    tokens (with a log-probability of -inf) are left out.
    """
    ranked: list[tuple[float, Continuation]] = []
    for beam in beams:
        ranked += [
            (beam.score + rank, (beam.score + value, beam.prefix, token))
            for value, token, rank in zip(*(law(beam.prefix) or ((), (), ())), strict=True)
            if value > -inf
        ]
    ranked.sort(key=itemgetter(0), reverse=True)  # sorting is stable, also with reverse=True
    chosen = [continuation for _, continuation in ranked[:count]]
    return sorted(chosen, key=itemgetter(0), reverse=True) if RANKED_BY_SCORE else chosen


def best_beams(beams: Iterable[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=attrgetter("score"), reverse=True)[:count]


@dataclass
class BeamSearch:
    """The beam search of one prompt, with its `live` beams and the best `finished` hypotheses so far.

    `limit` is the greatest number of output tokens. `index` and `stats` are as in `Row`; in the statistics a step of
    the search takes the place of a token: `emitted` counts steps, `accepted` those that drafted prefixes made possible.
    """

    request: Request
    settings: Beams
    limit: int
    index: int = 0
    stats: Stats = field(default_factory=Stats)
    live: list[Beam] = field(init=False)
    finished: list[Hypothesis] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    error: Fault | None = field(default=None, init=False)
    _hopeful: bool = field(default=True, init=False)  # whether a live beam may still beat the finished ones

    def __post_init__(self) -> None:
        self.live = [Beam(Prefix(self.request.prompt[-1]), 0.0)]
        self._keep = self.settings.candidates(len(self.request.eos))

    @property
    def depth(self) -> int:
        return self.live[0].prefix.depth

    @property
    def missing(self) -> list[Prefix]:
        return [beam.prefix for beam in self.live if not beam.prefix.scored]

    def advance(self) -> int:
        steps = 0
        while not self.finish_reason and not self.missing:
            self._step()
            steps += 1
        return steps

    def _step(self) -> None:
        self.error = next((beam.prefix.fault for beam in self.live if beam.prefix.fault), None)
        if self.error:
            self.finish_reason = "error"
            return
        settings, width, length = self.settings, self.settings.num_beams, self.depth + 1
        open_ = self._hopeful and not (settings.early_stopping is True and len(self.finished) == width)
        going: list[Beam] = []
        for rank, (score, prefix, token) in enumerate(
            best_continuations(self.live, self._keep, lambda prefix: prefix.best)
        ):
            text = [*self.request.prompt, *prefix.tokens, token]
            reason = self.request.finish_reason(text, self.limit - length)
            if reason is None:
                going.append(Beam(prefix.child(token), score))
            elif rank < width and open_:  # lower ranks are candidates only so that enough beams stay live
                score /= length**settings.length_penalty
                self.finished.append(Hypothesis((*prefix.tokens, token), score, reason))
                self.finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
                del self.finished[width:]
        self.live = best_beams(going, width) or self.live
        full = len(self.finished) == width
        if going and full:
            far = settings.early_stopping == "never" and settings.length_penalty > 0
            hoped = self.live[0].score / (self.limit if far else length) ** settings.length_penalty
            self._hopeful = self._hopeful and hoped > self.finished[-1].score
        if not going or not self._hopeful or (full and settings.early_stopping is True):
            self.finish_reason = self.finished[0].finish_reason if self.finished else "length"

    def hypotheses(self) -> Sequence[Hypothesis]:
        """Return up to `num_return_sequences` hypotheses, the best first.

        If the search has not ended, or has failed, live beams follow the finished hypotheses. There are fewer if the
        settings allow no more texts.
        """
        hypotheses = list(self.finished)
        if self.finish_reason is None or self.error:
            length = max(1, self.depth) ** self.settings.length_penalty
            reason = self.finish_reason or "interrupted"
            hypotheses = [replace(each, finish_reason=reason) for each in hypotheses]
            hypotheses += [Hypothesis(tuple(beam.prefix.tokens), beam.score / length, reason) for beam in self.live]
        return hypotheses[: self.settings.num_return_sequences]
