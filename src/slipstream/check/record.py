"""Records decoding: the scores, laws and draws of every round, and the emitted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.check.enumeration import CHAINS, PATHS, TREES, WIDE, DraftShape, Pair, normed
from slipstream.core.draft import ABSENT, Draft, Verdict, ancestors
from slipstream.core.draws import Key, Purpose, Rng, inverse
from slipstream.core.law import Law, distance, total_variation
from slipstream.core.protocols import Scorer
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds, succeeded
from slipstream.measure.replay import plain_law

MOST_PAIRS = 48


@dataclass(frozen=True)
class Emission:
    """An emitted token, its source, and the scores (vocab,) of its position in the round.
    `inside`: whether more positions of the round follow it. `origin` is the text's length when the round began."""

    token: int
    round: int
    source: str
    scores: Tensor
    inside: bool
    origin: int


@dataclass
class RecordedText:
    """A generated text and the rounds that made it."""

    row: Row
    emissions: list[Emission] = field(default_factory=list)
    rounds: int = 0

    @property
    def tokens(self) -> list[int]:
        return [emission.token for emission in self.emissions]


@dataclass
class Observations:
    """The observations of a decoding. The gaps are the largest total variations between laws that should be equal.

    `p` compares the verifier's laws with plain processing of the same scores, `q` the laws that the drafter reported
    with those that it drew from (None: no such draw was seen), `next` the verdict's law with that of the last token's
    draw. `astray` counts emitted tokens that were neither accepted nor drawn.
    """

    texts: list[RecordedText] = field(default_factory=list)
    p: float = 0.0
    q: float | None = None
    next: float = 0.0
    astray: int = 0
    drafted: int = 0
    form: DraftShape = CHAINS
    pairs: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class Drawn:
    """A draw of a round: the law and the tokens (rows, positions), or the `chances` that a graph drew by."""

    key: Key
    law: Law | None = None
    tokens: Tensor | None = None
    chances: list[list[float]] | None = None


class _Recorder:
    """Wraps a decoder and records the scores and draws of the current round."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = replace(
            decoder, target=cast("Scorer", _RecordingTarget(decoder.target, self)), rng=_RecordingRng(decoder.rng, self)
        )
        self.drawn: list[Drawn] = []
        self.scores: Tensor

    def draws(self, scope: tuple[str, ...], purpose: Purpose) -> list[Drawn]:
        return [each for each in self.drawn if each.key.scope == scope and each.key.purpose == purpose]


@dataclass(frozen=True, eq=False)
class _RecordingRng:
    """Makes the decoder's own draws, and records them and the numbers that are returned."""

    rng: Rng
    recorder: _Recorder

    @property
    def coupled(self) -> bool:
        return self.rng.coupled

    def __call__(self, law: Law, key: Key) -> Tensor:
        tokens = self.rng(law, key)
        self.recorder.drawn.append(Drawn(key, law, tokens))
        return tokens

    def chances(self, key: Key, positions: int) -> list[list[float]] | None:
        numbers = self.rng.chances(key, positions)
        if numbers is not None:
            self.recorder.drawn.append(Drawn(key, chances=numbers))
        return numbers

    def select(self, places: Sequence[int]) -> Rng:
        return _RecordingRng(self.rng.select(places), self.recorder)


class _RecordingTarget:
    """Wraps the target and records its scores."""

    def __init__(self, scorer: Scorer, recorder: _Recorder) -> None:
        self._scorer, self._recorder = scorer, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def extend(self, *args: Any, **kwargs: Any) -> Tensor:
        self._recorder.scores = self._scorer.extend(*args, **kwargs)
        return self._recorder.scores


def watch(decoder: Decoder, requests: Sequence[Request]) -> Observations:
    recorder = _Recorder(decoder)
    texts: dict[int, RecordedText] = {}
    observed = Observations()
    for round in rounds(recorder.decoder, requests):
        succeeded(round.rows)
        if round.draft.parents is not None:
            observed.form = TREES if round.draft.paths is None else PATHS
        # The laws that verdict and draft report must be those that tokens were drawn from.
        _compare_next(observed, round.verdict, recorder.draws((), Purpose.NEXT))
        _compare_draft(observed, round.draft, (), recorder)
        for place, row in enumerate(round.rows):
            view = _View(round, place, recorder)
            view.compare(observed)
            view.emit(texts.setdefault(row.index, RecordedText(row)))
            view.collect(observed)
        recorder.drawn.clear()
    observed.texts = [texts[index] for index in range(len(requests))]
    return observed


