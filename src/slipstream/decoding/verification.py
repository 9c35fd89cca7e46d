"""Verification: from the target's logits to its laws, the verdict on a draft, and the token after the accepted ones.

A batch may hold rows with different rules or samplers: laws are verified group by group. On a GPU all of it can be one
CUDA graph, with one transfer of what was decided: eagerly, a sampled round starts some seventy small kernels after the
target's pass, which takes the host longer than a pass of a 1.1 B model takes the GPU. Rules and draws are those of
`acceptance` and `core.draws`; a graph gets the random numbers that the row's `Rng` would have used at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict, Verifier, merge_verdicts
from slipstream.core.draws import Purpose, inverse
from slipstream.core.law import Faults, Law, distance, wide
from slipstream.core.request import Row
from slipstream.core.round import Context
from slipstream.decoding.rules import BLOCK, MATCH, TOKEN
from slipstream.decoding.sampling import law_of_scores, temperatures_of
from slipstream.execution.backends import captures
from slipstream.execution.graphs import Graph, Graphs, shapes, warn
from slipstream.execution.passes import Mode


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verification: the target's laws `p` after the pending token and after every drafted one, the
    `verdict` on the draft, and the tokens (rows,) that follow the accepted ones.

    `faults` are the positions where no law can be made.
    """

    p: Law
    verdict: Verdict
    following: Tensor
    faults: Faults


Verification = Callable[[Verifier, Context, Tensor, Draft, str], Outcome]
"""A way to verify a draft: (verifier, context, logits (rows, gamma + 1, vocab), draft, name of the target) -> Outcome.

The verifier serves the rows whose requests name no rule.
"""


def verify_eagerly(verifier: Verifier, context: Context, logits: Tensor, draft: Draft, model: str) -> Outcome:
    p, faults = context.target_law(logits, draft, model)
    groups: dict[tuple[Verifier, bool, bool], list[int]] = {}
    points = draft.law.points if draft.law else None  # of which block verification asks other questions
    for place, row in enumerate(context.rows):
        kind = (verifier_of(row, verifier), row.request.sampler.greedy, points is not None and points[place])
        groups.setdefault(kind, []).append(place)
    if len(groups) == 1:
        [(shared, *_)] = groups
        verdict = shared(p, draft, context.draw)
    else:
        verdicts = [
            rule(p.select(torch.tensor(places, device=p.device)), draft.select(places), context.select(places).draw)
            for (rule, *_), places in groups.items()
        ]
        verdict = merge_verdicts(verdicts, list(groups.values()))
    return Outcome(p, verdict, draw_next(context, verdict), faults)


def draw_next(context: Context, verdict: Verdict) -> Tensor:
    return context.draw(verdict.law, Purpose.NEXT, verdict.accepted.tolist())[:, 0]


def verifier_of(row: Row, otherwise: Verifier) -> Verifier:
    return otherwise if row.request.rule is None else row.request.rule.verify


CAPTURABLE = frozenset(rule.verify for rule in (TOKEN, BLOCK, MATCH))
"""The verifiers that compute with tensors alone, and draw each purpose once."""

MOST_GRAPHS = 24
"""The greatest number of graphs that are kept: each holds laws over the whole vocabulary for all its positions."""

ROUNDING = 1e-3  # the greatest total variation between a law from a graph and the same law made eagerly


def verification_on(device: torch.device, mode: Mode) -> Verification:
    """Return how drafts are verified on a device in a mode: by graphs where passes are captured, otherwise eagerly."""
    return CapturedVerification(mode.progress) if mode.compiled and captures(device) else verify_eagerly


@dataclass
class CapturedVerification:
    """Verifies chains as CUDA graphs, one per rule, kind of law, number of rows and of drafted tokens.

    Graphs serve rows with one rule that are all greedy, or all sampled by a temperature alone; other rows are verified
    eagerly. The first laws of a graph are compared with eager ones. If capturing fails, one warning says why, and
    verification stays eager.
    """

    progress: Callable[[str], object] | None = None
    _graphs: Graphs = field(default_factory=lambda: Graphs(MOST_GRAPHS))
    _failed: bool = False

    def __call__(self, verifier: Verifier, context: Context, logits: Tensor, draft: Draft, model: str) -> Outcome:
        outcome, question = None, None if self._failed else _Question.of(verifier, context, logits, draft)
        if question:
            try:
                graph = self._graphs.find(question.key) or self._capture(question, context, draft, model)
                outcome = question.outcome(graph.run(question.inputs))
            except Exception as error:  # too little memory, an operation that a graph cannot hold, ...
                self._failed = True
                warn(model, "verifies eagerly, its verification", error)
        return outcome or verify_eagerly(verifier, context, logits, draft, model)

    def _capture(self, question: _Question, context: Context, draft: Draft, model: str) -> Graph:
        rows, gamma = draft.tokens.shape
        if self.progress:
            self.progress(f"capturing the verification of {rows} x {gamma} drafted tokens")
        graph = self._graphs.capture(question.key, question.function, question.inputs, question.logits.device)
        outcome = question.outcome(graph.run(question.inputs))
        p, faults = context.target_law(question.logits, draft, model)
        if outcome is not None and not faults and not (gap := float(distance(p, outcome.p).max())) <= ROUNDING:
            raise ValueError(f"the captured verification makes other distributions (they differ by {gap:.2g})")
        return graph


