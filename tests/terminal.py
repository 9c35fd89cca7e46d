"""Running the command line in this process, as tests do."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from slipstream.cli import app as cli


def run(*arguments: str, stdin: str | bytes | None = None, **environment: str) -> Result:
    """`slipstream ARGUMENTS`, with nobody watching."""
    clean: dict[str, str | None] = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "100", "TERM": "xterm"}
    result = CliRunner().invoke(cli.app, list(arguments), input=stdin, env={**clean, **environment})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
