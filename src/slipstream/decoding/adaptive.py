"""`Adaptive`, the controller that chooses the fastest gamma by measured times; 0 is plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.request import Row
from slipstream.core.round import Round
from slipstream.decoding.round_estimates import Acceptance, Curve, RoundCosts, clocked

NEAR = 0.97  # gammas whose predicted speed is at least this share of the best one's may be tried instead, to time them
CLEARLY = 0.97  # plain steps look slower than they are between rounds that draft: a draft displaces what caches hold
ENOUGH = 2  # measured rounds of a gamma, after which its time counts as known
SHARE = 0.5  # the part of a position's cost per row that a row must be expected to gain to draft that position
PATIENCE = (4, 32)  # the least and the greatest number of plain rounds before a new attempt
ENDED = 0.95  # the factor by which the lengths of texts fade with every text that ends
OUTLIER = 2.0  # a round counts as at most this many times its predicted seconds


@dataclass(frozen=True, slots=True)
class Learned:
    """The state of `Adaptive`: measured costs of rounds, acceptance, and when to draft again after plain rounds.

    `credit` is the time that may still be lost against plain decoding, in plain steps. `behind` counts the rounds since
    the last draft, `wait` those until the next attempt, `patience` those to wait after an attempt that fails. `read`
    has how much of each row's text the draft has read, `ended` the number of texts that ended, and of their tokens.
    """

    costs: RoundCosts = field(default_factory=RoundCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)
    credit: float = 0.0
    behind: int = 0
    wait: int = 0
    patience: int = PATIENCE[0]
    rounds: int = 0
    read: Mapping[int, int] = field(default_factory=dict)
    ended: tuple[float, float] = (0.0, 0.0)

    def unread(self, rows: Sequence[Row], since: Sequence[int] | None = None) -> int:
        """Return how many tokens of the rows' texts the draft has not read, without the last `since` of each."""
        new = since or [0] * len(rows)
        return sum(max(0, len(row.tokens) - n - self.read.get(row.index, 0)) for row, n in zip(rows, new, strict=True))

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
    texts counts too: drafting has to win it back in the tokens that are expected to be written yet.

    When no draft is worth its time, rounds are plain, with an attempt of `probe` tokens after 4, 8, ... 32 of them;
    after an attempt that stands, drafting goes on at once. A budget limits all attempts: once `credit` plain steps, and
    `allowance` steps per token, are lost against plain decoding, drafting pauses. Costs that are unknown, as when the
    number of rows changes, are measured first: a plain step, then `probe` tokens. `most` is the greatest gamma, `start`
    the one of the first two drafts, after which comes a plain step. Raises ValueError if `start` or `probe` is not
    between 1 and `most`, or `credit` or `allowance` is negative.

    What was learned is kept from call to call. The choice depends on the clock, so a sampled text of a seed may differ
    between runs; its law does not.
    """

    most: int = 8
    start: int = 3
    probe: int = 2
    credit: float = 12.0
    allowance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("start", "probe"):
            if not 1 <= getattr(self, name) <= self.most:
                raise ValueError(f"{name}={getattr(self, name)} is not possible: use 1 to most={self.most}.")
        if not (self.credit >= 0 and self.allowance >= 0):  # NaN is neither
            raise ValueError(f"credit={self.credit} and allowance={self.allowance} must be 0 or more: they are losses.")

    def init(self) -> Learned:
        """Return the state before any round: no costs and no acceptance are known."""
        return Learned(credit=self.credit)

    def resume(self, state: Learned) -> Learned:
        """Return the state for new rows: what was learned about costs, acceptance and lengths, and the credit left."""
        return replace(state, acceptance=replace(state.acceptance, rows={}), behind=0, read={})

    def gammas(self, state: Learned, rows: Sequence[Row]) -> list[int]:
        """Return the best gamma by what was measured; a row with low acceptance drafts fewer tokens, or none."""
        count, opening = len(rows), (self.start, self.start, 0)
        if state.rounds < len(opening):
            return [opening[state.rounds]] * count
        draft, rest = state.costs.of(rows)
        if not state.costs.knows_plain(rows):
            return [0] * count
        if not draft.tried:
            return [self.probe if state.credit >= 0 else 0] * count
        outlook = _Outlook.of(state, rows, (draft, rest), self.most)
        if not state.behind or state.rounds == len(opening):
            return outlook.shares(outlook.less_known(outlook.best(state.credit)))
        price = outlook.loss(self.probe) + outlook.reading / outlook.seconds[0]
        dear = min(price, self.credit) > state.credit or outlook.hopeless(self.probe)
        return [0 if state.wait or dear else self.probe] * count

    def update(self, state: Learned, round: Round) -> Learned:
        """Return the state after a round: its times, its acceptance, and the time gained or lost by speculation."""
        drafting = [place for place, gamma in enumerate(round.gammas) if gamma]
        rows = [round.rows[place] for place in drafting]
        unread = state.unread(rows, [len(round.tokens[place]) for place in drafting])
        costs = state.costs.learn(round, unread)
        known = replace(
            state,
            costs=costs,
            acceptance=state.acceptance.learn(round),
            rounds=state.rounds + 1,
            read=_read(state, round),
            ended=_ended(state, round),
        )
        credit = state.credit + self.allowance * sum(map(len, round.tokens)) / len(round.rows)
        if not drafting:
            return replace(known, credit=min(self.credit, credit), behind=state.behind + 1, wait=max(0, state.wait - 1))
        credit = min(self.credit, max(-self.credit, credit - _loss(costs, round, unread, attempt=state.behind > 0)))
        patience = state.patience // 2 if _pays(costs, round) else state.patience * 2
        patience = min(PATIENCE[1], max(PATIENCE[0], patience))
        whole = sum(round.accepted) == sum(round.draft.depths) > 0
        return replace(known, credit=credit, behind=0, wait=0 if whole else patience, patience=patience)


def _read(state: Learned, round: Round) -> dict[int, int]:
    """Return how much of each running row's text the draft has read after a round."""
    running = [(row, gamma) for row, gamma in zip(round.rows, round.gammas, strict=True) if not row.finish_reason]
    return {row.index: len(row.tokens) if gamma else state.read.get(row.index, 0) for row, gamma in running}


