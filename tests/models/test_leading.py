"""Who leads and who follows, in one process: two ranks that are connected by a pipe, each with the whole of a model."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from slipstream.cache.prefixes import PrefixCache
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters.model import ModelDrafter
from slipstream.execution.ranks import RankLost, Ranks
from slipstream.models.causal import CausalScorer
from slipstream.models.leading import FollowingRank, LeadingScorer, ModelShard
from toys import FAMILIES, ragged, tiny

NUMBER = 0


@dataclass
class Both:
    """The scorer of the rank that leads, and the rank that follows in a thread, with how that has ended."""

    leading: LeadingScorer
    follower: FollowingRank
    thread: threading.Thread
    faults: list[Exception]

    @property
    def followed(self) -> Any:
        return self.follower.parts[NUMBER].scorer

    def close(self) -> None:
        self.leading_ranks.close()
        self.thread.join(20)

    leading_ranks: Any = None


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr("slipstream.execution.ranks.PATIENCE", 1.0)
    monkeypatch.setattr("slipstream.execution.ranks.CLOSING", 0.1)
    ours, its = Pipe()
    ranks, follower = Ranks(0, 2, {1: ours}), FollowingRank(Ranks(1, 2, {0: its}))
    parts = [ModelShard(CausalScorer(tiny(FAMILIES["llama"]))) for _ in range(2)]
    follower.parts[NUMBER] = parts[1]
    faults: list[Exception] = []

    def run() -> None:
        try:
            follower.run()
        except Exception as error:
            faults.append(error)
        finally:
            follower.ranks.close()

    thread = threading.Thread(target=run)
    thread.start()
    found = Both(LeadingScorer(ranks, NUMBER, parts[0]), follower, thread, faults, ranks)
    yield found
    found.close()
    assert not thread.is_alive()


def decoder(target: Any) -> Decoder:
    draft = CausalScorer(tiny(FAMILIES["llama"], seed=1))
    return Decoder(target, ModelDrafter(draft), controller=Fixed(3), batch_size=2)


def test_the_other_rank_holds_the_same_texts_at_every_round(both: Both) -> None:
    alone = [row.output for row in generate(decoder(CausalScorer(tiny(FAMILIES["llama"]))), ragged())]
    asked = ragged()
    rows = []
    with Scheduler(decoder(both.leading), prefill_chunk=4, prefix_cache=PrefixCache(1 << 20)) as scheduler:
        rows = [scheduler.add(each) for each in (*asked, *asked)]
        while scheduler.busy:
            scheduler.step()
    assert [row.output for row in rows[:3]] == [row.output for row in rows[3:]] == alone
    both.leading.add(1)
    both.leading.prefill([[1, 2, 3]])
    both.close()
    assert both.followed.lengths == both.leading.lengths == [3] and not both.faults
    assert torch.equal(both.followed.alone([1, 2]), CausalScorer(tiny(FAMILIES["llama"])).alone([1, 2]))


def test_a_rank_that_has_come_apart_is_noticed(both: Both) -> None:
    """The control: rows that nobody told it of."""
    both.followed.add(1)
    with pytest.raises(RankLost, match=r"rank 1 has failed: its rows have \[0, 0\] tokens, and those of rank 0 \[0\]"):
        for _ in range(3):
            both.leading.add(1)
            both.leading.prefill([[1, 2, 3]])
            both.thread.join(5)
            both.leading.rollback([0])
            both.leading.free([0])


def test_an_error_that_all_ranks_have_costs_nothing_but_the_call(both: Both) -> None:
    both.leading.add(1)
    with pytest.raises(IndexError):
        both.leading.prefill([[1_000_000]])
    both.leading.prefill([[1, 2, 3]])
    assert both.leading.lengths == [3] and both.thread.is_alive()


def test_an_error_of_one_rank_ends_the_job_in_a_sentence(both: Both) -> None:
    def broken(*args: Any) -> None:
        raise MemoryError("no memory left")

    both.leading.add(1)
    both.followed.prefill = broken
    with pytest.raises(RankLost, match="rank 1 has failed: no memory left"):
        both.leading.prefill([[1, 2, 3]])
        both.thread.join(20)
        both.leading.prefill([[1]])
    assert [type(error) for error in both.faults] == [RankLost]
    with pytest.raises(RankLost):
        both.leading.check()


def test_an_error_of_rank_0_alone_ends_the_job_too(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    both.leading.add(1)
    both.leading.prefill([[1]])
    inner = both.leading.model
    monkeypatch.setattr(type(inner), "forward", _fails_once(type(inner).forward, inner))
    with pytest.raises(RankLost, match="no memory left"):
        both.leading.prefill([[2]])


def _fails_once(forward: Any, model: Any) -> Any:
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if self is model:
            raise MemoryError("no memory left")
        return forward(self, *args, **options)

    return run


def test_drafts_of_the_targets_own_layers_are_refused(both: Both) -> None:
    with pytest.raises(ValueError, match="lies on 2 ranks, so no part of it can run for a draft on one"):
        both.leading.sharing_rows(both.leading.model, "part")
