"""Running the command line in this process, as tests do."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

import typer
from click.testing import Result
from typer.testing import CliRunner

from reproduction import cli as reproduction
from slipstream.cli import app as cli

EMPTY: Mapping[str, str] = MappingProxyType({})
typer.main.get_command_from_info = cache(typer.main.get_command_from_info)  # else each line makes all commands anew


def run(*arguments: str, stdin: str | bytes | None = None, **environment: str) -> Result:
    """`slipstream ARGUMENTS`, with nobody watching."""
    return invoke(cli.app, arguments, stdin, environment)


def reproduce(*arguments: str) -> Result:
    """`python -m reproduction ARGUMENTS`."""
    return invoke(reproduction.app, arguments)


def invoke(
    app: typer.Typer, arguments: Sequence[str], stdin: str | bytes | None = None, environment: Mapping[str, str] = EMPTY
) -> Result:
    """Run a program's command line."""
    clean: dict[str, str | None] = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "100", "TERM": "xterm"}
    result = CliRunner().invoke(app, list(arguments), input=stdin, env={**clean, **environment})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
