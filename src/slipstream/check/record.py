"""Decoding, overheard: the scores, laws and draws of every round, and what was emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.check.enumeration import WIDE, Pair, normed
from slipstream.core.draft import ABSENT, Draft, Verdict, ancestors
from slipstream.core.law import Law
from slipstream.core.protocols import Scorer
from slipstream.core.request import Request, Row
from slipstream.core.round import Key, Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds, sound
from slipstream.measure.replay import distance, plain_law

MOST_PAIRS = 48


@dataclass(frozen=True)
class Emission:
    """A token, where it came from, and the scores (vocab,) that the round had for its position.

    `inside`: the round went on after it. `origin` is the length of the text when the round began.
    """

    token: int
    round: int
    source: str
    scores: Tensor
    inside: bool
    origin: int


@dataclass
class Text:
    """One text and how it came about."""

    row: Row
    emissions: list[Emission] = field(default_factory=list)
    rounds: int = 0

    @property
    def tokens(self) -> list[int]:
        """The output."""
        return [emission.token for emission in self.emissions]


@dataclass
class Sight:
    """What was seen. The gaps are the largest total variations between laws that should be equal.

    `p`: what the verifier got, against plain processing of the same scores. `q`: what the drafter reported, against
    what it drew from (None: no such draw was seen). `next`: what the verdict says, against what the last token was
    drawn from. `astray` counts emitted tokens that are neither accepted nor drawn ones.
    """

    texts: list[Text] = field(default_factory=list)
    p: float = 0.0
    q: float | None = None
    next: float = 0.0
    astray: int = 0
    drafted: int = 0
    tree: bool = False
    pairs: list[Pair] = field(default_factory=list)


class _Tap:
    """A decoder that keeps what passed between its parts in the current round."""

    def __init__(self, decoder: Decoder) -> None:
        self._parts = decoder
        self.decoder = replace(
            decoder, target=cast(Scorer, _Target(decoder.target, self)), verifier=self._verify, seam=self._draw
        )
        self.drawn: list[tuple[str, Law, Tensor]] = []
        self.scores: Tensor
        self.p: Law
        self.verdict: Verdict

    def _verify(self, p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
        self.p, self.verdict = p, self._parts.verifier(p, draft, draw)
        return self.verdict

    def _draw(self, law: Law, key: Key) -> Tensor:
        tokens = self._parts.seam(law, key)
        self.drawn.append((key.purpose, law, tokens))
        return tokens


class _Target:
    """The target; what it answers is kept."""

    def __init__(self, scorer: Scorer, tap: _Tap) -> None:
        self._scorer, self._tap = scorer, tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def extend(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the target does it."""
        self._tap.scores = self._scorer.extend(*args, **kwargs)
        return self._tap.scores


def watch(decoder: Decoder, requests: Sequence[Request], on_round: Callable[[Round], None] | None = None) -> Sight:
    """Decode the requests and look at every round."""
    tap = _Tap(decoder)
    texts: dict[int, Text] = {}
    sight = Sight()
    for round in rounds(tap.decoder, requests):
        sound(round.rows)
        sight.tree |= round.draft.parents is not None
        _compare_draws(sight, round, tap)
        for place, row in enumerate(round.rows):
            view = _View(round, place, tap)
            view.compare(sight)
            view.emit(texts.setdefault(row.index, Text(row)))
            view.collect(sight)
        tap.drawn.clear()
        if on_round:
            on_round(round)
    sight.texts = [texts[index] for index in range(len(requests))]
    return sight


