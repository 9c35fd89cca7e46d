"""The options that several commands share, with their names, help texts and limits."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.markup import escape

from slipstream.cli.ranks import on_ranks
from slipstream.core.model_options import DEVICES, DTYPES, MODEL_OPTIONS, RANKS, ModelOptions
from slipstream.core.options import OPTIONS, WHEN
from slipstream.models.loading.pairings import chat_target

MODELS, SAMPLING, OUTPUT = "Models", "Sampling", "Output"


def option(panel: str | None, help: str, *names: str, **settings: Any) -> Any:
    """Return a typer option in a panel of the help; its text is escaped, so that [plot] is not read as a rich style."""
    return typer.Option(*names, help=escape(help), rich_help_panel=panel, **settings)


def _option(panel: str, metavar: str | None, help: str, *names: str, **settings: Any) -> Any:
    return option(panel, help, *names, metavar=metavar, **settings)


def parse_gamma(text: int | str) -> int | str:
    """Parse --gamma: "5" -> 5, "auto" -> "auto"; a default value is returned unchanged. Raises typer.BadParameter."""
    if text == "auto" or isinstance(text, int):
        return text
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number of tokens, 0 or more, nor auto.")
    return int(text)


def parse_device_map(text: Any) -> Any:
    """Parse --device-map: "auto" -> "auto"; '{"model.layers": 0, "": "cpu"}' -> the dictionary.

    Raises typer.BadParameter for invalid JSON and for values that are no devices.
    """
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return text
    try:
        devices = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f'{text!r} is no JSON object ({error.msg}): write {{"model": 0, ...}}.') from None
    if not all(isinstance(place, str | int) for place in devices.values()):
        raise typer.BadParameter(f"{text!r}: a device is a number, or a name as cuda:1, cpu or disk.")
    return devices


def parse_tree(text: Any) -> Any:
    """Parse --tree: "3,2,1" -> (3, 2, 1); a default value is returned unchanged. Raises typer.BadParameter."""
    if not isinstance(text, str):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is not a list of candidates per level, such as 3,2,1."
        raise typer.BadParameter(message) from None


Lossless = Annotated[bool, _option(MODELS, None, "Refuse what would change the output distribution.", "--lossless")]
Plain = Annotated[bool, _option(MODELS, None, "Decode without the draft, to compare.", "--plain")]
Batches = Annotated[list[int] | None, _option(MODELS, "N", "Prompts that run together. Repeatable.", "--batch", min=1)]
JsonSchemaFile = Annotated[
    Path | None, _option(SAMPLING, "FILE", "Answers are JSON by the schema in this file.", "--json-schema")
]
Regex = Annotated[str | None, _option(SAMPLING, "TEXT", "Answers match this regular expression.", "--regex")]
Choices = Annotated[list[str] | None, _option(SAMPLING, "TEXT", "Answers are one of these. Repeatable.", "--choice")]
LarkFile = Annotated[Path | None, _option(SAMPLING, "FILE", "Answers fit the Lark grammar in this file.", "--grammar")]
Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts; - is all of stdin as one.")]
File = Annotated[str | None, typer.Option("--prompts", metavar="FILE", help="More prompts, one per line; - is stdin.")]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompts in the target's chat template.")]
Image = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="An image that the prompts are about, for vision models. Repeatable."),
]
Audio = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="FILE", help="A sound that the prompts are about, for audio models. Repeatable."),
]
Stream = Annotated[bool, _option(OUTPUT, None, "Print tokens as they are made.", "--stream")]
Explain = Annotated[bool, _option(OUTPUT, None, "Show each round: drafted, kept, corrected.", "--explain")]
Profile = Annotated[bool, _option(OUTPUT, None, "Show afterwards where the time went.", "--profile")]
Json = Annotated[bool, _option(OUTPUT, None, "A JSON line per prompt, as each finishes; index names it.", "--json")]
Force = Annotated[
    bool, _option(OUTPUT, None, "Replace an existing file that is of another kind; never an input.", "--force")
]
ReportJson = Annotated[bool, _option(OUTPUT, None, "The report as one JSON object.", "--json")]


KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, ""),
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    list[str]: (list[str], "TEXT"),
    list[int]: (list[int], "ID"),
    dict[int, float]: (list[str], "ID=BIAS"),
    WHEN: (Literal["true", "false", "never"], "WHEN"),
    RANKS: (bool, ""),
}
"""The kinds of options -> their types on the command line, and what stands for a value in the help."""

PARSERS: dict[Any, Callable[[Any], Any]] = {
    int | str: parse_gamma,
    tuple[int, ...]: parse_tree,
    DEVICES: parse_device_map,
}
"""The kinds of options whose values have a form of their own -> their parsers."""


def declared_option(name: str) -> Any:
    """Return the typer option for an option of a call or of models."""
    each = (MODEL_OPTIONS | OPTIONS)[name]
    parser = PARSERS.get(each.kind)
    kind, metavar = (Any, "") if parser else KINDS.get(each.kind, (each.kind, ""))
    repeated = " Repeatable." if kind in (list[str], list[int]) else ""
    also = f" Or --{each.request.replace('_', '-')}." if each.request else ""
    flags = (each.flag or f"--{name.replace('_', '-')}",) if kind is bool or len(name) == 1 else ()
    bounds = {"min": each.possible.least, "max": each.possible.most} if each.is_number else {}
    limits = {end: kind(bound) for end, bound in bounds.items() if math.isfinite(bound)}
    panel = MODELS if name in MODEL_OPTIONS else OUTPUT if each.group == "output" else SAMPLING
    return _option(
        panel, each.metavar or metavar or None, f"{each.help}{repeated}{also}", *flags, parser=parser, **limits
    )


def options_of(names: Iterable[str], **defaults: Any) -> type:
    """Return a group of options for `with_options`: those of a call or of models, with their own defaults or these."""
    kinds, values = dict[str, Any](), dict[str, Any]()
    for each in ((MODEL_OPTIONS | OPTIONS)[name] for name in names):
        kind = Any if each.kind in PARSERS else KINDS.get(each.kind, (each.kind, ""))[0]
        usual = False if kind is bool else None if each.default in ((), {}) else each.default
        value = values[each.name] = defaults.get(each.name, usual)
        kind = kind | None if value is None and kind is not Any else kind
        kinds[each.name] = Annotated[kind, declared_option(each.name)]
    return type("Options", (), {"__annotations__": kinds, **values})


def grouped(*groups: str, without: Collection[str] = (), **defaults: Any) -> type:
    """Return the options that commands take together, for `with_options`."""
    every = (MODEL_OPTIONS | OPTIONS).values()
    return options_of((each.name for each in every if each.group in groups and each.name not in without), **defaults)


def asked_models(context: typer.Context, **more: Any) -> ModelOptions:
    """Return the options of models that a command has; a tree or a plan sets what was not written."""
    params, written = context.params, written_parameters(context)
    asked = {name: params[name] for name in MODEL_OPTIONS if name in params}
    if params.get("plan"):
        asked |= {name: None for name in ("gamma", "verify") if name not in written}
    if params.get("tree") and "gamma" not in written:
        asked["gamma"] = None
    if "tp_plan" in asked:
        asked["tp_plan"] = "auto" if asked["tp_plan"] else None
    return ModelOptions(**{**asked, **more})


def chat_models(context: typer.Context, **more: Any) -> ModelOptions:
    """Return the options of models of a chat or a server: if none was named, a chat model where one is installed."""
    asked = asked_models(context, **more)
    return asked if asked.given("pair", "plan") else replace(asked, target=chat_target())


Target = Annotated[str | None, declared_option("target")]
Draft = Annotated[str | None, declared_option("draft")]
Quantize = Annotated[str | None, declared_option("quantize")]
Dtype = Annotated[DTYPES, declared_option("dtype")]
Device = Annotated[str | None, declared_option("device")]
Compile = Annotated[bool, declared_option("compile")]
BatchSize = Annotated[int, declared_option("batch_size")]
ThreadOptions = options_of(["threads"])


class FormOptions:
    """The options for structured output, of which at most one is given."""

    json_schema: JsonSchemaFile = None
    regex: Regex = None
    choice: Choices = None
    lark_file: LarkFile = None


def with_options(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of `groups` to a command, whose values are in `context.params`."""

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        @wraps(command)
        def run(**values: Any) -> None:
            arguments = {name: values[name] for name in own}
            if values.get("threads"):
                from slipstream.kernels.threads import use_threads

                use_threads(values["threads"])
            if values.get("tp_plan"):
                on_ranks(partial(command, **arguments))
            else:
                command(**arguments)

        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=kind)
            for group in groups
            for name, kind in get_type_hints(group, include_extras=True).items()
            if name not in own
        ]
        parameters = [*(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()), *added]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return extended


def written_parameters(context: typer.Context) -> dict[str, str]:
    """Return the parameters that the user gave, with their spelling: {"top_k": "--top-k", "prompts": "PROMPT"}."""
    written = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name and source and source.name not in {"DEFAULT", "DEFAULT_MAP"}:
            is_option = parameter.param_type_name == "option"
            written[parameter.name] = parameter.opts[0] if is_option else str(parameter.metavar or parameter.name)
    return written


def refuse_others(context: typer.Context, allowed: Collection[str], mode: str) -> None:
    """Raises ValueError if the user gave a parameter outside `allowed`; `mode` begins the sentence of the error."""
    if others := [written for name, written in written_parameters(context).items() if name not in allowed]:
        raise ValueError(f"{mode}, so {', '.join(others)} cannot be used with it: leave that out.")
