"""The tables of speeds in the documents are those that the JSON files give, and there are no others."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scripts import script
from slipstream.bench.records import Result

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


tables = script("benchmarks/tables.py")
MACHINE: dict[str, Any] = {"cpu": "a processor", "cores": 2, "threads": 2, "build": "abc"}
MACHINE |= {"torch": "2", "transformers": "5", "python": "3.11", "slipstream": "1"}


def result(contender: str, speed: float, temperature: float = 0.0, execution: str | None = None) -> dict[str, Any]:
    """A row of a race as `slipstream bench` gives it."""
    spread, over = ({"median": value, "min": value, "max": value} for value in (speed, speed / 50))
    alpha = 0.8 if "speculative" in contender else None
    facts: list[Any] = [contender, 1, temperature, 5 if alpha else None, None, None, execution, 4, 192]
    return asdict(Result(*facts, [speed], spread, over, over, 4, 4, alpha=alpha))  # type: ignore[arg-type]


def record(figures: Any, **machine: Any) -> dict[str, Any]:
    return {"date": "2026-01-01", "machine": MACHINE | machine, "commands": ["python x.py"], "figures": [figures]}


RACE = [result("slipstream speculative", 200, execution="compiled"), result("transformers generate", 50)]


def run(program: str, way: str, seconds: float, lap: int = 0, **more: Any) -> dict[str, Any]:
    """A run of a race: 100 tokens."""
    place = {"model": "m", "program": program, "way": way, "rows": 1, "temperature": 0.0, "lap": lap}
    return {**place, "seconds": seconds, "tokens": 100, "texts": [1, 2], "busy": 0.5, "own": {"seconds": {}}} | more


RUNS = [
    run("slipstream", "plain", 2, own={"seconds": {"prefill": 1, "target": 1}}),
    run("slipstream", "lookup@5", 1, texts=[1, 3], own={"seconds": {"prefill": 0.5, "target": 0.5}}),
    run("slipstream", "lookup@auto", 2.5),
    run("llama.cpp", "plain", 4),
    run("llama.cpp", "plain", 5, 1),
    run("llama.cpp", "plain", 40, 2),
]
PLANNED = {"model": "m", "way": "lookup@5", "temperature": 0.0, "predicted": 1.6, "low": 1.5, "high": 1.7}
START: dict[str, Any] = {"model": "m", "program": "llama.cpp", "imports": 0.1, "loading": 0.3, "token": 0.2}
START |= {"resident": 200, "peak": 300}
RACED = {"runs": RUNS, "about": {"slipstream": "slipstream 1"}, "first": [START], "plans": [PLANNED]}
FOUND = {"race": record(RACED), "bench": record({"rows": RACE})}


def test_the_documents_hold_what_was_measured() -> None:
    documents = {path.name: path.read_text(encoding="utf-8") for path in tables.DOCUMENTS}
    assert tables.faults(documents, tables.records()) == []
    names = [mark["name"] for text in documents.values() for mark in tables.MARKED.finditer(text)]
    assert sorted({*names}) == sorted(tables.TABLES)


def test_a_table_that_was_changed_and_one_that_nobody_writes_are_found() -> None:
    text = tables.filled("# A\n<!-- table: speed -->\n<!-- end -->\n", FOUND)
    assert "| slipstream, lookup, gamma 5 | 100 (5.00) |" in text and "| llama.cpp, plain | 20 |" in text
    assert "a processor, 2 cores" in text and "2026-01-01" in text and "`python x.py`" in text and "source abc" in text
    assert tables.faults({"A": text}, FOUND) == []
    stale = tables.faults({"A": text.replace("100 (5", "300 (5")}, FOUND)
    assert stale == ["A is not what `python benchmarks/tables.py` writes"]
    by_hand = "\n| tokens per second | now |\n|---|---|\n| ours | 900 |\n"
    assert tables.faults({"A": text + by_hand}, FOUND) == ["A: no command writes the table | tokens per second | now |"]
    assert tables.faults({"A": text + "\n| you want | argument |\n|---|---|\n"}, FOUND) == []


def test_what_was_not_measured_is_said_to_be_so() -> None:
    text = tables.filled("<!-- table: rules -->\n| old | figures |\n<!-- end -->", FOUND)
    assert "Not measured with this build" in text and "old" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [("<!-- table: speed -->\n| a |\n", "has no end"), ("<!-- table: gone -->\n<!-- end -->", "no table gone")],
)
def test_marks_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tables.filled(text, FOUND)


def test_figures_of_two_builds_or_machines_do_not_stand_together(tmp_path: Path) -> None:
    for name, kept in FOUND.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    assert tables.records(tmp_path) == FOUND
    (tmp_path / "race.json").write_text(json.dumps(record(RACED, cpu="another")))  # it is measured alone
    tables.records(tmp_path)
    for fact in ("build", "cpu", "threads"):
        (tmp_path / "rules.json").write_text(json.dumps(record({}, **{fact: "another"})))
        with pytest.raises(ValueError, match=f"which differ in {fact}"):
            tables.records(tmp_path)


def test_a_build_is_known_by_its_source(tmp_path: Path) -> None:
    measurements = sys.modules["measurements"]
    (tmp_path / "a.py").write_text("x = 1\n")
    before = measurements.digest(tmp_path)
    assert before == measurements.digest(tmp_path)
    (tmp_path / "b.txt").write_text("no source")
    assert before == measurements.digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert before != measurements.digest(tmp_path)


def test_every_table_is_written_from_a_measurement() -> None:
    measured = {each.name for each in tables.MEASUREMENTS}
    assert {source for source, _ in tables.TABLES.values()} == measured | {"chat", "race", "race-intel"}
    files = {word for each in tables.MEASUREMENTS for command in each.commands for word in command if ".py" in word}
    assert all((BENCHMARKS.parent / file).is_file() for file in files)


TIMES = {"bfloat16": {"seconds": 0.002, "bytes": 1e8}, "int8": {"seconds": 0.001, "bytes": 5e7}}
BYTES = {"model": "small", "rows": 6, "times": TIMES}
SPREAD = {"case": [1, 2], "ours": 1e-3, "torch": 2e-3, "onednn": 3e-3, "model": "small", "rows": 6}
PREDICTION = {"gamma": 5, "c": 0.1, "curve": 1.1, "factor": 2.0, "low": 1.9, "high": 2.1}
PLAN = {
    "compile": False,
    "machine": {"target": {"parameters": 134e6}},
    "figures": {
        "draft": "d",
        "settings": {"sampling": {"temperature": 0.0}},
        "outlooks": {"1": {"d": {"alpha": 0.75, "best": 5, "predictions": [PREDICTION]}}},
        "verifications": [{"factor": 2.1, "factors": [2.0, 2.2], "difference": 0.05}],
    },
}
RULE = {"rule": "block", "mean_acceptance_length": 2.5, "difference": 0.1, "interval": [-0.1, 0.3], "alpha": 0.6}
WAY = {"dtype": "bfloat16", "way": "compile", "differ": 0, "texts": 164, "plain": 700.4, "speculative": 800.6}
SEARCHED: dict[str, Any] = {"beams": 4, "draft_beams": 6, "prompts": 200, "drafted": {"equal": 199, "near_ties": 1}}
SEARCHED |= {"target_calls": {"plain": 480, "drafted": 192}, "fewer_calls": 2.5, "alpha": 0.657}
SEARCHED |= {"speed_plain": 1.25, "speed_drafted": 1.5}
BEAMS = {"settings": {"target": None, "compile": False}, "rows": [SEARCHED]}
STREAMS = {"streams": 16, "first_p50": 0.2, "gap_p50": 0.01, "gap_p99": 0.1}
WAITS = {
    "race": [
        {**STREAMS, "contender": "slipstream", "tokens_per_second": 300.0, "runs": [300.0, 200.0, 390.0]},
        {**STREAMS, "contender": "transformers serve", "tokens_per_second": 130.0, "runs": [100.0, 100.0, 130.0]},
    ],
    "prefix": [{"chat": 2000, "ratio": 0.05, "runs": [{"first": 1.0, "second": 0.05, "same": True}]}],
    "prompt": [{"tokens": 4000, "alone": 0.05, "beside": 0.2, "long": 4.0}],
    "overhead": [{"ratio": 1.04, "runs": [{"ratio": 1.04}]}],
}
ATTENTION = {"heads": "9/3 x 64", "format": "float32", "threads": 1, "slots": 4096, "tokens": 6}
ATTENTION |= {"seconds": 0.001, "bytes": 5e6, "bandwidth": 1e10}
CONTEXTS = {
    "prefill": [{"tokens": 4096, "ours": 3.0, "transformers": 4.0}],
    "rounds": [{"context": 128, "plain": 5.0, "round": 10.0, "ratio": 2.0}],
    "attention": {"rows": [ATTENTION]},
}


@pytest.mark.parametrize(
    ("name", "figures", "line"),
    [
        ("plan", PLAN, "| 134 M | 0 | 0.75 | 0.10 | 1.10 | 5 | 2.00 (1.90-2.10) | 2.10 (2.00-2.20) | +5.0 % |"),
        ("rules", {"rows": [RULE]}, "| block | 2.500 | +0.100 [-0.100, +0.300] | 0.600 |"),
        (
            "beams",
            BEAMS,
            "| embedded, eager | 4 | 199 of 200, 1 near-ties | 6 | 0.657 | 480 / 192 = 2.50 | 1.25 | 1.50 |",
        ),
        ("exact-shape", [WAY], "| bfloat16, any shape, compiled | 0 of 164 | 700 | 801 |"),
        ("kernel", {"products": [SPREAD], "quantized": [], "attentions": [SPREAD]}, "| small | 6 | 1.00 | 3.00 |"),
        ("kernel", {"products": [], "quantized": [BYTES], "attentions": []}, "| small | 6 | 2.00 (50) | 1.00 (50) |"),
        ("bench", {"rows": RACE}, "| 0 | transformers generate | 50 (50-50) | 1.00 | 1.00 | - | - | - | - |"),
        ("serving", WAITS, "| 16 | slipstream | 300 | 3.00 | 200 | 10 | 100 |"),
        ("waits", WAITS, "| one stream, server / library | 1.040 | by repetition 1.04 |"),
        ("waits", WAITS, "| 0.050 | 0.050 / 1.000 s; the same text as without the cache |"),
        ("contexts", CONTEXTS, "| 4096 | 3.00 | 4.00 | 0.75 |"),
        ("contexts", CONTEXTS, "| 9/3 x 64 | float32 | 1 | 4096 | 6 | 5.0 | 10.0 | 0.50 |"),
        ("race", RACED, "m: 3 of 4 drafted texts of ours are those of plain decoding."),
        ("race-bars", RACED, "| plain / the others' best plain | m, 1 text, T = 0 | >= 1 | 2.50 | yes |"),
        ("race-bars", RACED, "| lookup, gamma auto / plain | m, 1 text, T = 0 | >= 0.98 | 0.80 | no |"),
        ("first-tokens", RACED, "| m | llama.cpp | 0.50 | 0.1 | 200 | 300 |"),
        ("race-plans", RACED, "| m | lookup, gamma 5 | 0 | 1.60 (1.50-1.70) | 2.00 | +25 % |"),
    ],
)  # fmt: skip
def test_tables_say_what_the_figures_say(name: str, figures: Any, line: str) -> None:
    _, write = tables.TABLES[name]
    assert line in write(record(figures))
