"""Requests come and go between rounds, and rows of every kind share a batch: each has the text it would have alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from torch import Tensor

from drafters.test_contracts import BY_CONTEXT, MADE, OWN, decoder, llama
from slipstream.core.draft import Draft, Tree
from slipstream.core.draws import Rng
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN, Rule, lenient
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.models.causal import CausalScorer
from slipstream.models.tables import TableScorer
from toys import (
    EXACT,
    FAMILIES,
    GREEDY,
    PAIRS,
    SAMPLE,
    WRONG,
    dirichlet_table,
    enumerate_outcomes,
    plain_law,
    request,
    scorer,
    tiny,
    total_variation,
)

TARGET, DRAFT = PAIRS["generic"]
LENIENT = lenient(0.5)
RULES: tuple[Rule | None, ...] = (None, TOKEN, BLOCK, MATCH, COUPLED, LENIENT)


def pair(size: int = 4, gamma: int = 3) -> Decoder:
    """A target and a draft of tables."""
    return Decoder(scorer(TARGET), ModelDrafter(scorer(DRAFT, "draft")), controller=Fixed(gamma), batch_size=size)


def of_every_kind(count: int, seed: int = 0, longest: int = 5) -> list[Request]:
    """Greedy and sampled requests of all rules, with gammas of their own or none, some of which end early."""
    kinds = random.Random(seed)
    return [
        request(
            [kinds.randrange(3) for _ in range(kinds.randint(1, longest))],
            kinds.randint(1, 12),
            kinds.choice([GREEDY, SAMPLE, Sampling(temperature=0.7, top_k=2), Sampling(repetition_penalty=1.3)]),
            eos=frozenset({2} if kinds.random() < 0.3 else ()),
            seed=number,
            key=number,
            rule=kinds.choice(RULES),
            gamma=kinds.choice([None, 0, 1, 4]),
        )
        for number in range(count)
    ]


def drain(scheduler: Scheduler) -> list[Round]:
    """All rounds that are left."""
    rounds = []
    while (round := scheduler.step()) is not None:
        rounds.append(round)
    return rounds


def alone(make: Callable[[], Decoder], requests: Sequence[Request]) -> list[list[int]]:
    """The text of each request in a decoder of its own."""
    return [generate(make(), [each])[0].output for each in requests]


# ---- rows of every kind -----------------------------------------------------------------------------------------


def test_rows_of_every_kind_have_the_texts_they_would_have_alone() -> None:
    requests = of_every_kind(40)
    assert [row.output for row in generate(pair(), requests)] == alone(pair, requests)


@pytest.mark.parametrize("name", sorted(set(MADE) - BY_CONTEXT - OWN))
def test_every_drafter_drafts_for_rows_of_every_kind(name: str) -> None:
    requests = [each for each in of_every_kind(12, seed=3) if name != "tree" or each.rule is not LENIENT]

    def make() -> Decoder:
        return replace(decoder(name, (2,)), batch_size=5)

    assert [row.output for row in generate(make(), requests)] == alone(make, requests)


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_target_that_drafts_for_itself_serves_rows_of_every_kind(name: str) -> None:
    requests = [replace(each, rule=None) for each in of_every_kind(8, seed=4)]

    def make() -> Decoder:
        return replace(decoder(name, (2,)), batch_size=4)

    assert [row.output for row in generate(make(), requests)] == alone(make, requests)


def test_trees_serve_greedy_beside_sampled_rows() -> None:
    def make() -> Decoder:
        tree = TreeDrafter(scorer(DRAFT, "draft"), (2, 1))
        return Decoder(scorer(TARGET), tree, BLOCK.verify, Fixed(2), batch_size=4)

    requests = [replace(each, rule=None, gamma=None) for each in of_every_kind(24, seed=5)]
    rows = generate(make(), requests)
    assert [row.output for row in rows] == alone(make, requests)
    assert sum(row.stats.accepted for row in rows if row.request.sampler.greedy) > 0


@pytest.mark.parametrize("rule", [TOKEN, BLOCK, MATCH, COUPLED])
def test_the_law_of_a_sampled_row_beside_a_greedy_one_is_the_target_s(rule: Rule) -> None:
    """By enumeration of everything that a batch of both can draw."""
    greedy, sampled = request([0, 1], 3, GREEDY, key=1), request([0, 2], 2, key=2, rule=rule)

    def run(rng: Rng) -> tuple[int, ...]:
        mine = replace(sampled, rule=Rule("enumerated", rule.verify, rng))
        batch = replace(pair(2, gamma=2), rng=rng)
        first, second = generate(batch, [greedy, mine])
        assert first.output == generate(pair(), [greedy])[0].output
        return tuple(second.output)

    assert total_variation(enumerate_outcomes(run), plain_law(TARGET, (0, 2), 2)) < EXACT


def test_control_verdicts_of_the_wrong_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are verified with the drafts of others have other texts."""
    select = Draft.select
    monkeypatch.setattr(Draft, "select", lambda draft, places: select(draft, sorted(places, reverse=True)))
    requests, texts = of_every_kind(40), None
    with suppress(AssertionError):  # of the cache, which is asked to keep more than there is
        texts = [row.output for row in generate(pair(), requests)]
    assert texts != alone(pair, requests)


