"""What users write on the command line about sampling and ends -> the options of a call, checked before any loading."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.app import flag, say

if TYPE_CHECKING:
    from slipstream.engine.generation import Completion

BEAMS = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
LIMITS = ("seed", "plain", "max_new_tokens", "lossless", "n", "logprobs", "echo", "max_time", *BEAMS)
"""Options of a call that are no settings of sampling, under the names of the parameters."""

EARLY = {"true": True, "false": False}
"""How `--early-stopping` is written, where that is no name."""


def call_options(params: dict[str, Any]) -> dict[str, Any]:
    """The options of a call that a command's parameters give, without those that nobody gave and that have no default.

    Raises ValueError for what cannot be.
    """
    from slipstream.engine.options import read_options

    options = {**_sampling(params), **{name: params[name] for name in LIMITS if params.get(name) is not None}}
    options["stop"] = [_unescape(text) for text in params["stop"] or ()]
    if params["stop_token_ids"]:
        options["stop_token_ids"] = list(params["stop_token_ids"])
    if options.get("early_stopping") in EARLY:
        options["early_stopping"] = EARLY[options["early_stopping"]]
    read_options(options)
    return options


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Select the parameters of a command that are settings of `Sampling`."""
    from slipstream.decoding.sampling import Sampling

    off = {field.name: field.default for field in fields(Sampling) if field.name in params}
    settings = {name: params[name] for name in off if name != "logit_bias"}
    for name, value in settings.items():
        if not math.isfinite(value):
            raise ValueError(f"{flag(name)} {value} is not a finite number.")
    idle = [flag(name) for name in ("top_k", "top_p", "min_p", "typical_p") if settings[name] != off[name]]
    if params["logit_bias"]:
        settings["logit_bias"] = _biases(params["logit_bias"])
    if Sampling(**settings).greedy and idle:
        say(f"note: --temperature 0 is greedy and ignores {', '.join(idle)}.")
    return settings


FORMS = {"json_schema": "json_schema", "regex": "regex", "choice": "choice", "lark_file": "lark"}
"""Parameters that say what form answers have, and the methods of `Grammars` that read them."""


def read_form(params: dict[str, Any]) -> dict[str, Any]:
    """The form that a command's parameters ask for, files as their text: {"regex": "[a-z]+"}; empty if none is.

    Raises ValueError for several at once, OSError for a file that cannot be read.
    """
    given = {name: params[name] for name in FORMS if params.get(name)}
    if len(given) > 1:
        names = ", ".join("--grammar" if name == "lark_file" else flag(name) for name in given)
        raise ValueError(f"{names} exclude each other: an answer has one form.")
    return {FORMS[name]: _text(value) if isinstance(value, Path) else value for name, value in given.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8.") from None


def _biases(given: Sequence[str]) -> dict[int, float]:
    """ "42=-inf" -> {42: -inf}, for several of them. Raises ValueError for anything else."""
    found: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {text!r} is not possible: write a token id and a number, 42=-5.") from None
        if number in found:
            raise ValueError(f"--logit-bias names the token {number} twice: give it one bias.")
        found[number] = value
    return found


def _unescape(text: str) -> str:
    r"""The escapes \n, \t, \r and \\ -> their characters."""
    if not text:
        raise ValueError("--stop is empty: give the text to end before.")
    return re.sub(r"\\([ntr\\])", lambda escape: {"n": "\n", "t": "\t", "r": "\r"}.get(escape[1], "\\"), text)


def answer_as_dict(completion: Completion) -> dict[str, Any]:
    """An answer as a JSON line tells it."""
    names = ("text", "tokens", "finish_reason", "prompt_tokens", "context_full")
    error = {"error": completion.error} if completion.error else {}
    found = {**error, **{name: getattr(completion, name) for name in names}}
    if completion.logprobs is not None:
        found["logprobs"] = [asdict(each) for each in completion.logprobs]
    if completion.score is not None:
        found["score"] = completion.score
    return {**found, "stats": completion.stats.as_dict()}
