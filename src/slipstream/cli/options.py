"""The options that several commands share, with their names, help texts and limits."""

import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from slipstream.cli.app import flag as flag_of
from slipstream.core.model_options import DEVICES, DRAFTS, MODEL_OPTIONS, RANKS, ModelOptions
from slipstream.core.options import OPTIONS, WHEN
from slipstream.models.loading.pairings import PAIRINGS, chat_target


def on_ranks(command: Callable[[], None]) -> None:
    """Run a command on rank 0, with its target on all ranks; only rank 0 reads, prints and writes.

    Raises ValueError, which says how to start it, in a single process, and ConnectionError on all remaining ranks
    when one is lost.
    """
    from slipstream.engine.load import follow
    from slipstream.execution.ranks import RankLost, join

    ranks = join()
    if not ranks.leads:
        warnings.simplefilter("ignore")  # rank 0 shows the same warnings
        try:
            follow()
        except RankLost as error:
            raise RankLost(f"rank {ranks.rank} ends: {error}") from error
        return
    try:
        command()
    except RankLost:
        raise
    except BaseException:
        if ranks.lost is None:
            raise
        raise RankLost(ranks.lost) from None  # torchrun ends all ranks when one has ended, which looks like Ctrl-C
    finally:
        ranks.close()


MODELS, SAMPLING, OUTPUT = "Models", "Sampling", "Output"


def option(panel: str | None, help: str, *names: str, **settings: Any) -> Any:
    """Return a typer option in a panel of the help; its text is escaped: rich would read [words] as styles."""
    return typer.Option(*names, help=escape(help), rich_help_panel=panel, **settings)


def completing(forms: Iterable[str]) -> Callable[[str], list[str]]:
    begins = [re.sub(r"[A-Z].*", "", form) for form in forms]
    return lambda incomplete: [begin for begin in begins if begin.startswith(incomplete)]


COMPLETIONS = {  # options whose values shells complete
    "target": completing(PAIRINGS),
    "draft": completing(DRAFTS),
    "verify": completing(("token", "block", "match", "coupled", "gbv:K", "lenient:L")),
}

Own = Callable[[str, str | None], tuple[Any, Any]]  # a parameter's name and its panel -> its annotation and its default
Group = dict[str, tuple[Any, Any]]  # options of `with_options`: the annotation and the default of each


def own(kind: Any, default: Any, help: str, metavar: str | None = None, flag: str = "", **limits: Any) -> Own:
    """Return an option of one command, or a few, for `panel`: `flag` is its name where that is not the parameter's."""

    def made(name: str, panel: str | None) -> tuple[Any, Any]:
        flags = (flag or flag_of(name),) if flag or kind is bool else ()
        settings = {"metavar": metavar, "autocompletion": COMPLETIONS.get(name), **limits}
        return Annotated[kind, option(panel, help, *flags, **settings)], default

    return made


def panel(name: str | None, **options: Own) -> Group:
    """Return a group of options for `with_options`, which the help shows together under a name."""
    return {each: made(each, name) for each, made in options.items()}


def parse_gamma(text: int | str) -> int | str:
    """Parse --gamma: "5" -> 5, "auto" -> "auto"; a default value is returned unchanged. Raises typer.BadParameter."""
    if text == "auto" or isinstance(text, int):
        return text
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number of tokens, 0 or more, nor auto.")
    return int(text)


def parse_device_map(text: Any) -> Any:
    """Parse --device-map: "auto" -> "auto"; '{"model.layers": 0, "": "cpu"}' -> the dictionary.
    Raises typer.BadParameter for invalid JSON and for values that are no devices."""
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


Lossless = panel(MODELS, lossless=own(bool, False, "Refuse what would change the output distribution."))
Plain = panel(MODELS, plain=own(bool, False, "Decode without the draft, to compare."))
Forms = panel(  # options for structured output, of which at most one is given
    SAMPLING,
    json_schema=own(Path | None, None, "Answers are JSON by the schema in this file.", "FILE"),
    regex=own(str | None, None, "Answers match this regular expression.", "TEXT"),
    choice=own(list[str] | None, None, "Answers are one of these. Repeatable.", "TEXT"),
    lark_file=own(Path | None, None, "Answers fit the Lark grammar in this file.", "FILE", "--grammar"),
)

Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts; - is all of stdin as one.")]
PROMPTS = own(str | None, None, "More prompts, one per line; - is stdin.", "FILE", "--prompts")
CHAT = own(bool, False, "Wrap the prompts in the target's chat template.")
Asked = panel(None, file=PROMPTS, chat=CHAT)
Spoken = panel(
    None,
    language=own(str | None, None, "The language spoken, as de; English without it.", "CODE"),
    translate=own(bool, False, "Write English for any spoken language."),
)
BATCH = own(list[int] | None, None, "Prompts that run together. Repeatable.", "N", min=1)
FORCE = own(bool, False, "Replace an existing file that is of another kind; never an input.")
REPORT_JSON = own(bool, False, "The report as one JSON object.", flag="--json")

KINDS: dict[Any, tuple[Any, str]] = {  # their types on the command line, and what stands for a value in the help
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

PARSERS: dict[Any, Callable[[Any], Any]] = {  # kinds of options whose values have a form of their own -> their parsers
    int | str: parse_gamma,
    tuple[int, ...]: parse_tree,
    DEVICES: parse_device_map,
}


def options_of(names: Iterable[str], **defaults: Any) -> Group:
    """Return a group of options for `with_options`: those of a call or of models, with their own defaults or these."""
    found = Group()
    for each in ((MODEL_OPTIONS | OPTIONS)[name] for name in names):
        parser = PARSERS.get(each.kind)
        kind, metavar = (Any, "") if parser else KINDS.get(each.kind, (each.kind, ""))
        repeated = " Repeatable." if kind in (list[str], list[int]) else ""
        also = f" Or --{each.request.replace('_', '-')}." if each.request else ""
        flags = (each.flag or flag_of(each.name),) if kind is bool or len(each.name) == 1 else ()
        bounds = {"min": each.possible.least, "max": each.possible.most} if each.is_number else {}
        limits = {end: kind(bound) for end, bound in bounds.items() if math.isfinite(bound)}
        shown = MODELS if each.name in MODEL_OPTIONS else OUTPUT if each.group == "output" else SAMPLING
        settings = {"metavar": each.metavar or metavar or None, "parser": parser, **limits}
        settings["autocompletion"] = COMPLETIONS.get(each.name)
        usual = False if kind is bool else None if each.default in ((), {}) else each.default
        default = defaults.get(each.name, usual)
        kind = kind | None if default is None and kind is not Any else kind
        found[each.name] = Annotated[kind, option(shown, f"{each.help}{repeated}{also}", *flags, **settings)], default
    return found


def grouped(*groups: str, without: Collection[str] = (), **defaults: Any) -> Group:
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


Where = options_of(["dtype", "device", "threads"])


def with_options(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of `groups` to a command, whose values are in `context.params`.
    An option of several groups is that of the first."""

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

        parameters = {name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in own.items()}
        for group in groups:
            for name, (kind, usual) in group.items():
                each = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual, annotation=kind)
                parameters.setdefault(name, each)
        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
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
