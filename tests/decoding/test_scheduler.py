"""Requests come and go between rounds, and rows of every kind share a batch: each has the text it would have alone."""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from drafters.test_contracts import BY_CONTEXT, MADE, OWN, decoder, llama
from slipstream.core.draft import Draft
from slipstream.core.draws import Rng, draw
from slipstream.core.protocols import scorers_among
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.source import numbers, same_source
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN, Rule, lenient
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.models.causal import CausalScorer
from toys.enumeration import EXACT, WRONG, enumerate_outcomes, total_variation
from toys.families import FAMILIES, tiny
from toys.tables import PAIRS, TableScorer, dirichlet_table, plain_law, scorer
from toys.texts import GREEDY, SAMPLE, rare, request

TARGET, DRAFT = PAIRS["generic"]
LENIENT = lenient(0.5)
RULES: tuple[Rule | None, ...] = (None, TOKEN, BLOCK, MATCH, COUPLED, LENIENT)


def pair(size: int = 4, gamma: int = 3) -> Decoder:
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
    return list(scheduler.rounds())


def coming(scheduler: Scheduler, requests: Sequence[Request], at_once: Callable[[], int]) -> list[Row]:
    """The rows of requests of which some more come before every step."""
    rows = list[Row]()
    while len(rows) < len(requests) or scheduler.busy:
        rows += [scheduler.add(each) for each in requests[len(rows) : len(rows) + at_once()]]
        scheduler.step()
    return rows


def alone(make: Callable[[], Decoder], requests: Sequence[Request]) -> list[list[int]]:
    return [generate(make(), [each])[0].output for each in requests]


# ---- rows of every kind -----------------------------------------------------------------------------------------


def test_rows_of_every_kind_have_the_texts_they_would_have_alone() -> None:
    requests = of_every_kind(40)
    assert [row.output for row in generate(pair(), requests)] == alone(pair, requests)


@pytest.mark.parametrize("name", sorted(set(MADE) - BY_CONTEXT))
def test_every_drafter_drafts_for_rows_of_every_kind(name: str) -> None:
    requests = [each for each in of_every_kind(12, seed=3) if name != "tree" or each.rule is not LENIENT]
    if name in OWN:
        requests = [replace(each, rule=None) for each in of_every_kind(8, seed=4)]

    def make() -> Decoder:
        return replace(decoder(name, (2,)), batch_size=4 if name in OWN else 5)

    assert [row.output for row in generate(make(), requests)] == alone(make, requests)


def test_trees_serve_greedy_beside_sampled_rows() -> None:
    def make() -> Decoder:
        tree = TreeDrafter(scorer(DRAFT, "draft"), (2, 1))
        return Decoder(scorer(TARGET), tree, BLOCK.verify, Fixed(2), batch_size=4)

    requests = [replace(each, rule=None, gamma=None) for each in of_every_kind(24, seed=5)]
    rows = generate(make(), requests)
    assert [row.output for row in rows] == alone(make, requests)
    assert sum(row.stats.accepted for row in rows if row.request.sampler.greedy) > 0


@pytest.mark.parametrize("rule", [TOKEN, BLOCK, *rare(MATCH, COUPLED)])
def test_the_law_of_a_sampled_row_beside_a_greedy_one_is_the_target_s(rule: Rule) -> None:
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


def test_a_draft_reads_nothing_that_it_is_not_asked_for() -> None:
    """Neither while all rounds are plain, nor for the rows that are given no drafts."""

    class Some(Fixed):
        """Drafts for the first row only, every third round."""

        def init(self) -> int:  # type: ignore[override]
            return 0

        def gammas(self, state: int, rows: Sequence[Row]) -> list[int]:  # type: ignore[override]
            return [self.tokens * (state % 3 == 2 and row.index == 0) for row in rows]

        def update(self, state: int, round: Round) -> int:  # type: ignore[override]
            return state + 1

    requests, draft = [request([number] * 50, 12, GREEDY, key=number) for number in range(3)], Counting()
    rows = generate(replace(pair(), drafter=ModelDrafter(draft), controller=Some(2)), requests)
    assert rows[0].stats.drafted > 0 and 50 <= sum(draft.read) < 100
    assert [row.output for row in rows] == alone(lambda: pair(gamma=0), requests)
    idle = Counting()
    generate(replace(pair(gamma=0), drafter=ModelDrafter(idle)), requests)
    assert idle.lengths == [] and idle.read == []


