"""The options of a call: the values they may take, what they mean, and a one-sentence error for any other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from slipstream.core.beams import Beams
from slipstream.core.options import CALL, OPTIONS, REQUEST_FIELDS, CallFields
from slipstream.core.protocols import Controller
from slipstream.core.values import OptionError, is_whole, whole_number
from slipstream.decoding.controllers import controller
from slipstream.decoding.grammar import Grammar
from slipstream.decoding.rules import Rule, rule
from slipstream.decoding.sampling import Sampling
from slipstream.engine.requests import Encoder, listed, shown

ALIASES = {field: name for name, field in REQUEST_FIELDS.items() if field != name}
"""Names of options in requests -> our names."""

BEAMS = ("length_penalty", "early_stopping", "num_return_sequences")  # options of beam search besides `num_beams`


@dataclass(frozen=True)
class Options(CallFields):
    """The options of a call besides those of `Sampling`. Raises ValueError for impossible values.

    `gamma` and `verify` are those of this call; None leaves them to the engine. `seed` is one number, or one for each
    prompt. With `num_beams` above 1, beam search continues the prompts with the settings of `Beams`; those that are
    None take its defaults.
    """

    gamma: int | str | Controller | None = None
    verify: str | Rule | None = None

    def __post_init__(self) -> None:
        for name, option in CALL.items():
            only_scored = name == "max_new_tokens" and self.max_new_tokens == 0 and self.prompt_logprobs is not None
            if name != "seed" and not only_scored:
                option.check(getattr(self, name))
        if is_whole(self.seed) or isinstance(self.seed, str) or not isinstance(self.seed, Iterable):
            whole_number("seed", self.seed, 0)
        else:
            seeds = listed(self.seed, "seed", "it is one whole number, or one for each prompt")
            object.__setattr__(self, "seed", tuple(whole_number("seed", seed, 0) for seed in seeds))
        stops = [self.stop] if isinstance(self.stop, str) else listed(self.stop, "stop", "it is one text or several")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise OptionError(f"stop holds {shown(text)}, but it is one text or several, none of them empty.")
        object.__setattr__(self, "stop", tuple(stops))
        for name in ("stop_token_ids", "decoder_prompt"):
            ids = listed(getattr(self, name), name, "it is a list of token ids")
            object.__setattr__(self, name, tuple(whole_number(name, token, 0) for token in ids))
        prediction = "" if self.prediction is None else self.prediction
        for name, value in (("cache_salt", self.cache_salt), ("prediction", prediction)):
            if not isinstance(value, str):
                raise OptionError(f"{name} is {shown(value)}, but it is a text.")
        if self.gamma is not None:
            controller(self.gamma)
        if self.verify is not None:
            rule(self.verify)
        self._check_beams()

    @property
    def beams(self) -> Beams | None:
        if self.num_beams == 1:
            return None
        settings = {name: getattr(self, name) for name in BEAMS}
        return Beams(self.num_beams, **{name: value for name, value in settings.items() if value is not None})

    def _check_beams(self) -> None:
        if self.beams is None:
            for name in BEAMS:
                if getattr(self, name) is not None:
                    instead = "; for samples of a prompt, use n" if name == "num_return_sequences" else ""
                    raise OptionError(f"{name} is for beam search, which num_beams=4 asks for{instead}.")
            return
        reasons = {
            "n": (self.n > 1, "beams are no samples: use num_return_sequences"),
            "logprobs": (self.logprobs is not None, "a beam has one score, which its answer carries"),
            "prompt_logprobs": (self.prompt_logprobs is not None, "a search does not score its prompt"),
            "stop": (bool(self.stop), "beams end at tokens: use stop_token_ids"),
            "prediction": (self.prediction is not None, "beams do not copy from a prediction: use lookup as the draft"),
            "max_time": (self.max_time is not None, "a search that is broken off has no result: use max_new_tokens"),
            "verify": (self.verify is not None, "what a draft proposes is scored, and never drawn from"),
        }
        for name, (is_set, why) in reasons.items():
            if is_set:
                raise OptionError(f"num_beams={self.num_beams} excludes {name}: {why}.")

    @property
    def stops(self) -> list[str]:
        return list(self.stop)

    def ends(self, eos: frozenset[int]) -> frozenset[int]:
        return (frozenset() if self.ignore_eos else eos) | frozenset(self.stop_token_ids)

    def seeds(self, prompts: int) -> list[int]:
        if not isinstance(self.seed, tuple):
            return [cast("int", self.seed)] * prompts
        if len(self.seed) != prompts:
            raise OptionError(
                f"seed holds {len(self.seed)} numbers for {prompts} prompts: give one number, or one for each prompt."
            )
        return list(self.seed)

    @property
    def own_gamma(self) -> int | None:
        """The gamma of this request alone, for a batch that it shares with others; None if it sets none."""
        if self.plain:
            return 0
        if self.gamma is not None and not is_whole(self.gamma):
            raise OptionError(
                f"gamma={self.gamma!r} is not possible in a batch that is shared with other calls: give a whole "
                "number of tokens, or leave it out."
            )
        return cast("int | None", self.gamma)


def read_options(arguments: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Split the options of a call into `Options` and the settings of `Sampling`; None stands for the default."""
    names = {field.name for field in fields(Options)}
    known = sorted({*names, *OPTIONS, "grammar", "processors"})
    if unknown := sorted(arguments.keys() - {*known, *ALIASES}):
        raise TypeError(f"unknown option {', '.join(unknown)}; known are {', '.join(known)}.")
    meant = {name: value for name, value in arguments.items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in meant and name in meant:
            raise OptionError(f"{alias} and {name} are one option: give one of them.")
        if alias in meant:
            meant[name] = meant.pop(alias)
    options = Options(**{name: value for name, value in meant.items() if name in names})
    return options, {name: value for name, value in meant.items() if name not in names}


def sampling(
    settings: Mapping[str, Any], asked: Options, eos: frozenset[int], encoder: Encoder, vocab: int
) -> Sampling:
    words, processors = settings.get("bad_words", ()), settings.get("processors", ())
    words = [words] if isinstance(words, str) else listed(words, "bad_words", "it is a list of texts or of ids")
    processors = [processors] if not isinstance(processors, Iterable) else list(processors)
    made = {
        **settings,
        "bad_words": [form for word in words for form in encoder.spellings(word)],
        "processors": tuple(processors),
    }
    result = Sampling(eos=asked.ends(eos), **made)
    banned = {token for word in result.bad_words for token in word}
    named = (("logit_bias", result.logit_bias), ("bad_words", banned), ("stop_token_ids", asked.stop_token_ids))
    for name, ids in named:
        if (most := max(ids, default=0)) >= vocab:
            raise OptionError(f"{name} has the token id {most}, but {encoder.name} knows 0..{vocab - 1}.")
    if result.min_new_tokens > asked.max_new_tokens:
        least, most = result.min_new_tokens, asked.max_new_tokens
        raise OptionError(f"min_new_tokens={least} is above max_new_tokens={most}: lower one or raise the other.")
    if asked.beams and result.grammar is not None:
        raise OptionError(f"num_beams={asked.num_beams} cannot be used with a grammar: leave one of them out.")
    if result.grammar is not None:
        _check_grammar(result.grammar, asked, result.min_new_tokens, vocab)
    if clash := {word[0] for word in result.bad_words if len(word) == 1}.intersection(asked.stop_token_ids):
        raise OptionError(f"bad_words forbids the token {min(clash)}, at which stop_token_ids ends: leave out one.")
    return result


def check_scoring(model: str, encodes: bool, media: bool, exact_shape: bool) -> None:
    for is_so, why in (
        (encodes, f"{model} is an encoder-decoder, which reads its prompt as a source"),
        (media, "images and sounds stand for some of its tokens"),
        (exact_shape, "exact_shape fixes the width of passes"),
    ):
        if is_so:
            raise ValueError(f"prompt_logprobs is not possible, for {why}: leave it out.")


def check_callback(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise OptionError(f"{name}={shown(value)} is not possible: it must be a function, or None.")


def _check_grammar(grammar: Grammar, call: Options, least: int, vocab: int) -> None:
    if call.ignore_eos or least:
        name = "ignore_eos" if call.ignore_eos else "min_new_tokens"
        raise OptionError(f"a grammar says where a text may end, so {name} cannot go with it: leave one out.", name)
    if grammar.vocab != vocab:
        raise ValueError(
            f"the grammar was made for a model of {grammar.vocab} tokens, and this one has {vocab}: make it with this "
            "engine's `grammars`."
        )
