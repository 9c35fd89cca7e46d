"""The exactness certificate: it passes what is exact, fails what is not, and says when it cannot tell."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import terminal
from scripted import repeat
from slipstream.check import CheckReport, check
from slipstream.check.controls import broken
from slipstream.check.enumeration import CHAIN_CELLS, TREE, Pair, deep, normed, rule_laws, wide
from slipstream.check.samples import CellCounts, critical, detectable, tail
from slipstream.core.draft import Draft, Verdict, Verifier
from slipstream.core.draws import DrawnBy, Key, draw, draw_coupled
from slipstream.core.law import Law, total_variation
from slipstream.core.protocols import Drafter, Scorer
from slipstream.core.request import Prefixes, Request, Row
from slipstream.core.round import Context, Round
from slipstream.decoding import acceptance, verification
from slipstream.decoding import speculate as decoding
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN, Rule, lenient
from slipstream.decoding.verification import CapturedVerification
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.choice import Choice
from slipstream.drafters.frequent_tokens import TokenCounts
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.execution import graphs
from slipstream.execution.draft_graphs import DraftGraphs
from slipstream.execution.graphs import GRAPHS
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, HF_VOCAB, PAIRS, VOCAB, dirichlet_table, rare, scorer, tiny
from toys.kernels import needs_kernel
from toys.tables import Table, TableScorer

PROMPTS = [(0, 2), (1,), (2, 2, 1, 0)]
FEW = {"samples": 256, "max_new_tokens": 24}
LEAST = {"samples": 32, "max_new_tokens": 8}  # enough for faults that every text shows

Draw = Callable[..., Tensor]


def engine(
    pair: tuple[Table, Table] = PAIRS["generic"],
    drafter: Callable[[Scorer], Drafter] = ModelDrafter,
    target: Callable[[Table], Scorer] = scorer,
    eos: frozenset[int] = frozenset(),
) -> Engine:
    """Two tables, gamma 2; many texts of a sample run together."""
    decoder = Decoder(target(pair[0]), drafter(scorer(pair[1], "draft")), controller=Fixed(2), batch_size=128)
    return Engine(decoder, eos=eos)


def run(made: Engine | None = None, **options: Any) -> CheckReport:
    """A small check; only sampling, unless asked otherwise."""
    return check(made or engine(), PROMPTS, **{"temperature": 1.0, **FEW, **options})


def failed(report: CheckReport) -> set[str]:
    return {test.name for part in report.parts for test in part.tests if not test.passed}


# ---- what is exact passes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [TOKEN, BLOCK, *rare(MATCH), COUPLED], ids=lambda each: each.name)
def test_exact_rules_pass_greedy_and_sampled(rule: Rule) -> None:
    report = check(engine(), PROMPTS, verify=rule, **FEW)
    assert report.verdict == "pass", report.text()
    assert report.greedy and report.sampling
    assert all(control.caught_by for control in report.controls) and len(report.controls) == 6
    names = [test.name for test in report.sampling.tests]
    assert ("same seed" in names) == (rule is COUPLED)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"verify": "block"}, {"verify": "coupled", "top_k": 40}], ids=str)
def test_a_pair_of_models_passes(options: dict[str, Any]) -> None:
    target, draft = (tiny(FAMILIES["llama"], seed, initializer_range=0.3) for seed in (0, 1))
    made = load(target, draft, gamma=3, tokenizer=Nobody())
    report = check(made, [(5, 6, 7), (9,)], samples=128, max_new_tokens=16, repetition_penalty=1.2, **options)
    assert report.verdict == "pass", report.text()
    assert report.greedy and report.greedy.tests[1].figures["whole"] is not None


@pytest.mark.parametrize("draft", ["exit:1", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_target_that_drafts_for_itself_passes(draft: str) -> None:
    """It drafts on the rows of the target, which are given to it as when a round begins."""
    made = load(tiny(FAMILIES["llama"], initializer_range=0.3), draft, gamma=2, tokenizer=Nobody())
    report = run(made, **LEAST)
    assert not failed(report), report.text()
    assert report.sampling and report.sampling.tests


@pytest.mark.slow
def test_one_shape_leaves_no_rounding() -> None:
    target, draft = (tiny(FAMILIES["llama"], seed, initializer_range=0.3) for seed in (0, 1))
    made = load(target, draft, gamma=2, batch_size=4, tokenizer=Nobody(), exact_shape=True)
    report = check(made, [(5, 6, 7), (9,)], samples=96, max_new_tokens=12)
    assert report.verdict == "pass" and report.greedy, report.text()
    tokens, scores = report.greedy.tests[:2]
    assert scores.figures["noise"] == 0 and tokens.figures["allowed_gap"] == 0


class Nobody:
    """A tokenizer without words."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def get_vocab(self) -> dict[str, int]:
        return {}