def _ended(state: Learned, round: Round) -> tuple[float, float]:
    """Return the number of texts that ended, and of their tokens, after a round; older ones count less and less."""
    count, tokens = state.ended
    for row in round.rows:
        if row.finish_reason and row.output:
            count, tokens = ENDED * count + 1, ENDED * tokens + len(row.output)
    return count, tokens


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Expected tokens and seconds of the next round, for gamma 0, 1, ..."""

    timed: list[int]  # how many rounds of each gamma were measured
    survivals: list[list[float]]  # per row: the chances that at least 1, 2, ... drafted tokens stand
    seconds: list[float]
    tokens: list[float]
    left: float  # the number of tokens that all rows will write yet
    reading: float  # the seconds in which the draft reads what it has not read of the texts

    @staticmethod
    def of(state: Learned, rows: Sequence[Row], costs: tuple[Curve, Curve], most: int) -> _Outlook:
        """Make the outlook from what was learned and two cost curves: drafting, and the rest, which is above 0."""
        (draft, rest), count, acceptance = costs, len(rows), state.acceptance
        chances = acceptance.chances(most)
        hit = acceptance.hit
        survivals = [[hit * s for s in acceptance.survival(row.index, chances)] for row in rows]
        some = 1 - (1 - hit) ** count
        plain = rest.at(0)
        seconds, tokens = [plain], [float(count)]
        for gamma in range(1, most + 1):
            seconds.append(draft.at(gamma) + some * rest.at(gamma) + (1 - some) * plain)
            tokens.append(tokens[-1] + sum(survival[gamma - 1] for survival in survivals))
        timed, reading = [rest.timed(gamma) for gamma in range(most + 1)], state.costs.reading.at(state.unread(rows))
        return _Outlook(timed, survivals, seconds, tokens, sum(map(state.left, rows)), reading)

    def speed(self, gamma: int) -> float:
        """Return the expected tokens per second of a gamma."""
        return self.tokens[gamma] / self.seconds[gamma]

    def loss(self, gamma: int) -> float:
        """Return how much longer than a plain round a round takes, in plain steps: what is lost if nothing stands."""
        return self.seconds[gamma] / self.seconds[0] - 1

    def time_left(self, gamma: int) -> float:
        """Return the seconds in which the texts will be complete, if all rounds have this gamma."""
        return self.left / self.speed(gamma) + (self.reading if gamma else 0.0)

    def best(self, credit: float) -> int:
        """Return the gamma with which the texts end first, among those that can lose at most `credit` plain steps; 0 if
        they do not end clearly earlier with it than without drafts."""
        best = min((i for i in range(len(self.seconds)) if not i or self.loss(i) <= credit), key=self.time_left)
        return best if self.time_left(best) < CLEARLY * self.time_left(0) else 0

    def hopeless(self, gamma: int) -> bool:
        """Return whether a gamma takes longer than plain decoding even if all that is drafted stands."""
        fastest = self.seconds[gamma] / self.seconds[0] / (1 + gamma)
        return fastest * self.time_left(0) + self.reading > self.time_left(0)

    def less_known(self, best: int) -> int:
        """Return a gamma predicted to be nearly as fast as the best that was hardly timed yet; else the best."""
        if not best or self.timed[best] < ENOUGH:
            return best
        least = NEAR * self.speed(best)
        near = [i for i in range(1, len(self.seconds)) if self.timed[i] < ENOUGH and self.speed(i) > least]
        return min(near, key=lambda gamma: self.timed[gamma], default=best)

    def shares(self, gamma: int) -> list[int]:
        """Return a gamma per row: the positions at which the row is expected to gain its share of their cost."""
        prices = [SHARE * (self.seconds[i] - self.seconds[i - 1]) * self.speed(gamma) for i in range(1, gamma + 1)]
        prices = [price / len(self.survivals) for price in prices]
        return [
            next((i for i, price in enumerate(prices) if survival[i] < price), gamma) for survival in self.survivals
        ]


def _pays(costs: RoundCosts, round: Round) -> bool:
    """Return whether plain decoding of a round's tokens takes longer than such rounds usually do."""
    (draft, rest), depth = costs.of(round.rows), max(round.draft.depths)
    plain = rest.at(0) * sum(map(len, round.tokens)) / len(round.rows)
    return plain >= draft.at(depth or max(round.gammas)) + rest.at(depth)


def _loss(costs: RoundCosts, round: Round, unread: int, attempt: bool) -> float:
    """Return how much longer a round took than plain decoding of its tokens would have, in plain steps; 0 if its times
    cannot be true.

    The time of reading `unread` tokens counts in an attempt; else it was expected to be won back later.
    """
    if not clocked(round):
        return 0.0
    (draft, rest), depth = costs.of(round.rows), max(round.draft.depths)
    drafting, total = round.seconds["draft"] + round.reading, sum(round.seconds.values())
    predicted = draft.at(depth or max(round.gammas)) + (costs.reading.at(unread) if attempt else 0.0)
    spent = drafting / costs.load if attempt or not unread else predicted
    took = min(spent + (total - drafting) / costs.load, OUTLIER * (predicted + rest.at(depth)))
    return took / rest.at(0) - sum(map(len, round.tokens)) / len(round.rows)
