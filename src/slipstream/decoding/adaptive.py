"""`Adaptive`, the controller that chooses the fastest gamma by measured times; 0 is plain decoding."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from slipstream.core.request import Row
from slipstream.core.round import Round
from slipstream.decoding.round_estimates import (
    ENOUGH,
    Acceptance,
    Curve,
    RoundCosts,
    RoundKind,
    clocked,
    kind_that_drafts,
    size,
)

NEAR = 0.97  # gammas whose predicted speed is at least this share of the best one's may be tried instead, to time them
CLEARLY = 0.97  # plain steps look slower than they are between rounds that draft: a draft displaces what caches hold
NEARBY = 8  # a text of which the draft has read all but so many tokens counts as read
CAUTION = 2.0  # reading texts has to win back this many times its cost before any drafted token was tested ...
DOUBTED = 8.0  # ... and half as much more than its cost after so many: acceptance is known from a few rows until then
TOGETHER = 0.5  # the part of the time for reading texts one by one that reading them in a batch is expected to take
FURTHEST = 2  # attempts measure what up to so many drafted tokens cost
SHARE = 0.5  # the part of a position's cost per row that a row must be expected to gain to draft that position
PATIENCE = (4, 64)  # the least and the greatest number of plain rounds before a new attempt
DOUBT = 256  # plain rounds after which even what looked hopeless is attempted again: its first runs may have been slow
EARNED = 2.0  # speculation that gains earns a credit of up to this many times the first: drafts fail in rows at times
ENDED = 0.95  # the factor by which the lengths of texts fade with every text that ends
PLAIN = 16  # after so many plain rounds that follow each other, few of them are measured ...
EVERY = 4  # ... and ask whether to draft again: one in so many
OUTLIER = 2.0  # a round counts as at most this many times its predicted seconds


class Unread(NamedTuple):
    """The number of tokens of texts that the draft has not read, and how many of these follow the prompts."""

    tokens: int
    written: int


@dataclass(frozen=True, slots=True)
class Learned:
    """The state of `Adaptive`: measured costs of rounds, acceptance, and when to draft again after plain rounds.

    `acceptance` is kept for rounds in which tokens are sampled (True) and for greedy ones, of which more stands.
    `credits` is the time that may still be lost against plain decoding, in plain steps, by the kind of rounds: what was
    lost in large batches must not keep a single text from drafting. `behind` counts the rounds since the last draft,
    `wait` those until the next attempt, `patience` those to wait after an attempt that fails, and `skipped` those since
    one was measured. `pilots` is the number of
    rows that may draft next though the draft has yet to read their texts. `read` has how much of each row's text it has
    read, `ended` the number of texts that ended, and of their tokens.
    """

    costs: RoundCosts = field(default_factory=RoundCosts)
    acceptance: Mapping[bool, Acceptance] = field(default_factory=dict)
    credits: Mapping[RoundKind, float] = field(default_factory=dict)
    behind: int = 0
    wait: int = 0
    patience: int = PATIENCE[0]
    pilots: int = 1
    skipped: int = 0
    read: Mapping[int, int] = field(default_factory=dict)
    ended: tuple[float, float] = (0.0, 0.0)

    def acceptance_of(self, kind: RoundKind) -> Acceptance:
        """Return the acceptance in rounds of this kind, greedy or sampled, which begins with a guess."""
        return self.acceptance.get(kind.sampled, Acceptance())

    def unread(self, rows: Sequence[Row], since: Sequence[int] | None = None) -> Unread:
        """Return what the draft has not read of the rows' texts, without the last `since` tokens of each."""
        tokens = written = 0
        for row, new in zip(rows, since or [0] * len(rows), strict=True):
            length = len(row.tokens) - new
            lacking = max(0, length - self.read.get(row.index, 0))
            tokens += lacking
            written += min(lacking, length - len(row.request.prompt))
        return Unread(tokens, written)

    def left(self, row: Row) -> float:
        """Return the number of tokens that a row is expected to write yet.

        It is as much as texts have on average, or as the row has written so far if that is more: a text that is longer
        than others were is of another kind. It is never more than the row's limit.
        """
        (count, tokens), written = self.ended, row.request.max_new_tokens - row.room
        return min(row.room, max(tokens / count, written)) if count else row.room