# ---- coming and going -------------------------------------------------------------------------------------------


def test_64_requests_at_random_times_have_the_texts_they_would_have_alone() -> None:
    requests, times = of_every_kind(64, seed=1), random.Random(2)
    with Scheduler(pair(6)) as scheduler:
        rows = coming(scheduler, requests, lambda: times.choice([0, 0, 1, 3]))
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
        for sampler, how in [(GREEDY, {}), (SAMPLE, {"rule": COUPLED}), (SAMPLE, {}), (GREEDY, {"gamma": 0})] * 4
    ]
    requests = [replace(each, key=number, seed=number) for number, each in enumerate(requests)]
    with Scheduler(make(), prefill_chunk=8) as scheduler:
        rows = coming(scheduler, requests, lambda: times.choice([0, 1, 2]))
    same = [row for row in rows if row.request.sampler.greedy or row.request.rule is COUPLED]
    assert len(same) == 12
    assert [row.output for row in same] == alone(make, [row.request for row in same])


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


def test_a_scheduler_without_work_rests_and_goes_on() -> None:
    """Aborting what has ended changes nothing."""
    with Scheduler(pair()) as scheduler:
        assert scheduler.step() is None
        first = scheduler.add(request([0], 2, GREEDY))
        drain(scheduler)
        scheduler.abort(first)
        assert scheduler.step() is None and first.finish_reason == "length"
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
    def __init__(self) -> None:
        super().__init__(dirichlet_table(1), 3)
        self.read: list[int] = []

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        self.read.append(sum(map(len, texts)))
        super().prefill(texts, first)


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


def test_prompts_that_nobody_waits_for_are_read_together_a_piece_of_each() -> None:
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=200) as scheduler:
        rows = [scheduler.add(request([number] * 500, 1)) for number in range(3)]
        assert scheduler.step() is None and scheduler.busy, "a piece was read, and no row can run yet"
        drain(scheduler)
    assert target.read == [600, 600, 297] and all(row.output for row in rows)


def test_pieces_grow_with_the_prompts_that_wait_for_each_row_that_runs() -> None:
    """Up to the growth that was asked for; where nobody runs, every text is read by that much."""
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=10, prefill_growth=3) as scheduler:
        scheduler.add(request([0] * 41, 200))
        scheduler.step()
        scheduler.step()
        assert target.read == [30, 10]
        target.read.clear()
        for number in (1, 2, 3, 4):
            scheduler.add(request([number % 3] * (100 + number), 1, key=number))
            scheduler.step()
        assert target.read == [10, 20, 30, 30]
        drain(scheduler)
    assert sum(target.read) == sum(100 + number - 1 for number in (1, 2, 3, 4))


def test_a_short_prompt_waits_for_one_piece_of_a_long_one() -> None:
    """Which was there before, is put behind it in the cache, and goes on to be read."""
    long, short = request([0, 1] * 400, 5, GREEDY), request([2, 2, 0], 5, GREEDY)
    with Scheduler(pair(), prefill_chunk=100) as scheduler:
        rows = [scheduler.add(long)]
        scheduler.step()
        rows.append(scheduler.add(short))
        round = scheduler.step()
        assert round is not None and round.rows == (rows[1],)
        assert scheduler.reading == [rows[0]]
        drain(scheduler)
    assert [row.output for row in rows] == alone(pair, [long, short])


def test_a_short_prompt_does_not_wait_for_a_large_piece_of_a_long_one() -> None:
    """Where no row runs, it is read at once with half a piece of the long one, which ends although short ones come."""
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=10, prefill_growth=4) as scheduler:
        long = scheduler.add(request([0] * 121, 1))
        scheduler.step()
        assert target.read == [40]
        for _ in range(8):
            assert not long.output
            short = scheduler.add(request([1] * 8, 1))
            scheduler.step()
            assert short.output and target.read[-1] == 7 + 5
        scheduler.step()
        assert long.output, "what is left of it fits into one call"


def test_the_eldest_prompt_gets_half_of_every_piece() -> None:
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=10) as scheduler:
        scheduler.add(request([0], 200))
        scheduler.step()
        eldest = scheduler.add(request([1] * 101, 1))
        for _ in range(20):
            assert not eldest.output
            scheduler.add(request([2] * 6, 1))  # shorter ones come all the time
            scheduler.step()
        assert eldest.output


