"""Answers that are printed as they finish: nothing is lost by an interruption."""

import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from processes import OUTPUT, Command
from slipstream.cli.generate import Answers
from slipstream.engine.engine import Engine, Interrupted
from slipstream.engine.generation import Completion
from terminal import run
from toys import rare


def read(text: str) -> dict[int, dict[str, Any]]:
    """The lines by index, each once, without what differs from run to run."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line.pop("index"): {name: line[name] for name in line if name != "stats"} for line in lines}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has no law for texts that begin as `class`."""

    def stuck(ids: Any, scores: Any) -> Any:
        if ids.shape[1] >= 5 and ids[0, 0] == first:
            raise ValueError("stuck")
        return scores

    first = slipstream.load().encode("class A")[0]
    real = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, *args, **more: real(self, *args, processors=[stuck], **more))
    stream = Engine.stream_batch
    stuck_stream = lambda self, *args, **more: stream(self, *args, processors=[stuck], **more)  # noqa: E731
    monkeypatch.setattr(Engine, "stream_batch", stuck_stream)


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


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("mode", [[], *rare(["--stream"], ["--explain"]), ["--json"]])
def test_a_prompt_that_fails_takes_no_other_with_it(mode: list[str]) -> None:
    result = run("generate", "x =", "class A", "import", "--max-new-tokens", "6", *mode)
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
    result = run("generate", "x =", "--max-new-tokens", "2", "--json")
    context = slipstream.load().decoder.target.context
    assert result.exit_code == 0 and read(result.stdout)[0]["context_full"] is True
    assert f"slipstream: note: the answer (prompt 1) ended early, at the {context} tokens that " in result.stderr
    result = run("generate", *"abcde", "--max-new-tokens", "2")
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
    result = run("generate", "a", "b", "c")
    assert result.exit_code == 130
    assert result.stdout == (f"==> prompt 1 <==\na{done[0].text}\n\n==> prompt 2 <==\nb{done[1].text}\n")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_keeps_what_is_finished(kind: signal.Signals, tmp_path: Path) -> None:
    prompts, count = tmp_path / "prompts.txt", 400
    prompts.write_text("".join(f"x{number} =\n" for number in range(count)))
    reading, writing = os.pipe()
    command = ["generate", "--prompts", str(prompts), "--max-new-tokens", "24", "--json"]
    process = Command(*command, streams={OUTPUT: writing})
    os.close(writing)
    with open(reading, encoding="utf-8") as printed, process.stderr:
        first = [printed.readline() for _ in range(9)]
        process.send_signal(kind)
        rest = printed.read()
    assert process.wait(60) == 130
    lines = read("".join(first) + rest)
    finished = [index for index, line in lines.items() if line["finish_reason"] == "length"]
    assert sorted(lines) == list(range(count)) and 9 <= len(finished) < count
    assert all(lines[index]["finish_reason"] == "interrupted" for index in set(range(count)) - set(finished))