class Copier:
    """Drafts 0, 1, 0, 1, ... as point masses."""

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        if not any(gammas):
            return Draft.empty(len(gammas), torch.device("cpu"))
        tokens = (torch.arange(max(gammas, default=0)) % 2).expand(len(gammas), -1)
        return Draft(tokens, Law(tokens=tokens), tuple(gammas))

    def observe(self, round: Round) -> None:
        pass


def trees(small: Scorer) -> Drafter:
    return TreeDrafter(small, (2, 2))


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        *((lambda small: Copier(), rule) for rule in (TOKEN, BLOCK, MATCH)),
        (trees, TOKEN),
        *(pytest.param(trees, rule, marks=pytest.mark.slow) for rule in (BLOCK, MATCH, COUPLED)),
    ],
)
def test_trees_and_copied_drafts_pass(drafter: Callable[[Scorer], Drafter], rule: Rule) -> None:
    report = check(engine(drafter=drafter), PROMPTS, verify=rule, **FEW)
    assert report.verdict == "pass", report.text()


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["zeros", "points"])
def test_laws_with_zeros_pass(pair: str) -> None:
    report = run(engine(PAIRS[pair]))
    assert report.verdict == "pass", report.text()


# ---- injected faults ----------------------------------------------------------------------------------------------


def accept_all(p: Law, draft: Draft, draw: Draw) -> Verdict:
    if draft.law is None:
        return TOKEN.verify(p, draft, draw)
    counts = torch.tensor(draft.lengths)
    return Verdict(counts, p.at(counts), acceptance.beta(p, draft.law))


def no_residual(p: Law, draft: Draft, draw: Draw) -> Verdict:
    verdict = TOKEN.verify(p, draft, draw)
    return replace(verdict, law=p.at(verdict.accepted))


