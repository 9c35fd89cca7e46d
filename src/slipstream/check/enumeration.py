"""Computes the exact law of a rule by enumerating every draft and every coin, on laws met while decoding.

The verifier in use itself is called; its draws are enumerated instead of drawn, and every outcome is weighted. Large
vocabularies are pooled into cells: the most likely tokens, and one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import ABSENT, Draft, Verdict, Verifier, ancestors
from slipstream.core.draws import Purpose
from slipstream.core.law import Law, total_variation

WIDE, CHAIN_CELLS, TREE_CELLS = 512, 4, 3
TOGETHER = 1 << 14  # the most numbers of the tables of processes that go through a rule at once
CHOICES = 4  # the most outcomes of a draw to enumerate: coins have two or three, while draws of tokens have too many
Topology = tuple[int, ...]
TREE: Topology = (-1, -1, 0, 0, 1, 1)


@dataclass(frozen=True)
class DraftShape:
    """The shape of drafts, and the processes to enumerate for it: one position on `wide` cells with the shape
    `shallow`, two on `deep` cells with the shape `bushy`, from every `every`-th pair. The shape None is a chain; with
    `replacement`, siblings are drawn independently of each other."""

    wide: int = WIDE
    shallow: Topology | None = None
    deep: int = CHAIN_CELLS
    bushy: Topology | None = None
    every: int = 8
    replacement: bool = False


CHAINS = DraftShape()
TREES = DraftShape(shallow=(-1,), deep=TREE_CELLS, bushy=TREE, every=24)
PATHS = DraftShape(wide=24, shallow=(-1, -1), deep=TREE_CELLS, bushy=(-1, -1, 0, 1), every=24, replacement=True)
"""The form of two paths of two tokens; its wide drafts are as many as cells squared."""


@dataclass(frozen=True)
class Pair:
    """The laws p and q of a position (cells,), float64, and p after the drafted token. `copied`: q is one-hot."""

    p: Tensor
    q: Tensor
    following: Tensor
    copied: bool = False

    def pooled(self, cells: int) -> Pair:
        """Return the pair pooled to at most `cells` cells, of which the last holds all other tokens."""
        if self.p.shape[0] <= cells:
            return self
        top = torch.maximum(self.p, self.q).topk(cells - 1).indices
        few = (torch.cat([law[top], (law.sum() - law[top].sum()).clamp(min=0)[None]]) for law in self.laws)
        p, q, following = map(normed, few)
        return Pair(p, q, following, self.copied)

    @property
    def lacking(self) -> float:
        """The chance by p of the tokens that are never drafted."""
        return float(self.p[self.q == 0].sum())

    @property
    def laws(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.p, self.q, self.following


def normed(weights: Tensor) -> Tensor:
    weights = weights.double().cpu()
    return weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Processes:
    """Small processes p and q on cells, side by side: p[i] and q[i] (processes,) + (cells,) * i + (cells,) are the laws
    after every i tokens."""

    p: list[Tensor]
    q: list[Tensor]
    copied: bool

    @property
    def law(self) -> Tensor:
        joint = self.p[0]
        for p in self.p[1:]:
            joint = joint.unsqueeze(-1) * p
        return joint


def wide(pairs: Sequence[Pair]) -> Processes:
    p, q, following = (torch.stack(laws) for laws in zip(*(pair.laws for pair in pairs), strict=True))
    return Processes([p, following[:, None].expand(-1, p.shape[1], -1)], [q], pairs[0].copied)


def deep(pairs: Sequence[Pair], cells: int, starts: Sequence[int] = (0,)) -> Processes:
    """Make processes of two drafted tokens on few cells, from each start, with the laws of another pair after every
    text."""
    few = [pair.pooled(cells) for pair in pairs]
    cells, taken = few[0].p.shape[0], 0
    p, q = list[Tensor](), list[Tensor]()
    for length in range(3):
        count = cells**length
        these = [few[(start + place) % len(few)] for start in starts for place in range(taken, taken + count)]
        shape, taken = (len(starts), *(cells,) * (length + 1)), taken + count
        p.append(torch.stack([pair.p for pair in these]).view(shape))
        q.append(torch.stack([pair.q for pair in these]).view(shape))
    return Processes(p, q[:2], pairs[starts[0]].copied)


def rule_laws(verify: Verifier, made: Processes, parents: Topology | None, replacement: bool = False) -> Tensor:
    """Return the joint laws (processes,) + (cells,) * len(made.p) of the first tokens under a rule; after the round
    they follow p.

    `parents` is the shape of the draft, None for a chain; see `DraftShape`. Raises TooMany if the rule draws among too
    many tokens to enumerate.
    """
    lines = ancestors(parents or tuple(range(-1, len(made.q) - 1)))
    owners, tokens, weights = drafts(made, lines, replacement)
    p = torch.stack([after(made.p[len(line)], owners, tokens, line) for line in ((), *lines)], 1)
    q = torch.stack([after(made.q[len(line) - 1], owners, tokens, line[:-1]) for line in lines], 1)
    law = Law(tokens=tokens) if made.copied else Law(probs=q)
    draft = Draft(tokens, law, (len(lines),) * len(tokens), parents=parents, replacement=replacement)
    sums = [torch.zeros(laws.shape, dtype=torch.float64) for laws in made.p]
    for verdict, chance in outcomes(lambda draw: verify(Law(probs=p), draft, draw)):
        _collect(sums, verdict, draft, owners, weights * chance)
    joint = sums[0]
    for law_of_next, more in zip(made.p[1:], sums[1:], strict=True):
        joint = joint.unsqueeze(-1) * law_of_next + more
    return joint


def drafts(made: Processes, lines: Sequence[Sequence[int]], replacement: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return every draft of every process: the process (rows,), the tokens (rows, nodes) and the chance (rows,).
    Siblings are drawn without replacement by default. If q is copied there is one draft of each: the token of q, with
    the next ids as its siblings."""
    count, cells = made.p[0].shape
    siblings = [[older for older in range(node) if lines[older][:-1] == lines[node][:-1]] for node in range(len(lines))]
    owners, weights = torch.arange(count), torch.ones(count, dtype=torch.float64)
    if made.copied:
        return owners, (made.q[0].argmax(1)[:, None] + torch.tensor([*map(len, siblings)])) % cells, weights
    tokens, options = torch.zeros(count, 0, dtype=torch.long), torch.tensor([*range(cells), ABSENT])
    for line, elder in zip(lines, siblings, strict=True):
        q = torch.nn.functional.pad(after(made.q[len(line) - 1], owners, tokens, line[:-1]), (0, 1))
        for older in [] if replacement else elder:  # an ABSENT one zeroes the last column, which is set below
            q = q.scatter(1, tokens[:, older : older + 1] % (cells + 1), 0)
        orphan = (tokens[:, list(line[:-1])] == ABSENT).any(1)
        q[:, -1] = (orphan | (q[:, :-1].sum(1) <= 0)).double()
        q[orphan, :-1] = 0
        weights = (weights[:, None] * normed(q)).flatten()
        tokens = torch.cat([tokens.repeat_interleave(cells + 1, 0), options.repeat(len(tokens))[:, None]], 1)
        owners, possible = owners.repeat_interleave(cells + 1), weights > 0
        owners, tokens, weights = owners[possible], tokens[possible], weights[possible]
    return owners, tokens, weights


