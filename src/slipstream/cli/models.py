"""`slipstream models`: which architectures work, tried on tiny random models."""

from dataclasses import asdict
from typing import Annotated

import typer

from slipstream.cli.app import app, say
from slipstream.text.jsontext import json_text


@app.command()
def models(
    names: Annotated[list[str] | None, typer.Argument(help="Types or classes, such as qwen3_next; none: all.")] = None,
    try_: Annotated[bool, typer.Option("--try", help="Make tiny random models and run them.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="How long one architecture may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/families.md.")] = False,
) -> None:
    """Say which architectures of the installed transformers work, by which way, and why others are refused.

    Without --try it lists them. Exit code 2 if texts differ from transformers' own, or an architecture fails.

    Example: slipstream models --try qwen3_next lfm2 mamba
    """
    from slipstream.check.families import FamilyTrial, architectures, attempts, counted, table

    chosen = architectures(names or ())
    if not try_:
        for each in chosen:
            print(json_text({"family": each.family, "name": each.name}) if as_json else f"{each.family}  {each.name}")
        return
    outcomes: list[FamilyTrial] = []
    for outcome in attempts(chosen, seconds):
        outcomes.append(outcome)
        if as_json:
            print(json_text(asdict(outcome)), flush=True)
        elif not markdown:
            why = outcome.why or outcome.way
            print(f"{outcome.family:24} {outcome.name:40} {outcome.verdict:9} {why}", flush=True)
    if markdown:
        print(table(outcomes))
    say(counted(outcomes))
    if any(outcome.verdict in {"differs", "fails"} for outcome in outcomes):
        raise typer.Exit(2)