@pytest.mark.parametrize(("lengths", "piece"), [((1200,), 512), ((70, 71, 72, 73), 20)])
@pytest.mark.parametrize("shape", [None, (2, 1)])
def test_a_draft_reads_prompts_in_the_pieces_of_the_target_however_many_come(
    shape: tuple[int, ...] | None, lengths: tuple[int, ...], piece: int
) -> None:
    """Until it has read the prompt, its row is decoded plainly; the texts are those of the target alone."""
    draft, first = Counting(), request([0, 1], 40, GREEDY, key=9)
    drafter = ModelDrafter(draft) if shape is None else TreeDrafter(draft, shape)
    requests = [request([n % 3 for n in range(length)], 12, GREEDY, key=length) for length in lengths]
    decoder = Decoder(scorer(dirichlet_table(1)), drafter, BLOCK.verify, Fixed(2))
    with Scheduler(decoder, prefill_chunk=piece) as scheduler:
        running = scheduler.add(first)
        scheduler.step()
        draft.read.clear()
        rows = [scheduler.add(each) for each in requests]
        drain(scheduler)
    assert sum(draft.read) >= sum(lengths) and max(draft.read) <= piece
    assert rows[0].stats.accepted > 0 and len(rows[0].stats.drafted_by_position) == 2
    expected = plain(Decoder(scorer(dirichlet_table(1))), [first, *requests])
    assert [row.output for row in (running, *rows)] == [row.output for row in expected]


# ---- ends that nobody waits for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True])
def test_a_long_prompt_is_read_no_further_once_it_is_aborted(beside: bool) -> None:
    """The abort is seen before the next piece, also where nobody else runs."""
    target = Counting()
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=10) as scheduler:
        running = [scheduler.add(request([0, 1], 40, key=1))] if beside else []
        scheduler.step()
        target.read.clear()
        late = scheduler.add(request([1] * 500, 4, key=2))
        assert (scheduler.step() is None) is not beside
        scheduler.abort(late)
        drain(scheduler)
        assert scheduler.step() is None and not scheduler.busy and target.lengths == []
    assert target.read == [10] and late.finish_reason == "abort" and not late.output
    assert [len(row.output) for row in running] == [40] * beside


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7])
def test_an_abort_at_any_time_leaves_the_others_alone(steps: int) -> None:
    """In the queue, while its prompt is read, before its first token, while it runs."""
    requests = [request([0, 1], 30, GREEDY), request([1, 2] * 20, 20, GREEDY), request([2], 30, GREEDY)]
    with Scheduler(pair(), prefill_chunk=10) as scheduler:
        rows = [scheduler.add(requests[0])]
        scheduler.step()
        rows += [scheduler.add(each) for each in requests[1:]]
        for _ in range(steps):
            scheduler.step()
        gone, had = rows[1], list(rows[1].output)
        where = "reads" if gone in scheduler.reading else "runs" if gone in scheduler.running else "waits"
        scheduler.abort(gone)
        drain(scheduler)
    expected = alone(pair, requests)
    assert where == {0: "waits", 1: "reads", 3: "reads", 4: "runs", 7: "runs"}[steps]
    assert gone.finish_reason == "abort" and gone.output == had == expected[1][: len(had)]
    assert bool(had) == (steps >= 4)
    assert [rows[0].output, rows[2].output] == [expected[0], expected[2]]


def test_an_abort_in_the_very_last_round_comes_too_late() -> None:
    with Scheduler(pair(gamma=0)) as scheduler:

        def stop(tokens: list[int]) -> None:
            if len(tokens) == 4:
                scheduler.abort(last)

        other = request([1, 2], 9, GREEDY, key=2)
        rows = [scheduler.add(request([0, 1], 2, key=1, stop=stop)), scheduler.add(other)]
        last = rows[0]
        drain(scheduler)
    assert last.finish_reason == "length" and len(last.output) == 2
    assert rows[1].output == alone(pair, [other])[0]


def test_rows_wait_in_the_order_of_their_priority_then_of_their_arrival() -> None:
    order = [2, 0, 1, 0, -1]
    with Scheduler(pair(1)) as scheduler:
        rows = [scheduler.add(request([0], 2, priority=priority)) for priority in order]
        ended = [row for round in scheduler.rounds() for row in round.rows if row.finish_reason]
    assert [rows.index(row) for row in ended] == [4, 1, 3, 2, 0]


