"""The options that several commands share, with their names, help texts and limits."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.markup import escape

from slipstream.cli.ranks import on_ranks
from slipstream.core.options import OPTIONS, WHEN

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


def parse_precision(text: str) -> str:
    """Check a precision of weights such as "int4?group=64" -> its text. Raises typer.BadParameter for anything else."""
    from slipstream.kernels.quantization import Precision

    try:
        return str(Precision.read(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Target = Annotated[str | None, _option(MODELS, "MODEL", "Hub name or folder (or --model). Without: the embedded pair.")]
Draft = Annotated[
    str | None,
    _option(
        MODELS,
        "DRAFT",
        "Hub name or folder, int4, int8, window:N, lookup, ngram:FILE, datastore:DIR, exit:LAYERS, eagle3:NAME, "
        "dflash:NAME, mtp, heads:DIR, tcp://HOST:PORT, embedded; chains 'a>b', choices 'a|b' and 'a||b' "
        "(docs/drafts.md). Or --draft-model. Without: plain.",
    ),
]
Gamma = Annotated[
    Any,
    _option(
        *(MODELS, "N|auto", "Tokens drafted per round (or --num-speculative-tokens); auto: as many as pay."),
        parser=parse_gamma,
    ),
]
Tree = Annotated[str | None, _option(MODELS, "K,K,..", "Candidates per level instead of a chain, e.g. 3,2,1.")]
Verify = Annotated[
    str,
    _option(
        *(MODELS, "RULE"),
        "token, block, match, coupled (a seed's text is the same with any draft), gbv:K (K paths a round), lenient:L.",
    ),
]
PlanFile = Annotated[
    str | None, _option(MODELS, "FILE", "A plan of `slipstream plan`; options given here come first.", "--plan")
]
Lossless = Annotated[bool, _option(MODELS, None, "Refuse what would change the output law.", "--lossless")]
ExactShape = Annotated[
    bool, _option(MODELS, None, "Run the target in one shape: same bits with and without a draft.", "--exact-shape")
]
Plain = Annotated[bool, _option(MODELS, None, "Decode without the draft, to compare.", "--plain")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _option(MODELS, "NAME", "Of the weights: auto, float32, bfloat16 or float16."),
]
EncoderDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    _option(MODELS, "NAME", "Of an encoder-decoder's encoder alone. Without: as --dtype.", "--encoder-dtype"),
]
Device = Annotated[str | None, _option(MODELS, "NAME", "cpu, cuda, cuda:1, mps ... Without: a GPU if there is one.")]
DeviceMap = Annotated[
    Any,
    _option(
        *(MODELS, "NAME|JSON", "Spread the target's layers over devices: auto, balanced, or {layers: device}."),
        "--device-map",
        parser=parse_device_map,
    ),
]
TensorParallel = Annotated[
    bool,
    _option(MODELS, None, "Divide the target among the processes that torchrun starts.", "--tensor-parallel"),
]
TrustRemoteCode = Annotated[
    bool, _option(MODELS, None, "Run Python code that comes with the target: read it first.", "--trust-remote-code")
]
Compile = Annotated[
    bool, _option(MODELS, None, "Make graphs of the models' passes first: about a minute, then faster.", "--compile")
]
Quantize = Annotated[
    str | None,
    _option(
        *(MODELS, "NAME", "int8 or int4: the target's weights, which makes another model (or --draft int4, exact)."),
        parser=parse_precision,
    ),
]
Threads = Annotated[
    int | None, _option(MODELS, "N", "Threads on CPUs. Without: as many as this process has cores for.", min=1)
]
BatchSize = Annotated[int, _option(MODELS, "N", "Prompts that run together.", min=1)]
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
Task = Annotated[
    str | None,
    _option(
        *(MODELS, "TASK"),
        "Of an encoder-decoder: translation_en_to_de, 'eng_Latn>deu_Latn', or text before each source, 'summarize: '.",
    ),
]
Stream = Annotated[bool, _option(OUTPUT, None, "Print tokens as they are made.", "--stream")]
Explain = Annotated[bool, _option(OUTPUT, None, "Show each round: drafted, kept, corrected.", "--explain")]
Profile = Annotated[bool, _option(OUTPUT, None, "Show afterwards where the time went.", "--profile")]
Json = Annotated[bool, _option(OUTPUT, None, "A JSON line per prompt, as each finishes; index names it.", "--json")]
Out = Annotated[
    str | None, _option(OUTPUT, "FILE", "Write the JSON lines to FILE, each as it finishes, instead of printing.")
]
Resume = Annotated[bool, _option(OUTPUT, None, "Go on with the --out FILE of an earlier run.", "--resume")]
Force = Annotated[
    bool, _option(OUTPUT, None, "Replace an existing file that is of another kind; never an input.", "--force")
]
ReportJson = Annotated[bool, _option(OUTPUT, None, "The report as one JSON object.", "--json")]


KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, ""),
    int: (int, "N"),
    float: (float, "X"),
    list[str]: (list[str], "TEXT"),
    list[int]: (list[int], "ID"),
    dict[int, float]: (list[str], "ID=BIAS"),
    WHEN: (Literal["true", "false", "never"], "WHEN"),
}
"""The kinds of options of a call -> their types on the command line, and what stands for a value in the help."""


def options_of(names: Collection[str], **defaults: Any) -> type:
    """Return a group of options for `with_options`: those options of a call, with their own defaults or these."""
    kinds, values = dict[str, Any](), dict[str, Any]()
    for each in (OPTIONS[name] for name in names):
        kind, metavar = KINDS[each.kind]
        repeated = " Repeatable." if kind in (list[str], list[int]) else ""
        also = f" Or --{each.field.replace('_', '-')}." if each.field not in (each.name, None) else ""
        flags = ("--" + each.name.replace("_", "-"),) if kind is bool or len(each.name) == 1 else ()
        bounds = {"min": each.possible.least, "max": each.possible.most} if each.is_number else {}
        limits = {name: kind(bound) for name, bound in bounds.items() if math.isfinite(bound)}
        panel = OUTPUT if each.group == "output" else SAMPLING
        made = _option(panel, metavar or None, f"{each.help}{repeated}{also}", *flags, **limits)
        values[each.name] = defaults.get(each.name, each.default or None if repeated else each.default)
        kinds[each.name] = Annotated[kind | None if values[each.name] is None else kind, made]
    return type("CallOptions", (), {"__annotations__": kinds, **values})


def grouped(*groups: str) -> type:
    """Return the options of a call that commands take together, for `with_options`."""
    return options_of([name for name, each in OPTIONS.items() if each.group in groups])


class ThreadOptions:
    """The option for the number of threads, of all commands that run models; `with_options` applies it."""

    threads: Threads = None


class TargetOptions:
    """The options for loading the target, besides its dtype and device."""

    encoder_dtype: EncoderDtype = None
    quantize: Quantize = None
    device_map: DeviceMap = None
    tensor_parallel: TensorParallel = False
    trust_remote_code: TrustRemoteCode = False


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
            if values.get("tensor_parallel"):
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


def parse_tree(text: str | None) -> tuple[int, ...] | None:
    """Parse --tree: "3,2,1" -> (3, 2, 1), None -> None. Raises ValueError for anything else."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--tree {text!r} is not a list of candidates per level, such as 3,2,1.") from None


def placed(context: typer.Context) -> dict[str, Any]:
    """Return the arguments of `load` for the options in `TargetOptions` that were given; others are left out."""
    arguments = {name: value for name in get_type_hints(TargetOptions) if (value := context.params[name])}
    return {**arguments, "tp_plan": "auto"} if arguments.pop("tensor_parallel", False) else arguments


def shaped(context: typer.Context) -> dict[str, Any]:
    """Return the arguments of `load` for tree and gamma; with a tree, the default gamma is replaced by None."""
    tree, gamma = parse_tree(context.params["tree"]), context.params["gamma"]
    if tree and "gamma" not in written_parameters(context):
        gamma = None
    return {"tree": tree, "gamma": gamma}


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
