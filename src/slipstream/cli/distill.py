"""The command `slipstream distill`, which trains a draft model for a target."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.cli.app import INTERRUPTED, app, say, tell
from slipstream.cli.console import busy, console
from slipstream.cli.console import steps as bar
from slipstream.cli.options import OUTPUT, REPORT_JSON, Where, options_of, own, panel, with_options
from slipstream.cli.settings import read_documents
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.training.distill import Distiller, DistillSettings, DraftCosts, Measurement
    from slipstream.training.material import Divided, Material
    from slipstream.training.students import Distilled

Target = Annotated[str | None, typer.Argument(metavar="TARGET", help="Hub name or folder. Without: the embedded one.")]
REQUIRED = inspect.Parameter.empty
Aimed = panel(
    "The draft",
    out=own(Path, REQUIRED, "The folder of the draft; it appears when it is whole.", "DIR"),
    size=own(float, 0.1, "Share of the target's parameters.", "X", min=0.0, max=1.0),
    layers=own(int | None, None, "Layers of a new draft, with --width.", "N", min=1),
    width=own(int | None, None, "Hidden size of a new draft, with --layers.", "N", min=1),
    draft=own(str | None, None, "Improve this draft instead: hub name, folder, or embedded.", "NAME"),
    work=own(Path | None, None, "Where the state of the training goes. Without: DIR.training.", "DIR"),
)
Texts = panel(
    "Texts",
    data=own(
        list[str], REQUIRED, "Files of text or JSON lines, also .gz, folders of them, dataset:NAME. Repeatable.", "SRC"
    ),
    field=own(str | None, None, "Of JSON lines: where the text is, such as prompt.", "NAME"),
    write=own(int, 200_000, "Tokens that the target writes first, to learn from.", "N", min=0),
    written=own(float, 0.75, "Share of the steps on what the target wrote.", "X", min=0.0, max=1.0),
)
Lessons = panel(
    "Training",
    objective=own(
        Literal["kl-tv", "kl", "reverse-kl", "tv", "sequence"],
        "kl-tv",
        "kl-tv, kl, reverse-kl, tv (the chance of a refusal), or sequence (the target's tokens alone).",
    ),
    steps=own(int, 2000, "Most steps of the training.", "N", min=1),
    rows=own(int, 16, "Texts in a step.", "N", min=1),
    length=own(int, 256, "Tokens of a text.", "N", min=8),
    rate=own(float | None, None, "Learning rate; 0.004, of a draft that is improved 0.001.", "X"),
    measure_every=own(int, 100, "Steps between measurements.", "N", min=1),
    patience=own(int, 5, "Measurements without a greater speed-up, after which it ends.", "N", min=1),
    gamma=own(int, 5, "Tokens drafted per round while it is measured.", "N", min=1),
    bfloat16=own(bool, False, "Multiply in bfloat16: faster where the processor can."),
    seed=own(int, 0, "Same seed, same draft.", "N", min=0, max=2**63 - 1),
)


@app.command()
@with_options(Aimed, Texts, Lessons, Where, options_of(["compile"]), panel(OUTPUT, as_json=REPORT_JSON))
def distill(context: typer.Context, target: Target = None) -> None:
    """Train a small draft model that says what a target says; the same command resumes an interrupted training.

    Then: slipstream generate --target TARGET --draft DIR

    Example: slipstream distill Qwen/Qwen3-1.7B --data my-texts --out my-draft --compile
    """
    from slipstream.core.garbage import keep_freed_memory
    from slipstream.training.distill import Distiller, DistillSettings
    from slipstream.training.material import divide
    from slipstream.training.students import check_draft_folder, save_draft

    params = context.params
    if (params["layers"] is None) != (params["width"] is None):
        raise ValueError("a size is given by both --layers and --width, or by --size alone.")
    if params["draft"] and params["layers"]:
        raise ValueError("--draft improves a draft as large as it is: leave --layers and --width out.")
    chosen_rate = {"rate": (1e-3 if params["draft"] else 4e-3) if params["rate"] is None else params["rate"]}
    written = {"written": params["written"] if params["write"] else 0.0}
    own_names = [each.name for each in fields(DistillSettings) if each.name in params]
    settings = DistillSettings(**{**{name: params[name] for name in own_names}, **chosen_rate, **written})
    out, data = params["out"], params["data"]
    check_draft_folder(out)
    folder = params["work"] or out.with_name(out.name + ".training")
    try:
        with busy("loading"):
            tokenizer, documents = read_documents(target, data, params["field"])
            between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            divided = divide([[*between, *ids] for ids in documents])  # may be unfit, before the model is loaded
            engine = _engine(target, params["dtype"], params["device"], params["compile"])
        size, student = _student(engine, params)
        costs = _costs(engine, size, student, divided.prompts[:6], params, folder / "costs.json")
        material = _material(engine, divided, settings, params["write"], folder)
        distiller = Distiller(engine, student, material, costs, settings, folder)
        keep_freed_memory()
        if done := distiller.progress.steps:
            say(f"going on from step {done} of {settings.steps}")
        with bar() as show:
            distiller.train(
                lambda progress, loss: show(progress.steps, settings.steps, f"loss {loss:.3f}"),
                lambda measurement: say(_measurement_line(measurement, settings.steps)),
            )
    except KeyboardInterrupt:
        say("stopped and saved; the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    origin = f"improved from `{params['draft']}`" if params["draft"] else "trained from scratch"
    about = _about(distiller, target or "embedded", data, origin, size)
    save_draft(distiller.as_used(), engine.tokenizer, about, out)
    if params["as_json"]:
        print(json_text({"out": str(out), **about.as_dict()}))
    else:
        print(f"{out}: {about.parameters:,} parameters ({about.size}), {about.steps} steps, {about.tokens:,} tokens")
        print(_measurement_line(about.measured[-1], about.settings.steps))
        print(f"use: slipstream generate --target {about.target} --draft {out}")


def _engine(target: str | None, dtype: str, device: str | None, compile: bool) -> Engine:
    from slipstream.engine.load import alone, load
    from slipstream.training.material import target_of

    source, exact = alone(target, dtype)
    progress = console(stderr=True).print if compile else None
    engine = load(source, dtype=exact, device=device, batch_size=64, compile=compile, progress=progress)
    target_of(engine)
    tell(engine.notes)
    return engine


def _student(engine: Engine, params: dict[str, Any]) -> tuple[str, Any]:
    """Return the name of the draft, which is its size or where it comes from, and the model before its training."""
    from slipstream.models.loading.load import load_model
    from slipstream.models.loading.pairings import EMBEDDED
    from slipstream.training.material import target_of
    from slipstream.training.students import Size, new_student, size_for

    target, draft, layers = target_of(engine), params["draft"], params["layers"]
    if draft:
        source = EMBEDDED / "draft" if draft == "embedded" else draft
        model = load_model(source, "float32", str(target.device))
        if model.config.get_text_config().vocab_size != target.model.config.get_text_config().vocab_size:
            raise ValueError(f"{draft} has another vocabulary than {target.name}: take a draft with its tokenizer.")
        return draft, model.float()
    size = Size(layers, params["width"]) if layers else size_for(target.model.config, params["size"])
    return str(size), new_student(target.model, size, params["seed"])


def _costs(
    engine: Engine, name: str, student: Any, texts: Sequence[Any], params: dict[str, Any], file: Path
) -> DraftCosts:
    """Return what drafting costs, which is measured at the first run only: a resumed training counts as it began."""
    from slipstream.execution.passes import Mode
    from slipstream.measure.environment import parameters
    from slipstream.plan.draft_costs import measure_costs
    from slipstream.training.distill import DraftCosts
    from slipstream.training.material import target_of

    costs = DraftCosts.read(file, name)
    if costs is None:
        progress = console(stderr=True).print if params["compile"] else None
        mode = Mode(params["compile"], packed=True, ahead=(params["gamma"],), progress=progress)
        with busy("measuring what drafting costs"):
            costs = measure_costs(engine, student, texts, params["gamma"], mode)
        costs.save(file, name)
    share = parameters(student) / parameters(target_of(engine).model)
    say(f"{name}: {share:.1%} of the target, a drafting step costs {costs.c:.3f} of its steps")
    return costs


def _material(engine: Engine, divided: Divided, settings: DistillSettings, write: int, folder: Path) -> Material:
    from slipstream.training.material import SEQUENCE, Amount, gather

    read = round(settings.steps * settings.rows * settings.length * (1 - settings.written))
    amount = Amount(settings.length, read, write, settings.objective != SEQUENCE, settings.seed)
    with bar() as show:
        return gather(engine, divided, amount, folder, lambda done: show(done, write, "the target writes"))


def _about(distiller: Distiller, target: str, data: Sequence[str], origin: str, size: str) -> Distilled:
    from slipstream.training.students import Distilled

    return Distilled(
        target=target,
        data=tuple(data),
        size=size,
        origin=origin,
        parameters=distiller.student.num_parameters(),
        **asdict(distiller.progress),
        written=distiller.material.written.tokens,
        prompts=len(distiller.material.prompts),
        costs=distiller.costs,
        settings=distiller.settings,
        measured=tuple(distiller.found),
    )


def _measurement_line(measurement: Measurement, total: int) -> str:
    parts = list[str]()
    columns = zip((0, 1), measurement.alpha, measurement.kept, measurement.gammas, measurement.gains, strict=True)
    for temperature, alpha, shares, gamma, gain in columns:
        kept = " ".join(f"{share:.2f}" for share in shares)
        parts.append(f"T={temperature} alpha {alpha:.3f}, kept {kept}, {gain:.2f}x at gamma {gamma}")
    return f"step {measurement.steps}/{total}: {'; '.join(parts)}"
