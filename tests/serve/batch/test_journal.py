"""A journal loses nothing and makes nothing twice, wherever the process that writes it is killed."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.serve.batch.journal import Journal, Printed
from slipstream.serve.batch.lines import OPENAI, PLAIN, BatchLine, ServerReply, refused

FACTS = {"settings": "one", "prompts": "two"}
LINES = [
    BatchLine(0, "ä", "/v1/completions"),
    BatchLine(1, None, "/v1/completions"),
    BatchLine(2, "c", "/v1/completions", {}, OPENAI),
]


def answer(text: str) -> ServerReply:
    usage = {"prompt_tokens": 1, "completion_tokens": len(text)}
    return ServerReply(200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": usage}, "r")


ANSWERS = [answer("zero\n"), refused("it is too long."), answer("zwei \ud800")]


def opened(out: Path, facts: dict[str, str] = FACTS, anew: bool = False) -> Journal:
    return Journal(out, facts, {**PLAIN.columns, **OPENAI.columns}, anew)


def complete(out: Path, order: Sequence[int] = (2, 0, 1)) -> list[int]:
    with opened(out) as journal:
        missing = [index for index in order if index not in journal.answered]
        for index in missing:
            journal.write(LINES[index], ANSWERS[index])
        journal.finish()
    return missing


def test_the_file_of_answers_is_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert complete(out) == [2, 0, 1]
    first, second, third = map(json.loads, out.read_text().splitlines())
    counts = {"prompt_tokens": 1, "completion_tokens": 5}
    assert first == {"index": 0, "id": "ä", "text": "zero\n", "finish_reason": "stop", **counts}
    assert second == {"index": 1, "error": "it is too long."}
    assert third["custom_id"] == "c" and third["error"] is None
    assert third["response"]["status_code"] == 200 and third["response"]["body"] == ANSWERS[2].body
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "the journal is gone"


def test_a_run_that_is_killed_after_any_byte_goes_on_where_it_was(tmp_path: Path) -> None:
    """Around the ends of lines, and at every seventh byte."""
    out, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    complete(whole)
    with opened(out) as journal:
        begun = [journal.path.stat().st_size]
        for index in (2, 0, 1):
            journal.write(LINES[index], ANSWERS[index])
            begun.append(journal.path.stat().st_size)
        data = journal.path.read_bytes()
    assert begun[-1] == len(data)
    ends = {end + near for end in begun for near in (-1, 0, 1) if end + near <= len(data)}
    sizes = {*range(0, len(data) + 1, 7), *ends}
    for size in sorted(sizes):
        out.unlink(missing_ok=True)
        journal.path.write_bytes(data[:size])
        kept = max(0, sum(size >= end for end in begun) - 1)
        assert complete(out) == [2, 0, 1][kept:], size
        assert out.read_bytes() == whole.read_bytes(), size


def test_a_run_that_is_killed_between_the_answers_and_the_end_of_the_journal_ends(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with opened(out) as journal:
        for line, each in zip(LINES, ANSWERS, strict=True):
            journal.write(line, each)
        kept = journal.path.read_bytes()
        journal.finish()
    journal.path.write_bytes(kept)
    assert complete(out) == []
    assert not journal.path.exists()


def test_answers_to_something_else_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with opened(out) as journal:
        journal.write(LINES[0], ANSWERS[0])
    for name, other in (("settings", {**FACTS, "settings": "x"}), ("prompts", {**FACTS, "prompts": "x"})):
        with pytest.raises(ValueError, match=f"begun with other {name}: .*--force"):
            opened(out, other)
    with opened(out) as journal:
        assert journal.answered == {0} and journal.failed == 0
    with opened(out, {**FACTS, "settings": "x"}, anew=True) as journal:
        assert journal.answered == set()


def test_failures_of_an_earlier_run_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with opened(out) as journal:
        journal.write(LINES[1], ANSWERS[1])
        assert journal.failed == 1
    with opened(out) as journal:
        assert journal.failed == 1


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("precious\n")
    with pytest.raises(ValueError, match="exists: name another file, or replace it with --force"):
        opened(out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    journal = tmp_path / "answers.jsonl.partial"
    for content in ("precious\n", "precious", '{"index": 0}\n'):
        journal.write_text(content)
        for anew in (False, True):
            with pytest.raises(ValueError, match="is no journal of a batch"):
                opened(out, anew=anew)
        assert journal.read_text() == content
    assert out.read_text() == "precious\n"


def test_one_run_writes_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path / "answers.jsonl"), pytest.raises(ValueError, match="being written by another run"):
        opened(tmp_path / "answers.jsonl")
    with opened(tmp_path / "answers.jsonl") as journal:
        assert journal.answered == set()


def test_a_damaged_journal_is_said_to_be_one(tmp_path: Path) -> None:
    with opened(tmp_path / "answers.jsonl") as journal:
        journal.write(LINES[0], ANSWERS[0])
    journal.path.write_bytes(journal.path.read_bytes() + b"nonsense\n")
    with pytest.raises(ValueError, match=r"partial:3 is damaged: begin anew with --force"):
        opened(tmp_path / "answers.jsonl")


def test_answers_become_a_table(tmp_path: Path) -> None:
    from pyarrow.parquet import read_table

    out = tmp_path / "answers.parquet"
    complete(out)
    table = read_table(out).to_pydict()
    assert table["index"] == [0, 1, None] and table["text"] == ["zero\n", None, None]
    assert table["error"] == [None, "it is too long.", None]
    assert json.loads(table["response"][2])["status_code"] == 200


def test_several_samples_stand_in_one_line() -> None:
    choices = [{"index": i, "message": {"content": text}, "finish_reason": "stop"} for i, text in enumerate("ab")]
    found = ServerReply(200, {"choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    record: dict[str, Any] = PLAIN.record(0, "x", found)
    assert record["text"] == "a" and [sample["text"] for sample in record["samples"]] == ["a", "b"]


def test_answers_are_printed_as_they_come() -> None:
    stream = io.StringIO()
    sink = Printed(stream)
    for index in (1, 0):
        sink.write(LINES[index], ANSWERS[index])
        assert json.loads(stream.getvalue().splitlines()[-1])["index"] == index
    sink.finish()
    assert sink.answered == set()
