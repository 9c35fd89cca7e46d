"""Sampling settings: they turn logits into the law really sampled from.

Standardized sampling (section 2.2 of arXiv 2211.17192): argmax, temperature, top-k, nucleus and the rest are maps
from logits to a distribution. They are applied at every position of a round, on the prefix that position really
has, to target and draft alike; after that everything is plain sampling from a law. The processors are those of
transformers, in its order: bias, penalties, bans, the user's own, then the warpers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from slipstream.core.law import Fault, Law, ModelFault, RowFailure, wide
from slipstream.core.options import SAMPLING, SamplingFields
from slipstream.core.request import Prefixes, Row
from slipstream.core.values import OptionError, is_real, is_whole
from slipstream.decoding.grammar import Grammar, GrammarMask
from slipstream.kernels.laws import greatest

Processor = Callable[[Tensor, Tensor], Tensor]
"""A logits processor in transformers' convention: (input_ids (1, length), scores (1, vocab)) -> scores.

Its method `process_positions`, if it has one, takes the scores (positions, vocab) of all positions of a row, each after
its own prefix (length,).
"""


class ModelProcessors(Protocol):
    """What a model asks for besides the settings of a call, such as tokens that its generation config suppresses."""

    def penalties(self, prompt_length: int, device: torch.device) -> Sequence[Processor]:
        """Return the processors that change single logits, for a row whose prompt has `prompt_length` tokens."""

    def cuts(self, least: int) -> Sequence[Processor]:
        """Return the processors that shape the law of sampled texts, each of which leaves `least` tokens or more."""


class Suppress(LogitsProcessor):
    """Makes tokens impossible, as transformers' does, which looks for them in the whole vocabulary at each call."""

    def __init__(self, tokens: Sequence[int], device: torch.device) -> None:
        self.tokens = torch.tensor(list(tokens), dtype=torch.long, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, self.tokens[self.tokens < scores.shape[-1]], -math.inf)