def early_bonus(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """The bonus comes from the position before."""
    verdict = TOKEN.verify(p, draft, draw)
    full = (verdict.accepted == torch.tensor(draft.lengths)) & (verdict.accepted > 0)
    early = p.at((verdict.accepted - 1).clamp(min=0))
    return replace(verdict, law=Law.join([verdict.law, early], 1).at(full.long()))


def tokenwise_block(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """The products of ratios are tested one after the other, with the ordinary residual."""
    if draft.law is None:
        return TOKEN.verify(p, draft, draw)
    keep = acceptance.survival(p, draft)[:, 1:]
    passed = draw(Law(probs=torch.stack([keep, 1 - keep], -1)), "accept") == 0
    inside = torch.arange(passed.shape[1]) < torch.tensor(draft.lengths)[:, None]
    accepted = (passed & inside).long().cumprod(-1).sum(-1)
    refused = (accepted < torch.tensor(draft.lengths))[:, None, None]
    here, q = p.at(accepted), draft.law.at(accepted.clamp(max=draft.law.positions - 1))
    law = torch.where(refused, acceptance.residual(here, q).dense, here.dense)
    return Verdict(accepted, Law(probs=law), acceptance.beta(p, draft.law))


def impatient_block(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Block verification that stops at the first test that fails."""
    coins: list[Tensor] = []

    def keeping(law: Law, purpose: str, start: Any = 0) -> Tensor:
        coins.append(draw(law, purpose, start))
        return coins[-1].cummax(-1).values

    return acceptance.block(p, draft, keeping)


@pytest.mark.parametrize("verify", [accept_all, no_residual, early_bonus, tokenwise_block, impatient_block])
def test_a_wrong_verifier_is_caught_by_the_exact_law(verify: Verifier) -> None:
    report = run(verify=Rule("mine", verify), **LEAST)
    assert report.verdict == "fail" and "rule" in failed(report), report.text()


@pytest.mark.parametrize("verify", [accept_all, no_residual])
def test_a_wrong_verifier_is_caught_by_the_samples(verify: Verifier) -> None:
    assert "samples" in failed(run(verify=Rule("mine", verify), samples=1000))


def softened(law: Law) -> Law:
    weights = law.dense**0.3
    return Law(probs=weights / weights.sum(-1, keepdim=True))


class Boaster:
    """Reports a law that was changed, by default softened. Draws through its own rng if it is to go unseen."""

    def __init__(self, inner: Drafter, hidden: bool, change: Callable[[Law], Law] = softened) -> None:
        self.inner, self.hidden, self.change = inner, hidden, change

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        rng = DrawnBy(_private) if self.hidden else context.rng
        draft = self.inner.propose(replace(context, rng=rng), gammas)
        if draft.law is None:
            return draft
        return replace(draft, law=self.change(draft.law))

    def observe(self, round: Round) -> None:
        self.inner.observe(round)


def _private(law: Law, key: Key) -> Tensor:
    return draw(law, replace(key, purpose="private"))


# ---- drafts that are made in graphs, chosen, or drafted themselves ------------------------------------------------


@pytest.mark.parametrize("boastful", [False, True])
def test_drafts_in_graphs_are_seen(boastful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models of three tokens, whose draft makes its chains in graphs, which run as the Python they are made of.

    The control: graphs that report another law than they draw from."""
    drafted, draft = list[bool](), DraftGraphs.run

    def counted(graphs: DraftGraphs, *work: Any) -> Any:
        found = draft(graphs, *work)
        drafted.append(found is not None)
        return (found[0], softened(found[1])) if found and boastful else found

    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    monkeypatch.setattr(DraftGraphs, "run", counted)
    target, small = (CausalScorer(tiny(FAMILIES["llama"], vocab_size=VOCAB, seed=seed)) for seed in (0, 1))
    small.make_draft_graphs((2,))
    report = run(Engine(Decoder(target, ModelDrafter(small), controller=Fixed(2))), temperature=0.8, **LEAST)
    assert "wiring" in failed(report) if boastful else not failed(report)
    assert len(drafted) > 20 and all(drafted)


def chained(small: Scorer, around: Callable[[Drafter], Drafter]) -> Drafter:
    return ChainDrafter(small, around(ModelDrafter(scorer(dirichlet_table(21), "tiny"))), gamma=2)


def chosen(small: Scorer, around: Callable[[Drafter], Drafter]) -> Drafter:
    return Choice([Lookup(), around(ModelDrafter(small))])


@pytest.mark.parametrize("made", [pytest.param(chained, marks=pytest.mark.slow), chosen])
def test_a_law_that_was_not_sampled_from_is_caught_inside_a_draft(made: Callable[..., Drafter]) -> None:
    assert not failed(run(engine(drafter=lambda small: made(small, lambda inner: inner)), **LEAST))
    boastful = engine(drafter=lambda small: made(small, lambda inner: Boaster(inner, hidden=False)))
    assert "wiring" in failed(run(boastful, **LEAST))


# ---- drafts that know a part of the tokens ------------------------------------------------------------------------

WHOLE = "distribution over the whole vocabulary"


def cut_pair() -> tuple[Table, Table]:
    """A draft that never drafts token 1."""
    target, draft = PAIRS["generic"]

    def part(prefix: tuple[int, ...]) -> tuple[float, ...]:
        first, _, last = draft(prefix)
        return first / (first + last), 0.0, last / (first + last)

    return target, part


def spread_over_all(law: Law) -> Law:
    """A law in which the tokens that were cut have chances too, a third of all."""
    lacking = law.dense == 0
    return Law(probs=law.dense * 2 / 3 + lacking / lacking.sum(-1, keepdim=True) / 3)


def noticing(report: CheckReport) -> dict[str, tuple[str, ...]]:
    """The controls of sampling, each with the tests that noticed it."""
    assert report.sampling
    return {control.name: control.caught_by for control in report.sampling.controls}


@pytest.mark.parametrize("rule", [BLOCK, pytest.param(COUPLED, marks=pytest.mark.slow)], ids=lambda each: each.name)
@pytest.mark.parametrize("shape", [None, pytest.param((2, 1), marks=pytest.mark.slow)], ids=["chain", "tree"])
def test_a_draft_that_knows_a_part_of_the_tokens_passes(shape: tuple[int, ...] | None, rule: Rule) -> None:
    made = engine(cut_pair(), lambda small: TreeDrafter(small, shape) if shape else ModelDrafter(small))
    report = run(made, verify=rule)
    assert report.verdict == "pass" and {"rule", "samples"} <= {*noticing(report)[WHOLE]}, report.text()
    assert WHOLE not in noticing(run(verify=rule, samples=1)), "for a draft of all tokens that is no mistake"


@pytest.mark.parametrize(("pair", "change"), [(PAIRS["generic"], softened), (cut_pair(), spread_over_all)])
@pytest.mark.parametrize(("hidden", "caught", "samples"), [(False, "wiring", 32), (True, "samples", 1000)])
def test_a_law_that_was_not_sampled_from_or_forgets_what_was_cut_is_caught(
    pair: tuple[Table, Table], change: Callable[[Law], Law], hidden: bool, caught: str, samples: int
) -> None:
    made = engine(pair, lambda small: Boaster(ModelDrafter(small), hidden, change))
    report = run(made, samples=samples)
    assert report.verdict == "fail" and caught in failed(report), report.text()
    assert "rule" not in failed(report)


def test_the_control_never_gives_the_tokens_that_a_draft_lacks() -> None:
    """By enumeration: they have the chance that p gives them with the rule itself, and none with the control."""
    p, q = normed(torch.tensor([5.0, 3.0, 2.0])), normed(torch.tensor([7.0, 0.0, 3.0]))
    process = wide([Pair(p, q, p)])
    control = next(rule for rule in broken(TOKEN, greedy=False, cut=True) if rule.name == WHOLE)
    assert float(rule_laws(TOKEN.verify, process, None).sum(2)[0, 1]) == pytest.approx(0.3, abs=1e-12)
    assert float(rule_laws(control.verify, process, None).sum(2)[0, 1]) == 0


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts of a target that writes every third of its tokens."""
    file = tmp_path_factory.mktemp("counts") / "toy.counts"
    TokenCounts.of([range(0, HF_VOCAB, 3)], HF_VOCAB, "toy").save(file)
    return file


@needs_kernel
@pytest.mark.parametrize("draft", ["int4?draft_vocab={}", *rare("int8?draft_vocab=20:{}")])
def test_a_cut_copy_of_the_target_passes(draft: str, counts: Path) -> None:
    """The control: its law of all tokens, reported for tokens that were drawn from a part of it."""
    target = tiny(FAMILIES["llama"], initializer_range=0.3)
    made = load(target, draft.format(counts), gamma=2, tokenizer=Nobody())
    assert made.decoder.drafter.scorer.name.endswith(" of its tokens")
    report = run(made, **LEAST)
    assert not failed(report) and "rule" in noticing(report)[WHOLE], report.text()
    boastful = Boaster(made.decoder.drafter, hidden=False, change=spread_over_all)
    assert "wiring" in failed(run(Engine(replace(made.decoder, drafter=boastful)), **LEAST))


# ---- other faults ------------------------------------------------------------------------------------------------


def test_a_seam_that_draws_from_another_law_is_caught() -> None:
    def sharpened(law: Law, key: Key) -> Tensor:
        return draw(Law(probs=law.dense**1.5) if key.purpose == "next" and not law.point else law, key)

    report = run(verify=Rule("mine", TOKEN.verify, DrawnBy(sharpened)), samples=1000)
    assert failed(report) == {"samples"}, report.text()


def test_impossible_tokens_are_caught_where_all_is_nearly_certain() -> None:
    """A certain law has no variance, so chi-squared does not see them."""

    def slipping(law: Law, key: Key) -> Tensor:
        tokens = draw(law, key)
        slips = torch.tensor([[request % 9 == 0] for request in key.requests])
        return tokens.where(~slips, (tokens + 1) % VOCAB) if key.purpose == "next" else tokens

    def certain(prefix: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(float(len(prefix) % VOCAB == token) for token in range(VOCAB))

    report = run(engine((certain, PAIRS["generic"][1])), verify=Rule("mine", TOKEN.verify, DrawnBy(slipping)))
    assert "samples" in failed(report) and report.sampling
    figures = report.sampling.tests[1].figures
    assert figures["freedom"] == 0 and figures["rare"] > 10 and figures["rare_expected"] == 0


def test_a_last_token_from_another_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def soft(context: Context, verdict: Verdict) -> Tensor:
        law = verdict.law if verdict.law.point else Law(probs=verdict.law.dense**0.9)
        return context.draw(law, "next", verdict.accepted.tolist())[:, 0]

    monkeypatch.setattr(verification, "draw_next", soft)
    assert "wiring" in failed(run(**LEAST))


@pytest.mark.parametrize(("rule", "replayed"), [(TOKEN, True), (BLOCK, True), (TOKEN, False)])
def test_verification_by_graphs_is_certified_if_it_is_replayed(
    rule: Rule, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before = engine(), GRAPHS.captured
    made.decoder = replace(made.decoder, verification=CapturedVerification())
    monkeypatch.setattr(graphs, "record", repeat if replayed else lambda function, pool: (function(), lambda: None))
    report = run(made, verify=rule, **LEAST)
    if replayed:
        assert not failed(report) and GRAPHS.captured > before
    else:
        assert "wiring" in failed(report)


@pytest.mark.slow
def test_penalties_that_do_not_move_inside_the_block_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{"repetition_penalty": 2.0}, {"frequency_penalty": 0.5, "temperature": 0.0}]
    assert [run(**each).verdict for each in options] == ["pass", "pass"]
    monkeypatch.setattr(Prefixes, "of_row", lambda self, row, place: [torch.tensor(row.tokens) for _ in self.paths])
    assert all("wiring" in failed(run(**each)) for each in options)


def test_a_text_that_goes_on_after_its_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(row: Row, tokens: Sequence[int]) -> tuple[int, ...]:
        row.tokens += tokens
        row.finish_reason = row.request.finish_reason(row.tokens, row.room)
        return tuple(tokens)

    monkeypatch.setattr(decoding, "emit", blind)
    assert "endings" in failed(run(temperature=0.0))


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({1})])
def test_a_text_that_ends_too_early_is_caught(monkeypatch: pytest.MonkeyPatch, eos: frozenset[int]) -> None:
    def hasty(request: Request, tokens: list[int], room: int) -> str | None:
        return "stop" if tokens[-1] in request.eos else "length" if room <= 1 else None

    assert not failed(run(engine(eos=eos), samples=64, max_new_tokens=4))
    monkeypatch.setattr(Request, "finish_reason", hasty)
    assert "endings" in failed(run(engine(eos=eos), samples=64, max_new_tokens=4))


def test_tokens_that_are_neither_accepted_nor_drawn_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = decoding.emit
    monkeypatch.setattr(decoding, "emit", lambda row, tokens: emit(row, [*tokens[:-1], 0]))
    assert {"wiring", "samples"} <= failed(run())


class Shifted(TableScorer):
    """Scores of a block are those of one position earlier."""

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Any = None) -> Tensor:
        return super().extend(tokens, counts, first, tree).roll(1, 1)


class Stale(TableScorer):
    """Takes one step back too few, so that a rejected token is seen."""

    def rollback(self, lengths: Sequence[int]) -> None:
        kept = [text[length] if len(text) > length else None for text, length in zip(self.texts, lengths, strict=True)]
        super().rollback(lengths)
        for text, token in zip(self.texts, kept, strict=True):
            if token is not None:
                text[-1] = token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Shifted, Stale])
def test_scores_of_wrong_positions_are_caught(kind: type[TableScorer], temperature: float) -> None:
    report = run(engine(target=lambda table: kind(table, VOCAB, "target")), **{**LEAST, "temperature": temperature})
    assert report.verdict == "fail" and "scores" in failed(report), report.text()


class Rewritten(TableScorer):
    """Has a model of its own, whose logits without a cache are off."""

    def __init__(self, table: Table, off: float) -> None:
        super().__init__(table, VOCAB, "rewritten")
        self.off = off

    def alone(self, text: Sequence[int], source: Any = None) -> Tensor:
        laws = [self.table(tuple(text[: i + 1])) for i in range(len(text))]
        logits = torch.tensor(laws, dtype=torch.float64).log()[None]
        logits[..., 0] += self.off
        return logits


@pytest.mark.parametrize(("off", "faults"), [(0.0, set()), (1e-3, set()), (0.5, {"scores"})])
def test_plain_steps_that_differ_from_the_model_itself_are_caught(off: float, faults: set[str]) -> None:
    made = engine(target=lambda table: Rewritten(table, off))
    report = run(made, temperature=0.0)
    assert failed(report) == faults and report.greedy
    assert report.greedy.tests[1].figures["whole"] == pytest.approx(off, abs=1e-9)


def test_a_greedy_token_that_nobody_verified_is_caught() -> None:
    def trusting(p: Law, draft: Draft, draw: Draw) -> Verdict:
        verdict = TOKEN.verify(p, draft, draw)
        accepted = verdict.accepted.clamp(min=min(1, min(draft.lengths)))
        return replace(verdict, accepted=accepted, law=p.at(accepted))

    report = run(verify=Rule("mine", trusting), temperature=0.0)
    assert failed(report) == {"tokens"} and report.greedy
    worst = max(report.greedy.differences, key=lambda difference: difference.gap)
    assert worst.source == "draft" and worst.gap > worst.allowed and not worst.near_tie
    assert "DIFFERENCE" in report.text()


@pytest.mark.slow
def test_a_coupled_rule_that_is_not_coupled_is_caught() -> None:
    """Its law is the target's, but not its text."""
    calls = iter(range(10**9))

    def fresh(law: Law, key: Key) -> Tensor:
        return draw_coupled(law, replace(key, requests=tuple(next(calls) for _ in key.requests)))

    report = run(verify=Rule("mine", MATCH.verify, DrawnBy(fresh)))
    assert report.verdict == "pass"
    broken = Rule("coupled", BLOCK.verify, draw_coupled)
    assert "same seed" in failed(run(verify=broken))


@pytest.mark.parametrize("leniency", [0.3, pytest.param(0.9, marks=pytest.mark.slow)])
def test_lossy_rules_fail_and_the_distance_is_told(leniency: float) -> None:
    report = run(verify=lenient(leniency), **LEAST)
    assert report.verdict == "fail" and report.sampling
    assert report.sampling.tests[0].figures["mean_per_token"] > 1e-3
    assert not failed(run(verify=lenient(1.0), **LEAST))


# ---- near-ties ----------------------------------------------------------------------------------------------------


class Noisy(TableScorer):
    """Blocks are scored with a little noise, as by another kernel."""

    def __init__(self, table: Table, noise: float) -> None:
        super().__init__(table, VOCAB, "noisy")
        self.noise = noise

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Any = None) -> Tensor:
        scores = super().extend(tokens, counts, first, tree)
        if tokens.shape[1] > 1:
            scores[..., 1] += self.noise
        return scores


def tied(ahead: float) -> tuple[Table, Table]:
    """Tokens 0 and 1 are almost equally likely; the draft prefers one of the three by the text."""
    best = 0.4 * math.exp(ahead)

    def p(prefix: tuple[int, ...]) -> tuple[float, ...]:
        return (best, 0.4, 0.6 - best) if len(prefix) % 4 == 0 else (0.1, 0.2, 0.7)

    return p, dirichlet_table(4)


def test_a_near_tie_is_told_from_a_fault() -> None:
    made = engine(tied(2e-6), target=lambda table: Noisy(table, 5e-6))
    report = run(made, temperature=0.0)
    assert report.verdict == "pass" and report.greedy, report.text()
    first = report.greedy.differences[0]
    assert (first.plain, first.emitted, first.near_tie) == (0, 1, True)
    assert first.gap == pytest.approx(2e-6, rel=1e-3) and first.allowed == pytest.approx(2e-5, rel=1e-3)
    assert first.position % 4 == (4 - len(PROMPTS[first.prompt])) % 4
    assert first.source in {"draft", "correction", "bonus"} and 1 <= first.round <= 24
    assert "near-tie" in report.text()
    strict = run(made, temperature=0.0, gap=1e-6)
    assert failed(strict) == {"tokens"}


def test_rounding_does_not_excuse_a_rule_that_prefers_the_second_best() -> None:
    """The tokens are within a near-tie of plain decoding, but not the best of their own round."""
    pair = tied(2e-6)
    made = engine((pair[0], lambda prefix: (0.05, 0.9, 0.05)), target=lambda table: Noisy(table, 5e-7))
    assert run(made, temperature=0.0).verdict == "pass"
    report = run(made, temperature=0.0, verify=lenient(1 - 1e-5), gap=1.0)
    assert failed(report) == {"tokens"}, report.text()


@pytest.mark.slow
def test_coupled_sampling_has_near_ties_too() -> None:
    for noise, verdicts in ((1e-3, {"pass"}), (0.2, {"fail"})):
        made = engine(target=lambda table, noise=noise: Noisy(table, noise))
        report = run(made, verify=COUPLED, max_new_tokens=400)
        assert report.sampling and {report.verdict} == verdicts, report.text()
        same = next(test for test in report.sampling.tests if test.name == "same seed")
        assert same.figures["different"] > 0
        assert same.passed or noise > 0.1


def test_noise_beyond_rounding_is_a_fault_of_the_scores() -> None:
    made = engine(target=lambda table: Noisy(table, 0.1))
    assert "scores" in failed(run(made, temperature=0.0))


# ---- what cannot be judged ----------------------------------------------------------------------------------------


WANTING_DRAFTS = "To judge, give longer texts (--max-new-tokens), other prompts or a weaker draft."


@pytest.mark.slow
def test_a_draft_that_equals_its_target_cannot_be_judged() -> None:
    """Samples are not what is missing: a budget that looks at the drafted tokens is noticed where p = q, too."""
    report = check(engine(PAIRS["same"]), PROMPTS, **FEW)
    assert report.verdict == "cannot judge", report.text()
    assert report.greedy and report.greedy.verdict == "cannot judge" and not failed(report)
    assert "CANNOT JUDGE" in report.text() and report.text().splitlines()[-1] == report.remedy == WANTING_DRAFTS


def test_texts_without_room_for_drafts_cannot_be_judged() -> None:
    report = run(temperature=0.0, max_new_tokens=1)
    assert report.verdict == "cannot judge" and report.text().splitlines()[-1] == WANTING_DRAFTS


@pytest.mark.slow
def test_too_few_samples_cannot_judge() -> None:
    report = run(samples=4)
    assert report.verdict == "cannot judge" and report.sampling
    assert report.sampling.blind == ["no broken rule was noticed by 'samples'"]
    assert report.text().splitlines()[-1] == report.as_dict()["remedy"] == "To judge, give --samples 1500."
    assert run(samples=1500, temperature=1.0).remedy is None


# ---- the faces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [({}, ["greedy", "sampling"]), ({"temperature": 0.0}, ["greedy"]), ({"temperature": 0.7}, ["sampling"])],
)
def test_the_temperature_chooses_the_parts(options: dict[str, Any], parts: list[str]) -> None:
    report = check(engine(), PROMPTS, samples=8, max_new_tokens=8, **options)
    found = report.as_dict()
    assert [name for name in ("greedy", "sampling") if found[name]] == parts
    if "temperature" in options:
        assert found["environment"]["temperature"] == f"{options['temperature']:g}"


@needs_kernel
def test_the_certificate_tells_in_what_precision_weights_are() -> None:
    target, draft = (tiny(FAMILIES["llama"], seed, initializer_range=0.3) for seed in (0, 1))
    options: dict[str, Any] = {"samples": 8, "max_new_tokens": 8, "temperature": 0.0}
    made = load(target, draft, gamma=2, tokenizer=Nobody(), quantize="int8")
    about = check(made, PROMPTS, **options).environment
    assert about["target_weights"] == "int8" and "draft_weights" not in about
    about = check(load(target, "int4?group=32", gamma=2, tokenizer=Nobody()), PROMPTS, **options).environment
    assert about["draft_weights"] == "int4" and "target_weights" not in about
    whole = check(load(target, draft, gamma=2, tokenizer=Nobody()), PROMPTS, **options).environment
    assert not {"target_weights", "draft_weights"} & set(whole)


class Learner:
    """Drafts from the frequencies of what was emitted after the same text; q is fixed before it is sampled."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Tensor] = {}

    def law(self, text: Sequence[int]) -> Tensor:
        counts = self.counts.get(tuple(text), torch.zeros(VOCAB)).double() + 0.2
        return counts / counts.sum()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        if not max(gammas, default=0):
            return Draft.empty(len(gammas), torch.device("cpu"))
        law = Law(probs=torch.stack([self.law(row.tokens) for row in context.rows]).unsqueeze(1))
        return Draft(context.draw(law, "draft"), law, tuple(min(gamma, 1) for gamma in gammas))

    def observe(self, round: Round) -> None:
        for row, new in zip(round.rows, round.tokens, strict=True):
            for place in range(len(row.tokens) - len(new), len(row.tokens)):
                counts = self.counts.setdefault(tuple(row.tokens[:place]), torch.zeros(VOCAB))
                counts *= 0.7
                counts[row.tokens[place]] += 1


@pytest.mark.slow
def test_a_draft_that_learns_raises_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its law tells which tokens were emitted, so cells by q/p would not follow from the text before a token."""
    report = run(engine(drafter=lambda small: Learner()), samples=600)
    assert report.verdict == "pass" and report.sampling, report.text()
    assert report.sampling.tests[1].figures["learned"]
    monkeypatch.setattr("slipstream.check.samples.LEARNED", 2.0)
    assert failed(run(engine(drafter=lambda small: Learner()), samples=600)) == {"samples"}


def test_the_report_survives_json() -> None:
    for rule in (TOKEN, Rule("mine", accept_all)):
        found = check(engine(), PROMPTS, verify=rule, samples=32, max_new_tokens=8).as_dict()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert set(found) == {"verdict", "remedy", "greedy", "sampling", "controls", "environment", "seconds"}
    assert found["greedy"]["differences"] and found["verdict"] == "fail"


def test_the_text_begins_with_the_verdict() -> None:
    lines = run(samples=8, verify=TOKEN).text().splitlines()
    assert lines[0].startswith("CANNOT JUDGE: ") and "rule token" in lines[1]
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.slow
def test_a_check_repeats() -> None:
    first, second = (run(samples=64).as_dict() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["sampling"] != run(samples=64, seed=1).as_dict()["sampling"]


def test_progress_is_told() -> None:
    messages: list[tuple[str, int, int]] = []
    run(samples=100, on_progress=lambda *what: messages.append(what))
    assert len({what for what, _, _ in messages}) >= 5
    assert all(0 <= done <= of for _, done, of in messages)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"verify": "best"}, ValueError),
        ({"samples": 0}, ValueError),
        ({"gamma": 0}, ValueError),
        ({"temperature": -1.0}, ValueError),
        ({"stop": "x"}, TypeError),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        run(**options)