class _View:
    """One row of a round. Position 0 is after the text, position n + 1 after node n of the draft."""

    def __init__(self, round: Round, place: int, recorder: _Recorder) -> None:
        self.round, self.place, self.recorder = round, place, recorder
        self.row, self.emitted = round.rows[place], round.tokens[place]
        self.before = self.row.tokens[: len(self.row.tokens) - len(self.emitted)]
        self.tokens = round.draft.tokens[place].tolist()
        self.lines = ancestors(round.draft.parents or tuple(range(-1, len(self.tokens) - 1)))
        self.nodes = [n for n in range(round.draft.lengths[place]) if self.tokens[n] != ABSENT]
        path = round.verdict.path
        count = int(round.verdict.accepted[place])
        self.path = list(range(count)) if path is None else path[place, :count].tolist()

    def compare(self, observed: Observations) -> None:
        lines = [(), *(self.lines[node] for node in self.nodes)]
        rows = [Row(self.row.request, self.row.index, [*self.before, *(self.tokens[n] for n in x)]) for x in lines]
        positions = torch.tensor([0, *(node + 1 for node in self.nodes)], device=self.recorder.scores.device)
        plain = plain_law(
            rows, self.recorder.scores[self.place, positions].unsqueeze(1), self.recorder.decoder.target.name
        )
        assert self.round.p is not None
        used = self.round.p.select(torch.full_like(positions, self.place)).at(positions)
        observed.p = _worst(observed.p, distance(plain, used))
        following = _next_tokens(self.round.verdict, self.recorder.draws((), Purpose.NEXT))
        expected = [*(self.tokens[node] for node in self.path), int(following[self.place, 0])]
        observed.astray += sum(a != b for a, b in zip(self.emitted, expected, strict=False))
        observed.astray += max(0, len(self.emitted) - len(expected))
        observed.drafted += len(self.nodes)

    def emit(self, text: RecordedText) -> None:
        positions = [0, *(node + 1 for node in self.path)]
        for j, token in enumerate(self.emitted):
            scores, inside = self.recorder.scores[self.place, positions[j]].clone(), j + 1 < len(positions)
            source = self.round.source(self.place, j)
            text.emissions.append(Emission(token, text.rounds + 1, source, scores, inside, len(self.before)))
        text.rounds += 1

    def collect(self, observed: Observations) -> None:
        assert self.round.p is not None
        p, q = self.round.p.probs, self.round.draft.law
        if p is None or q is None or not self.nodes or len(observed.pairs) == MOST_PAIRS:
            return
        node = self.nodes[len(observed.pairs) % len(self.nodes)]
        above = self.lines[node][-2] + 1 if len(self.lines[node]) > 1 else 0
        here, after = normed(p[self.place, above]), normed(p[self.place, node + 1])
        if q.probs is not None:
            drafted = q.probs[self.place, node]
        else:
            drafted = torch.nn.functional.one_hot(torch.tensor(self.tokens[node]), p.shape[-1])
        observed.pairs.append(Pair(here, normed(drafted), after, q.point).pooled(WIDE))


def _compare_next(observed: Observations, verdict: Verdict, drawn: Sequence[Drawn]) -> None:
    """Compare the verdict's law with the one that the last token was drawn from, unless a graph has drawn it."""
    if drawn[-1].law is not None:
        observed.next = _worst(observed.next, distance(drawn[-1].law, verdict.law))


def _next_tokens(verdict: Verdict, drawn: Sequence[Drawn]) -> Tensor:
    """Return the tokens (rows, 1) that were drawn after the accepted ones, or that the numbers of a graph draw from
    the verdict's law."""
    last = drawn[-1]
    if last.tokens is not None:
        return last.tokens
    if verdict.law.tokens is not None:
        return verdict.law.tokens
    numbers = torch.tensor(last.chances, dtype=torch.float64).gather(1, verdict.accepted[:, None].cpu())
    return inverse(verdict.law.dense, numbers.to(verdict.law.device))


