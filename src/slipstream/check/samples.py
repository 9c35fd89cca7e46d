"""The statistical test: every token of many short texts is compared with the target's law at its position."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import draw
from slipstream.core.law import Law, distance
from slipstream.core.request import Request, Row
from slipstream.core.round import Context
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, succeeded
from slipstream.measure.replay import replay

LEAST = 25.0  # the least variance of a direction that is tested: below it the normal limit does not hold


def tail(x: float, freedom: int, shift: float = 0.0) -> float:
    """Return P(X > x) for chi-squared with `freedom` degrees, noncentral by `shift`: a Poisson mixture."""
    centre = shift / 2
    reach = int(12 * math.sqrt(centre)) + 30
    counts = torch.arange(max(0, int(centre) - reach), int(centre) + reach if shift else 1, dtype=torch.float64)
    weights = (torch.xlogy(counts, torch.tensor(centre)) - centre - torch.lgamma(counts + 1)).exp()
    half = torch.tensor(max(x, 0.0) / 2, dtype=torch.float64)
    return float((weights * torch.special.gammaincc(freedom / 2 + counts, half)).sum())


def critical(false_alarm: float, freedom: int, shift: float = 0.0) -> float:
    return _solve(lambda x: tail(x, freedom, shift) < false_alarm)


def detectable(count: int, freedom: int, false_alarm: float, power: float, shift: float = 0.0) -> float:
    """Return the least bias that a test of `count` tokens detects with chance `power`, in total variation of cells.
    A mean bias of total variation d shifts the statistic by at least 4 count d^2, in any direction."""
    bar = critical(false_alarm, freedom, shift)
    return min(1.0, math.sqrt(_solve(lambda more: tail(bar, freedom, more) > power) / (4 * count)))


def _solve(reached: Callable[[float], bool]) -> float:
    """Return the smallest positive number for which a monotone condition holds."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


class CellCounts:
    """Counts of tokens in cells, compared with the chances that the target's laws give.

    The cells of a token may depend on the text before it, and so may their chances. Observed minus expected is then a
    martingale whose covariance is the sum of those of the single tokens; along its eigenvectors the counts are
    independent, and the sum of their squares over their variances is chi-squared.
    """

    def __init__(self, cells: int) -> None:
        self.count = 0
        self.excess = torch.zeros(cells, dtype=torch.float64)
        self.covariance = torch.zeros(cells, cells, dtype=torch.float64)

    def add(self, chances: Tensor, hits: Tensor) -> None:
        """Add n tokens: the chances (n, cells) of their cells, which sum to one, and `hits` (n,), the actual cells."""
        chances = chances.double().cpu()
        seen = torch.nn.functional.one_hot(hits.cpu(), chances.shape[1]).double()
        self.count += chances.shape[0]
        self.excess += (seen - chances).sum(0)
        self.covariance += chances.sum(0).diag() - chances.T @ chances

    def test(self) -> tuple[float, int]:
        variances, directions = torch.linalg.eigh(self.covariance)
        use = variances >= LEAST
        squares = (self.excess @ directions[:, use]).square() / variances[use]
        return float(squares.sum()), int(use.sum())


FALSE_ALARM, POWER = 1e-4, 0.9
RATIOS, SIZES = (0.8, 1.25), (0.03, 0.3)

CELLS = (len(RATIOS) + 1) * (len(SIZES) + 1)
"""The number of cells: by q/p, which reveals a wrong acceptance, and by p, which reveals a wrong position."""

GROUPS = 3  # the number of groups that are counted separately: first tokens, second tokens, and all later ones

LEARNED = 0.01
"""The total variation by which q may change while a batch is decoded; above it the draft learns from the tokens."""

RARE, SHARE = 1e-3, 0.9
"""Tokens with p below RARE are counted separately, as no cell would show them where all is nearly certain. Chi-squared
has the share SHARE of the false alarms, this count the rest."""