def test_nothing_to_check_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        check(engine(), [])
    with pytest.raises(ValueError, match="no draft"):
        check(Engine(Decoder(scorer(PAIRS["generic"][0]))), PROMPTS)


@pytest.mark.parametrize(
    ("pair", "arguments", "code"),
    [
        ("generic", [], 0),
        ("generic", ["--verify", "lenient:0.5"], 1),
        ("same", [], 3),
        ("generic", ["--verify", "best"], 2),
        ("generic", ["--top-p", "0"], 2),
        ("generic", ["--gamma", "0"], 2),
    ],
)
def test_the_command_exits_with_the_verdict(
    pair: str, arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = engine(PAIRS[pair])
    monkeypatch.setattr("slipstream.engine.load.load", lambda *_, **__: made)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in PROMPTS))
    fixed = ["check", "--prompts", str(file), "--samples", "256", "--max-new-tokens", "16", "--gamma", "2"]
    result = terminal.run(*fixed, *arguments, "--json")
    assert result.exit_code == code, result.output
    if code != 2:
        found = json.loads(result.stdout)
        assert found["verdict"] == {0: "pass", 1: "fail", 3: "cannot judge"}[code]
        assert found["greedy"] and found["sampling"] and found["environment"]["gamma"] == 2
        words = terminal.run(*fixed, "--temperature", "0", *arguments)
        assert words.stdout.startswith(found["verdict"].upper()) and "sampling" not in words.stdout