# ---- equal prompts ----------------------------------------------------------------------------------------------


def undrafted() -> Decoder:
    return Decoder(scorer(dirichlet_table(1)), controller=Fixed(0))


def samples(count: int, prompt: Sequence[int] = (0, 1, 2) * 30) -> list[Request]:
    return [request(prompt, 8, seed=number, key=number) for number in range(count)]


def test_equal_prompts_are_read_once_by_each_tenant_and_have_texts_of_their_own() -> None:
    target, requests = Counting(), samples(4)
    others = [request([1] * 300, 8, key=9), replace(requests[0], cache_salt="other")]
    with Scheduler(replace(undrafted(), target=target), prefill_chunk=50) as scheduler:
        rows = [scheduler.add(each) for each in [*requests[:2], *others, *requests[2:]]]
        drain(scheduler)
    assert sum(target.read) == 89 + 299 + 89
    assert [row.output for row in rows] == alone(undrafted, [row.request for row in rows])
    assert len({tuple(row.output) for row in rows}) > 3
    assert [row.stats.cached for row in rows] == [0, 89, 0, 0, 89, 89]


def test_whoever_waits_for_an_equal_prompt_goes_on_when_its_reader_is_aborted() -> None:
    target, requests = Counting(), samples(3)
    with Scheduler(Decoder(target, controller=Fixed(0)), prefill_chunk=40) as scheduler:
        rows = [scheduler.add(each) for each in requests]
        scheduler.step()
        scheduler.abort(rows[0])
        drain(scheduler)
    assert sum(target.read) == 89
    assert [row.output for row in rows[1:]] == alone(undrafted, requests[1:])


# ---- memory -----------------------------------------------------------------------------------------------------


class Weighed(TableScorer):
    """A table whose texts take a byte for every token."""

    def bytes_for(self, lengths: Sequence[int]) -> int:
        return sum(lengths)


def weighed(gamma: int = 2, rng: Rng = draw) -> Decoder:
    target, small = Weighed(TARGET, 3, "target"), Weighed(DRAFT, 3, "draft")
    return Decoder(target, ModelDrafter(small), controller=Fixed(gamma), batch_size=4, rng=rng)


def gave_way(scheduler: Scheduler, watch: Callable[[Round], object] = lambda round: None) -> int:
    """How often a row that had begun had to wait again, until all have ended."""
    times, before = 0, set[int]()
    for round in scheduler.rounds():
        watch(round)
        waiting = {row.index for row in scheduler.waiting if row.output}
        times, before = times + len(waiting - before), waiting
    return times


def test_rows_wait_for_memory_and_give_way_and_keep_their_texts() -> None:
    requests = [replace(each, rule=None, gamma=None) for each in of_every_kind(12, seed=8)]
    seen = list[tuple[int, int]]()
    with Scheduler(weighed(), memory=60) as scheduler:
        rows = [scheduler.add(each) for each in requests]
        target = scheduler.decoder.target
        assert gave_way(scheduler, lambda round: seen.append((len(round.rows), 2 * sum(target.lengths)))) > 1
    most, held = map(max, zip(*seen, strict=True))
    assert most > 1 and held <= 60
    same = [place for place, row in enumerate(rows) if row.request.sampler.greedy]
    expected = alone(weighed, requests)
    assert len(same) > 2 and [rows[place].output for place in same] == [expected[place] for place in same]


@pytest.mark.parametrize("rule", [MATCH, COUPLED])
def test_a_coupled_row_that_gave_way_has_the_text_it_would_have_alone(rule: Rule) -> None:
    requests = [request([0, 1], 12, seed=number, key=number, rule=rule) for number in range(4)]
    with Scheduler(weighed(), memory=60) as scheduler:
        rows = [scheduler.add(each) for each in requests]
        assert gave_way(scheduler) > 0
    if rule is COUPLED:
        assert [row.output for row in rows] == alone(weighed, requests)
    assert all(len(row.output) == 12 for row in rows)


