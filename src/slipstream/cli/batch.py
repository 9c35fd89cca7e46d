"""`slipstream batch`: files of prompts in, files of answers out, in a run that can be interrupted at any moment."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import INTERRUPTED, WRONG, app, say, tell
from slipstream.cli.console import countdown
from slipstream.cli.serve import ADDRESS, SERVED, Shared, missing_libraries, needed, recipe_of
from slipstream.cli.settings import call_options, read_form
from slipstream.core.model_options import MODEL_OPTIONS
from slipstream.core.options import REQUEST_FIELDS
from slipstream.files import TextFileKind, check_writable
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.serve.batch.lines import BatchLine, Keep, LineDefaults, ServerReply
    from slipstream.serve.recipe import Recipe

File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Prompts: JSON lines, OpenAI's batch format, text, or Parquet; - is stdin."),
]
Actors = opt.panel(
    "Cluster",
    ray=opt.own(bool, False, "Answer on a Ray cluster, by actors that each hold the models."),
    actors=opt.own(int | None, None, "Actors. Without: one per GPU, or one per node where there are none.", "N", min=1),
    ray_address=ADDRESS,
)
Output = opt.panel(
    "Output",
    out=opt.own(
        str,
        inspect.Parameter.empty,
        "The file of answers: JSON lines, or a table if it ends in .parquet; - prints them as they come.",
    ),
    force=opt.own(bool, False, "Replace an existing file of answers, and begin again."),
    as_json=opt.REPORT_JSON,
)

FORM_FIELDS = {"json_schema": "json", "regex": "regex", "choice": "choice", "lark": "grammar"}
"""The fields of `structured_outputs` for the methods of `Grammars`."""


@app.command()
@opt.with_options(
    opt.panel(None, chat=opt.own(bool, False, "Wrap prompts that are texts in the target's chat template.")),
    *(opt.Lossless, Shared, Actors, Output, SERVED, opt.grouped("sampling", "samples"), opt.Forms),
)
def batch(context: typer.Context, file: File) -> None:
    """Answer a file of prompts, each exactly once, however often the run is interrupted.

    A line is {"prompt": TEXT}, {"messages": [...]} or {"tokens": [...]}, with an "id" and any field of the server's
    requests (temperature, max_tokens, stop, ...), which comes before the options here; or a line of OpenAI's batch
    format. A prompt that cannot be answered gets an "error". Answers are kept in OUT.partial as they come: after
    Ctrl-C, a kill or a power cut, the same command goes on. At the end OUT holds them in the order of the prompts.

    Example: slipstream batch prompts.jsonl --out answers.jsonl --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
    """
    from slipstream.models.loading.origin import source_name
    from slipstream.serve.batch.journal import ENDING, MARK, AnswersFile, Journal, Printed
    from slipstream.serve.batch.lines import read_lines
    from slipstream.serve.settings import Limits, ServeSettings

    params = context.params
    out, force = params["out"], params["force"]
    limits = Limits(body_bytes=1 << 30, values=1 << 30, samples=1 << 16)  # only memory limits a batch
    names = tuple(params["names"] or [source_name(params["target"]) or "embedded"])
    settings = ServeSettings(names, max_queue=1 << 30, lossless=params["lossless"], limits=limits)
    recipe, defaults = recipe_of(opt.asked_models(context), settings, params), _defaults(context)
    if out.endswith(".parquet") and not find_spec("pyarrow"):
        raise ValueError(f"{out}: Parquet needs pyarrow: pip install 'slipstream[parquet]'.")
    if out != "-":
        inputs = [] if file == "-" else [file]
        check_writable(out, AnswersFile(), True, inputs)
        if Path(out).is_file() and Path(out).stat().st_size and not AnswersFile().recognises(Path(out)):
            raise ValueError(f"cannot write {out}: it exists and is no file of answers; name another file.")
        kept = TextFileKind("journal of a batch", MARK)
        check_writable(f"{out}{ENDING}", kept, True, inputs)  # replaced only if it is one
    given = read_lines(file, params["chat"])
    facts = _facts(params, defaults, recipe.template, given)
    lines = [defaults.complete(line) for line in given]
    runner = _runner(params, lines)
    columns: dict[str, str] = {}
    for form in {line.form.name: line.form for line in lines}.values():
        columns |= form.columns
    with nullcontext(Printed(sys.stdout)) if out == "-" else Journal(Path(out), facts, columns, force) as sink:
        # Earlier runs answered the resumed prompts, this one the answered; failed ones of both have an error.
        counts: dict[str, Any] = {"prompts": len(lines), "resumed": len(sink.answered), "answered": 0}
        counts |= {"failed": sink.failed, "tokens": 0, "seconds": 0.0}
        if counts["resumed"]:
            say(f"note: {counts['resumed']} of {len(lines)} prompts are answered already, in {out}{ENDING}.")
        code = _run(runner, recipe, lines, sink, counts)
    if params["as_json"]:
        print(json_text(counts), file=sys.stderr if out == "-" else sys.stdout)
    else:
        failed = f", {counts['failed']} of them with an error" if counts["failed"] else ""
        spent = f"{counts['tokens']} tokens in {counts['seconds']:.1f} s"
        say(f"{counts['resumed'] + counts['answered']} of {len(lines)} prompts are answered{failed}: {spent}.")
    raise typer.Exit(code or (WRONG if counts["failed"] else 0))


def _defaults(context: typer.Context) -> LineDefaults:
    from slipstream.serve.batch.lines import LineDefaults

    params, written = context.params, opt.written_parameters(context)
    options = {
        name: value for name, value in call_options(params, written).items() if name in written and name != "seed"
    }
    body = {field: options[name] for name, field in REQUEST_FIELDS.items() if name in options}
    if biases := body.get("logit_bias"):
        body["logit_bias"] = {str(token): max(bias, -100.0) for token, bias in biases.items()}  # as servers write it
    if form := read_form(params):
        body["structured_outputs"] = {FORM_FIELDS[name]: value for name, value in form.items()}
    if "verify" in written:
        body["speculative"] = {"verify": params["verify"]}
    plain = {"temperature": params["temperature"], "max_tokens": params["max_new_tokens"]}
    return LineDefaults(body, plain, params["seed"])


def _facts(
    params: dict[str, Any], defaults: LineDefaults, template: str | None, lines: list[BatchLine]
) -> dict[str, str]:
    """Return digests of the settings and of the prompts: a run resumes only a journal with the same ones."""
    from slipstream.serve.batch.lines import fingerprint

    same = [name for name, each in MODEL_OPTIONS.items() if each.changes and name != "verify"]  # which requests have
    law = {name: params[name] for name in (*same, "chat", "seed")}
    settings = [law, dict(defaults.body), dict(defaults.plain), template]
    return {"settings": fingerprint(settings), "prompts": fingerprint(line.facts for line in lines)}


def _runner(params: dict[str, Any], lines: list[BatchLine]) -> Callable[[Recipe, list[BatchLine], Keep], None]:
    """Return what answers the lines: the models in this process, with or without the server, or a Ray cluster.
    Raises ValueError for Ray's options without --ray, and for what needs libraries of the server that are missing."""
    if params["ray"]:
        needed("--ray")
        if not find_spec("ray"):
            raise ValueError("--ray needs Ray: pip install 'slipstream[ray]'.")
        from slipstream.serve.batch.run import run_on_cluster

        return partial(run_on_cluster, address=params["ray_address"], actors=params["actors"])
    if params["ray_address"] or params["actors"]:
        raise ValueError("--actors and --ray-address are about a cluster: add --ray.")
    from slipstream.serve.batch import direct as here

    if missing_libraries():
        for line in lines:
            if what := here.beyond(line):
                needed(f"prompt {line.index + 1} ({what})")
    else:
        from slipstream.serve.batch import run as here  # type: ignore[no-redef]
    return partial(here.run, on_load=lambda engine: tell(engine.notes), progress=say)


def _run(
    runner: Callable[[Recipe, list[BatchLine], Keep], None],
    recipe: Recipe,
    lines: list[BatchLine],
    sink: Any,
    counts: dict[str, Any],
) -> int:
    from slipstream.serve.batch.lines import refused

    left, began = [line for line in lines if line.index not in sink.answered], monotonic()
    with countdown(len(lines)) as show:

        def keep(line: BatchLine, answer: ServerReply) -> None:
            sink.write(line, answer)
            counts["answered"] += 1
            counts["failed"] += bool(answer.error)
            counts["tokens"] += answer.tokens
            counts["seconds"] = monotonic() - began
            if answer.error:
                say(f"prompt {line.index + 1}: {answer.error}")
            show(counts["resumed"] + counts["answered"], counts["failed"])

        try:
            for line in left:
                if line.error:
                    keep(line, refused(line.error))
            if sound := [line for line in left if not line.error]:
                runner(recipe, sound, keep)
        except (KeyboardInterrupt, asyncio.CancelledError):
            return INTERRUPTED
    sink.finish()
    return 0