# ---- false alarms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_no_false_alarm_in_many_seeds(seeds: int) -> None:
    """Each has a chance of 1e-4; so do 20 together of 2e-3."""
    values = []
    for seed in range(seeds):
        report = run(samples=64, seed=seed, max_new_tokens=8)
        assert not failed(report), report.text()
        assert report.sampling
        values.append(report.sampling.tests[1].figures["p_value"])
    assert len(set(values)) > seeds // 2 and 0.1 < sum(values) / seeds < 0.9


def test_tails_are_those_of_the_tables() -> None:
    assert tail(18.307, 10) == pytest.approx(0.05, rel=1e-4)
    assert tail(29.588, 10) == pytest.approx(0.001, rel=1e-3)
    assert critical(0.05, 1) == pytest.approx(3.8415, rel=1e-4)
    assert tail(0, 3) == 1


@pytest.mark.parametrize(("x", "freedom", "shift"), [(10.0, 4, 5.0), (60.0, 12, 30.0), (150.0, 3, 120.0)])
def test_noncentral_tails_are_those_of_shifted_normals(x: float, freedom: int, shift: float) -> None:
    torch.manual_seed(0)
    draws = torch.randn(200_000, freedom)
    draws[:, 0] += math.sqrt(shift)
    seen = float((draws.square().sum(-1) > x).double().mean())
    assert tail(x, freedom, shift) == pytest.approx(seen, abs=5e-3)