@dataclass(frozen=True)
class Adaptive:
    """Chooses the gamma with the most expected tokens per measured second, 0 included.

    The renewal rule: a round emits 1 + s_1 + ... + s_gamma tokens, where s_i is the chance that i drafted tokens stand,
    and takes as long as earlier rounds of this gamma took. At the gamma with the greatest ratio one more token stops
    being worth its time: s_{gamma+1} <= tokens per second x its seconds. Nothing is assumed about costs; they are
    medians of measurements with a similar number of rows. The time in which the draft reads what it has not read of the
    texts counts too: drafting has to win it back in the tokens that are expected to be written yet, up to `CAUTION`
    times as long as little is known of acceptance.

    When no draft is worth its time, rounds are plain, with an attempt of `probe` tokens after 4, 8, ... 64 of them;
    after an attempt that stands, drafting goes on at once. A budget limits the attempts in rounds of one kind, which is
    their number of rows and whether tokens are sampled: once `credit` plain steps, and `allowance` steps per token, are
    lost against plain decoding, drafting pauses. Costs that are unknown, as when the number of rows changes, are
    measured first: plain steps, then `probe` tokens, in a batch then up to `FURTHEST`. In a batch one row drafts at
    first, then two, four ...: the draft reads the text of each before it can tell whether that pays. `most` is the
    greatest gamma. Raises ValueError if `probe` is not between 1 and `most`, or `credit` or `allowance` is negative.

    What was learned is kept from call to call. The choice depends on the clock, so a sampled text of a seed may differ
    between runs; its law does not.
    """

    most: int = 8
    probe: int = 1
    credit: float = 6.0
    allowance: float = 0.007

    def __post_init__(self) -> None:
        if not 1 <= self.probe <= self.most:
            raise ValueError(f"probe={self.probe} is not possible: use 1 to most={self.most}.")
        if not (self.credit >= 0 and self.allowance >= 0):  # NaN is neither
            raise ValueError(f"credit={self.credit} and allowance={self.allowance} must be 0 or more: they are losses.")

    def init(self) -> Learned:
        """Return the state before any round: no costs and no acceptance are known."""
        return Learned()

    def resume(self, state: Learned) -> Learned:
        """Return the state for new rows: what was learned about costs, acceptance and lengths, and the credit left."""
        return replace(state, acceptance=_of_rows(state.acceptance, set()), read={})

    def gammas(self, state: Learned, rows: Sequence[Row]) -> list[int]:
        """Return the best gamma by what was measured; a row with low acceptance drafts fewer tokens, or none."""
        kind = RoundKind.of(rows)
        credit = state.credits.get(kind, self.credit)
        if (state.behind and (state.wait or credit < 0)) or not state.costs.knows_plain(kind):
            return [0] * len(rows)
        draft, rest = state.costs.of(kind)
        outlook = _Outlook(state, rows, state.acceptance_of(kind), draft, rest, self.most)
        probe = outlook.probe(self.probe)
        again = rest.timed(probe) == 1 and credit >= 0  # a first run of a shape is slow: it says little
        best = outlook.best(credit) if draft.tried and not state.behind and not again else 0
        if best:
            return _limited(outlook.shares(outlook.less_known(best)), state, rows, state.pilots)
        if not again and (state.wait or self._too_dear(state, rows, outlook, probe, credit)):
            return [0] * len(rows)
        return _limited([probe] * len(rows), state, rows, 1)

    def _too_dear(self, state: Learned, rows: Sequence[Row], outlook: _Outlook, probe: int, credit: float) -> bool:
        """Return whether the credit does not suffice for an attempt, or whether nothing seems to be won by it."""
        loss = outlook.loss(probe)
        if min(loss, self.credit) > credit:  # whatever there is to read
            return True
        unread = min(state.unread([row]) for row in rows)  # one row drafts in an attempt
        price = loss + self._price_of_reading(state.costs, unread, outlook.plain)
        return min(price, self.credit) > credit or (state.behind < DOUBT and outlook.hopeless(probe, self.probe))

    def _price_of_reading(self, costs: RoundCosts, unread: Unread, step: float) -> float:
        """Return what is charged for reading a text, in plain steps: what exceeds the allowance per written token.

        What is unread grows with every plain step, as the credit does: if all of it were charged, drafting could pause
        for ever. No token is read twice, so that all that is free costs as much as the allowance at most."""
        return max(0.0, costs.reading.at(unread.tokens) / step - self.allowance * unread.written)

    def update(self, state: Learned, round: Round) -> Learned:
        """Return the state after a round: its times, its acceptance, and the time gained or lost by speculation."""
        ended = any(row.finish_reason for row in round.rows)
        if not any(round.gammas):
            if state.wait and state.behind >= PLAIN and state.skipped < EVERY - 1 and not ended:
                return replace(state, behind=state.behind + 1, wait=state.wait - 1, skipped=state.skipped + 1)
            return self._after_plain(_without_ended(state, round) if ended else state, round)
        kind, earned = RoundKind.of(round.rows), self.allowance * sum(map(len, round.tokens)) / len(round.rows)
        before = state.credits.get(kind, self.credit)
        drafting = [place for place, gamma in enumerate(round.gammas) if gamma]
        rows = [round.rows[place] for place in drafting]
        unread = state.unread(rows, [len(round.tokens[place]) for place in drafting])
        costs = state.costs.learn(round, kind, unread.tokens)
        draft, rest = costs.of(kind, kind_that_drafts(round))
        lost = _loss(draft, rest, round, unread.tokens, costs.load)
        if state.behind:  # what is read while drafting goes on was expected to be won back
            lost += self._price_of_reading(costs, unread, rest.at(0))
        credit = min(EARNED * self.credit, max(-self.credit, before + earned - lost))
        patience = state.patience // 2 if _pays(draft, rest, round) else state.patience * 2
        patience = min(PATIENCE[1], max(PATIENCE[0], patience))
        whole = sum(round.accepted) == sum(round.draft.depths) > 0
        acceptance = {**state.acceptance, kind.sampled: state.acceptance_of(kind).learn(round)}
        learned = replace(state, acceptance=acceptance, read=_read(state, round))
        return replace(
            _without_ended(learned, round) if ended else learned,
            costs=costs,
            credits={**state.credits, kind: credit},
            behind=0,
            wait=0 if whole else patience,
            patience=patience,
            pilots=2 * len(drafting),
        )

    def _after_plain(self, state: Learned, round: Round) -> Learned:
        """Return the state after a plain round, which emits a token per row, and the ones that were skipped before."""
        kind = RoundKind.of(round.rows)
        before = state.credits.get(kind, self.credit)
        credit = min(before + self.allowance * (1 + state.skipped), max(self.credit, before))
        return replace(
            state,
            costs=state.costs.learn(round, kind, 0),
            credits={**state.credits, kind: credit},
            behind=state.behind + 1,
            wait=state.wait - 1 if state.wait else EVERY if state.behind >= PLAIN else 0,
            pilots=1,
            skipped=0,
        )


