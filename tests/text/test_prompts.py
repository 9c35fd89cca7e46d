"""Prompts from arguments, files and stdin; a bad one is an item with an error, beside the good ones."""

import gzip
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.text.prompts import Item, gather, usable

CHAT = [{"role": "user", "content": "hi"}]


def write(folder: Path, data: bytes, name: str = "prompts.txt") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_arguments_come_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, b"three\n\nfive")
    assert gather(["one", "two"], file, chat=False) == [
        Item("prompt 1", "one", "one"),
        Item("prompt 2", "two", "two"),
        Item(f"{file}:1", "three", "three"),
        Item(f"{file}:3", "five", "five"),
    ]


def test_lines_of_a_text_file_keep_their_spaces(tmp_path: Path) -> None:
    file = write(tmp_path, "\ufeff  a \r\n\tb\\n\n日本\n{not json}".encode())
    assert [item.prompt for item in gather([], file, chat=False)] == ["  a ", "\tb\\n", "日本", "{not json}"]


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.txt"])
def test_json_lines_in_their_three_forms(tmp_path: Path, name: str) -> None:
    data = b'{"prompt": "a\\nb", "id": 7}\n{"messages": [{"role": "user", "content": "hi"}]}\n\n{"tokens": [1, 2]}\n'
    items = gather([], write(tmp_path, data, name), chat=False)
    assert [item.prompt for item in items] == ["a\nb", CHAT, [1, 2]]
    assert [item.shown for item in items] == ["a\nb", "hi\n\n", ""]
    assert [item.where[-2:] for item in items] == [":1", ":2", ":4"]


ONE_OF = 'the line must be a JSON object with one of "prompt", "messages", "tokens".'
ROLES = '"messages" must be a list of objects with "role" and "content".'


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{oops", "this is not JSON (Expecting property name enclosed in double quotes, column 2)."),
        (b'{"prompt": "a"} x', "this is not JSON (Extra data, column 17)."),
        (b'["a"]', ONE_OF),
        (b'"a"', ONE_OF),
        (b'{"text": "a"}', ONE_OF),
        (b'{"prompt": "a", "tokens": [1]}', ONE_OF),
        (b'{"prompt": 3}', '"prompt" must be a string.'),
        (b'{"prompt": null}', '"prompt" must be a string.'),
        (b'{"prompt": ""}', "the prompt is empty."),
        (b'{"prompt": "\\ud800"}', "the prompt is not valid Unicode text."),
        (b'{"tokens": []}', "the prompt is empty."),
        (b'{"tokens": [1, true]}', '"tokens" must be a list of token ids.'),
        (b'{"tokens": [1.0]}', '"tokens" must be a list of token ids.'),
        (b'{"messages": "hi"}', ROLES),
        (b'{"messages": [{"role": "user"}]}', ROLES),
        (b'{"prompt": "\xff"}', "byte 13 is not UTF-8."),
        (b"[" * 200_000, "this JSON is nested too deeply."),
    ],
)
def test_a_bad_line_does_not_take_the_others_with_it(tmp_path: Path, line: bytes, error: str) -> None:
    good = b'{"prompt": "good"}'
    file = write(tmp_path, b"\n".join([good, line, good]))
    first, bad, last = gather([], file, chat=False)
    assert bad == Item(f"{file}:2", error=error)
    assert first.prompt == last.prompt == "good"


def test_chat_wraps_text_only(tmp_path: Path) -> None:
    data = b'{"prompt": "hi"}\n{"messages": [{"role": "user", "content": "hi"}]}\n{"tokens": [1]}'
    text, messages, tokens = gather([], write(tmp_path, data), chat=True)
    assert text.prompt == messages.prompt == CHAT
    assert tokens.error == "--chat cannot wrap token ids."


@pytest.mark.parametrize(
    ("arguments", "file", "data", "prompts"),
    [
        (["-"], None, b"a\nb\n", ["a\nb"]),  # all of it; the line break is echo's
        (["-"], None, b"a\nb\r\n", ["a\nb"]),
        (["-"], None, b"a\n\n", ["a\n"]),
        ([], "-", b"a\nb\n", ["a", "b"]),
        (["x"], "-", b'{"prompt": "a"}', ["x", "a"]),
    ],
)
def test_stdin(
    arguments: list[str], file: str | None, data: bytes, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, data)
    items = gather(arguments, file, chat=False)
    assert [item.prompt for item in items] == prompts
    assert items[-1].where.startswith("stdin")


def test_bad_arguments_are_items_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"\xff")
    errors = [item.error for item in gather(["", "a\udcff", "-"], None, chat=False)]
    assert errors == ["the prompt is empty.", "the prompt is not valid Unicode text.", "byte 1 is not UTF-8."]


@pytest.mark.parametrize(
    ("arguments", "file", "error"),
    [
        ([], None, "there is no prompt: give a PROMPT or --prompts FILE."),
        (["-", "-"], None, "stdin (-) can be read only once: drop one of the dashes."),
        (["-"], "-", "stdin (-) can be read only once: drop one of the dashes."),
        (["x"], "missing.txt", "cannot read missing.txt: No such file or directory."),
        (["x"], ".", "cannot read .: Is a directory."),
    ],
)
def test_nothing_to_read(arguments: list[str], file: str | None, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        gather(arguments, file, chat=False)
    assert str(caught.value) == error


def test_a_binary_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"one\n\xff\0two\n" * 100)
    with pytest.raises(ValueError, match=r"model\.bin is no text: it holds bytes that are 0"):
        gather([], str(tmp_path / "model.bin"), False)


def test_an_empty_file_holds_no_prompt(tmp_path: Path) -> None:
    file = write(tmp_path, b"\n \n")
    with pytest.raises(ValueError, match="holds no prompt"):
        gather([], file, chat=False)


def test_a_file_may_be_compressed(tmp_path: Path) -> None:
    file = write(tmp_path, gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'), "p.jsonl.gz")
    assert [item.prompt for item in gather([], file, chat=False)] == ["a", "b"]
    damaged = write(tmp_path, gzip.compress(b"text " * 99)[:-20], "q.gz")
    with pytest.raises(ValueError, match="damaged gzip"):
        gather([], damaged, chat=False)


def test_one_prompt_that_cannot_be_used_is_named() -> None:
    good = gather(["a", "b"], None, False)
    assert usable(good) == good
    with pytest.raises(ValueError, match=r"^prompt 2: the prompt is empty\.$"):
        usable(gather(["a", "", "\ud800"], None, False))