def after(table: Tensor, owners: Tensor, tokens: Tensor, line: Sequence[int]) -> Tensor:
    return table[(owners, *(tokens[:, node].clamp(min=0) for node in line))]


def _collect(sums: list[Tensor], verdict: Verdict, draft: Draft, owners: Tensor, weights: Tensor) -> None:
    """Add the emitted tokens of every row to those of its process: sums[i] (processes,) + (cells,) * (i + 1) are texts
    of i accepted tokens and one more."""
    law, cells = verdict.law, sums[0].shape[1]
    following = law.dense[:, 0] if law.tokens is None else torch.nn.functional.one_hot(law.tokens[:, 0], cells)
    path = torch.arange(len(sums) - 1).expand(len(weights), -1) if verdict.path is None else verdict.path
    for accepted, total in enumerate(sums):
        rows = (verdict.accepted == accepted) & (weights > 0)
        prefix = owners[rows]
        for depth in range(accepted):
            prefix = prefix * cells + draft.tokens[rows].gather(1, path[rows, depth : depth + 1])[:, 0]
        total.view(-1, cells).index_add_(0, prefix, weights[rows, None] * following[rows].double())


class TooMany(Exception):
    """Raised if a draw has too many outcomes to enumerate."""


class Replay:
    """Replaces draws by given choices, the same for all rows; `chance` (rows,) is the chance of them in each row."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.sizes: list[int] = []
        self.chance = torch.ones(1, dtype=torch.float64)

    def __call__(self, law: Law, purpose: Purpose, start: int | Sequence[int] = 0, node: int | None = None) -> Tensor:
        if law.point:
            return law.ids
        picks = list[int]()
        for _ in range(law.positions):  # the next choice among all outcomes: a given one, or the first
            if (size := law.dense.shape[-1]) > CHOICES:
                raise TooMany
            if len(self.sizes) == len(self.choices):
                self.choices.append(0)
            self.sizes.append(size)
            picks.append(self.choices[len(self.sizes) - 1])
        tokens = torch.tensor(picks).expand(law.rows, -1)
        self.chance = self.chance * (law.of(tokens) / law.dense.sum(-1)).double().nan_to_num().prod(-1)
        return tokens

    def following(self) -> list[int] | None:
        """Return the next choices, depth first; None after the last."""
        choices = list(self.choices)
        while choices and choices[-1] + 1 == self.sizes[len(choices) - 1]:
            choices.pop()
        return [*choices[:-1], choices[-1] + 1] if choices else None


def outcomes(run: Callable[[Replay], Verdict]) -> Iterator[tuple[Verdict, Tensor]]:
    choices: list[int] | None = []
    while choices is not None:
        replay = Replay(choices)
        verdict = run(replay)
        yield verdict, replay.chance
        choices = replay.following()


@dataclass(frozen=True)
class Distance:
    """The total variation of a rule's law from the target's: for the first token, and for all tokens of a process."""

    token: float
    joint: float


def distances(verify: Verifier, pairs: Sequence[Pair], form: DraftShape) -> list[Distance]:
    """Return the exact distances of a rule on processes made of these pairs: wide ones and deep ones."""
    results = list[Distance]()
    for made, parents in _shapes(pairs, form):
        try:
            laws, want = rule_laws(verify, made, parents, form.replacement), made.law
        except TooMany:
            continue
        later = tuple(range(2, laws.dim()))
        first = total_variation(laws.sum(later), want.sum(later)).tolist()
        results += map(Distance, first, total_variation(laws.flatten(1), want.flatten(1)).tolist())
    return results


def _shapes(pairs: Sequence[Pair], form: DraftShape) -> Iterator[tuple[Processes, Topology | None]]:
    """Yield the processes, with the shape of their drafts; what is small goes through the rule together."""
    for copied in {pair.copied for pair in pairs}:
        broad = [pair for pair in wide_pairs(pairs, form) if pair.copied is copied]
        most = max(1, TOGETHER // len(broad[0].p) ** 2) if broad else 1
        for start in range(0, len(broad), most):
            yield wide(broad[start : start + most]), form.shallow
        if starts := [start for start in range(0, len(pairs), form.every) if pairs[start].copied is copied]:
            yield deep(pairs, form.deep, starts), form.bushy


def wide_pairs(pairs: Sequence[Pair], form: DraftShape) -> list[Pair]:
    """Return the pairs, about a dozen, that processes of one drafted token are made of."""
    return [pair.pooled(form.wide) for pair in pairs[:: max(1, len(pairs) // 12)]]
