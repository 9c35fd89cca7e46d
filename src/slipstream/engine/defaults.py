"""What a model's generation config asks for, as transformers' `generate` would honour it, where a call sets nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from slipstream.core.values import is_whole
from slipstream.decoding.sampling import Processor, Sampling, Suppress, SuppressAfter

AUTO, NONE = "auto", "none"  # the generation config that comes with the model, and none

SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    "min_new_tokens",
)
OPTIONS, BEAMS = ("max_new_tokens", "max_time"), ("length_penalty", "early_stopping")
"""The settings of a call that have transformers' names: of `Sampling`, others, and those of beam search alone."""

PENALTIES = (
    *("sequence_bias", "bad_words_ids", "min_length", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
)
CUTS = {"top_h": hf.TopHLogitsWarper, "epsilon_cutoff": hf.EpsilonLogitsWarper, "eta_cutoff": hf.EtaLogitsWarper}
"""What has no setting of a call: processors for every text, and for texts that are sampled."""

ENDS = ("min_new_tokens", "min_length", "forced_bos_token_id", "forced_eos_token_id")
"""What decides where a text begins and ends, which a grammar does where there is one."""

AS_PROCESSOR, MISSING = "give it as a processor", "it is not available"
NOT_APPLIED = {  # what `generate` would honour and is not applied, and what to do instead
    "num_beams": "ask for it by num_beams",
    "num_return_sequences": "ask for it by n, or by num_return_sequences",
    "max_length": "max_new_tokens limits a text",
    "stop_strings": "give them as stop",
    **dict.fromkeys(
        ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config"), AS_PROCESSOR
    ),
    **dict.fromkeys(("constraints", "force_words_ids"), "use a grammar"),
    **dict.fromkeys(("guidance_scale", "penalty_alpha", "diversity_penalty", "dola_layers", "token_healing"), MISSING),
}

OFF: dict[str, Any] = {  # the values that change nothing
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_return_sequences", "length_penalty"), 1),
    **dict.fromkeys(("top_k", "min_p", "no_repeat_ngram_size", "min_new_tokens", "min_length"), 0),
    **dict.fromkeys(("remove_invalid_values", "token_healing", "early_stopping"), False),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty", *CUTS), 0),
}


@dataclass(frozen=True)
class Defaults:
    """The defaults of a model's calls: `settings` under the names of options, and `others`, which have none.
    `left` are those that are not applied, with the reason. `eos` are the tokens that end a text, in any case."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    eos: frozenset[int] = frozenset()

    @staticmethod
    def of(model: Any, tokenizer: Any, asked: Any) -> Defaults:
        """Read the generation config of a model ("auto"), none ("none"), another one, or that in a folder."""
        config = model.generation_config if asked == NONE else _config(model, asked)
        named = (getattr(each, "eos_token_id", None) for each in (config, tokenizer))
        ends = next((each for each in named if each is not None), ())
        eos = frozenset([ends] if isinstance(ends, int) else ends)
        if asked == NONE:
            return Defaults(eos=eos)
        given = {
            name: value
            for name, value in config.to_diff_dict().items()
            if value is not None and value != [] and not (name in OFF and value == OFF[name])
        }
        if getattr(model.config, "is_encoder_decoder", False):
            given.pop("forced_bos_token_id", None)  # the decoder's text begins with it anyway
        if given.get("do_sample"):
            given.setdefault("temperature", 1.0)
        else:
            given.pop("temperature", None)
        left = {name: why for name, why in NOT_APPLIED.items() if name in given}
        settings = {name: given[name] for name in (*SETTINGS, *OPTIONS, *BEAMS) if name in given}
        for name in [name for name in SETTINGS if name in settings]:
            try:
                Sampling(**{name: settings[name]})
            except ValueError as error:
                del settings[name]
                left[name] = str(error).removesuffix(".")
        others = {name: given[name] for name in (*PENALTIES, *CUTS) if name in given}
        return Defaults(settings, others, left, eos)

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call, with the model's settings in place of those that are None or missing."""
        given = {name: value for name, value in options.items() if value is not None}
        aliases = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        own = {name: value for name, value in self.settings.items() if aliases.get(name) not in given}
        if "grammar" in given:
            own.pop("min_new_tokens", None)
        for name in BEAMS if given.get("num_beams", 1) == 1 else ("max_time",):
            own.pop(name, None)
        most = given.get("max_new_tokens", given.get("max_tokens", own.get("max_new_tokens")))
        if "min_new_tokens" in own and is_whole(most):
            own["min_new_tokens"] = min(own["min_new_tokens"], most)
        return {**own, **given}

    def processors(self, most: int, settings: Mapping[str, Any]) -> ConfiguredProcessors | None:
        """Return the processors of a call of at most so many tokens with these settings; None if there are none."""
        grammar, least = settings.get("grammar") is not None, settings.get("min_new_tokens") is not None
        unused = {*(ENDS if grammar else ()), *(("min_length",) if least else ())}
        others = {name: value for name, value in self.others.items() if name not in unused}
        return ConfiguredProcessors(others, self.eos, most) if others else None

    @property
    def notes(self) -> list[str]:
        """The sentences for users: what applies to their calls, and what does not."""
        notes = list[str]()
        if applied := {**self.settings, **self.others}:
            settings = ", ".join(
                f"{name} ({len(value)})" if isinstance(value, list | tuple | dict) else f"{name}={value}"
                for name, value in applied.items()
            )
            notes.append(
                f"the model's generation config sets {settings}; what a call sets itself comes first, and "
                "generation_config='none' (--generation-config none) leaves all of it out."
            )
        if self.left:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left.items())
            notes.append(f"of the model's generation config this is not applied: {reasons}.")
        return notes


