"""`slipstream check`: is the output the target's own? Exit code 0 if so, 1 if not, 3 if this cannot be judged."""

from dataclasses import fields
from typing import Any

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import app
from slipstream.cli.console import busy, steps
from slipstream.cli.settings import loaded
from slipstream.core.options import SHAPES
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import gather, usable

CODES = {"pass": 0, "fail": 1, "cannot judge": 3}

Trials = opt.panel(
    "Sampling",
    max_new_tokens=opt.own(int, 64, "Tokens of the texts that are followed one by one.", "N", min=1),
    samples=opt.own(int, 1500, "Short texts of the statistical test.", "N", min=1),
    temperature=opt.own(float | None, None, "Without: greedy, then 1.", "X", min=0.0),
    seed=opt.own(int, 0, "Same seed, same report.", "N"),
)


@app.command()
@opt.with_options(
    opt.grouped("pair", "rounds", "tree", "compile", "rows", "task", "threads", "target", gamma=5, verify="block"),
    *(opt.Asked, Trials, opt.options_of(SHAPES), opt.panel("Output", as_json=opt.REPORT_JSON)),
)
def check(context: typer.Context, prompts: opt.Prompts = None) -> None:
    """Certify that speculative output is the target's own, on your models, settings and prompts.

    Without prompts: beginnings of programs. Exit code 0: it is; 1: it is not; 3: a broken rule would not be noticed.

    Example: slipstream check --verify block --temperature 0.8 --top-p 0.9
    """
    with busy("starting"):
        from slipstream.bench.records import PROMPTS
        from slipstream.check import check as run

    params = context.params
    given = prompts or params["file"]
    items = usable(gather(prompts or [], params["file"], params["chat"])) if given else []
    options = _options(params)
    engine = loaded(opt.asked_models(context))
    with steps() as on_step:
        texts = [item.prompt for item in items] or PROMPTS
        report = run(engine, texts, on_progress=lambda what, done, total: on_step(done, total, what), **options)
    print(json_text(report.as_dict(), ensure_ascii=False) if params["as_json"] else report.text())
    raise typer.Exit(CODES[report.verdict])


def _options(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that are settings of a check or of `Sampling`, and differ from their defaults.
    They are checked before anything is loaded. A tree's depth is its gamma, and for auto the engine's gamma counts."""
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
