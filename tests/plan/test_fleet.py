"""A simulated fleet: against a queue of known law, against a simulation in small steps, and from the file of a plan."""

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.model_options import ModelOptions
from slipstream.engine.plan_file import Plan
from slipstream.plan.fleet import Arrival, Pace, multiplied, paces, read_trace, simulate
from terminal import run


def test_a_single_request_takes_its_reading_and_its_tokens() -> None:
    served = simulate(Pace((1, 4), (0.5, 0.8), 0.25), 1, [Arrival(3.0, 8, 10)])
    assert served.first_token["p50"] == pytest.approx(8 * 0.25 + 0.5)
    assert served.end["p50"] == pytest.approx(8 * 0.25 + 10 * 0.5)
    assert served.between["p50"] == pytest.approx(0.5)
    assert (served.seconds, served.behind) == (pytest.approx(10.0), pytest.approx(7.0))
    assert served.busy == pytest.approx(0.7) and served.tokens_per_second == pytest.approx(1.0)
    assert served.cost(3600.0) == pytest.approx(10.0 / 10 * 1e6)


def test_two_rows_share_the_pace_of_two_and_wait_while_a_prompt_is_read() -> None:
    """The first has 4 tokens at 4 and waits until 5; both write a token in 1.5 s, so the second ends at 11, the first
    with 8 tokens by then, and at 13."""
    arrivals, pace = [Arrival(0.0, 0, 10), Arrival(4.0, 2, 4)], Pace((1, 2), (1.0, 1.5), 0.5)
    served = simulate(pace, 1, arrivals)
    assert served.seconds == pytest.approx(13.0)
    assert served.end["p50"] == pytest.approx(13.0) and served.end_mean == pytest.approx((13.0 + 7.0) / 2)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waiting_in_a_queue_is_what_theory_says(load: float) -> None:
    """M/D/1, one row and texts of one length: the mean wait is load / (2 (1 - load)) services.

    Over 60,000 requests 12 % are more than five standard errors of it: a false alarm has odds below 1e-5.
    """
    chance, now, arrivals = random.Random(5), 0.0, []
    for _ in range(60_000):
        now += chance.expovariate(load)
        arrivals.append(Arrival(now, 0, 1))
    served = simulate(Pace((1,), (1.0,), 0.0), 1, arrivals)
    assert served.busy == pytest.approx(load, rel=0.03)
    assert served.end_mean - 1.0 == pytest.approx(load / (2 * (1 - load)), rel=0.12)


def in_small_steps(pace: Pace, arrivals: list[Arrival], step: float) -> float:
    """When the last of the requests ends, for one replica, by moving on in small steps."""
    now, waiting, reading, left = 0.0, list(arrivals), 0.0, list[float]()
    joining: Arrival | None = None
    while waiting or left or joining:
        if joining is None and waiting and waiting[0].time <= now and len(left) < pace.rows[-1]:
            joining = waiting.pop(0)
            reading = joining.prompt * pace.reading
        if joining is not None:
            reading -= step
            if reading <= 0:
                left.append(joining.tokens)
                joining = None
        elif left:
            left = [tokens - step / pace.per_token(len(left)) for tokens in left]
            left = [tokens for tokens in left if tokens > 0]
        now += step
    return now


@pytest.mark.parametrize("seed", range(3))
def test_events_and_small_steps_agree(seed: int) -> None:
    chance = random.Random(seed)
    pace = Pace((1, 2, 4), (0.1, 0.12, 0.2), 0.004)
    times = sorted(chance.uniform(0, 20) for _ in range(25))
    arrivals = [Arrival(time, chance.randrange(1, 60), chance.randrange(1, 30)) for time in times]
    assert simulate(pace, 1, arrivals).seconds == pytest.approx(in_small_steps(pace, arrivals, 0.0005), abs=0.15)


def test_paces_lie_on_lines_between_what_was_measured() -> None:
    pace = Pace((1, 4, 8), (1.0, 2.5, 3.5), 0.0)
    assert [pace.per_token(rows) for rows in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 3.0, 3.5]
    assert Pace((2,), (1.0,), 0.0).per_token(1) == 1.0