def _tally(count: int, bias: float, seed: int) -> CellCounts:
    """Tokens whose cells have changing chances; half of the mass of cell 0 and 1 moves by the bias."""
    generator = torch.Generator().manual_seed(seed)
    shape = torch.tensor([[5.0, 3.0, 1.5, 0.5], [1.0, 4.0, 3.0, 0.1]])[torch.arange(count) % 2]
    chances = shape / shape.sum(-1, keepdim=True)
    real = chances.clone()
    real[:, 0] -= bias
    real[:, 1] += bias
    tally = CellCounts(4)
    tally.add(chances, torch.multinomial(real, 1, generator=generator)[:, 0])
    return tally


def _p_values(bias: float, runs: int) -> list[float]:
    return [tail(*_tally(1000, bias, seed).test()) for seed in range(runs)]


def test_p_values_are_uniform_without_a_bias() -> None:
    values = _p_values(0.0, 500)
    for bar in (0.02, 0.1, 0.5, 0.9):
        share = sum(value < bar for value in values) / len(values)
        assert abs(share - bar) < 4 * math.sqrt(bar * (1 - bar) / len(values))


def test_the_promised_bias_is_seen() -> None:
    """`detectable` is an upper bound: that bias is seen at least as often as it says, a much smaller one is not."""
    freedom = _tally(1000, 0.0, 0).test()[1]
    assert freedom == 3
    bias = detectable(1000, freedom, 1e-3, 0.9)
    assert sum(value < 1e-3 for value in _p_values(bias, 300)) / 300 > 0.86
    assert sum(value < 1e-3 for value in _p_values(bias / 4, 300)) / 300 < 0.2