@dataclass(frozen=True)
class _Question:
    """What a graph is asked: a draft, and the logits (rows, gamma + 1, vocab) of the target after each of its tokens.
    `numbers` are those in [0, 1) with which coins (rows, gamma) and the next token (rows, gamma + 1) are drawn."""

    verifier: Verifier
    logits: Tensor
    draft: Draft
    temperatures: tuple[float, ...]
    numbers: dict[Purpose, Tensor]

    @staticmethod
    def of(verifier: Verifier, context: Context, logits: Tensor, draft: Draft) -> _Question | None:
        """Make the question for a graph; None if rules, samplers, draws or the shape of the draft do not allow one."""
        rules = {verifier_of(row, verifier) for row in context.rows}
        temperatures = temperatures_of(context.rows)
        if temperatures is None or len({temperature == 0 for temperature in temperatures}) > 1:
            return None
        [shared, *others] = rules
        if others or shared not in CAPTURABLE or draft.parents is not None or (draft.law and draft.law.points):
            return None
        positions = logits.shape[1]
        coins = context.rng.chances(context.key(Purpose.ACCEPT), positions - 1)
        following = context.rng.chances(context.key(Purpose.NEXT), positions)
        if coins is None or following is None:
            return None
        numbers = {
            Purpose.ACCEPT: torch.tensor(coins, dtype=torch.float64).view(len(context.rows), positions - 1),
            Purpose.NEXT: torch.tensor(following, dtype=torch.float64),
        }
        return _Question(shared, logits, draft, tuple(temperatures), numbers)

    @property
    def sampled(self) -> bool:
        return any(self.temperatures)

    @property
    def key(self) -> tuple[object, ...]:
        return self.verifier, self.sampled, self.draft.law is None, shapes(self.inputs)

    @property
    def inputs(self) -> list[Tensor | None]:
        law = self.draft.law
        counts, temperatures = torch.tensor(self.draft.lengths), torch.tensor(self.temperatures, dtype=torch.float32)
        q = (None, None) if law is None else (law.probs, law.tokens)
        return [self.logits, self.draft.tokens, *q, counts, temperatures, *self.numbers.values()]

    def function(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Verify -> a summary as float64, p, and the law of the next token.

        The summary is one vector: accepted tokens (rows,), next tokens (rows,), whether all logits are finite, and beta
        (rows, gamma).
        """
        logits, tokens, q, q_tokens, counts, temperatures, coins, following = inputs
        assert logits is not None and tokens is not None and temperatures is not None and following is not None
        # Greedy laws need no temperature, and dividing by it would make them NaN.
        scores = wide(logits) / temperatures[:, None, None] if self.sampled else wide(logits)
        p, valid = law_of_scores(scores, not self.sampled)
        law = None if q is None and q_tokens is None else Law(probs=q, tokens=q_tokens)
        draft = Draft(tokens, law, self.draft.lengths, counts=counts)
        numbers = {Purpose.ACCEPT: coins, Purpose.NEXT: following}
        verdict = self.verifier(p, draft, lambda law, purpose: _drawn(law, numbers[purpose]))
        token = _drawn(verdict.law, following.gather(1, verdict.accepted[:, None]))
        parts = (verdict.accepted, token[:, 0], valid.isfinite().all()[None], verdict.beta.flatten())
        laws = (p.probs, p.tokens, p.scores, verdict.law.probs, verdict.law.tokens)
        # One vector, so that one transfer brings all that the host has to know; the laws stay on the GPU.
        return [torch.cat([part.double() for part in parts]), *(each for each in laws if each is not None)]

    def outcome(self, outputs: Sequence[Tensor]) -> Outcome | None:
        """Read what the graph has decided, which lies on the CPU then; None if some logits are not finite."""
        summary, *laws = outputs
        rows, gamma = self.draft.tokens.shape
        decided = summary.cpu()  # waits for the GPU
        accepted, following, finite, beta = decided.split([rows, rows, 1, rows * gamma])
        if not finite:
            return None
        p = Law(probs=laws.pop(0)) if self.sampled else Law(tokens=laws.pop(0), scores=laws.pop(0))
        [law] = laws
        next_law = Law(probs=law) if law.is_floating_point() else Law(tokens=law)
        verdict = Verdict(accepted.long(), next_law, beta.view(rows, gamma).float())
        return Outcome(p, verdict, following.long(), {})


def _drawn(law: Law, chances: Tensor | None) -> Tensor:
    if law.tokens is not None:
        return law.tokens
    assert chances is not None
    return inverse(law.dense, chances)
