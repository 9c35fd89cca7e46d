"""Choose among several drafters: what is known first, the first that has a draft, or the one measured to be fastest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.core.draft import Draft, ScopedDraft, padded
from slipstream.core.draws import ScopedDraws
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Traits, scorers_among
from slipstream.core.request import Row
from slipstream.core.round import Context, Round, believable
from slipstream.drafters.copying import CopyingDrafter, grammar_of
from slipstream.drafters.lookup import Prediction
from slipstream.drafters.tree import TreeDrafter


class Choice:
    """Drafts each row with the first drafter that has tokens for it: a copy if the text repeats itself, else a model.

    Rows with and without a match share a round. Every drafter observes every round, which keeps its caches up to date.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """Make a choice among drafters in order of preference. Raises ValueError for fewer than two, and for trees."""
        self.drafters = _checked(drafters)
        self.traits = Traits(scorers_among(drafters), drafters=self.drafters)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        left, drafts, parts = list(gammas), list[Draft](), list[ScopedDraft]()
        for place, drafter in enumerate(self.drafters):
            if not any(left):
                break
            scope = f"choice{place}"
            draft = drafter.propose(replace(context, rng=ScopedDraws(context.rng, scope)), left)
            left = [0 if length else gamma for gamma, length in zip(left, draft.lengths, strict=True)]
            drafts.append(draft)
            parts.append(ScopedDraft(scope, draft, tuple(row for row, length in enumerate(draft.lengths) if length)))
        if not drafts:
            return Draft.empty(len(gammas), torch.device("cpu"))
        return replace(merge(drafts), parts=tuple(parts))

    def observe(self, round: Round) -> None:
        for drafter in self.drafters:
            drafter.observe(round)


def merge(drafts: Sequence[Draft]) -> Draft:
    """Merge drafts of the same rows, of which at most one has tokens for a row."""
    full = [draft for draft in drafts if any(draft.lengths)]
    if len(full) < 2:
        return full[0] if full else drafts[0]
    device = next((draft.tokens.device for draft in full if draft.law and not draft.law.point), full[0].tokens.device)
    rows = range(len(full[0].lengths))
    owners = [next((draft for draft in full if draft.lengths[row]), full[0]) for row in rows]
    tokens = padded([owner.tokens[row].tolist() for row, owner in enumerate(owners)], device)
    laws = [owner.q.of_row(row).to(device).stretched(tokens.shape[1]) for row, owner in enumerate(owners)]
    return Draft(tokens, Law.join(laws, 0), tuple(owner.lengths[row] for row, owner in enumerate(owners)))


DISCOUNT = 0.995  # how much a round's weight falls with every later one
EXPLORE = 0.15  # how far the bound of a drafter that was hardly tried lies above its speed, in the best speed
HOLD = 4  # the number of rounds for which a drafter is used once it is chosen


