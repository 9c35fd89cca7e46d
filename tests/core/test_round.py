"""Times of a round, on a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.core import round as rounds
from slipstream.core.round import Stopwatch, stopwatch
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters.model import ModelDrafter
from toys import Clock, dirichlet_table, request, scorer
from toys.tables import TableScorer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "perf_counter", clock)
    return clock


def test_laps_add_up_and_leave_out_what_was_measured_apart(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 1
    with watch.apart("prefill"):
        clock.now += 10
    clock.now += 2
    watch.lap("draft")
    clock.now += 4
    watch.lap("target")
    with pytest.raises(RuntimeError), watch.apart("prefill"):
        clock.now += 20
        raise RuntimeError
    watch.lap("draft")
    assert watch.laps == {"prefill": 30, "draft": 3, "target": 4}


class SlowReader(TableScorer):
    """A table that takes 100 seconds for a source, one for every token of a prompt, ten for every pass that drafts."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(dirichlet_table(3), 3, "slow")
        self.clock = clock

    def add(self, *arguments: object) -> None:
        super().add(*arguments)
        self.clock.now += 100

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        super().prefill(texts, first)
        self.clock.now += sum(map(len, texts))

    def extend(self, *arguments: object, **options: object) -> object:
        self.clock.now += 10
        return super().extend(*arguments, **options)


def test_a_draft_reads_prompts_as_prefill_and_not_as_drafting(clock: Clock) -> None:
    decoder = Decoder(scorer(dirichlet_table(1)), ModelDrafter(SlowReader(clock), 3), controller=Fixed(2))
    with Scheduler(decoder) as scheduler:
        row = scheduler.add(request([0, 1, 2, 0, 1, 2], 6))
        first, *others = scheduler.rounds()
    assert first.seconds["draft"] == 20 and first.reading == row.stats.seconds["prefill"] == 105
    assert all(round.seconds["draft"] == 10 * round.draft.depths[0] and not round.reading for round in others)
    assert row.stats.seconds["draft"] == sum(round.seconds["draft"] for round in (first, *others))


class FakeEvent:
    """An event of a GPU whose clock stands still but for what `FakeEvent.clock` is set to (seconds)."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at - self.at)


def test_a_gpus_phases_are_measured_by_its_own_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead: it reaches every mark at once, while the GPU takes seconds for each phase."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(FakeEvent, "clock", 5.0)
    watch = stopwatch(torch.device("cuda"))
    with watch.apart("prefill"):
        clock.now += 0.5
    for phase, arrival in (("draft", 7.0), ("target", 8.0), ("target", 8.5), ("accept", 9.0)):
        FakeEvent.clock = arrival
        watch.lap(phase)
    assert not {"draft", "target", "accept"} & set(watch.laps)  # nobody waits for the GPU
    clock.now += 4.5
    watch.end("rest")
    assert watch.laps == {"prefill": 0.5, "draft": 1.5, "target": 1.5, "accept": 0.5, "rest": 1.0}


def test_a_hosts_last_phase_is_a_lap() -> None:
    watch = stopwatch(torch.device("cpu"))
    watch.lap("draft")
    watch.end("rest")
    assert list(watch.laps) == ["draft", "rest"]