class SuppressAfter(Suppress):
    """Makes tokens impossible at one position only, after `length` tokens."""

    def __init__(self, tokens: Sequence[int], device: torch.device, length: int) -> None:
        super().__init__(tokens, device)
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids, scores) if input_ids.shape[-1] == self.length else scores

    def process_positions(self, prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """See `Processor`; the same scores where none of the positions is the one."""
        if all(len(prefix) != self.length for prefix in prefixes):
            return scores
        return torch.cat([self(prefix[None], scores[j : j + 1]) for j, prefix in enumerate(prefixes)])


# Processors that do not depend on the prefix: applied to all positions of all rows in one call.
PREFIX_FREE = frozenset(
    {
        *(hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper),
        *(hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.LogitNormalization),
        *(hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor, Suppress),
    }
)


class AppearancePenalty(LogitsProcessor):
    """Presence and frequency penalties as OpenAI and vLLM define them: on the output only, not on the prompt."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        output = input_ids[:, self.prompt_length :]
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


WARPS = tuple(name for name, option in SAMPLING.items() if option.warps)
"""The options that cut the law, unless it is greedy."""


@dataclass(frozen=True, eq=False)
class Sampling(SamplingFields):
    """The settings of sampling. The default is greedy decoding.

    `eos` are the tokens that end a text; the first `min_new_tokens` may not be one of them. `grammar` masks the outputs
    that it does not allow, before anything else changes the logits. `processors` are the user's own, e.g. a
    `LogitsProcessorList`: each is called with `(input_ids (1, length), scores (1, vocab))` for one row and position at
    a time. `model_processors` makes those that the model itself asks for. Raises ValueError, in one sentence, for
    values that are not possible.
    """

    eos: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    processors: Sequence[Processor] = ()
    model_processors: ModelProcessors | None = None
    _chains: dict[tuple[int, torch.device], tuple[Processor, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, option in SAMPLING.items():
            option.check(getattr(self, name))
        _check_bias(self.logit_bias)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise OptionError(f"grammar={self.grammar!r} is not possible: give one that `engine.grammars` has made.")
        for word in self.bad_words:
            if isinstance(word, str) or not word or not all(is_whole(token) and token >= 0 for token in word):
                raise OptionError(f"bad_words holds {word!r}, but a word is a list of one or more token ids.")
        for processor in self.processors:
            if not callable(processor):
                raise OptionError(f"processors holds {processor!r}, but a processor is called as (input_ids, scores).")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def temperature_alone(self) -> float | None:
        """The temperature, if nothing else shapes the law (0 is greedy); None otherwise."""
        warped = any(getattr(self, name) != SAMPLING[name].default for name in WARPS)
        if self.model_processors is not None or self.processors or (warped and not self.greedy):
            return None
        return None if self._penalties(0, torch.device("cpu")) else self.temperature

    def for_beams(self) -> Sampling:
        """Return these settings for beams that are sampled: what shapes the law becomes processors of its logarithm.
        As in transformers, cuts leave one token more than the number of those that end a text, and at least two."""
        off = {name: SAMPLING[name].default for name in ("temperature", *WARPS)}
        return replace(self, processors=(*self.processors, *self._warpers(max(2, 1 + len(self.eos)))), **off)

    def chain(self, prompt_length: int, device: torch.device) -> tuple[Processor, ...]:
        if (prompt_length, device) not in self._chains:
            # As in transformers, a user's processor comes in place of one of its kind that the settings ask for.
            kinds = {type(processor): processor for processor in reversed(self.processors)}
            chain = [kinds.get(type(each), each) for each in self._penalties(prompt_length, device)]
            chain += [each for each in self.processors if each not in chain]
            self._chains[prompt_length, device] = (*chain, *(() if self.greedy else self._warpers()))
        return self._chains[prompt_length, device]

    def _penalties(self, prompt_length: int, device: torch.device) -> list[Processor]:
        chain: list[Processor] = []
        if self.grammar is not None:
            chain.append(GrammarMask(self.grammar, prompt_length))
        if self.logit_bias:
            chain.append(
                hf.SequenceBiasLogitsProcessor([[[int(token)], float(bias)] for token, bias in self.logit_bias.items()])
            )
        if self.repetition_penalty != 1:
            chain.append(hf.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.presence_penalty or self.frequency_penalty:
            chain.append(AppearancePenalty(self.presence_penalty, self.frequency_penalty, prompt_length))
        if self.no_repeat_ngram_size:
            chain.append(hf.NoRepeatNGramLogitsProcessor(int(self.no_repeat_ngram_size)))
        if self.bad_words:
            words = [list(word) for word in self.bad_words]
            chain.append(hf.NoBadWordsLogitsProcessor(words, eos_token_id=sorted(self.eos) or None))
        if self.min_new_tokens and self.eos:
            eos = torch.tensor(sorted(self.eos), device=device)
            chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, eos))
        if self.model_processors is not None:
            chain += self.model_processors.penalties(prompt_length, device)
        return chain

    def _warpers(self, least: int = 1) -> list[Processor]:
        """Return the processors that shape the law, of which each leaves at least so many tokens."""
        chain: list[Processor] = []
        if self.temperature != 1:
            chain.append(hf.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            chain.append(hf.TopKLogitsWarper(self.top_k, min_tokens_to_keep=least))
        if self.top_p < 1:
            chain.append(hf.TopPLogitsWarper(self.top_p, min_tokens_to_keep=least))
        if self.min_p:
            chain.append(hf.MinPLogitsWarper(self.min_p, min_tokens_to_keep=least))
        if self.typical_p < 1:
            chain.append(hf.TypicalLogitsWarper(mass=self.typical_p, min_tokens_to_keep=least))
        if self.model_processors is not None:
            chain += self.model_processors.cuts(least)
        return chain

    def law(self, logits: Tensor, rows: Sequence[Row], texts: Prefixes, model: str) -> Law:
        """Return the law really sampled from, in float32 or wider, from logits (rows, positions, vocab).

        Raises RowFailure, a FloatingPointError, if a position has none: the logits hold NaN or infinity, a processor
        raises or returns NaN or another shape, or no token is left. It names model or processor, text and position.
        """
        scores = wide(logits)
        try:
            processed = self._process(scores, rows, texts)
        except Exception:  # a user's processor may raise anything
            return self._law_by_position(scores, rows, texts, model)
        law, certain = self._law(processed)
        return law if certain else self._law_by_position(scores, rows, texts, model)

    def _law(self, scores: Tensor) -> tuple[Law, bool]:
        law, total = law_of_scores(scores, self.greedy)
        return law, math.isfinite(sum(total.flatten().tolist()))

    def _process(self, scores: Tensor, rows: Sequence[Row], texts: Prefixes) -> Tensor:
        chains = [self.chain(len(row.request.prompt), scores.device) for row in rows]
        prefixes: list[list[Tensor]] = []
        for stage, processor in enumerate(chains[0]):
            if type(processor) in PREFIX_FREE:
                flat = scores.flatten(0, 1)
                cut = partial(nucleus, processor) if type(processor) is hf.TopPLogitsWarper else processor
                scores = cut(texts.drafted.new_empty(flat.shape[0], 0), flat).view_as(scores)
                continue
            prefixes = prefixes or [texts.of_row(row, r) for r, row in enumerate(rows)]
            given = list(scores)
            made = list[Tensor]()
            for chain, texts_so_far, own in zip(chains, prefixes, given, strict=True):
                each: Any = chain[stage]
                if hasattr(each, "process_positions"):
                    made.append(each.process_positions(texts_so_far, own))
                else:
                    parts = [_apply(each, text, own[j : j + 1]) for j, text in enumerate(texts_so_far)]
                    made.append(torch.cat(parts))
            if any(new is not old for new, old in zip(made, given, strict=True)):
                scores = torch.stack(made)
        return scores

    def _law_by_position(self, scores: Tensor, rows: Sequence[Row], texts: Prefixes, model: str) -> Law:
        laws, faults, count = list[Law](), dict[tuple[int, int], Fault](), scores.shape[1]
        for r, row in enumerate(rows):
            prefixes = texts.of_row(row, r)
            parts = [self._law_at(scores[r, j : j + 1], row, prefixes[j], model) for j in range(count)]
            laws.append(Law.join([law for law, _ in parts], 1))
            faults |= {(r, j): fault for j, (_, fault) in enumerate(parts) if fault}
        law = Law.join(laws, 0)
        if faults:
            raise RowFailure(faults, law)
        return law

    def _law_at(self, logits: Tensor, row: Row, prefix: Tensor, model: str) -> tuple[Law, Fault | None]:
        """Return the law (1, 1) of logits (1, vocab) after a prefix; or an arbitrary one, and the fault."""
        where = f"text {row.index} after {len(prefix)} tokens"
        scores, culprit = logits, ""
        try:
            for processor in self.chain(len(row.request.prompt), logits.device):
                culprit = culprit if scores.isnan().any() else _name(processor)
                scores = _apply(processor, prefix, scores)
        except Exception as error:
            failed = f"the processor {_name(processor)} fails for {where}:"
            if isinstance(error, _WrongShape):
                return self._arbitrary(logits), Fault(f"{failed} {error}")
            return self._arbitrary(logits), Fault.of(f"{failed} {type(error).__name__}: {error}", error)
        best, best_logit = float(scores.max()), float(logits.max())
        if math.isfinite(best) or (self.greedy and best == math.inf and math.isfinite(best_logit)):
            return self._law(scores[None])[0], None
        if not math.isfinite(best_logit):
            return self._arbitrary(logits), ModelFault(
                f"{model} gives non-finite logits for position {len(prefix)} of text {row.index}: the weights are "
                "damaged or overflow in this dtype (try bfloat16 or float32)."
            )
        if best == -math.inf:
            return self._arbitrary(logits), Fault(
                f"no token is possible for {where}: the sampling settings or a processor forbid every token of the "
                "vocabulary."
            )
        value = "NaN" if math.isnan(best) else "infinity"
        return self._arbitrary(logits), Fault(f"the processor {culprit} fails for {where}: it returns {value}.")

    def _arbitrary(self, logits: Tensor) -> Law:
        return self._law(torch.zeros_like(logits)[None])[0]


def nucleus(warper: hf.TopPLogitsWarper, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Cut laws (rows, vocab) as transformers' warper does, which sorts them for as long as a small pass.
    Tokens rarer than (1 - top_p) / vocab weigh less than 1 - top_p together, so that they go in any order."""
    laws, out, least = scores.softmax(-1), 1 - warper.top_p, warper.min_tokens_to_keep
    likely = laws > out / scores.shape[-1]
    if scores.device.type != "cpu" or int((counts := likely.sum(-1)).min()) < least:  # or there is no law
        return cast("Tensor", warper(input_ids, scores))
    rows, tokens = likely.nonzero(as_tuple=True)
    inside = torch.arange(int(counts.max())) < counts[:, None]  # where likely tokens stand, closed up to the left
    order = scores.new_full(inside.shape, -math.inf).masked_scatter_(inside, scores[rows, tokens]).argsort(stable=True)
    some = scores.new_zeros(inside.shape).masked_scatter_(inside, laws[rows, tokens])
    total = some.gather(1, order).cumsum(1, dtype=torch.float64)
    stays = (total + (laws.sum(-1, dtype=torch.float64) - total[:, -1])[:, None]).to(laws.dtype) > out
    stays[:, -least:] = True
    kept = torch.zeros_like(stays).scatter_(1, order, stays)[inside]
    places = rows[kept], tokens[kept]
    return torch.full_like(scores, warper.filter_value).index_put_(places, scores[places])


def law_of_scores(scores: Tensor, greedy: bool) -> tuple[Law, Tensor]:
    """Make a law of processed scores (rows, positions, vocab), and return numbers (rows, positions) that are finite
    exactly where it is valid."""
    if greedy:
        # NaN or infinite exactly if there is a NaN, +inf, or nothing but -inf
        values, tokens = greatest(scores)
        return Law(tokens=tokens, scores=scores), values
    probs = scores.softmax(-1)  # any of these makes all of it NaN, so that one token is enough to see it
    return Law(probs=probs), probs[..., 0]


def temperatures_of(rows: Sequence[Row]) -> list[float] | None:
    """Return the temperature of each row; None if other settings than temperatures shape any of their laws."""
    samplers = [row.request.sampler for row in rows]
    known = [sampler.temperature_alone for sampler in samplers if isinstance(sampler, Sampling)]
    temperatures = [each for each in known if each is not None]
    return temperatures if len(temperatures) == len(samplers) else None


def _check_bias(biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise OptionError(f"logit_bias={biases!r} is not possible: it must be a dict of token ids and numbers.")
    for token, bias in biases.items():
        if not is_whole(token) or token < 0:
            raise OptionError(f"logit_bias has the key {token!r}, but a token id is a whole number, 0 or more.")
        if not is_real(bias) or not bias < math.inf:
            raise OptionError(
                f"logit_bias={{{token}: {bias!r}}} is not possible: a bias is a finite number, or -inf to forbid it."
            )


class _WrongShape(ValueError):
    """Raised if a processor returns something other than scores of the right shape."""


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", None) or type(processor).__name__


def _apply(processor: Processor, prefix: Tensor, scores: Tensor) -> Tensor:
    """Apply a processor to scores (1, vocab) after a prefix (length,)."""
    processed = processor(prefix[None], scores.clone())
    if getattr(processed, "shape", None) != scores.shape:
        shape = getattr(processed, "shape", None)
        what = f"no scores but {type(processed).__name__}" if shape is None else f"scores of shape {tuple(shape)}"
        raise _WrongShape(f"it returns {what}, and not of shape {tuple(scores.shape)}.")
    return processed