def _read(state: Learned, round: Round) -> dict[int, int]:
    """Return how much of each row's text the draft has read after a round."""
    drafted = zip(round.rows, round.gammas, strict=True)
    return {row.index: len(row.tokens) if gamma else state.read.get(row.index, 0) for row, gamma in drafted}


def _without_ended(state: Learned, round: Round) -> Learned:
    """Return the state without the rows that ended in a round, and with the lengths of their texts.

    Older lengths count less and less."""
    count, tokens = state.ended
    for row in round.rows:
        if row.finish_reason and row.output:
            count, tokens = ENDED * count + 1, ENDED * tokens + len(row.output)
    running = {row.index for row in round.rows if not row.finish_reason}
    read = {index: length for index, length in state.read.items() if index in running}
    return replace(state, acceptance=_of_rows(state.acceptance, running), read=read, ended=(count, tokens))


def _of_rows(acceptance: Mapping[bool, Acceptance], running: Container[int]) -> dict[bool, Acceptance]:
    """Return acceptances without what was learned about single rows, except the running ones."""
    return {sampled: of_kind.of_rows(running) for sampled, of_kind in acceptance.items()}


@dataclass(frozen=True)
class _Outlook:
    """Expected tokens and seconds of the next round, for gamma 0, 1, ..., computed when they are needed.

    Plain rounds need few of them, and all that a controller computes between two rounds is time in which no model runs.
    """

    state: Learned
    rows: Sequence[Row]
    acceptance: Acceptance
    draft: Curve  # the seconds of drafting
    rest: Curve  # those of everything else, above 0
    most: int

    @cached_property
    def plain(self) -> float:
        """The seconds of a plain round."""
        return self.rest.at(0)

    @cached_property
    def seconds(self) -> list[float]:
        """The expected seconds of a round, by gamma."""
        return [self.plain, *map(self._seconds, range(1, self.most + 1))]

    def _seconds(self, gamma: int) -> float:
        """Return the expected seconds of a round with a gamma above 0."""
        some = 1 - (1 - self.acceptance.hit) ** len(self.rows)
        return self.draft.at(gamma) + some * self.rest.at(gamma) + (1 - some) * self.plain

    @cached_property
    def survivals(self) -> list[list[float]]:
        """The chances that at least 1, 2, ... drafted tokens stand, per row."""
        hit, chances = self.acceptance.hit, self.acceptance.chances(self.most)
        return [[hit * chance for chance in self.acceptance.survival(row.index, chances)] for row in self.rows]

    @cached_property
    def tokens(self) -> list[float]:
        """The expected number of emitted tokens, by gamma."""
        drafted = (sum(at_depth) for at_depth in zip(*self.survivals, strict=True))
        return list(accumulate(drafted, initial=float(len(self.rows))))

    @cached_property
    def left(self) -> float:
        """The number of tokens that all rows will write yet."""
        return sum(map(self.state.left, self.rows))

    @cached_property
    def reading(self) -> float:
        """The seconds in which the draft reads what it has not read of the texts.

        What several texts take together is less than what was measured of one, until as much was read at once.
        """
        unread, reading = self.state.unread(self.rows).tokens, self.state.costs.reading
        known = len(self.rows) == 1 or reading.timed(size(unread))
        return reading.at(unread) * (1.0 if known else TOGETHER)

    def speed(self, gamma: int) -> float:
        """Return the expected tokens per second of a gamma."""
        return self.tokens[gamma] / self.seconds[gamma]

    def loss(self, gamma: int) -> float:
        """Return how much longer than a plain round a round takes, in plain steps: what is lost if nothing stands."""
        return self._seconds(gamma) / self.plain - 1 if gamma else 0.0

    def time_left(self, gamma: int) -> float:
        """Return the seconds in which the texts will be complete, if all rounds have this gamma; reading counts up to
        `CAUTION` times, the fewer drafted tokens were tested the more."""
        doubt = (CAUTION - 1) * DOUBTED / (DOUBTED + sum(self.acceptance.tested))
        return self.left / self.speed(gamma) + ((1 + doubt) * self.reading if gamma else 0.0)

    def best(self, credit: float) -> int:
        """Return the gamma with which the texts end first, among those that can lose at most `credit` plain steps; 0 if
        they do not end clearly earlier with it than without drafts."""
        best = min((i for i in range(self.most + 1) if not i or self.loss(i) <= credit), key=self.time_left)
        return best if self.time_left(best) < CLEARLY * self.time_left(0) else 0

    def probe(self, least: int) -> int:
        """Return the gamma of an attempt: the `least`, or in a batch, once that was timed, the next that was not.

        A pass over three times as many tokens as rows may take hardly longer than one over twice as many, or far
        longer. Only gammas are tried that would pay if the target took no longer for them than for the least.
        """
        further = range(least + 1, min(self.most, FURTHEST) + 1)
        if len(self.rows) == 1 or self.rest.timed(least) < ENOUGH:
            return least
        return next((each for each in further if self.rest.timed(each) < ENOUGH and self._may_pay(each, least)), least)

    def _may_pay(self, gamma: int, least: int) -> bool:
        """Return whether a gamma would pay if the target took as long for it as for the `least` one."""
        fastest = self.tokens[gamma] / (self.draft.at(gamma) + self.rest.at(least))
        return self.speed(0) < CLEARLY * fastest

    def hopeless(self, gamma: int, least: int) -> bool:
        """Return whether a gamma is known to take longer than plain decoding even if all that is drafted stands.

        One that was not timed takes at least as long as the `least` one, if that was."""
        if self.rest.timed(least) < ENOUGH:
            return False
        plainly = self.left * self.plain / len(self.rows)
        timed = gamma if self.rest.timed(gamma) >= ENOUGH else least
        fastest = (self.draft.at(gamma) + self.rest.at(timed)) / self.plain / (1 + gamma)
        return fastest * plainly + self.reading > plainly

    def less_known(self, best: int) -> int:
        """Return a gamma predicted to be nearly as fast as the best that was hardly timed yet; else the best."""
        if not best or self.rest.timed(best) < ENOUGH:
            return best
        least = NEAR * self.speed(best)
        near = [i for i in range(1, self.most + 1) if self.rest.timed(i) < ENOUGH and self.speed(i) > least]
        return min(near, key=self.rest.timed, default=best)

    def shares(self, gamma: int) -> list[int]:
        """Return a gamma per row: as many positions as gain most over the row's share of their cost."""
        prices = [SHARE * (self.seconds[i] - self.seconds[i - 1]) * self.speed(gamma) for i in range(1, gamma + 1)]
        prices = [price / len(self.survivals) for price in prices]
        return [_most_gained(survival, prices) for survival in self.survivals]


