"""The options of a call, each declared once, for Python, commands, requests, batches, draft servers and documents.

A field of `SamplingFields` or `CallFields` is an option: its name, its type, its default, and in `option` the rest. To
add one, write it here, and use it where it acts, such as in `decoding/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from slipstream.core.values import OptionError, is_finite, is_whole, true_or_false

TINY = 1e-20  # the least temperature above 0; logits divided by a smaller one are infinite
WHEN = bool | Literal["never"]  # the kind of `early_stopping`


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers, whose lower end may be excluded."""

    least: float
    most: float
    open: bool = False

    @staticmethod
    def read(text: str) -> Bounds:
        """Read an interval as mathematics writes it, such as "(0, 1]" or "[0, inf)"."""
        least, most = text[1:-1].split(",")
        return Bounds(float(least), float(most), text[0] == "(")

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.open and value == self.least)


@dataclass(frozen=True)
class Option:
    """An option: what it means, what values are possible, and its names elsewhere.

    `kind` is the type of a value in JSON. Numbers lie within `bounds`, which `words` describe, and in requests within
    `served`. `request` is its field in requests, `hf` its name in transformers; "" is the same name, None is none.
    Requests take it under the names `also` too.

    Commands take the options of a `group` together. Greedy decoding ignores an option that `warps`. Of those of models,
    a `flag` is the name of a command's option if it is another, `changes` says whether the distribution may be another
    one, and `one_piece` why a target that is divided among processes cannot have the option.
    """

    name: str
    default: Any
    help: str
    kind: Any
    words: str = ""
    bounds: str = "(-inf, inf)"
    served: str = ""
    request: str | None = ""
    hf: str | None = ""
    also: tuple[str, ...] = ()
    group: str = "sampling"
    warps: bool = False
    metavar: str = ""
    flag: str = ""
    changes: bool = True
    one_piece: str = ""

    @property
    def field(self) -> str | None:
        """The name of its field in requests; None if they have none."""
        return self.name if self.request == "" else self.request

    @cached_property
    def possible(self) -> Bounds:
        return Bounds.read(self.bounds)

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float)

    def check(self, value: Any) -> None:
        """Raise ValueError for a number or a switch that is not possible; None is possible where it is the default."""
        if value is None and self.default is None:
            return
        if self.kind is bool:
            true_or_false(self.name, value)
        elif self.is_number:
            whole = "" if self.kind is float or is_whole(value) else "a whole number, "
            fits = is_finite(value) and value in self.possible and not (self.name == "temperature" and 0 < value < TINY)
            if whole or not fits:
                raise OptionError(f"{self.name}={value!r} is not possible: it must be {whole}{self.words}.")


def option(default: Any, help: str, words: str = "", bounds: str = "(-inf, inf)", served: str = "", **rest: Any) -> Any:
    """Return a field of a dataclass that is an option; without a `kind`, it has the type of its default."""
    about = {"kind": type(default), **rest, "help": help, "words": words, "bounds": bounds, "served": served}
    return field(default_factory=dict, metadata=about) if default == {} else field(default=default, metadata=about)


PYTHON_ONLY: dict[str, Any] = {"group": "", "request": None, "hf": None}  # what an option has that is of Python alone


def declared(table: type) -> dict[str, Option]:
    made = [each for each in fields(table) if "help" in each.metadata]
    defaults = {each.name: {} if each.default is MISSING else each.default for each in made}
    return {each.name: Option(each.name, defaults[each.name], **each.metadata) for each in made}


@dataclass(frozen=True, eq=False)
class SamplingFields:
    """The options that change the distribution, under the names of transformers and vLLM."""

    temperature: float = option(0.0, "0 is greedy.", "0 (greedy), or 1e-20 and more", "[0, inf)", "[0, 100]")
    top_k: int = option(
        *(0, "Only the N most probable tokens; 0 is off.", "0 (off) or more", "[0, inf)", "[-1, 2147483647]"),
        warps=True,
    )
    top_p: float = option(
        *(1.0, "Only the smallest set this probable; 1 is off.", "above 0 and at most 1 (off)", "(0, 1]"), warps=True
    )
    min_p: float = option(
        *(0.0, "Only tokens X times as likely as the best; 0 is off.", "between 0 (off) and 1", "[0, 1]"), warps=True
    )
    typical_p: float = option(
        *(1.0, "Locally typical sampling; 1 is off.", "above 0 and at most 1 (off)", "(0, 1]"), warps=True
    )
    repetition_penalty: float = option(
        *(1.0, "On tokens of prompt and output; 1 is off.", "above 0 (1 is off)", "(0, inf)", "[0.01, 100]"),
        also=("repeat_penalty",),
    )
    presence_penalty: float = option(
        *(0.0, "Once on tokens of the output; 0 is off.", "a number (0 is off)"), served="[-2, 2]", hf=None
    )
    frequency_penalty: float = option(
        *(0.0, "On each appearance in the output; 0 is off.", "a number (0 is off)"), served="[-2, 2]", hf=None
    )
    no_repeat_ngram_size: int = option(
        0, "No N tokens in a row appear twice; 0 is off.", "0 (off) or more", "[0, inf)", "[0, 2147483647]"
    )
    min_new_tokens: int = option(
        *(0, "No end before so many tokens.", "0 or more", "[0, inf)", "[0, 2147483647]"), request="min_tokens"
    )
    logit_bias: Mapping[int, float] = option(
        {},
        "Add to the logit of a token; -inf (in requests -100) forbids it.",
        kind=dict[int, float],
        hf="sequence_bias",
    )
    bad_words: Sequence[Sequence[int]] = option((), "Never write this text.", kind=list[str], hf="bad_words_ids")