class _View:
    """One row of one round. Position 0 stands after the text, position n + 1 after node n of the draft."""

    def __init__(self, round: Round, place: int, tap: _Tap) -> None:
        self.round, self.place, self.tap = round, place, tap
        self.row, self.emitted = round.rows[place], round.tokens[place]
        self.before = self.row.tokens[: len(self.row.tokens) - len(self.emitted)]
        self.tokens = round.draft.tokens[place].tolist()
        self.lines = ancestors(round.draft.parents or tuple(range(-1, len(self.tokens) - 1)))
        self.nodes = [n for n in range(round.draft.lengths[place]) if self.tokens[n] != ABSENT]
        path = tap.verdict.path
        count = int(tap.verdict.accepted[place])
        self.path = list(range(count)) if path is None else path[place, :count].tolist()

    def compare(self, sight: Sight) -> None:
        """The laws at all positions, and the tokens that stand."""
        lines = [(), *(self.lines[node] for node in self.nodes)]
        rows = [Row(self.row.request, self.row.index, [*self.before, *(self.tokens[n] for n in x)]) for x in lines]
        positions = torch.tensor([0, *(node + 1 for node in self.nodes)], device=self.tap.scores.device)
        plain = plain_law(rows, self.tap.scores[self.place, positions].unsqueeze(1), self.tap.decoder.target.name)
        used = self.tap.p.select(torch.full_like(positions, self.place)).at(positions)
        sight.p = _worst(sight.p, distance(plain, used))
        _, _, drawn = self.tap.drawn[-1]
        stands = [*(self.tokens[node] for node in self.path), int(drawn[self.place, 0])]
        sight.astray += sum(a != b for a, b in zip(self.emitted, stands, strict=False))
        sight.astray += max(0, len(self.emitted) - len(stands))
        sight.drafted += len(self.nodes)

    def emit(self, text: Text) -> None:
        """Note the emitted tokens."""
        positions = [0, *(node + 1 for node in self.path)]
        for j, token in enumerate(self.emitted):
            scores, inside = self.tap.scores[self.place, positions[j]].clone(), j + 1 < len(positions)
            source = self.round.source(self.place, j)
            text.emissions.append(Emission(token, text.rounds + 1, source, scores, inside, len(self.before)))
        text.rounds += 1

    def collect(self, sight: Sight) -> None:
        """Keep the laws of one position for the enumeration."""
        p, q = self.tap.p.probs, self.round.draft.law
        if p is None or q is None or not self.nodes or len(sight.pairs) == MOST_PAIRS:
            return
        node = self.nodes[len(sight.pairs) % len(self.nodes)]
        above = self.lines[node][-2] + 1 if len(self.lines[node]) > 1 else 0
        here, after = normed(p[self.place, above]), normed(p[self.place, node + 1])
        sight.pairs.append(Pair(here, normed(self._q(q, node, p.shape[-1])), after, q.point).pooled(WIDE))

    def _q(self, law: Law, node: int, vocab: int) -> Tensor:
        if law.probs is not None:
            return law.probs[self.place, node]
        return torch.nn.functional.one_hot(torch.tensor(self.tokens[node]), vocab)


def _compare_draws(sight: Sight, round: Round, tap: _Tap) -> None:
    """The draft's reported laws with those drawn from, and the verdict's with that of the last token."""
    sight.next = _worst(sight.next, distance(tap.drawn[-1][1], tap.verdict.law))
    draft = round.draft
    if draft.law is None:
        return
    drawn = [(law, tokens) for purpose, law, tokens in tap.drawn if purpose.split(".")[0] == "draft"]
    if draft.law.tokens is not None:
        sight.q = _worst(sight.q or 0.0, draft.law.tokens != draft.tokens)
    elif len(drawn) == draft.law.positions:
        for node, (law, tokens) in enumerate(drawn):
            sight.q = _worst(sight.q or 0.0, _drawn_from(draft, node, law.to(draft.tokens.device), tokens))


def _drawn_from(draft: Draft, node: int, law: Law, tokens: Tensor) -> Tensor:
    """How far the law of a draw is from the one reported for a node (rows,); 1 if another token came out."""
    assert draft.law is not None
    want, parents = draft.law.dense[:, node].clone(), draft.parents
    if parents is not None and not draft.replacement:
        elder = [older for older in range(node) if parents[older] == parents[node]]
        want.scatter_(1, draft.tokens[:, elder].clamp(min=0), 0)
    there = torch.tensor([node < length for length in draft.lengths], device=want.device)
    there &= draft.tokens[:, node] != ABSENT
    total = want.sum(-1, keepdim=True)
    gap = (law.dense[:, 0] / law.dense[:, 0].sum(-1, keepdim=True) - want / total).abs().sum(-1) / 2
    return torch.where(tokens[:, 0].to(want.device) == draft.tokens[:, node], gap, 1.0).where(there, 0.0)


def _worst(so_far: float, gaps: Tensor) -> float:
    """The larger one; NaN is the worst of all."""
    gap = float(gaps.double().max())
    return so_far if gap <= so_far else gap
