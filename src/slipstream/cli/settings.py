"""Options of the command line for sampling and the ends of texts -> options of a call, checked before any loading."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.app import flag, say, tell
from slipstream.cli.console import busy
from slipstream.core.model_options import ModelOptions
from slipstream.core.options import OPTIONS

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

OF_MODELS = (  # options that a model's generation config may set
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("min_new_tokens", "max_new_tokens", "max_time"),
)

MOST_NAMES = 5  # files that a message names; the others are only counted
EARLY = {"true": True, "false": False}  # values of `--early-stopping` that are not names


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
    Raises ValueError for several at once, OSError for a file that cannot be read."""
    forms = {name: params[name] for name in FORMS if params.get(name) not in (None, [], ())}
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


def loaded(models: ModelOptions) -> Engine:
    """Load models, with a spinner, and say the notes of loading."""
    with busy("loading"):
        from slipstream.engine.load import load

        engine = load(models, progress=say)
    tell(engine.notes)
    return engine


def read_documents(target: str | None, sources: Sequence[str], field: str | None) -> tuple[Any, list[Any]]:
    """Return the tokenizer of a target, and documents as its token ids; skipped files are said."""
    from slipstream.models.loading.load import load_tokenizer
    from slipstream.text.documents import token_ids

    skipped, tokenizer = list[Path](), load_tokenizer("embedded" if target is None else target)
    ids = list(token_ids(sources, tokenizer, field, skipped))
    if skipped:
        names = ", ".join(map(str, skipped[:MOST_NAMES])) + (", ..." if len(skipped) > MOST_NAMES else "")
        say(f"note: of the folders {len(skipped)} files were skipped, which are no text in UTF-8: {names}")
    return tokenizer, ids