def plan(**changes: Any) -> Plan:
    """A plan as if it had been measured with one row and with eight."""

    def outlook(step: float, share: float) -> dict[str, Any]:
        return {
            "milliseconds_by_width": {"plain": {"seconds": {"median": step}}},
            "predictions": [{"gamma": 3, "round": 2.0 * share, "tokens_per_call": 4.0}],
        }

    outlooks = {"1": {"small": outlook(10.0, 1.0)}, "8": {"small": outlook(20.0, 1.5)}}
    figures = {"draft": "small", "reading": {"tokens": 1000, "seconds": 2.0}, "outlooks": outlooks, **changes}
    return Plan(ModelOptions("target", "small"), {1: 3, 8: 0}, 100, figures=figures, machine={"cpu": "a processor"})


def test_paces_are_those_of_the_plan() -> None:
    found = paces(plan())
    assert found["plain"] == Pace((1, 8), (0.01, 0.02), 0.002)
    assert found["speculative"] == Pace((1, 8), (0.005, 0.02), 0.002), "with eight rows the plan does not speculate"
    with pytest.raises(ValueError, match="make it again"):
        paces(plan(reading=None))


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01.5000000,10,3\n2023-11-16 18:00:00.0000000,7,2\n"


def test_traces_are_read_by_time(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(TRACE)
    with gzip.open(tmp_path / "azure.csv.gz", "wt") as file:
        file.write(TRACE)
    (tmp_path / "plain.csv").write_text("time,prompt_tokens,completion_tokens\n4.5,10,3\n3,7,2\n")
    for name in ("azure.csv", "azure.csv.gz", "plain.csv"):
        assert read_trace(tmp_path / name) == [Arrival(0.0, 7, 2), Arrival(1.5, 10, 3)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no column for the time"),
        ("time,prompt_tokens\n1,2\n", "no column for the tokens"),
        ("time,prompt_tokens,completion_tokens\n", "holds no request"),
        ("time,prompt_tokens,completion_tokens\n1,2,x\n", "line 2"),
        ("time,prompt_tokens,completion_tokens\n1,-2,1\n", "-2 and 1 tokens"),
        ("time,prompt_tokens,completion_tokens\nsoon,2,1\n", "line 2"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_trace(tmp_path / "trace.csv")


def test_a_load_takes_a_share_of_the_requests_or_copies_of_them() -> None:
    arrivals = [Arrival(float(time), 1, 1) for time in range(2000)]
    assert multiplied(arrivals, 1.0) == arrivals
    for load in (0.5, 2.5):
        found = multiplied(arrivals, load)
        assert len(found) == pytest.approx(2000 * load, rel=0.1)
        assert found == sorted(found, key=lambda each: each.time) and min(each.time for each in found) >= 0
    for load in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="not possible"):
            multiplied(arrivals, load)


def test_more_replicas_serve_faster_and_cost_what_they_cost(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    times = "".join(f"{number / 20},100,50\n" for number in range(400))
    (tmp_path / "trace.csv").write_text(f"time,prompt_tokens,completion_tokens\n{times}")
    files = ("--plan", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.csv"))
    result = run("plan", *files, "--replicas", "2", "--replicas", "20", "--price", "3", "--json")
    assert result.exit_code == 0, result.output
    few, many = json.loads(result.stdout)["simulated"]
    assert few["plain"]["replicas"] == 2 and many["plain"]["replicas"] == 20
    for kind in ("plain", "speculative"):
        assert many[kind]["first_token"]["p99"] < few[kind]["first_token"]["p99"]
        assert many[kind]["cost_per_million_tokens"] > few[kind]["cost_per_million_tokens"] > 0
    assert few["speculative"]["behind"] <= few["plain"]["behind"]
    shown = run("plan", *files, "--replicas", "2", "--price", "3", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80 and "cost/M" in shown
    shown = " ".join(shown.split())
    assert "Simulated: everything else" in shown and "a processor" in shown


def test_a_simulation_needs_a_plan_and_a_trace(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    assert "name it with --plan" in run("plan", "--replicas", "2").stderr
    found = run("plan", "--plan", str(tmp_path / "plan.json"), "--replicas", "2")
    assert "name a CSV file with --trace" in found.stderr
