"""Options of the command line for sampling and the ends of texts -> options of a call, checked before any loading."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.app import flag, say
from slipstream.core.options import OPTIONS

if TYPE_CHECKING:
    from slipstream.engine.generation import Completion

OF_MODELS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("min_new_tokens", "max_new_tokens", "max_time"),
)
"""The options that a model's generation config may set."""

EARLY = {"true": True, "false": False}
"""The values of `--early-stopping` that are not names."""


def call_options(params: dict[str, Any], written: Collection[str]) -> dict[str, Any]:
    """Return the options of a call from a command's parameters, without those that are None.

    Settings that the model may have of its own are left out unless they are `written`. Raises ValueError for impossible
    values.
    """
    from slipstream.decoding.sampling import WARPS, Sampling
    from slipstream.engine.options import read_options

    options = {name: params[name] for name in OPTIONS if params.get(name) not in (None, (), [])}
    if not all(options.get("stop", ())):
        raise ValueError("--stop is empty: give the text to end before.")
    signs = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    options["stop"] = [
        re.sub(r"\\([ntr\\])", lambda escape: signs[escape[1]], text) for text in options.get("stop", ())
    ]
    if "logit_bias" in options:
        options["logit_bias"] = _biases(options["logit_bias"])
    if options.get("early_stopping") in EARLY:
        options["early_stopping"] = EARLY[options["early_stopping"]]
    settings = read_options(options)[1]
    sampling = Sampling(**{name: value for name, value in settings.items() if name != "bad_words"})  # still texts
    idle = [flag(name) for name in WARPS if settings[name] != OPTIONS[name].default]
    if sampling.greedy and idle:
        say(f"note: --temperature 0 is greedy and ignores {', '.join(idle)}.")
    return {name: value for name, value in options.items() if name in written or name not in OF_MODELS}


FORMS = {"json_schema": "json_schema", "regex": "regex", "choice": "choice", "lark_file": "lark"}
"""The parameters that set the form of answers -> the methods of `Grammars` that take them."""


def read_form(params: dict[str, Any]) -> dict[str, Any]:
    """Return the form that a command's parameters set, files as their text: {"regex": "[a-z]+"}; {} without one.

    Raises ValueError for several at once, OSError for a file that cannot be read.
    """
    forms = {name: params[name] for name in FORMS if params.get(name)}
    if len(forms) > 1:
        names = ", ".join("--grammar" if name == "lark_file" else flag(name) for name in forms)
        raise ValueError(f"{names} exclude each other: an answer has one form.")
    try:
        texts = {name: value.read_text("utf-8") for name, value in forms.items() if isinstance(value, Path)}
    except UnicodeDecodeError:
        raise ValueError(f"{next(iter(forms.values()))} is no text in UTF-8.") from None
    return {FORMS[name]: texts.get(name, value) for name, value in forms.items()}


def _biases(texts: Sequence[str]) -> dict[int, float]:
    """Return biases by token id, such as {42: -inf} for "42=-inf". Raises ValueError for other texts."""
    by_id: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {text!r} is not possible: write a token id and a number, 42=-5.") from None
        if number in by_id:
            raise ValueError(f"--logit-bias names the token {number} twice: give it one bias.")
        by_id[number] = value
    return by_id


def answer_as_dict(completion: Completion) -> dict[str, Any]:
    names = ("text", "tokens", "finish_reason", "prompt_tokens", "context_full")
    error = {"error": completion.error} if completion.error else {}
    record = {**error, **{name: getattr(completion, name) for name in names}}
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(each) for each in completion.logprobs]
    if completion.score is not None:
        record["score"] = completion.score
    return {**record, "stats": completion.stats.as_dict()}