# ---- the enumeration ----------------------------------------------------------------------------------------------


@cache
def pairs(copied: bool = False) -> list[Pair]:
    generator = torch.Generator().manual_seed(0)

    def law() -> Tensor:
        return normed((torch.randn(40, generator=generator) * 2).softmax(-1))

    made = []
    for _ in range(24):
        p, q = law(), law()
        q = torch.nn.functional.one_hot(q.argmax(), 40).double() if copied else (p + q) / 2
        made.append(Pair(p, q, law(), copied))
    return made


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("rule", [TOKEN, BLOCK, MATCH], ids=lambda rule: rule.name)
def test_the_enumerated_law_of_exact_rules_is_the_targets(rule: Rule, copied: bool) -> None:
    for parents, cells in ((None, CHAIN_CELLS), (TREE, 3)):
        made = deep(pairs(copied), cells, (0, 5))
        laws = rule_laws(rule.verify, made, parents).flatten(1)
        assert laws.sum(1).tolist() == pytest.approx([1, 1], abs=1e-12)
        assert total_variation(laws, made.law.flatten(1)).max() < 1e-12


def test_the_enumerated_law_of_accepting_everything_is_the_drafts() -> None:
    made = deep(pairs(), CHAIN_CELLS, (0, 5))
    want = made.q[0][:, :, None, None] * made.q[1][:, :, :, None] * made.p[2]
    assert total_variation(rule_laws(accept_all, made, None).flatten(1), want.flatten(1)).max() < 1e-12
    some = wide(pairs()[:3])
    assert total_variation(rule_laws(accept_all, some, None).sum(2), some.q[0]).max() < 1e-12


def test_pooling_keeps_the_mass() -> None:
    pooled = pairs()[0].pooled(5)
    top = torch.maximum(pairs()[0].p, pairs()[0].q).topk(4).indices
    assert torch.equal(pooled.p[:4], pairs()[0].p[top])
    assert all(float(law.sum()) == pytest.approx(1) and law.shape == (5,) for law in pooled.laws)