def _most_gained(survival: Sequence[float], prices: Sequence[float]) -> int:
    """Return the number of positions at which the sum of chances minus prices is greatest, the least such number."""
    gains = list(accumulate((chance - price for chance, price in zip(survival, prices, strict=False)), initial=0.0))
    return gains.index(max(gains))


def _pays(draft: Curve, rest: Curve, round: Round) -> bool:
    """Return whether plain decoding of a round's tokens takes longer than such rounds usually do."""
    depth = max(round.draft.depths)
    plain = rest.at(0) * sum(map(len, round.tokens)) / len(round.rows)
    return plain >= draft.at(depth or max(round.gammas)) + rest.at(depth)


def _loss(draft: Curve, rest: Curve, round: Round, unread: int, load: float) -> float:
    """Return how much longer a round took than plain decoding of its tokens would have, in plain steps; 0 if its times
    cannot be true, or are the first of their kind. The time in which the draft read `unread` tokens does not count."""
    depth = max(round.draft.depths)
    if not clocked(round) or rest.timed(depth) < ENOUGH:
        return 0.0
    total = sum(round.seconds.values()) - round.reading - round.seconds["draft"]
    predicted = draft.at(depth or max(round.gammas))
    drafting = predicted if unread else round.seconds["draft"] / load
    took = min(drafting + total / load, OUTLIER * (predicted + rest.at(depth)))
    return took / rest.at(0) - sum(map(len, round.tokens)) / len(round.rows)


def _limited(gammas: Sequence[int], state: Learned, rows: Sequence[Row], pilots: int) -> list[int]:
    """Return the gammas, without those of rows that the draft has yet to read and that are more than the pilots."""
    unread = [state.unread([row]).tokens for row in rows]
    places = sorted((place for place, gamma in enumerate(gammas) if gamma), key=lambda place: unread[place])
    chosen = {place for number, place in enumerate(places) if number < pilots or unread[place] <= NEARBY}
    return [gamma if place in chosen else 0 for place, gamma in enumerate(gammas)]
