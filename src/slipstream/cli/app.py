"""The application: its name, its exit codes, and one sentence for whatever the user got wrong."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

BROKEN_PIPE, WRONG, INTERRUPTED = 1, 2, 130
"""Exit codes: nobody reads our output any more; something given is wrong; Ctrl-C."""


class Commands(TyperGroup):
    """The commands; what the user got wrong is one sentence on stderr, never a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command and exit."""
        quiet()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            code = BROKEN_PIPE
        except typer.TyperException as error:
            code = say(error.format_message().replace("Value error, ", ""))
        except (ValueError, OSError, FloatingPointError) as error:
            code = say(str(error))
        sys.exit(code)


ALIASES = {"model": "target", "draft-model": "draft", "num-speculative-tokens": "gamma", "max-tokens": "max-new-tokens"}
"""Names of options in other engines."""


def _normalize(name: str) -> str:
    """The name of an option: an underscore is a dash."""
    name = name.replace("_", "-")
    return ALIASES.get(name, name)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _normalize, "help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `slipstream` command."""
    app(prog_name="slipstream")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {metadata.version('slipstream')}")
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
    """One line on stderr -> the exit code of an error."""
    print("slipstream:", " ".join(text.split()), file=sys.stderr)
    return WRONG


def tell(notes: Iterable[str]) -> None:
    """What was chosen while loading, on stderr."""
    for note in notes:
        say(f"note: {note}")


def quiet() -> None:
    """transformers keeps its loading bars and its warnings to itself; errors still come as exceptions."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def flag(name: str) -> str:
    """The option of a parameter."""
    return "--" + name.replace("_", "-")