def off_by_giving_way(rule: Rule, count: int) -> float:
    """By enumeration: the sampled row is sent back to wait whenever the greedy one before it has grown."""
    times = list[int]()

    def run(rng: Rng) -> tuple[int, ...]:
        decoder = replace(weighed(1, rng), verifier=rule.verify, batch_size=2)
        with Scheduler(decoder, memory=16) as scheduler:
            scheduler.add(request([0, 1], 4, GREEDY, gamma=0, key=1))
            sampled = scheduler.add(request([0, 2], count, key=2))
            times.append(gave_way(scheduler))
        return tuple(sampled.output)

    off = total_variation(enumerate_outcomes(run), plain_law(TARGET, (0, 2), count))
    assert max(times) > 0, "nobody gave way"
    return off


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_the_law_of_a_row_that_gives_way_is_the_target_s(rule: Rule) -> None:
    assert off_by_giving_way(rule, 3) < EXACT


def test_control_a_row_that_comes_back_without_its_last_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: what was emitted is there, but one token of it is not read again."""
    prefill = TableScorer.prefill

    def short(self: TableScorer, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        prefill(self, [[*text[:-2], *text[-1:], *text[-1:]] if len(text) > 2 else text for text in texts], first)

    monkeypatch.setattr(TableScorer, "prefill", short)
    assert off_by_giving_way(TOKEN, 4) > WRONG


def test_what_never_fits_is_refused_and_what_grows_too_long_ends() -> None:
    with Scheduler(weighed(), memory=40) as scheduler:
        with pytest.raises(ValueError, match="prompt 0 has 30 tokens, for which the memory"):
            scheduler.check(request([0] * 30, 2))
        assert not scheduler.busy
        row = scheduler.add(request([0] * 10, 50))
        drain(scheduler)
    assert row.finish_reason == "length" and row.context_full and 18 <= len(row.tokens) <= 20
    with pytest.raises(ValueError, match="memory=0"):
        Scheduler(weighed(), memory=0)
    with pytest.raises(ValueError, match="table, draft cannot tell what rows take"):
        Scheduler(pair(), memory=10)


@pytest.mark.slow
def test_a_real_model_keeps_to_its_memory() -> None:
    """What its cache has allocated is never more; texts are those of unlimited rows."""

    def make() -> Decoder:
        small = ModelDrafter(CausalScorer(tiny(FAMILIES["llama"], seed=1, max_position_embeddings=1024)))
        large = CausalScorer(tiny(FAMILIES["llama"], max_position_embeddings=1024))
        return Decoder(large, small, controller=Fixed(3), batch_size=6)

    lengths = [100, 300, 20, 20, 20, 20, 120, 90]
    requests = [request([n] * length, 40, GREEDY, key=n) for n, length in enumerate(lengths)]
    decoder = make()
    (draft,) = scorers_among([decoder.drafter])
    target = decoder.target
    assert isinstance(target, CausalScorer) and isinstance(draft, CausalScorer)
    limit = 2 * target.bytes_for([500, 500])
    with Scheduler(decoder, memory=limit) as scheduler:
        rows = [scheduler.add(each) for each in requests]
        waited, most = False, 0
        for round in scheduler.rounds():
            most = max(most, len(round.rows))
            waited |= len(round.rows) < 5 and bool(scheduler.waiting)
            assert target.bytes_allocated + draft.bytes_allocated <= limit
    assert waited and most > 2
    assert [row.output for row in rows] == alone(make, requests)


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


def test_sources_of_sound_are_compared_by_their_features() -> None:
    sounds = [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, 2), (0, 0), None]
    same = [[same_source(left, right) for right in sounds] for left in sounds]
    assert same == [[i == j or {i, j} == {0, 1} for j in range(len(sounds))] for i in range(len(sounds))]
    assert [numbers(each) == numbers(sounds[0]) for each in sounds[:3]] == [True, True, False]  # the keys of draws


def test_rows_wait_while_it_holds_and_have_their_texts_then() -> None:
    made, requests = pair(), of_every_kind(4)
    want = [row.output for row in generate(pair(), requests)]
    with Scheduler(made) as scheduler:
        rows = [scheduler.add(each) for each in requests[:2]]
        assert scheduler.idle and scheduler.busy
        scheduler.step()
        assert not scheduler.idle
        scheduler.holds = True
        rows += [scheduler.add(each) for each in requests[2:]]
        while not scheduler.idle:
            scheduler.step()
        assert all(row.finish_reason for row in rows[:2]) and not any(row.output for row in rows[2:])
        assert scheduler.step() is None and scheduler.busy and not made.target.lengths
        scheduler.holds = False
        for _ in scheduler.rounds():
            pass
    assert [row.output for row in rows] == want