@dataclass
class Samples:
    """The counts of the tokens of many texts; `moved` is the mean total variation by which rounding moves a law.
    `learned`: whether the draft learns from the texts, so that the cells must not depend on q."""

    moved: float = 0.0
    learned: bool = False
    texts: int = 0
    rare: int = 0
    rare_expected: float = 0.0
    tallies: list[CellCounts] = field(default_factory=lambda: [CellCounts(CELLS) for _ in range(GROUPS)])

    @property
    def tokens(self) -> int:
        return sum(tally.count for tally in self.tallies)

    @property
    def shift(self) -> float:
        """The noncentrality that rounding may add to the statistic, as a mean bias of total variation `moved`."""
        return 4 * self.tokens * self.moved**2

    @property
    def statistic(self) -> tuple[float, int]:
        results = [tally.test() for tally in self.tallies]
        return sum(x for x, _ in results), sum(freedom for _, freedom in results)

    @property
    def p_value(self) -> float:
        """The chance of a statistic at least as large if the law is the target's."""
        x, freedom = self.statistic
        common = tail(x, freedom, self.shift) if freedom else 1.0
        # Chernoff's bound on the chance of this many rare tokens, of which rounding may add some.
        seen, mean, rare = self.rare, self.rare_expected + self.moved * self.tokens, 1.0
        if seen > mean:
            rare = math.exp(seen - mean - seen * math.log(seen / mean)) if mean else 0.0
        return min(1.0, common / SHARE, rare / (1 - SHARE))

    @property
    def detectable(self) -> float | None:
        """The smallest mean bias that would have been detected with chance POWER; None without any cell to test."""
        _, freedom = self.statistic
        return detectable(self.tokens, freedom, FALSE_ALARM * SHARE, POWER, self.shift) if freedom else None


def take(decoder: Decoder, requests: Sequence[Request], moved: float, on_texts: Callable[[Samples], bool]) -> Samples:
    """Decode the requests and count their tokens; stop early if `on_texts`, called after every batch, returns True."""
    samples = Samples(moved)
    for start in range(0, len(requests), decoder.batch_size):
        some = requests[start : start + decoder.batch_size]
        before = None if start else _first_draft(decoder, some)
        outputs = [row.output for row in succeeded(generate(decoder, some))]
        samples.learned |= not start and _moved(before, _first_draft(decoder, some))
        _count(samples, decoder, some, outputs)
        samples.texts += len(some)
        if on_texts(samples):
            break
    return samples


def _count(samples: Samples, decoder: Decoder, requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
    """Count the cell of every token of a batch, replayed by plain decoding, by the draft's law before it."""
    drafts: list[Draft] = []

    def ask(place: int, rows: Sequence[Row]) -> None:
        drafts.append(decoder.drafter.propose(Context(tuple(rows), draw), [int(place < len(each)) for each in outputs]))

    for place, rows, _, law in replay(decoder.target, requests, outputs, None if samples.learned else ask):
        going = [place < len(output) for output in outputs]
        p = law.dense[:, 0].double()
        # The cell of every token depends on the text alone, as q is drafted again for it.
        q = p if samples.learned else _draft_law(drafts.pop(), p)
        ratio = torch.bucketize((q / p).nan_to_num(nan=1.0), torch.tensor(RATIOS, device=p.device, dtype=p.dtype))
        size = torch.bucketize(p, torch.tensor(SIZES, device=p.device, dtype=p.dtype))
        cells = ratio * (len(SIZES) + 1) + size
        chances = torch.zeros(len(rows), CELLS, dtype=torch.float64, device=p.device)
        chances.scatter_add_(1, cells, p / p.sum(-1, keepdim=True))
        taken = torch.tensor([[output[place] if place < len(output) else 0] for output in outputs], device=p.device)
        alive = torch.tensor(going, device=p.device)
        samples.tallies[min(place, GROUPS - 1)].add(chances[alive], cells.gather(1, taken)[alive, 0])
        samples.rare += int((p.gather(1, taken)[alive] < RARE).sum())
        samples.rare_expected += float(p[alive].where(p[alive] < RARE, 0).sum())


def _first_draft(decoder: Decoder, requests: Sequence[Request]) -> Law | None:
    rows, target = [Row(request, index, list(request.prompt)) for index, request in enumerate(requests)], decoder.target
    target.add(len(rows), [request.source for request in requests])
    try:
        target.prefill([row.tokens[:-1] for row in rows])  # as when a round begins: the target may draft for itself
        law = decoder.drafter.propose(Context(tuple(rows), draw), [1] * len(rows)).law
    finally:
        target.free(range(len(rows)))
    return law and law.first(1)


def _moved(before: Law | None, after: Law | None) -> bool:
    """Return whether a draft has changed its law for the same texts, since it learned from them."""
    if before is None or after is None:
        return before is not after
    return bool(distance(before, after).max() > LEARNED)


def _draft_law(draft: Draft, p: Tensor) -> Tensor:
    """Return the law of the draft's first token (rows, vocab); p itself for rows without a draft."""
    draft = draft.to(p.device)
    if draft.law is None:
        return p
    law: Law = draft.law.first(1)
    q = p.clone() if law.probs is None else law.probs[:, 0].to(p.dtype)
    if law.tokens is not None:
        q.zero_().scatter_(1, law.tokens.clamp(min=0), 1)
    none = torch.tensor([not length for length in draft.lengths], device=p.device)
    return p.where(none[:, None], q)
