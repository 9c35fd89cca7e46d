"""`slipstream check`: is the output the target's own? Exit code 0 if so, 1 if not, 3 if this cannot be judged."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from slipstream.cli.app import INTERRUPTED, app, say, tell
from slipstream.cli.console import busy, console, steps
from slipstream.cli.options import (
    SAMPLING,
    Chat,
    File,
    Prompts,
    ReportJson,
    asked_models,
    grouped,
    options_of,
    with_options,
)
from slipstream.core.options import SHAPES
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import gather, usable

CODES = {"pass": 0, "fail": 1, "cannot judge": 3}
Temperature = Annotated[
    float | None, typer.Option(metavar="X", min=0.0, help="Without: greedy, then 1.", rich_help_panel=SAMPLING)
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Tokens of the texts that are followed one by one.", rich_help_panel=SAMPLING
    ),
]
Samples = Annotated[
    int, typer.Option(metavar="N", min=1, help="Short texts of the statistical test.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int, typer.Option(metavar="N", help="Same seed, same report.", rich_help_panel=SAMPLING)]


@app.command()
@with_options(
    grouped("pair", "rounds", "tree", "compile", "rows", "task", "threads", "target", gamma=5, verify="block"),
    options_of(SHAPES),
)
def check(
    context: typer.Context,
    prompts: Prompts = None,
    file: File = None,
    chat: Chat = False,
    max_new_tokens: MaxNewTokens = 64,
    samples: Samples = 1500,
    temperature: Temperature = None,
    seed: Seed = 0,
    as_json: ReportJson = False,
) -> None:
    """Certify that speculative output is the target's own, on your models, settings and prompts.

    Without prompts: beginnings of programs. Exit code 0: it is; 1: it is not; 3: a broken rule would not be noticed.

    Example: slipstream check --verify block --temperature 0.8 --top-p 0.9
    """
    from slipstream.bench import PROMPTS
    from slipstream.check import check as run
    from slipstream.engine.load import load

    items = usable(gather(prompts or [], file, chat)) if prompts or file else []
    options = _options(context.params)
    with busy(console(stderr=True), "loading"):
        engine = load(asked_models(context), progress=say)
    tell(engine.notes)
    try:
        with steps(console(stderr=True)) as on_step:
            texts = [item.prompt for item in items] or PROMPTS
            report = run(engine, texts, on_progress=lambda what, done, total: on_step(done, total, what), **options)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    print(json_text(report.as_dict(), ensure_ascii=False) if as_json else report.text())
    raise typer.Exit(CODES[report.verdict])


def _options(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that are settings of a check or of `Sampling`, and differ from their defaults.

    They are checked before anything is loaded. A tree's depth is its gamma, and for auto the engine's gamma counts.
    """
    from slipstream.check import CheckSettings
    from slipstream.decoding.sampling import Sampling

    defaults = [{field.name: field.default for field in fields(kind)} for kind in (CheckSettings, Sampling)]
    changed = [{name: params[name] for name in kind if params.get(name, kind[name]) != kind[name]} for kind in defaults]
    ours, sampling = changed
    if params["tree"] or params["gamma"] == "auto":
        del ours["gamma"]
    CheckSettings(**ours)
    if params["temperature"] is None:
        del sampling["temperature"]
    else:
        sampling["temperature"] = params["temperature"]
    Sampling(**sampling)
    return {**ours, **sampling}
