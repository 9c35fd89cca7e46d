"""The command-line application: its exit codes, and errors of the user reported in one sentence."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from slipstream.core.signals import INTERRUPTED as INTERRUPTED
from slipstream.core.signals import end_commands
from slipstream.files import WriteError, reason
from slipstream.version import __version__

BROKEN_PIPE, WRONG = 1, 2  # exit codes: output that nobody reads, wrong input


class Reporting:
    """A command, or a group of them, that reports errors of the user in one sentence on stderr, without a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _ended():
            return super().make_context(*args, **kwargs)  # type: ignore[misc]

    def invoke(self, context: Any) -> Any:
        with _ended():
            return super().invoke(context)  # type: ignore[misc]

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        quiet()
        if fault := open_streams():
            sys.exit(fault)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        with redirect_stdout(_Output(sys.stdout)), _plain_warnings():
            try:
                code = super().main(*args, **{**kwargs, "standalone_mode": False})  # type: ignore[misc]
                sys.stdout.flush()
            except (BrokenPipeError, LostOutput) as error:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit works
                code = BROKEN_PIPE
                if isinstance(error, LostOutput):
                    say(str(error))
            except typer.TyperException as error:
                code = say(error.format_message().replace("Value error, ", ""))
            except (ValueError, OSError, FloatingPointError) as error:
                code = say(_sentence(error))
            except (MemoryError, RuntimeError) as error:
                # Too little memory, on the CPU or an accelerator; torch has errors of its own.
                of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
                if not (of_torch or isinstance(error, MemoryError)):
                    raise
                code = say("there is not enough memory: take smaller numbers, fewer prompts, or smaller models.")
        sys.exit(code)


@contextmanager
def _ended() -> Iterator[None]:
    """End a command that does not end by itself at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted.")
        raise typer.Exit(INTERRUPTED) from None


class Commands(Reporting, TyperGroup):
    """The group of all commands."""


class SingleCommand(Reporting, TyperCommand):
    """The command of a program that has no others."""


class LostOutput(Exception):
    """Raised when standard output cannot be written."""


class _Output:
    """A wrapper of standard output that raises `LostOutput` if it cannot be written, to tell it from other files."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(self._stream.write, text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except BrokenPipeError:  # nobody reads any more
            raise
        except OSError as error:
            raise LostOutput(f"cannot write to standard output: {error.strerror}.") from error


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings raised in this package as one-line notes, and other warnings as usual."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
            if Path(__file__).parents[1] in Path(filename).parents:
                say(f"note: {message}")
            else:
                usual(message, category, filename, lineno, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def open_streams() -> int:
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        say("standard output is closed: send it to a file, or to /dev/null.")
        return BROKEN_PIPE
    return 0


ALIASES = {"model": "target", "draft-model": "draft", "num-speculative-tokens": "gamma", "max-tokens": "max-new-tokens"}
ALIASES |= {"min-tokens": "min-new-tokens", "stop-token-id": "stop-token-ids"}
"""The names of options in other engines, and ours for them."""


SETTINGS: Any = {
    "token_normalize_func": lambda name: ALIASES.get(name := name.replace("_", "-"), name),
    "help_option_names": ["-h", "--help"],
}
app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, context_settings=SETTINGS)


def main(app: typer.Typer = app, name: str = "slipstream") -> None:
    """Run the `slipstream` command, or another program of such commands."""
    end_commands()
    app(prog_name=name)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {__version__}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: Version = False) -> None:
    """Lossless speculative decoding: a small draft model guesses ahead, the target keeps what it agrees with.

    Example: slipstream generate "def fibonacci(n):" --explain
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def say(text: str) -> int:
    """Write a line to stderr and return the exit code of an error."""
    with suppress(OSError):  # stderr is gone, so the error cannot be reported
        print("slipstream:", " ".join(text.split()), file=sys.stderr, flush=True)
    return WRONG


def _sentence(error: Exception) -> str:
    if not isinstance(error, OSError) or isinstance(error, WriteError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {reason(error)}." if error.filename else f"{reason(error)}."


def tell(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def quiet() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def flag(name: str) -> str:
    """Return the option of a parameter: "top_k" -> "--top-k"."""
    return "--" + name.replace("_", "-")
