"""Computes the exact law of a rule by enumerating every draft and every coin, on laws met while decoding.

The verifier in use itself is called; its draws are enumerated instead of drawn, and every outcome is weighted. Large
vocabularies are pooled into cells: the most likely tokens, and one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product

import torch
from torch import Tensor

from slipstream.core.draft import ABSENT, Draft, Verdict, Verifier, ancestors
from slipstream.core.draws import Purpose
from slipstream.core.law import Law, total_variation

WIDE, CHAIN_CELLS, TREE_CELLS = 512, 4, 3
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


# ---- processes made of pairs of laws ---------------------------------------------------------------------------------


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
class Process:
    """Small processes p and q on cells: p[i] and q[i] (cells,) * i + (cells,) are the laws after every i tokens."""

    p: list[Tensor]
    q: list[Tensor]
    copied: bool

    @property
    def law(self) -> Tensor:
        joint = self.p[0]
        for p in self.p[1:]:
            joint = joint.unsqueeze(-1) * p
        return joint


def wide(pair: Pair) -> Process:
    cells = pair.p.shape[0]
    return Process([pair.p, pair.following.expand(cells, cells)], [pair.q], pair.copied)


def deep(pairs: Sequence[Pair], cells: int) -> Process:
    """Make a process of two drafted tokens on few cells, with the laws of another pair after every text."""
    supply = iter(pairs[i % len(pairs)].pooled(cells) for i in count())
    cells = next(supply).p.shape[0]
    p, q = list[Tensor](), list[Tensor]()
    for length in range(3):
        these = [next(supply) for _ in product(range(cells), repeat=length)]
        p.append(torch.stack([pair.p for pair in these]).view((cells,) * (length + 1)))
        q.append(torch.stack([pair.q for pair in these]).view((cells,) * (length + 1)))
    return Process(p, q[:2], pairs[0].copied)


def rule_law(verify: Verifier, process: Process, parents: Topology | None, replacement: bool = False) -> Tensor:
    """Return the joint law (cells,) * len(process.p) of the first tokens under a rule; after the round they follow p.

    `parents` is the shape of the draft, None for a chain; see `DraftShape`. Raises TooMany if the rule draws among too
    many tokens to enumerate.
    """
    lines = ancestors(parents or tuple(range(-1, len(process.q) - 1)))
    tokens, weights = drafts(process, lines, replacement)
    p = torch.stack([_after(process.p[len(line)], tokens, line) for line in ((), *lines)], 1)
    q = torch.stack([_after(process.q[len(line) - 1], tokens, line[:-1]) for line in lines], 1)
    law = Law(tokens=tokens) if process.copied else Law(probs=q)
    draft = Draft(tokens, law, (len(lines),) * len(tokens), parents=parents, replacement=replacement)
    sums = [torch.zeros(p.shape[-1] ** (i + 1), dtype=torch.float64) for i in range(len(process.p))]
    for verdict, chance in outcomes(lambda draw: verify(Law(probs=p), draft, draw)):
        _collect(sums, verdict, draft, weights * chance)
    joint = sums[0]
    for law_of_next, more in zip(process.p[1:], sums[1:], strict=True):
        joint = (joint.view(law_of_next.shape[:-1]).unsqueeze(-1) * law_of_next).flatten() + more
    return joint.view(process.p[-1].shape)


def drafts(process: Process, lines: Sequence[Sequence[int]], replacement: bool = False) -> tuple[Tensor, Tensor]:
    """Return every draft (rows, nodes) with its chance (rows,); siblings are drawn without replacement by default.
    If q is copied there is one draft: the token of q, with the next ids as its siblings."""
    cells, siblings = (
        process.p[0].shape[0],
        [[older for older in range(node) if lines[older][:-1] == lines[node][:-1]] for node in range(len(lines))],
    )
    if process.copied:
        first = int(process.q[0].argmax())
        return torch.tensor([[(first + len(elder)) % cells for elder in siblings]]), normed(torch.ones(1))
    tokens, weights = torch.zeros(1, 0, dtype=torch.long), normed(torch.ones(1))
    options = torch.tensor([*range(cells), ABSENT])
    for line, elder in zip(lines, siblings, strict=True):
        q = torch.nn.functional.pad(_after(process.q[len(line) - 1], tokens, line[:-1]), (0, 1))
        for older in [] if replacement else elder:  # an ABSENT one zeroes the last column, which is set below
            q = q.scatter(1, tokens[:, older : older + 1] % (cells + 1), 0)
        orphan = (tokens[:, list(line[:-1])] == ABSENT).any(1)
        q[:, -1] = (orphan | (q[:, :-1].sum(1) <= 0)).double()
        q[orphan, :-1] = 0
        weights = (weights[:, None] * normed(q)).flatten()
        tokens = torch.cat([tokens.repeat_interleave(cells + 1, 0), options.repeat(len(tokens))[:, None]], 1)
        tokens, weights = tokens[weights > 0], weights[weights > 0]
    return tokens, weights


def _after(table: Tensor, tokens: Tensor, line: Sequence[int]) -> Tensor:
    places = tuple(tokens[:, node].clamp(min=0) for node in line)
    return table[places] if line else table.expand(len(tokens), -1).clone()


def _collect(sums: list[Tensor], verdict: Verdict, draft: Draft, weights: Tensor) -> None:
    """Add the emitted tokens of every row: sums[i] (cells ** (i + 1)) are texts of i accepted tokens and one more."""
    cells = sums[0].shape[0]
    if verdict.law.tokens is None:
        following = verdict.law.dense[:, 0].double()
    else:
        following = torch.nn.functional.one_hot(verdict.law.tokens[:, 0], cells).double()
    path = torch.arange(len(sums) - 1).expand(len(weights), -1) if verdict.path is None else verdict.path
    for accepted, total in enumerate(sums):
        rows = (verdict.accepted == accepted) & (weights > 0)
        prefix = torch.zeros(int(rows.sum()), dtype=torch.long)
        for depth in range(accepted):
            prefix = prefix * cells + draft.tokens[rows].gather(1, path[rows, depth : depth + 1])[:, 0]
        total.view(-1, cells).index_add_(0, prefix, weights[rows, None] * following[rows])


# ---- every outcome of the draws --------------------------------------------------------------------------------------


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
            assert law.tokens is not None
            return law.tokens
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


# ---- distances -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """The total variation of a rule's law from the target's: for the first token, and for all tokens of a process."""

    token: float
    joint: float


def distances(verify: Verifier, pairs: Sequence[Pair], form: DraftShape) -> list[Distance]:
    """Return the exact distances of a rule on processes made of these pairs: wide ones and deep ones."""
    shapes = [(wide(pair), form.shallow) for pair in wide_pairs(pairs, form)]
    starts = range(0, len(pairs), form.every)
    shapes += [(deep([*pairs[start:], *pairs[:start]], form.deep), form.bushy) for start in starts]
    results = []
    for process, parents in shapes:
        try:
            law, want = rule_law(verify, process, parents, form.replacement), process.law
        except TooMany:
            continue
        later = tuple(range(1, law.dim()))
        first = total_variation(law.sum(later), want.sum(later))
        results.append(Distance(float(first), float(total_variation(law.flatten(), want.flatten()))))
    return results


def wide_pairs(pairs: Sequence[Pair], form: DraftShape) -> list[Pair]:
    """Return the pairs, about a dozen, that processes of one drafted token are made of."""
    return [pair.pooled(form.wide) for pair in pairs[:: max(1, len(pairs) // 12)]]
