"""The application: its name, its exit codes, and one sentence for whatever the user got wrong."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from slipstream.files import WriteError, reason
from slipstream.version import __version__

BROKEN_PIPE, WRONG, INTERRUPTED = 1, 2, 130
"""Exit codes: our output cannot be written any more, or nobody reads it; something given is wrong; Ctrl-C."""

MOST_NAMES = 5
"""How many files a message names at most; the others are only counted."""


class Commands(TyperGroup):
    """The commands; what the user got wrong is one sentence on stderr, never a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command and exit."""
        quiet()
        if fault := open_streams():
            sys.exit(fault)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        with redirect_stdout(_Output(sys.stdout)), _plain_warnings():
            try:
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
                sys.stdout.flush()
            except (BrokenPipeError, LostOutput) as error:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
                code = BROKEN_PIPE
                if isinstance(error, LostOutput):
                    say(str(error))
            except typer.TyperException as error:
                code = say(error.format_message().replace("Value error, ", ""))
            except (ValueError, OSError, FloatingPointError) as error:
                code = say(_sentence(error))
            except (MemoryError, RuntimeError) as error:
                if not _is_memory(error):
                    raise
                code = say("there is not enough memory: take smaller numbers, fewer prompts, or smaller models.")
        sys.exit(code)


def _is_memory(error: Exception) -> bool:
    """Whether memory was too little, on the processor or on an accelerator; torch raises errors of its own."""
    torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return torchs or isinstance(error, MemoryError)


class LostOutput(Exception):
    """Standard output cannot be written."""


class _Output:
    """Standard output that says so if it cannot be written, for files that cannot raise the same errors."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _saying_so():
            return self._stream.write(text)

    def flush(self) -> None:
        with _saying_so():
            self._stream.flush()


@contextmanager
def _saying_so() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LostOutput(f"cannot write to standard output: {error.strerror}.") from error


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings are notes in one line; those of others stay as they are."""
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
    """Replace streams that were closed before we began, where that does no harm -> an exit code if it does, or 0."""
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
"""Names of options in other engines."""


def _normalize(name: str) -> str:
    """The name of an option: an underscore is a dash."""
    name = name.replace("_", "-")
    return ALIASES.get(name, name)


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _normalize, "help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `slipstream` command."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    app(prog_name="slipstream")


def _interrupt(*_: Any) -> NoReturn:
    """SIGTERM, as batch systems and containers send it, ends a command as cleanly as Ctrl-C."""
    raise KeyboardInterrupt


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
    with suppress(OSError):  # nobody can be told that there is nobody to tell
        print("slipstream:", " ".join(text.split()), file=sys.stderr, flush=True)
    return WRONG


def _sentence(error: Exception) -> str:
    """What an error says; the system's own ones without their number."""
    if not isinstance(error, OSError) or isinstance(error, WriteError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {reason(error)}." if error.filename else f"{reason(error)}."


def tell(notes: Iterable[str]) -> None:
    """What was chosen while loading, on stderr."""
    for note in notes:
        say(f"note: {note}")


def tell_skipped(files: Sequence[Path]) -> None:
    """Which files of folders were left out, on stderr, if any."""
    if files:
        names = ", ".join(map(str, files[:MOST_NAMES])) + (", ..." if len(files) > MOST_NAMES else "")
        say(f"note: of the folders {len(files)} files were skipped, which are no text in UTF-8: {names}")


def quiet() -> None:
    """transformers keeps its loading bars and its warnings to itself; errors still come as exceptions."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def flag(name: str) -> str:
    """The option of a parameter."""
    return "--" + name.replace("_", "-")
