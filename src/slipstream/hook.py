"""Speculative decoding inside transformers' own `generate`, through its `custom_generate` hook.

`generate` prepares everything (processors, stopping criteria, lengths, padding); we only run the decoding loop, and
hand back what it would have returned. Whatever cannot be honoured is refused in one sentence, before any work.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation import logits_process as hf

from slipstream.controllers import controller
from slipstream.decoding import Decoder, rounds
from slipstream.drafters.model import ModelDrafter
from slipstream.models import CausalScorer, load_model
from slipstream.records import Controller, Request, Row, Verifier
from slipstream.rules import TOKEN, Rule
from slipstream.sampling import PREFIX_FREE, Processor, Sampling, request_key
from slipstream.stats import Stats

# Processors that treat every row alike: one row at a time, they do what they do in a batch.
ROW_FREE = PREFIX_FREE | {
    *(hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.NoRepeatNGramLogitsProcessor),
    *(hf.SequenceBiasLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.ForcedBOSTokenLogitsProcessor),
    *(hf.ForcedEOSTokenLogitsProcessor, hf.ExponentialDecayLengthPenalty, hf.TopHLogitsWarper),
    *(hf.SuppressTokensAtBeginLogitsProcessor, hf.WatermarkLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor),
}
# Parts of names, since not every version of transformers has all of them.
STATEFUL = ("ClassifierFreeGuidance", "SynthIDText", "WhisperNoSpeech", "EOSDelayPattern")
# What `generate` itself puts there, or what changes no result.
HARMLESS = {
    *("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"),
    *("return_dict", "tokenizer"),
}
OWN_CACHE = "custom_generate brings a cache of its own, so leave it out"

Source: TypeAlias = str | Path | PreTrainedModel
"""A hub name, a folder or a loaded model."""


def custom_generate(
    draft: Source,
    gamma: int | str | Controller = 5,
    *,
    verifier: Rule | Verifier = TOKEN,
    seed: int | None = None,
) -> Speculation:
    """Make transformers' `generate` speculative: the same law, fewer calls of the model.

    >>> speculate = custom_generate("path/or/name/of/a/draft", gamma=5)  # doctest: +SKIP
    >>> model.generate(**inputs, custom_generate=speculate, max_new_tokens=64, do_sample=True)  # doctest: +SKIP

    `draft` is a loaded model, used as it is, or a folder or hub name, loaded at the first call with the model's
    device and dtype. `gamma` is how many tokens to draft per round, "auto", or a controller; `verifier` a rule of
    `slipstream.rules`, or a verifier. `seed=None` takes a seed from torch's global generator whenever a call
    samples, so `torch.manual_seed` makes it reproducible; an integer gives every call the same randomness.

    Returns what `generate` returns: token ids (rows, longest), prompt included, padded on the right; or a
    `GenerateDecoderOnlyOutput` with `sequences`, and `scores` and `logits` if wanted: one (rows, vocab) per
    position, where a row that has ended shows its certain pad token; its `past_key_values` are None.

    Logits processors and stopping criteria are honoured. Your own must not keep a state (processors look at drafts,
    which may be rejected) nor mix rows: they see one row at a time, repeated to the size of the batch. In place of
    `stop_strings` pass a `StopStringCriteria`: `generate` loses their tokenizer when it is given a callable.

    Keep the callable to keep the draft and both caches; it serves one call at a time. `.stats` pools the last one.
    Raises ValueError in one sentence for what it cannot honour: beam search and other modes, an assistant, caches,
    embeddings or other model inputs of your own, attentions and hidden states, guidance.
    """
    rule = verifier if isinstance(verifier, Rule) else Rule("own", verifier)
    return Speculation(draft, controller(gamma), rule, seed)


class Speculation:
    """The callable that `custom_generate` makes; see there. `stats` are the counts of the last call."""

    def __init__(self, draft: Source, controller: Controller, rule: Rule, seed: int | None) -> None:
        self.stats = Stats()
        self._source, self._controller, self._rule, self._seed = draft, controller, rule, seed
        self._scorers: tuple[CausalScorer, CausalScorer] | None = None
        self._busy = threading.Lock()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Processor],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the decoding loop of `generate`: input_ids (rows, width), left-padded -> (rows, longest)."""
        call = _withheld(model)
        streamer = call.get("streamer") if streamer is None else streamer
        if streamer is not None and len(input_ids) > 1:
            raise ValueError("a streamer needs a single row: the rows of a batch advance at different paces.")
        _refuse_mode(model, generation_config, call)
        _refuse_inputs(logits_processor, model_kwargs, call)
        pads = _padding(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        batch = _Batch(input_ids, pads, logits_processor, stopping_criteria, generation_config)
        with self._alone(model):
            rows = self._decode(model, batch, streamer)
        return batch.result(rows)

    def _draft(self, model: PreTrainedModel) -> PreTrainedModel:
        if not isinstance(self._source, PreTrainedModel):
            self._source = load_model(self._source, dtype=model.dtype, device=str(model.device))
        return self._source

    def _decode(self, model: PreTrainedModel, batch: _Batch, streamer: Any) -> list[Row]:
        seed = self._seed
        if seed is None:  # greedy decoding must not advance the generator: generate would not either
            seed = int(torch.randint(2**63 - 1, ())) if batch.config.do_sample else 0
        if self._scorers is None or self._scorers[0].model is not model:
            self._scorers = (CausalScorer(model), CausalScorer(self._draft(model)))
        target, draft = self._scorers
        drafter, rule = ModelDrafter(draft, target.vocab), self._rule
        decoder = Decoder(target, drafter, rule.verify, self._controller, len(batch.pads), rule.seam)
        away = any(scorer.device != batch.ids.device for scorer in self._scorers)
        rows = _run(decoder, batch.requests(seed, away), streamer)
        if not batch.pads_ended:
            _level(decoder, rows)
        if any(map(_full, rows)):
            warnings.warn(f"the text ends at the {target.context} tokens that {target.name} holds.", stacklevel=2)
        self.stats = sum((row.stats for row in rows), Stats())
        return rows

    @contextmanager
    def _alone(self, model: PreTrainedModel) -> Iterator[None]:
        """One call at a time, with dropout off; every module is as it was afterwards."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this callable is already decoding: give each thread a custom_generate(...) of its own.")
        training: list[torch.nn.Module] = []
        try:
            training += [module for each in (model, self._draft(model)) for module in each.modules() if module.training]
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            self._busy.release()


def _run(decoder: Decoder, requests: Sequence[Request], streamer: Any = None) -> list[Row]:
    """Decode to the end -> rows in order. The streamer gets each token on its own, as `generate` puts them."""
    rows: dict[int, Row] = {}
    with closing(cast(Any, rounds(decoder, requests))) as stream:  # also if a streamer or a criterion raises
        for round in stream:
            rows.update({row.index: row for row in round.rows})
            for token in round.tokens[0] if streamer is not None else ():
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return [rows[index] for index in range(len(requests))]


def _level(decoder: Decoder, rows: Sequence[Row]) -> None:
    """Let the shorter rows run on: without an EOS token, `generate` ends all rows together."""
    longest = max(len(row.output) for row in rows)
    missing = [(row, longest - len(row.output)) for row in rows if not _full(row) and len(row.output) < longest]
    more_of = [replace(row.request, prompt=tuple(row.tokens), max_new_tokens=n, stop=None) for row, n in missing]
    for (row, _), more in zip(missing, _run(decoder, more_of), strict=True):
        row.finish_reason = "length" if _full(more) else row.finish_reason
        row.tokens += more.output
        row.stats += more.stats


def _full(row: Row) -> bool:  # the target's context, before the limit
    return row.finish_reason == "length" and row.room > 0


# ---- what generate was asked for --------------------------------------------------------------------------------


def _withheld(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `generate` that it does not pass on to callables, read from its frame; {} without a frame.

    Up to 5.23 at least, `_extract_generation_mode_kwargs` replaces the dict that holds the streamer, synced_gpus
    and assistant_model; a text streamer would wait for its end forever.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return {name: frame.f_locals.get(name) for name in ("streamer", "synced_gpus", "assistant_model", "kwargs")}
        frame = frame.f_back
    return {}


def _refuse_mode(model: PreTrainedModel, config: Any, call: dict[str, Any]) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError("custom_generate needs a causal language model, but this one is an encoder-decoder.")
    if call.get("assistant_model") is not None:
        raise ValueError("custom_generate has a draft already: leave out assistant_model.")
    mode = config.get_generation_mode(None)
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"custom_generate decodes greedily or by sampling, but these settings ask for {mode.value}.")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(f"cache_implementation={config.cache_implementation!r} cannot be honoured: {OWN_CACHE}.")
    if call.get("synced_gpus"):
        raise ValueError("synced_gpus=True cannot be honoured: the ranks would make different numbers of calls.")


def _refuse_inputs(processors: Sequence[Processor], model_kwargs: dict[str, Any], call: dict[str, Any]) -> None:
    cache = model_kwargs.get("past_key_values")
    if (call.get("kwargs") or {}).get("past_key_values") is not None or (cache is not None and cache.get_seq_length()):
        raise ValueError(f"past_key_values cannot be honoured: {OWN_CACHE}.")
    given = {name for name, value in model_kwargs.items() if value is not None and value is not False}
    if alien := sorted(given - HARMLESS):
        raise ValueError(f"{', '.join(alien)} cannot be honoured: custom_generate feeds token ids and nothing else.")
    for processor in processors:
        if any(part in kind.__name__ for part in STATEFUL for kind in type(processor).__mro__):
            raise ValueError(f"{type(processor).__name__} cannot be honoured: it keeps a state, and drafts may fall.")


def _padding(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """Padding tokens before each row of ids (rows, width)."""
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    pads = (~seen).sum(1)
    if not torch.equal(seen, torch.arange(ids.shape[1], device=ids.device) >= pads[:, None]):
        raise ValueError("attention_mask must be zeros (padding), then ones: pad on the left, without holes.")
    usual = seen.long().cumsum(1) - 1
    if positions is not None and not bool(((positions == usual) | ~seen).all()):
        raise ValueError("position_ids must count every row from 0, as they do by default: leave them out.")
    return pads.tolist()


# ---- rows, as generate shows them -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _InBatch:
    """Shows a processor what `generate` would: the row with its padding, among as many rows as the batch has.

    The other rows are copies of this one, so whatever a processor keeps per row is looked up at the right place.
    """

    processor: Processor
    batch: _Batch
    row: int
    copies: int  # the size of the batch, or 1 for processors that treat every row alike
    ours: bool  # known to take any text; others are spared texts that generate would never show

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (1, length), scores (1, vocab) -> scores (1, vocab)."""
        ids = torch.cat([self.batch.padding(self.row), input_ids.to(self.batch.ids.device)], 1)
        if not self.ours and self.batch.is_over(ids):
            return scores
        done = self.processor(ids.repeat(self.copies, 1), scores.to(ids.device).repeat(self.copies, 1))
        place = self.row if self.copies > 1 else 0
        return done[place : place + 1].to(scores.device)


class _Record:
    """A processor that changes nothing and keeps what it sees, by text length.

    The target looks after the draft, and later rounds overwrite what was rejected: what stays is the target's.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (1, length), scores (1, vocab) -> the same scores."""
        self.seen[input_ids.shape[1]] = scores.float()
        return scores


class _Batch:
    """One call of `generate`: the prompts it shows, and how they become requests and its result."""

    def __init__(
        self, ids: Tensor, pads: list[int], processors: Sequence[Processor], criteria: Sequence[Any], config: Any
    ) -> None:
        self.ids, self.pads, self.processors, self.criteria, self.config = ids, pads, processors, criteria, config
        ends = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
        self.eos = frozenset(int(token) for end in ends for token in torch.as_tensor(end).flatten())
        self.pads_ended = bool(ends)  # otherwise generate lets rows that have ended run on with the others
        limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
        self.limit = max(ids.shape[1] + 1, min(limits, default=2**62))
        self.pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
        wanted = config.return_dict_in_generate
        self.scores = [_Record() for _ in pads] if wanted and config.output_scores else []
        self.logits = [_Record() for _ in pads] if wanted and config.output_logits else []
        if self.pads_ended and self.pad is None and len(pads) > 1:
            raise ValueError("rows that end early are padded, but pad_token_id is not set: pass one.")

    def padding(self, row: int) -> Tensor:
        """The tokens before the row's text, (1, count)."""
        return self.ids[row : row + 1, : self.pads[row]]

    def is_over(self, ids: Tensor) -> bool:
        """Whether a text (1, length) goes on after its end, as drafts do: nothing of it will be emitted."""
        return ids.shape[1] >= self.limit or not self.eos.isdisjoint(ids[0, self.ids.shape[1] :].tolist())

    def requests(self, seed: int, away: bool) -> list[Request]:
        """One request per row. `away`: a model lives on another device than the token ids and the processors."""
        samplings: dict[Any, Sampling] = {}
        copies: Counter[tuple[int, ...]] = Counter()
        simple = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in self.criteria)
        room = self.limit - self.ids.shape[1]
        requests = []
        for row, pads in enumerate(self.pads):
            prompt = tuple(self.ids[row, pads:].tolist())
            if (kind := self._kind(row)) not in samplings:
                samplings[kind] = self._sampling(row, away)
            eos, stop = (self.eos, None) if simple else (frozenset[int](), self._stop(row))
            key = request_key(prompt, copies[prompt])
            requests.append(Request(prompt, samplings[kind], room, eos, seed, key, stop))
            copies[prompt] += 1
        return requests

    def _kind(self, row: int) -> Any:
        """Rows of one kind share their Sampling, so that their laws are made in one go."""
        if self.scores or self.logits or not all(map(_treats_rows_alike, self.processors)):
            return row
        prefix_free = all(type(processor) in PREFIX_FREE for processor in self.processors)
        return () if prefix_free else tuple(self.padding(row)[0].tolist())

    def _sampling(self, row: int, away: bool) -> Sampling:
        chain = [self._adapt(processor, row, away) for processor in self.processors]
        before, after = self.logits[row : row + 1], self.scores[row : row + 1]
        return Sampling(temperature=float(bool(self.config.do_sample)), processors=[*before, *chain, *after])

    def _adapt(self, processor: Processor, row: int, away: bool) -> Processor:
        kind, known = type(processor), type(processor) in ROW_FREE
        own = _of_row(row, processor)
        if known and not away and (kind in PREFIX_FREE or not self.pads[row]):
            return own
        alone = known or kind is hf.PrefixConstrainedLogitsProcessor
        return _InBatch(own, self, row, 1 if alone else len(self.pads), known)

    def _stop(self, row: int) -> Callable[[list[int]], str | None]:
        padding, rows, criteria = self.padding(row)[0].tolist(), len(self.pads), cast(Any, self.criteria)
        start = self.ids.shape[1] - len(padding)

        def stop(tokens: list[int]) -> str | None:
            ids = torch.tensor([*padding, *tokens], device=self.ids.device).repeat(rows, 1)
            seen = [record.seen for record in self.scores[row : row + 1]]  # criteria are given the scores, if kept
            scores = tuple(seen[0][at].repeat(rows, 1) for at in range(start, len(tokens))) if seen else None
            return "stop" if bool(criteria(ids, scores)[row]) else None

        return stop

    def result(self, rows: Sequence[Row]) -> Any:
        """Token ids (rows, longest), or the record that holds them."""
        outputs = [row.output for row in rows]
        longest = max(map(len, outputs))
        padded = [[*output, *[self.pad or 0] * (longest - len(output))] for output in outputs]
        sequences = torch.cat([self.ids, torch.tensor(padded, device=self.ids.device)], 1)
        if not self.config.return_dict_in_generate:
            return sequences
        scores, logits = (self._steps(records, rows, longest) for records in (self.scores, self.logits))
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)

    def _steps(self, records: Sequence[_Record], rows: Sequence[Row], longest: int) -> tuple[Tensor, ...] | None:
        """What was recorded at each emitted position, `longest` times (rows, vocab); None if nothing was wanted."""
        steps = []
        for record, row in zip(records, rows, strict=bool(records)):
            start, count = len(row.request.prompt), len(row.output)
            seen = [record.seen[start + i][0] for i in range(count)]
            record.seen.clear()  # the settings of sampling may be remembered beyond the call
            ended = torch.full_like(seen[0], float("-inf"))
            ended[self.pad or 0] = 0.0
            steps.append(seen + [ended] * (longest - count))
        return tuple(torch.stack(step).to(self.ids.device) for step in zip(*steps, strict=True)) or None


def _treats_rows_alike(processor: Processor) -> bool:
    # The repetition penalty may have a number of tokens to ignore for each row.
    return type(processor) in ROW_FREE and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)


def _of_row(row: int, processor: Any) -> Processor:
    """The processor for this row alone, where it is known what it keeps for each row."""
    if type(processor) is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), 1)
    if type(processor) not in ROW_FREE or _treats_rows_alike(processor):
        return processor
    own = copy(processor)
    own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    return own