def _config(model: Any, asked: Any) -> GenerationConfig:
    if asked == AUTO or isinstance(asked, GenerationConfig):
        return model.generation_config if asked == AUTO else asked
    try:
        return GenerationConfig.from_pretrained(asked)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"generation_config={asked!r} is not possible: give 'auto' for the model's, 'none', a folder with a "
            "generation_config.json, or a GenerationConfig."
        ) from error


@dataclass(frozen=True)
class ConfiguredProcessors:
    """Makes the processors that a generation config asks for by `given`, for texts of at most so many tokens."""

    given: Mapping[str, Any]
    eos: frozenset[int]
    most: int

    def penalties(self, prompt_length: int, device: torch.device) -> list[Processor]:
        """Return those that change single logits, for a row whose prompt has `prompt_length` tokens."""
        eos, where = sorted(self.eos), str(device)
        begin = prompt_length + (prompt_length == 1 and "forced_bos_token_id" in self.given)
        makers: dict[str, Callable[[Any], Processor]] = {
            "sequence_bias": hf.SequenceBiasLogitsProcessor,
            "bad_words_ids": lambda value: hf.NoBadWordsLogitsProcessor(value, eos or None),
            "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
            "forced_eos_token_id": lambda value: hf.ForcedEOSTokenLogitsProcessor(
                prompt_length + self.most, value, where
            ),
            "remove_invalid_values": lambda value: hf.InfNanRemoveLogitsProcessor(),
            "suppress_tokens": lambda value: Suppress(value, device),
            "begin_suppress_tokens": lambda value: SuppressAfter(value, device, begin),
        }
        if eos:
            makers["min_length"] = lambda value: hf.MinLengthLogitsProcessor(value, eos, where)
            makers["exponential_decay_length_penalty"] = lambda value: hf.ExponentialDecayLengthPenalty(
                tuple(value), eos, prompt_length
            )
        return [makers[name](self.given[name]) for name in PENALTIES if name in self.given and name in makers]

    def cuts(self, least: int) -> list[Processor]:
        """Return those that shape the law of sampled texts, of which each leaves at least so many tokens."""
        keep = {name: {} if name == "top_h" else {"min_tokens_to_keep": least} for name in CUTS}
        return [make(self.given[name], **keep[name]) for name, make in CUTS.items() if name in self.given]