def test_a_draft_does_not_read_the_text_of_a_row_that_asks_for_no_drafts() -> None:
    requests = [request([0] * 50, 6, gamma=0, key=1), request([1] * 9, 6, key=2), request([2] * 7, 6, gamma=2, key=3)]
    draft = Counting()
    rows = generate(replace(pair(), drafter=ModelDrafter(draft)), requests)
    assert sum(draft.read) < 50 and rows[0].stats.drafted == 0
    assert len(rows[2].stats.drafted_by_position) == 2 and len(rows[1].stats.drafted_by_position) == 3


# ---- coming and going -------------------------------------------------------------------------------------------


def test_64_requests_at_random_times_have_the_texts_they_would_have_alone() -> None:
    requests, times = of_every_kind(64, seed=1), random.Random(2)
    rows = list[Row]()
    with Scheduler(pair(6)) as scheduler:
        while len(rows) < len(requests) or scheduler.step() is not None:
            for each in requests[len(rows) : len(rows) + times.choice([0, 0, 1, 3])]:
                rows.append(scheduler.add(each))
            scheduler.step()
    assert [row.output for row in rows] == alone(pair, requests)
    assert all(row.finish_reason in {"stop", "length"} for row in rows)


def test_a_real_model_serves_requests_at_random_times() -> None:
    """Greedy and coupled texts beside others are what they are alone."""

    def make() -> Decoder:
        small = ModelDrafter(CausalScorer(tiny(FAMILIES["llama"], seed=1)))
        return Decoder(CausalScorer(tiny(FAMILIES["llama"])), small, controller=Fixed(3), batch_size=6)

    times = random.Random(3)
    requests = [
        request([times.randrange(101) for _ in range(times.randint(1, 40))], times.randint(1, 16), sampler, **how)
        for sampler, how in [(GREEDY, {}), (SAMPLE, {"rule": COUPLED}), (SAMPLE, {}), (GREEDY, {"gamma": 0})] * 8
    ]
    requests = [replace(each, key=number, seed=number) for number, each in enumerate(requests)]
    rows = list[Row]()
    with Scheduler(make(), prefill_chunk=8) as scheduler:
        while len(rows) < len(requests) or scheduler.step() is not None:
            for each in requests[len(rows) : len(rows) + times.choice([0, 1, 2])]:
                rows.append(scheduler.add(each))
            scheduler.step()
    same = [row.request.sampler.greedy or row.request.rule is COUPLED for row in rows]
    texts = [row.output for row in rows]
    expected = alone(make, requests)
    assert sum(same) == 24
    assert [text for text, counts in zip(texts, same, strict=True) if counts] == [
        text for text, counts in zip(expected, same, strict=True) if counts
    ]