@dataclass(frozen=True)
class Arm:
    """The counts of one drafter: rounds, tokens and seconds, older ones with less weight."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Bandit:
    """Uses the drafter with the most tokens per second, measured while decoding; `decoder.NoDraft` may be one.

    It chooses by discounted upper confidence bounds (Garivier, Moulines 2011, arXiv 0805.3415): that with the largest
    speed + EXPLORE * (best speed) * sqrt(ln n / n_drafter) is used for `hold` rounds. The output law is exact, but
    which tokens a seed gives depends on times measured, unless decoding is greedy or coupled. A model that has not
    drafted for some rounds reads the missing tokens when it is tried; that time counts.
    """

    def __init__(
        self, drafters: Sequence[Drafter], hold: int = HOLD, clock: Callable[[Round], float] | None = None
    ) -> None:
        """Make a choice by speed; `clock` returns the seconds of a round (None: those that were measured)."""
        self.drafters = _checked(drafters)
        self.traits = Traits(scorers_among(drafters), drafters=self.drafters)
        self.arms, self.current = [Arm() for _ in self.drafters], 0
        self._hold, self._left = hold, 0  # for how many more rounds the current one is used
        self._clock = clock or (lambda round: sum(round.seconds.values()))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        self.choose()
        return self.drafters[self.current].propose(context, gammas)

    def observe(self, round: Round) -> None:
        for drafter in self.drafters:
            drafter.observe(round)
        if any(round.gammas):
            self.count(sum(map(len, round.tokens)), self._clock(round))

    def choose(self) -> None:
        """Choose the next round's drafter: each once, then that of the largest bound."""
        if self._left:
            self._left -= 1
        else:
            bounds = self.bounds()
            self.current, self._left = bounds.index(max(bounds)), self._hold - 1

    def bounds(self) -> list[float]:
        """Return every drafter's upper bound, in tokens per second; infinite for one that was never used."""
        everything = max(1.0, sum(arm.rounds for arm in self.arms))
        scale = EXPLORE * max(arm.speed for arm in self.arms)
        return [
            arm.speed + scale * math.sqrt(math.log(everything) / arm.rounds) if arm.rounds else math.inf
            for arm in self.arms
        ]

    def count(self, tokens: int, seconds: float) -> None:
        """Count a round of the current drafter, unless its seconds cannot be true."""
        if not believable(seconds):
            return
        self.arms = [Arm(arm.rounds * DISCOUNT, arm.tokens * DISCOUNT, arm.seconds * DISCOUNT) for arm in self.arms]
        arm = self.arms[self.current]
        self.arms[self.current] = Arm(arm.rounds + 1, arm.tokens + tokens, arm.seconds + seconds)


def _checked(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    if len(drafters) < 2:
        raise ValueError(f"a choice among {len(drafters)} drafters is not possible: give two or more.")
    if any(isinstance(drafter, TreeDrafter) for drafter in drafters):
        raise ValueError("a choice among drafters takes chains only: leave the tree out.")
    return tuple(drafters)


class Forced(CopyingDrafter[None]):
    """Drafts the usual tokens of the next text where a row's grammar allows only one.

    The same text may be possible in other tokens, so the target verifies it as any draft: a drafted x is kept with
    chance p(x), which is 1 if no other token is allowed.
    """

    def begin(self, row: Row) -> None: ...

    def copy(self, row: Row, gamma: int) -> list[int]:
        grammar = grammar_of(row)
        return [] if grammar is None else grammar.forced(row.output)[:gamma]


class KnownFirst:
    """Copies from predictions and drafts what grammars force; rows for which that gives nothing use another drafter.

    In rounds of rows without either, the other drafter makes the whole draft, and its draws have the same names in all
    rounds, so that a text does not depend on the other rows. Copied tokens of predictions are counted in the rows'
    statistics. Raises ValueError for a drafter of trees, which cannot share a round with chains.
    """

    def __init__(self, inner: Drafter) -> None:
        if isinstance(inner, TreeDrafter):
            raise ValueError(
                "predictions and forced tokens are drafted as chains, which share no round with a tree: leave the tree "
                "out."
            )
        self.inner, self.prediction, self.forced = inner, Prediction(), Forced()
        self._copied: tuple[int, ...] = ()  # places of the rows in this round whose draft is a copy of their prediction
        self.traits = Traits(scorers_among([inner]), drafters=(inner,))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        self._copied = ()
        if not any(row.request.prediction or grammar_of(row) for row in context.rows):
            return self.inner.propose(context, gammas)
        left, drafts = list(gammas), list[Draft]()
        for drafter in (self.prediction, self.forced, self.inner):
            drafts.append(drafter.propose(context, left))
            left = [0 if length else gamma for gamma, length in zip(left, drafts[-1].lengths, strict=True)]
        parts = [ScopedDraft("", draft, rows) for draft in drafts if (rows := _served(draft))]
        self._copied = _served(drafts[0])
        return parts[0].draft if len(parts) == 1 else replace(merge(drafts), parts=tuple(parts))

    def observe(self, round: Round) -> None:
        for place in self._copied:
            stats = round.rows[place].stats
            stats.predicted += round.draft.lengths[place]
            stats.predicted_accepted += round.accepted[place]
        for drafter in (self.prediction, self.forced, self.inner):
            drafter.observe(round)


def _served(draft: Draft) -> tuple[int, ...]:
    return tuple(place for place, length in enumerate(draft.lengths) if length)