@dataclass(frozen=True)
class CallFields:
    """The options of a call that do not change the distribution, but what is made of it: ends, seeds, beams, output."""

    max_new_tokens: int = option(
        *(128, "Most tokens of a completion.", "at least 1", "[1, inf)", "[-1, 2147483647]"),
        request="max_tokens",
        also=("max_completion_tokens", "n_predict"),
    )
    stop: str | Sequence[str] = option(
        (), r"End before this text (commands read \n and \t).", kind=list[str], hf="stop_strings"
    )
    stop_token_ids: Sequence[int] = option(
        (), "End at this token, as at an EOS token.", kind=list[int], hf="eos_token_id"
    )
    ignore_eos: bool = option(False, "Do not end at EOS tokens.", hf=None)
    max_time: float | None = option(
        *(None, "End a text after so many seconds; its length then depends on the clock."),
        *("a number of seconds, above 0", "(0, inf)"),
        kind=float,
    )
    seed: int | Sequence[int] = option(
        *(0, "Same seed, same text, whatever else runs; with gamma auto under the rule coupled.", "0 or more"),
        bounds="[0, inf)",
        served="[-9223372036854775808, 9223372036854775807]",
        hf=None,
    )
    n: int = option(
        *(1, "Samples of each prompt.", "at least 1", "[1, inf)"), group="samples", hf="num_return_sequences"
    )
    logprobs: int | None = option(
        *(None, "In JSON: logprobs of each token, and of the N most probable ones.", "at least 0", "[0, inf)"),
        kind=int,
        **{**PYTHON_ONLY, "group": "output"},
    )
    prompt_logprobs: int | None = option(
        None, "Logprobs of the tokens of the prompt, as logprobs.", "at least 0", "[0, inf)", kind=int, **PYTHON_ONLY
    )
    echo: bool = option(
        *(False, "Begin the text of an answer with its prompt, in JSON too."), **{**PYTHON_ONLY, "group": "output"}
    )
    lossless: bool = option(False, "Refuse what would change the distribution.", **PYTHON_ONLY)
    plain: bool = option(False, "Decode without the draft, to compare.", **PYTHON_ONLY)
    prediction: str | None = option(None, "A text that the output is expected to resemble.", kind=str, **PYTHON_ONLY)
    decoder_prompt: Sequence[int] = option(
        *((), "The tokens after the first ones of an encoder-decoder's decoder, such as Whisper's language and task."),
        kind=list[int],
        **PYTHON_ONLY,
    )
    priority: int = option(
        *(0, "Lower ones are served earlier.", "lower ones run first"),
        served="[-2147483648, 2147483647]",
        group="service",
        hf=None,
    )
    cache_salt: str = option("", "Prompts share cached prefixes only with the same salt.", group="service", hf=None)
    num_beams: int = option(
        *(1, "Beam search as in transformers; temperature samples the beams.", "at least 1", "[1, inf)"),
        group="beams",
        request=None,
    )
    length_penalty: float | None = option(
        *(None, "Of beams: scores are divided by length^X (1); above 0 favours long texts."),
        *("a number from -50 to 50; above 0 favours long texts", "[-50, 50]"),
        kind=float,
        group="beams",
    )
    early_stopping: bool | str | None = option(
        *(None, "Of beams: true ends when enough have finished, false (default) when hope is small."),
        kind=WHEN,
        group="beams",
    )
    num_return_sequences: int | None = option(
        *(None, "Of beams: texts for each prompt, the best first.", "at least 1", "[1, inf)"),
        kind=int,
        group="beams",
        request=None,
    )


SAMPLING, CALL = declared(SamplingFields), declared(CallFields)
OPTIONS = SAMPLING | CALL  # all options of a call, by their names
SHAPES = tuple(name for name, each in SAMPLING.items() if each.is_number)  # the numbers that change the distribution

REQUEST_FIELDS = {name: each.field for name, each in OPTIONS.items() if each.field}
"""The options that requests have, and their fields."""


def table() -> str:
    """Return the options as a table in Markdown, which docs/options.md holds; = stands for the same name."""
    rows = [["option", "default", "numbers", "request", "transformers", "meaning"], ["---"] * 6]
    for name, each in OPTIONS.items():
        names = [
            "-" if found is None else "=" if found in ("", name) else f"`{found}`" for found in (each.field, each.hf)
        ]
        default, numbers = str(each.default), each.bounds if each.is_number and each.words else ""
        rows.append([f"`{name}`", default if each.is_number or each.default else "", numbers, *names, each.help])
    return "".join(f"|{'|'.join(row)}|\n" for row in rows)


if __name__ == "__main__":
    print(table(), end="")