def test_requests_come_from_other_threads() -> None:
    requests, rows = of_every_kind(30, seed=6), dict[int, Row]()
    with Scheduler(pair(3)) as scheduler:

        def send(part: int) -> None:
            for number in range(part, len(requests), 3):
                rows[number] = scheduler.add(requests[number])

        threads = [threading.Thread(target=send, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            scheduler.step()
        for thread in threads:
            thread.join()
        drain(scheduler)
    assert [rows[number].output for number in range(len(requests))] == alone(pair, requests)
    assert len({row.index for row in rows.values()}) == len(requests)


def test_an_aborted_row_is_freed_before_the_next_round() -> None:
    long = [request([0, 1], 50, key=number) for number in range(4)]
    with Scheduler(pair(2)) as scheduler:
        rows = [scheduler.add(each) for each in long]
        scheduler.step()
        scheduler.abort(rows[0])  # runs
        scheduler.abort(rows[3])  # waits
        round = scheduler.step()
        assert round is not None and [row.index for row in round.rows] == [1, 2]
        assert (rows[0].finish_reason, rows[3].finish_reason) == ("abort", "abort")
        before = list(rows[0].tokens)
        drain(scheduler)
        assert scheduler.decoder.target.lengths == []
    assert rows[0].tokens == before and rows[3].output == []
    assert [row.output for row in rows[1:3]] == alone(pair, long[1:3])


def test_aborting_what_has_ended_changes_nothing() -> None:
    with Scheduler(pair()) as scheduler:
        row = scheduler.add(request([0], 2))
        drain(scheduler)
        scheduler.abort(row)
        assert scheduler.step() is None and row.finish_reason == "length"


def test_a_scheduler_without_work_rests_and_goes_on() -> None:
    with Scheduler(pair()) as scheduler:
        assert scheduler.step() is None
        first = scheduler.add(request([0], 2, GREEDY))
        drain(scheduler)
        assert scheduler.step() is None
        second = scheduler.add(request([0], 2, GREEDY))
        drain(scheduler)
    assert first.output == second.output != []


def test_one_scheduler_at_a_time_and_impossible_requests() -> None:
    made = pair()
    with Scheduler(made) as scheduler:
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            scheduler.add(request([], 3))
        scheduler.add(request([0], 30))
        scheduler.step()
        with pytest.raises(RuntimeError, match="serves one call at a time"):
            Scheduler(made)
    Scheduler(made).close()
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        Scheduler(made, prefill_chunk=0)


# ---- long prompts -----------------------------------------------------------------------------------------------


class Counting(TableScorer):
    """A table that notes how many tokens of prompts each call reads."""

    def __init__(self) -> None:
        super().__init__(dirichlet_table(1), 3)
        self.read: list[int] = []

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        self.read.append(sum(map(len, texts)))
        super().prefill(texts, first)

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        return super().extend(tokens, counts, first, tree)


def test_a_long_prompt_is_read_in_pieces_while_others_run() -> None:
    """Every running row gets tokens in every step, after at most one piece of the 1,000 tokens."""
    target = Counting()
    first, long = request([0, 1], 60, key=1), request([number % 3 for number in range(1000)], 4, key=2)
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=100) as scheduler:
        running = scheduler.add(first)
        scheduler.step()
        target.read.clear()
        late, short = scheduler.add(long), scheduler.add(request([2, 2], 3, key=3))
        steps = 0
        while not late.output:
            before, calls = len(running.output), len(target.read)
            scheduler.step()
            steps += 1
            assert len(running.output) == before + 1
            assert len(target.read) <= calls + 1 and all(count <= 100 for count in target.read)
        assert steps == 10 and sum(target.read) == 999 + 1
        assert short.output, "what fits behind the last piece is read with it"
        drain(scheduler)
    expected = plain(Decoder(scorer(dirichlet_table(1))), [first, long])
    assert [running.output, late.output] == [row.output for row in expected]


def test_a_prompt_that_nobody_waits_for_is_read_at_once() -> None:
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=10) as scheduler:
        scheduler.add(request([1] * 500, 1))
        drain(scheduler)
    assert target.read == [499]


@pytest.mark.parametrize("shape", [None, (2, 1)])
def test_a_draft_reads_a_long_prompt_in_pieces_too(shape: tuple[int, ...] | None) -> None:
    """Until it has read the prompt, its row is decoded plainly; the texts are those of the target alone."""
    long = request([number % 3 for number in range(1200)], 12, GREEDY, key=2)
    first, draft = request([0, 1], 40, GREEDY, key=1), Counting()
    drafter = ModelDrafter(draft) if shape is None else TreeDrafter(draft, shape)
    with Scheduler(Decoder(scorer(dirichlet_table(1)), drafter, BLOCK.verify, Fixed(2))) as scheduler:
        running = scheduler.add(first)
        scheduler.step()
        draft.read.clear()
        late = scheduler.add(long)
        drain(scheduler)
    assert sum(draft.read) >= 1200 and max(draft.read) <= 512
    assert late.stats.accepted > 0 and len(late.stats.drafted_by_position) == 2
    expected = plain(Decoder(scorer(dirichlet_table(1))), [first, long])
    assert [running.output, late.output] == [row.output for row in expected]


def test_an_aborted_prompt_is_read_no_further() -> None:
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=10) as scheduler:
        running = scheduler.add(request([0, 1], 40, key=1))
        scheduler.step()
        late = scheduler.add(request([1] * 500, 4, key=2))
        scheduler.step()
        scheduler.abort(late)
        drain(scheduler)
    assert sum(target.read) == 1 + 10 and late.finish_reason == "abort" and len(running.output) == 40


@pytest.mark.parametrize("name", sorted(OWN))
def test_pieces_of_prompts_do_not_disturb_a_target_that_drafts_for_itself(name: str) -> None:
    requests = [request([0, 1], 30, GREEDY), request([1, 2] * 20, 8, GREEDY), request([2] * 30, 8, GREEDY)]
    expected = [row.output for row in plain(Decoder(CausalScorer(llama())), requests)]
    with Scheduler(decoder(name, (2,)), prefill_chunk=5) as scheduler:
        rows = [scheduler.add(requests[0])]
        scheduler.step()
        rows += [scheduler.add(each) for each in requests[1:]]
        drain(scheduler)
    assert [row.output for row in rows] == expected


def test_control_a_piece_at_the_wrong_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of which a piece is read twice has another text."""

    def twice(self: TableScorer, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        TableScorer.prefill(self, [[*text[:1], *text[:-1]] for text in texts], first)

    requests = [request([0, 1, 2, 0, 2, 1, 1], 8, GREEDY)]
    good = generate(Decoder(Counting(), controller=Fixed(0)), requests)[0].output
    monkeypatch.setattr(Counting, "prefill", twice)
    assert generate(Decoder(Counting(), controller=Fixed(0)), requests)[0].output != good
    assert WRONG > EXACT
