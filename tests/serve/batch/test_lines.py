"""What files of prompts mean: their formats, what is wrong with a line, ids, defaults and seeds."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.serve.batch.lines import OPENAI, PLAIN, BatchLine, LineDefaults, fingerprint, read_lines

CHAT = [{"role": "user", "content": "Hello"}]


def written(folder: Path, *records: Any, name: str = "prompts.jsonl") -> Path:
    """A file of JSON lines; texts among the records are written as they are."""
    path = folder / name
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def test_our_own_lines_become_requests(tmp_path: Path) -> None:
    found = read_lines(
        written(tmp_path, {"id": "a", "prompt": "x", "top_k": 3}, {"id": 7, "messages": CHAT}, {"tokens": [1, 2]})
    )
    assert found == [
        BatchLine(0, "a", "/v1/completions", {"prompt": "x", "top_k": 3}),
        BatchLine(1, 7, "/v1/chat/completions", {"messages": CHAT}),
        BatchLine(2, None, "/v1/completions", {"prompt": [1, 2]}),
    ]
    assert [line.name for line in found] == ["a", "7", "2"]


def test_lines_of_openais_batches_become_requests(tmp_path: Path) -> None:
    body = {"model": "m", "messages": CHAT}
    record = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (line,) = read_lines(written(tmp_path, record))
    assert line == BatchLine(0, "r1", "/v1/chat/completions", body, OPENAI)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("{", "this is not JSON"),
        ("[1]", "no JSON object"),
        ('{"prompt": "x", "top_p": NaN}', "NaN is no number"),
        ({}, 'one of "prompt", "messages", "tokens"'),
        ({"prompt": "x", "tokens": [1]}, 'one of "prompt", "messages", "tokens"'),
        ({"prompt": 3}, '"prompt" must be a string'),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x", "id": [1]}, "the id is [1]"),
        ({"prompt": "x", "id": True}, "the id is true"),
        ({"prompt": "x", "stream": True}, "stream cannot be used"),
        ({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}, "only POST"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, '"body" must be'),
    ],
)
def test_a_line_that_cannot_be_asked_has_an_error_alone(tmp_path: Path, record: Any, sentence: str) -> None:
    wrong, right = read_lines(written(tmp_path, record, {"prompt": "y"}))
    assert sentence in wrong.error
    assert right.error == "" and right.index == 1


def test_other_files_hold_prompts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(tmp_path, "one", "", "two\r", name="prompts.txt")
    assert [line.body for line in read_lines(text)] == [{"prompt": "one"}, {"prompt": "two"}]
    assert read_lines(text, chat=True)[0].body == {"messages": [{"role": "user", "content": "one"}]}
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "zipped"}\n'))
    assert read_lines(packed)[0].body == {"prompt": "zipped"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "piped"}\n')))
    assert read_lines("-")[0].body == {"prompt": "piped"}
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\nb\xffd\n")
    assert [line.error for line in read_lines(bad)] == ["", "byte 2 is not UTF-8."]


def test_a_table_holds_prompts_and_its_nulls_are_not_given(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    rows = [{"id": "a", "prompt": "x", "seed": None}, {"id": "b", "messages": CHAT, "seed": 5}]
    columns = {name: [row.get(name) for row in rows] for name in ("id", "prompt", "messages", "seed")}
    write_table(pyarrow.table(columns), tmp_path / "prompts.parquet")
    first, second = read_lines(tmp_path / "prompts.parquet")
    assert first == BatchLine(0, "a", "/v1/completions", {"prompt": "x"})
    assert second == BatchLine(1, "b", "/v1/chat/completions", {"messages": CHAT, "seed": 5})
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ValueError, match=r"cannot read .*broken\.parquet"):
        read_lines(tmp_path / "broken.parquet")


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([], "holds no prompt"),
        (
            [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}],
            "prompts 1 and 3 both have the id 'a'",
        ),
        ([{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "y"}], "both have the id '1'"),
    ],
)
def test_files_that_make_no_batch_are_refused(tmp_path: Path, records: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_lines(written(tmp_path, *records))


def test_options_stand_behind_what_a_line_says() -> None:
    defaults = LineDefaults({"top_k": 5}, {"temperature": 0.0, "max_tokens": 128})
    ours = BatchLine(0, None, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    complete = defaults.complete(ours)
    assert complete.body.items() >= {"prompt": "x", "max_tokens": 3, "top_k": 5}.items()
    assert complete.fallback == {"temperature": 0.0}, "the model's own comes first"
    openai_line = BatchLine(0, "a", "/v1/completions", {"prompt": "x", "temperature": 0}, OPENAI)
    assert defaults.complete(openai_line).body == {"prompt": "x", "temperature": 0, "top_k": 5}
    renamed = BatchLine(0, None, "/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 9})
    complete = defaults.complete(renamed)
    assert "max_tokens" not in complete.body and "max_tokens" not in complete.fallback
    wrong = BatchLine(0, error="no")
    assert defaults.complete(wrong) is wrong


def test_a_sampled_line_gets_a_seed_of_its_own_that_stays() -> None:
    def seed(line: BatchLine, number: int = 0) -> Any:
        return LineDefaults(plain={"temperature": 1.0}, seed=number).complete(line).body.get("seed")

    one, other = (BatchLine(index, name, "/v1/completions", {"prompt": "x"}) for index, name in enumerate("ab"))
    moved = BatchLine(7, "a", "/v1/completions", {"prompt": "x"})
    assert seed(one) == seed(one) == seed(moved), "the id decides, not the place"
    assert len({seed(one), seed(other), seed(one, 1)}) == 3
    assert 0 <= seed(one) < 1 << 63, "what a request's seed may be"
    assert seed(BatchLine(0, "a", "/v1/completions", {"prompt": "x", "seed": 4})) == 4
    assert seed(BatchLine(0, "a", "/v1/completions", {"prompt": "x", "temperature": 0})) is None
    assert seed(BatchLine(0, "a", "/v1/responses", {"input": "x"}, OPENAI)) is None, "this endpoint has no seeds"


def test_a_fingerprint_differs_where_anything_does() -> None:
    line = BatchLine(0, "a", "/v1/completions", {"prompt": "x"})
    others = [
        BatchLine(1, "a", "/v1/completions", {"prompt": "x"}),
        BatchLine(0, "b", "/v1/completions", {"prompt": "x"}),
        BatchLine(0, "a", "/v1/chat/completions", {"prompt": "x"}),
        BatchLine(0, "a", "/v1/completions", {"prompt": "y"}),
        BatchLine(0, "a", "/v1/completions", {"prompt": "x"}, OPENAI),
    ]
    assert line.form is PLAIN
    assert len({fingerprint([each.facts]) for each in [line, *others]}) == 6
    assert fingerprint([line.facts]) != fingerprint([line.facts, line.facts])
