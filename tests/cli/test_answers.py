"""Answers that are written as they finish: nothing is lost by an interruption, and a later run goes on."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import slipstream
import slipstream.cli
from slipstream.cli.app import app
from slipstream.engine.engine import Engine, Interrupted
from slipstream.engine.generation import Completion
from slipstream.text.answers import Answers, digest, open_answers

PROMPTS = ["x =", "import", "import", "class A", "def f(x):", "import"]
SETTINGS = ["--max-new-tokens", "12", "--temperature", "1", "--seed", "4", "--stop", r"\n"]


def run(*arguments: str) -> Result:
    """`slipstream generate ARGUMENTS` on the embedded pair, with nobody watching."""
    clean = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "100", "TERM": "xterm"}
    result = CliRunner().invoke(app, ["generate", *arguments], env=clean)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def read(text: str) -> dict[int, dict[str, Any]]:
    """The lines by index, each once, without what differs from run to run."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line.pop("index"): {name: line[name] for name in line if name != "stats"} for line in lines}


def complaint(result: Result) -> str:
    assert result.exit_code == 2 and result.stdout == ""
    return result.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has no law for texts that begin as `class`."""

    def stuck(ids: Any, scores: Any) -> Any:
        if ids.shape[1] >= 5 and ids[0, 0] == first:
            raise ValueError("stuck")
        return scores

    first = slipstream.load().encode("class A")[0]
    real = Engine.generate
    monkeypatch.setattr(
        Engine, "generate", lambda self, *args, **options: real(self, *args, processors=[stuck], **options)
    )
    stream = Engine.stream_batch
    monkeypatch.setattr(
        Engine, "stream_batch", lambda self, *args, **options: stream(self, *args, processors=[stuck], **options)
    )


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as so many answers are written."""
    real, written = Answers.write, list[int]()

    def write(self: Answers, index: int, answer: dict[str, Any]) -> None:
        real(self, index, answer)
        written.append(index)
        if len(written) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(Answers, "write", write)


# ---- the file ---------------------------------------------------------------------------------------------------


