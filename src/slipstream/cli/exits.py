"""`slipstream exits`: search for the layers of the target that should draft for it, by measured speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.app import INTERRUPTED, app
from slipstream.cli.console import busy, console
from slipstream.cli.options import (
    BatchSize,
    Chat,
    Device,
    Dtype,
    File,
    Prompts,
    ReportJson,
    Target,
    ThreadOptions,
    options_of,
    with_options,
)
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import gather, usable

if TYPE_CHECKING:
    from slipstream.plan.layers import LayerSearch


Gamma = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens drafted per round while every choice is tried.")]
First = Annotated[bool, typer.Option("--first", help="Only exits after the first layers, no sets with skipped ones.")]


@app.command()
@with_options(ThreadOptions, options_of(["max_new_tokens", "temperature", "seed"], max_new_tokens=64))
def exits(
    context: typer.Context,
    prompts: Prompts = None,
    file: File = None,
    chat: Chat = False,
    target: Target = None,
    gamma: Gamma = 3,
    first: First = False,
    dtype: Dtype = "auto",
    device: Device = None,
    batch_size: BatchSize = 1,
    as_json: ReportJson = False,
) -> None:
    """Search the layers with which the target drafts best for itself; plain decoding may win.

    Without prompts: beginnings of programs. Then: slipstream generate --draft exit:LAYERS

    Example: slipstream exits --max-new-tokens 32 --temperature 1
    """
    from slipstream.bench import PROMPTS
    from slipstream.core.protocols import HasModel
    from slipstream.decoding.sampling import Sampling
    from slipstream.engine.load import embedded, load
    from slipstream.measure.requests import request_for
    from slipstream.plan.layers import first_layers, search_exit

    items = usable(gather(prompts or [], file, chat)) if prompts or file else []
    most, seed = context.params["max_new_tokens"], context.params["seed"]
    sampler = Sampling(temperature=context.params["temperature"])
    with busy(console(stderr=True), "loading"):
        source, exact = embedded(target, dtype)
        engine = load(source, dtype=exact, device=device, batch_size=batch_size)
    ids = [engine.encode(item.prompt) for item in items] or [engine.encode(prompt) for prompt in PROMPTS]
    requests = [request_for(one, sampler, most, eos=engine.eos, seed=seed) for one in ids]
    scorer = engine.decoder.target
    assert isinstance(scorer, HasModel)
    screen = console(stderr=True)
    try:
        with busy(screen, "measuring"):
            choices = first_layers(scorer) if first else None
            search = search_exit(engine.decoder, requests, choices, gamma, screen.print)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    print(json_text(search.as_dict()) if as_json else _table(search))


def _table(search: LayerSearch) -> str:
    shown = search.as_dict()
    rows = [("layers", "alpha", "tokens/call", "tokens/s", "best gamma", "predicted")]
    for trial in shown["trials"]:
        figures = (trial["alpha"], trial["mean_acceptance_length"], trial["tokens_per_second"])
        factor = f"{trial['factor']:.2f} x" if trial["best_gamma"] else "-"
        alpha, length, speed = figures
        rows.append(
            (trial["layers"], f"{alpha:.3f}", f"{length:.2f}", f"{speed:.1f}", str(trial["best_gamma"]), factor)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"plain decoding: {search.plain:.1f} tokens/s")
    for finish in shown["race"]:
        speed = f"{finish['tokens_per_second']:.1f} tokens/s, {finish['over_plain']:.2f} x plain"
        lines.append(f"exit:{finish['layers']} with gamma {finish['gamma']}: {speed}")
    best = shown["best"]
    lines.append(
        f"use --draft exit:{best['layers']} --gamma {best['gamma']}" if best else "do not draft with this target"
    )
    return "\n".join(lines)
