"""Predictions from chances of acceptance along a text: costs of gammas and of an oracle, and how far betas are i.i.d.

A chance is min(1, q(x)/p(x)) at a token x that the target wrote (greedy: whether the draft's choice is x). Given the
text, acceptance tests are independent coins with these chances (Algorithm 1), so expectations are computed exactly for
that text, without an i.i.d. assumption and without sampling drafts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from slipstream.theory import LIMIT

Chances = Sequence[float]
"""The chances at the positions of one text."""

NEGLIGIBLE = 1e-9  # the probability of reaching a position below which the rest of a round is ignored


def cost(chances: Chances, gamma: int, price: Callable[[int], float]) -> float:
    """Return the expected cost of all rounds of a text decoded with gamma; `price(n)` is for a round that keeps n.

    A round that keeps n < gamma tokens adds a correction, one that keeps gamma adds a bonus, and one whose draft ends
    the text adds nothing. price = 1 counts the rounds.
    """
    end = len(chances)
    rest = [0.0] * (end + 1)
    for start in reversed(range(end)):
        alive = 1.0
        for kept in range(min(gamma, end - start) + 1):
            place = start + kept
            if place == end:
                rest[start] += alive * price(kept)
                break
            stops = alive if kept == gamma else alive * (1 - chances[place])
            rest[start] += stops * (price(kept) + rest[place + 1])
            alive -= stops
            if alive < NEGLIGIBLE:
                break
    return rest[0]


def tokens_per_round(texts: Sequence[Chances], gamma: int) -> float:
    """Return tokens over the expected number of rounds, pooled over texts; a text's end may cut its last round."""
    return sum(map(len, texts)) / sum(cost(text, gamma, lambda kept: 1.0) for text in texts)


def oracle(texts: Sequence[Chances]) -> tuple[float, float]:
    """Return an oracle's target runs and drafted tokens, each per token of the texts; it drafts only accepted tokens.

    Section 3.5; the target still runs once a round (footnote 4). So the oracle's factor at c is 1 / (runs + c drafted).
    """
    tokens = sum(map(len, texts))
    runs = sum(cost(text, LIMIT, lambda kept: 1.0) for text in texts)
    return runs / tokens, sum(cost(text, LIMIT, float) for text in texts) / tokens


def best(per_round: Mapping[int, float], c: float) -> tuple[int, float]:
    """Return the fastest fixed gamma and its factor, from tokens per round by gamma.

    A target run costs 1 and a draft run c. The gamma is 0 if none is faster than plain decoding.
    """
    factors = {0: 1.0, **{gamma: tokens / (1 + gamma * c) for gamma, tokens in per_round.items()}}
    gamma = max(factors, key=lambda gamma: (factors[gamma], -gamma))
    return gamma, factors[gamma]


def endless(texts: Sequence[Chances]) -> list[Chances]:
    """Return all texts joined to one, so that no round is cut by the end of a text."""
    return [list(chain.from_iterable(texts))]


def autocorrelation(texts: Sequence[Chances], lag: int) -> float | None:
    """Return the correlation of acceptance at two positions `lag` apart; None if acceptance does not vary.

    It is 0 if betas are independent. Tests are independent given the text, so their covariance is that of the chances;
    their variance is a (1 - a).
    """
    pairs = [(text[place], text[place + lag]) for text in texts for place in range(len(text) - lag)]
    mean = math.fsum(chain.from_iterable(texts)) / max(1, sum(map(len, texts)))
    if not pairs or not 0 < mean < 1:
        return None
    return math.fsum((x - mean) * (y - mean) for x, y in pairs) / len(pairs) / (mean * (1 - mean))


def after(texts: Sequence[Chances], kept: int) -> float | None:
    """Return the chance that a token is kept after a rejected token and exactly `kept` accepted ones.

    None if there is no such place. With i.i.d. betas it is alpha for every `kept`.
    """
    above = below = 0.0
    for text in texts:
        for place in range(kept + 1, len(text)):
            weight = (1 - text[place - kept - 1]) * math.prod(text[place - kept : place])
            above, below = above + weight * text[place], below + weight
    return above / below if below > 0 else None


def by_place(texts: Sequence[Chances], places: int) -> list[float]:
    """Return the mean chance at the first, second, ... token of the texts."""
    columns = ([text[place] for text in texts if len(text) > place] for place in range(places))
    return [math.fsum(column) / len(column) for column in columns if column]