def _compare_draft(observed: Observations, draft: Draft, scope: tuple[str, ...], recorder: _Recorder) -> None:
    """Compare the laws that a draft reports with those that its tokens were drawn from, for each of its parts."""
    if draft.law is None:
        return
    if draft.parts:
        for part in draft.parts:
            within = (*scope, *([part.scope] if part.scope else []))
            _compare_draft(observed, part.draft, within, recorder)
            if part.verdict is not None:
                _compare_next(observed, part.verdict, recorder.draws(within, Purpose.NEXT))
        observed.q = _worst(observed.q or 0.0, _put_together(draft, scope, recorder))
    elif draft.law.point:
        observed.q = _worst(observed.q or 0.0, draft.law.ids != draft.tokens)
    else:
        drawn = recorder.draws(scope, Purpose.DRAFT)
        numbers = [each.chances for each in drawn if each.chances is not None]
        for chances in numbers[:1]:  # later ones are for a further round, which a server may prepare
            observed.q = _worst(observed.q or 0.0, _inverted(draft, chances))
        tokenwise = [each for each in drawn if each.chances is None]
        if len(tokenwise) == draft.law.positions:
            for node, each in enumerate(tokenwise):
                assert each.law is not None and each.tokens is not None
                gap = _drawn_from(draft, node, each.law.to(draft.tokens.device), each.tokens)
                observed.q = _worst(observed.q or 0.0, gap)


def _inverted(draft: Draft, chances: list[list[float]]) -> Tensor:
    """Return how far numbers are outside the intervals in [0, 1) of the drafted tokens by their law, (rows, gamma)."""
    weights = draft.q.dense.double()
    wanted = torch.tensor(chances, dtype=torch.float64, device=weights.device)[:, : draft.q.positions]
    aim = wanted * weights.sum(-1)
    upper = weights.cumsum(-1).gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
    lower = upper - weights.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
    outside = torch.maximum(lower - aim, aim - upper).clamp(min=0)
    drafted = torch.arange(draft.q.positions) < torch.tensor(draft.lengths)[:, None]
    return outside.where(drafted.to(outside.device), 0.0)


def _put_together(draft: Draft, scope: tuple[str, ...], recorder: _Recorder) -> Tensor:
    """Return the distance of every row's law from those of the parts it was made from (rows,); 1 for other tokens."""
    gaps = []
    for row, length in enumerate(draft.lengths):
        if not length:
            continue
        laws, tokens = list[Law](), list[int]()
        for part in draft.parts:
            if row in part.rows:
                place, drafted = torch.tensor([row]), part.draft.tokens[row]
                if part.verdict is None:
                    count = part.draft.lengths[row]
                    laws.append(part.draft.q.select(place).first(count))
                    tokens += drafted[:count].tolist()
                else:
                    following = recorder.draws((*scope, *([part.scope] if part.scope else [])), Purpose.NEXT)[-1]
                    assert part.p is not None and following.tokens is not None
                    accepted = int(part.verdict.accepted[row])
                    laws.append(part.p.select(place).first(accepted + 1))
                    tokens += [*drafted[:accepted].tolist(), int(following.tokens[row, 0])]
        reported = draft.q.of_row(row).first(length)
        gap = distance(Law.join(laws, 1).first(length), reported).max()
        gaps.append(gap if tokens[:length] == draft.tokens[row, :length].tolist() else torch.ones_like(gap))
    return torch.stack(gaps)


def _drawn_from(draft: Draft, node: int, law: Law, tokens: Tensor) -> Tensor:
    """Return the distance of a draw's law from the one reported for a node (rows,); 1 if another token was drawn."""
    want, parents = draft.q.dense[:, node].clone(), draft.parents
    if parents is not None and not draft.replacement:
        elder = [older for older in range(node) if parents[older] == parents[node]]
        want.scatter_(1, draft.tokens[:, elder].clamp(min=0), 0)
    drafted = torch.tensor([node < length for length in draft.lengths], device=want.device)
    drafted &= draft.tokens[:, node] != ABSENT
    total = want.sum(-1, keepdim=True)
    gap = total_variation(law.dense[:, 0] / law.dense[:, 0].sum(-1, keepdim=True), want / total)
    return torch.where(tokens[:, 0].to(want.device) == draft.tokens[:, node], gap, 1.0).where(drafted, 0.0)


def _worst(so_far: float, gaps: Tensor) -> float:
    """Return the largest gap so far; NaN counts as the largest."""
    gap = float(gaps.double().max())
    return so_far if gap <= so_far else gap
