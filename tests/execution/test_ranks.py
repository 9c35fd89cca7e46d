"""Ranks: what a process says when it is alone, how it notices a lost one, and interrupts within passes."""

import signal
import sys
from functools import partial
from multiprocessing import Pipe
from time import monotonic, sleep
from typing import Any

import pytest
import torch

import slipstream
from ranks import forked
from slipstream.core.signals import undisturbed
from slipstream.execution import ranks
from slipstream.execution.ranks import RankLost, Ranks, place
from terminal import run
from toys import FAMILIES, tiny


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


START = r"tensor parallelism needs two or more processes, .*: start them by torchrun --nproc-per-node 2"


def test_a_single_process_is_told_how_to_start_several() -> None:
    assert place() == (0, 1) and not slipstream.follow()
    with pytest.raises(ValueError, match=START):
        slipstream.load(tp_plan="auto")
    result = run("generate", "x", "--tensor-parallel")
    assert result.exit_code == 2 and "torchrun --nproc-per-node 2 -m slipstream generate" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tp_plan": "all"}, "tp_plan='all' is not possible: give 'auto'"),
        ({"tp_plan": "auto", "device": "cpu"}, "device cannot be used with tp_plan, for every rank takes the device"),
        ({"tp_plan": "auto", "quantize": "int8"}, "quantize cannot be used with tp_plan, for its kernels"),
        ({"tp_plan": "auto", "encoder_dtype": "bfloat16"}, "encoder_dtype cannot be used with tp_plan, for every rank"),
        ({"tp_plan": "auto", "kv_dtype": "int8"}, "kv_dtype cannot be used with tp_plan, for every rank keeps"),
        ({"tp_plan": "auto", "device_map": "auto"}, "device_map cannot be used with tp_plan, for a model is either"),
        ({"tp_size": 2}, "tp_size is not possible here: give tp_plan='auto'"),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        slipstream.load(**options)


def test_a_model_that_lies_on_ranks_already_is_refused() -> None:
    model: Any = tiny(FAMILIES["llama"])
    vars(model).update(_tp_size=2)  # as transformers marks one that it has divided
    with pytest.raises(ValueError, match="lies on 2 ranks already: give its name or folder, and tp_plan='auto'"):
        slipstream.load(model)
    with pytest.raises(ValueError, match="custom_generate decodes in one process, and this model lies on several"):
        model.generate(torch.tensor([[1]]), max_new_tokens=2, custom_generate=slipstream.custom_generate(model))


def test_an_interrupt_waits_for_the_end_of_a_pass() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), undisturbed():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    with pytest.raises(KeyboardInterrupt):  # and outside of one it is as it was
        signal.raise_signal(signal.SIGINT)


def test_an_error_in_a_pass_comes_before_an_interrupt() -> None:
    with pytest.raises(RankLost), undisturbed():
        signal.raise_signal(signal.SIGINT)
        raise RankLost("gone")


def test_a_closed_connection_is_noticed_while_nothing_is_asked() -> None:
    ours, its = Pipe()
    ranks, called = Ranks(0, 3, {2: ours}), []
    ranks.on_loss = lambda: called.append(1)
    ranks.check()
    its.close()
    end = monotonic() + 10
    while not called and monotonic() < end:
        sleep(0.01)
    with pytest.raises(RankLost, match="rank 2 of 3 has ended before all was done, so this job cannot go on"):
        ranks.check()
    ranks.close()


def stuck() -> None:
    ranks.GRACE = 1.0
    these = ranks.join()
    if not these.leads:
        sys.exit(3)
    with these.working():
        sleep(60)


@pytest.mark.slow
def test_a_pass_that_cannot_end_is_ended_when_a_rank_is_gone() -> None:
    """As a GPU waits for another one for ever; here the pass sleeps."""
    began = monotonic()
    leader, follower = forked(stuck)
    assert leader[0] == 2 and "rank 1 of 2 has ended before all was done" in leader[2], leader
    assert follower[0] == 3 and monotonic() - began < 30


@pytest.mark.slow
def test_a_rank_that_loads_without_following_says_what_to_call() -> None:
    leader, follower = forked(partial(slipstream.load, tp_plan="auto"))
    assert "this is rank 1, which works for rank 0: call slipstream.follow() before load()" in follower[2]
    assert "rank 1 of 2 has ended" in leader[2], leader