def test_a_file_holds_what_would_be_printed(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    printed, written = run(*PROMPTS, *SETTINGS, "--json"), run(*PROMPTS, *SETTINGS, "--out", str(out))
    assert (printed.exit_code, written.exit_code, written.stdout) == (0, 0, "")
    want, found = read(printed.stdout), read(out.read_text())
    assert [found[i].pop("digests").keys() for i in range(6)] == [{"settings", "prompt"}] * 6
    assert found == want and list(found) != sorted(found)  # as they finish


def test_an_interrupted_run_is_resumed_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal prompts too: their draws are told apart by their number among all prompts."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert run(*PROMPTS, *SETTINGS, "--out", str(whole)).exit_code == 0
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert run(*PROMPTS, *SETTINGS, "--out", str(out), "--batch-size", "2").exit_code == 130
    part = read(out.read_text())
    reasons = [line["finish_reason"] for line in part.values()]
    assert len(part) == 6 and 2 <= sum(reason != "interrupted" for reason in reasons) < 6
    kept = [line for line in out.read_text().splitlines() if '"interrupted"' not in line]
    with open(out, "a") as file:
        file.write('{"index": 3, "text": "torn')
    again = run(*PROMPTS, *SETTINGS, "--out", str(out), "--resume")
    assert (again.exit_code, again.stdout) == (0, "")
    assert out.read_text().splitlines()[: len(kept)] == kept  # what was finished was not made again
    assert read(out.read_text()) == read(whole.read_text())
    before = out.read_text()
    assert run(*PROMPTS, *SETTINGS, "--out", str(out), "--resume").exit_code == 0
    assert out.read_text() == before


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    out, prompts = tmp_path / "notes.md", tmp_path / "prompts.txt"
    out.write_text("mine\n")
    prompts.write_text("x =\n")
    short = ["--max-new-tokens", "2"]
    says = complaint(run("x =", *short, "--out", str(out)))
    assert "exists: --resume goes on with it, --force replaces it." in says
    assert "is no answer of an earlier run" in complaint(run("x =", *short, "--out", str(out), "--resume"))
    assert out.read_text() == "mine\n"
    same = ["--prompts", str(prompts), "--out", str(prompts), "--force"]
    assert "is an input of this command" in complaint(run(*short, *same))
    assert prompts.read_text() == "x =\n"
    assert run("x =", *short, "--out", str(out), "--force").exit_code == 0
    assert list(read(out.read_text())) == [0]
    new = tmp_path / "new.jsonl"
    assert run("x =", *short, "--out", str(new), "--resume").exit_code == 0 and len(read(new.read_text())) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resume"], "--resume is about the file of --out: name it."),
        (["--force"], "--force is about the file of --out: name it."),
        (["--out", "a", "--resume", "--force"], "--resume and --force exclude each other"),
        (["--out", "a", "--json"], "--json and --out exclude each other"),
        (["--out", ".", "--resume"], "cannot write .: it is a folder"),
        (["--out", "missing/a"], "cannot write missing/a: there is no folder missing"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in complaint(run("x", "--max-new-tokens", "2", *arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--seed", "4"], "was made with other settings"),
        (["--max-new-tokens", "3"], "was made with other settings"),
        (["--chat"], None),
        (["y ="], None),
    ],
)
def test_another_question_is_not_resumed(change: list[str], says: str | None, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    fixed = ["--max-new-tokens", "2", "--out", str(out)]
    assert run("x =", *fixed).exit_code == 0
    before = out.read_text()
    prompt = change if says is None and change != ["--chat"] else ["x =", *change]
    found = complaint(run(*prompt[:1], *fixed, *prompt[1:], "--resume"))
    assert (says or "was made with other") in found or "no chat template" in found
    assert out.read_text() == before


def test_other_drafts_batches_and_devices_answer_the_same_question(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert run("x =", "--max-new-tokens", "2", "--out", str(out)).exit_code == 0
    before = out.read_text()
    other = ["--draft", "lookup", "--batch-size", "2", "--gamma", "3"]
    assert run("x =", "--max-new-tokens", "2", "--out", str(out), "--resume", *other).exit_code == 0
    assert out.read_text() == before


def test_a_file_that_cannot_be_written_is_one_sentence() -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"^cannot write a\.jsonl: No space left on device\. --resume goes on"):
        Answers(Full(), "a.jsonl").write(0, {})
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interruption_waits_for_the_end_of_a_line() -> None:
    """The likeliest moment: whoever reads the line is woken by its flush."""

    class Struck(io.StringIO):
        def flush(self) -> None:
            signal.raise_signal(signal.SIGINT)

    answers, handler = Answers(Struck()), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        answers.write(3, {})
    assert answers.written == {3} and answers.stream.getvalue() == '{"index": 3}\n'  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGINT) is handler


def test_lines_of_others_are_refused(tmp_path: Path) -> None:
    out, asked = tmp_path / "a.jsonl", [{"settings": "s", "prompt": "p"}]
    good = {"index": 0, "finish_reason": "stop", "digests": asked[0]}
    bad: Sequence[Any] = ([], 5, None, {}, {**good, "index": 7}, {**good, "index": "x"}, {**good, "digests": 5})
    for record in bad:
        out.write_text(json.dumps(record) + "\n")
        with pytest.raises(ValueError, match=r"a\.jsonl:1 "):
            open_answers(str(out), asked, resume=True, force=False)
    out.write_text(json.dumps(good) + "\n" + json.dumps(good) + "\n" + json.dumps({**good, "finish_reason": "error"}))
    answers = open_answers(str(out), asked, resume=True, force=False)
    answers.stream.close()
    assert answers.finished == {0} and len(out.read_text().splitlines()) == 1


# ---- failures and notes -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("failing")
def test_a_prompt_that_fails_is_a_line_with_an_error(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    result = run(*PROMPTS, *SETTINGS, "--out", str(out))
    assert result.exit_code == 2
    assert (
        "slipstream: prompt 4: the processor stuck fails for text 3 after 5 tokens: ValueError: stuck" in result.stderr
    )
    lines = read(out.read_text())
    assert [lines[i]["finish_reason"] == "error" for i in range(6)] == [False, False, False, True, False, False]
    assert "ValueError: stuck" in lines[3]["error"] and lines[3]["tokens"]
    again = run(*PROMPTS, *SETTINGS, "--out", str(out), "--resume")  # it is tried again
    assert again.exit_code == 2 and read(out.read_text()) == lines


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("mode", [[], ["--stream"], ["--explain"], ["--json"]])
def test_a_prompt_that_fails_takes_no_other_with_it(mode: list[str]) -> None:
    result = run("x =", "class A", "import", "--max-new-tokens", "6", *mode)
    assert result.exit_code == 2 and result.stderr.count("ValueError: stuck") == 1
    if mode == ["--json"]:
        assert sorted(read(result.stdout)) == [0, 1, 2]
    else:
        assert all(name in result.stdout for name in ("prompt 1", "prompt 2", "prompt 3"))


@pytest.mark.slow
def test_a_full_context_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.generate

    def full(self: Engine, prompts: Any, **options: Any) -> list[Completion]:
        listen = options.pop("on_completion", None)
        done = [replace(each, context_full=True) for each in real(self, prompts, **options)]
        for place, each in enumerate(done):
            if listen:
                listen(place, each)
        return done

    monkeypatch.setattr(Engine, "generate", full)
    result = run("x =", "--max-new-tokens", "2", "--json")
    context = slipstream.load().decoder.target.context
    assert result.exit_code == 0 and read(result.stdout)[0]["context_full"] is True
    assert f"slipstream: note: the answer (prompt 1) ended early, at the {context} tokens that " in result.stderr
    result = run(*"abcde", "--max-new-tokens", "2")
    assert "note: 5 answers (prompt 1, prompt 2, prompt 3, ...) ended early" in result.stderr


def test_text_is_printed_in_order_as_soon_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three finishes first, the third never."""
    done = slipstream.load().generate(["a", "b", "c"], max_new_tokens=3)
    seen: list[str] = []

    def generate(self: Engine, prompts: Any, on_completion: Any, **options: Any) -> list[Completion]:
        for place in (1, 0):
            on_completion(place, done[place])
            seen.append(sys.stdout.getvalue() if isinstance(sys.stdout, io.StringIO) else "")
        raise Interrupted([*done[:2], replace(done[2], tokens=(), text="", finish_reason="interrupted")])

    monkeypatch.setattr(Engine, "generate", generate)
    result = run("a", "b", "c")
    assert result.exit_code == 130
    assert result.stdout == (f"==> prompt 1 <==\na{done[0].text}\n\n==> prompt 2 <==\nb{done[1].text}\n")


# ---- a process that is told to end ------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_keeps_what_is_finished_and_the_rest_is_resumed(kind: signal.Signals, tmp_path: Path) -> None:
    prompts, out, count = tmp_path / "prompts.txt", tmp_path / "a.jsonl", 400
    prompts.write_text("".join(f"x{number} =\n" for number in range(count)))
    command = [sys.executable, "-m", "slipstream", "generate", "--prompts", str(prompts), "--max-new-tokens", "24"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(9)]
        process.send_signal(kind)
        rest = process.stdout.read()
    assert process.returncode == 130
    lines = read("".join(first) + rest)
    finished = [index for index, line in lines.items() if line["finish_reason"] == "length"]
    assert sorted(lines) == list(range(count)) and 9 <= len(finished) < count
    assert all(lines[index]["finish_reason"] == "interrupted" for index in set(range(count)) - set(finished))
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_kill_leaves_whole_lines_in_the_file(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "a.jsonl"
    prompts.write_text("".join(f"x{number} =\n" for number in range(24)))
    command = [sys.executable, "-m", "slipstream", "generate", "--prompts", str(prompts), "--max-new-tokens", "8"]
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE) as process:
        while not (out.exists() and out.read_text().count("\n") >= 5):
            assert process.poll() is None
        process.kill()
    kept = [json.loads(line)["index"] for line in out.read_text().split("\n")[:-1]]
    assert len(kept) >= 5
    arguments = ["--prompts", str(prompts), "--max-new-tokens", "8", "--out", str(out), "--resume"]
    assert run(*arguments).exit_code == 0
    assert sorted(read(out.read_text())) == list(range(24))
