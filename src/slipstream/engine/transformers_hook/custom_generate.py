"""Speculative decoding inside transformers' own `generate`, through its `custom_generate` hook.

`generate` prepares everything (processors, stopping criteria, lengths, padding); we only run the decoding loop, and
return what it would have returned. What cannot be honoured is refused in one sentence, before any work.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateBeamDecoderOnlyOutput

from slipstream.core.beams import Beams, Hypothesis
from slipstream.core.draft import Verifier
from slipstream.core.protocols import Controller, Drafter, Traits
from slipstream.core.request import Request, Row
from slipstream.core.stats import Stats
from slipstream.core.values import whole_number
from slipstream.decoding.beam import beam_search
from slipstream.decoding.controllers import controller
from slipstream.decoding.decoder import Decoder, Experience
from slipstream.decoding.generate import rounds, succeeded
from slipstream.decoding.rules import TOKEN, Rule
from slipstream.decoding.sampling import Processor
from slipstream.decoding.scheduler import check_requests
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.specification import DrafterTerm, drafter, parse
from slipstream.engine.transformers_hook.batch import Batch
from slipstream.engine.transformers_hook.cache import Continued, ReadPrompt
from slipstream.engine.transformers_hook.call import (
    Opening,
    SignatureWithTokenizer,
    refuse_inputs,
    refuse_mode,
    withheld,
)
from slipstream.execution.names import CACHE
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.adapters import merged
from slipstream.models.loading.faults import refuse_missing
from slipstream.models.loading.load import load_model

NO_SCORE = -1e9  # the score that transformers gives a text that does not exist


def beams_of(config: Any) -> Beams | None:
    if not config.num_beams or config.num_beams == 1:
        return None
    texts, sampled = config.num_return_sequences or 1, bool(config.do_sample)
    return Beams(config.num_beams, config.length_penalty, config.early_stopping, texts, sampled)


class BeamCall:
    """One call of `generate` with beams: input_ids (prompts * num_beams, width) -> (prompts * texts, longest).
    Raises ValueError for what cannot be honoured: a prompt that is embeddings or lies in a cache, logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        handed: tuple[Sequence[Processor], Sequence[Any], Any],
        call: dict[str, Any],
        inputs: dict[str, Any],
    ) -> None:
        processors, criteria, config = handed
        beams = beams_of(config)
        assert beams is not None
        if inputs.get("inputs_embeds") is not None or (call.get("kwargs") or {}).get(CACHE) is not None:
            raise ValueError(f"inputs_embeds and {CACHE} cannot be honoured with num_beams: pass the prompt's tokens.")
        if config.return_dict_in_generate and config.output_logits:
            raise ValueError(
                "output_logits cannot be honoured with num_beams, for a draft changes which logits there are: "
                "leave it out."
            )
        self.beams, self.config = beams, config
        once = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == len(input_ids):
                once[name] = value[:: beams.num_beams]  # it was repeated for every beam
        ids = input_ids[:: beams.num_beams]
        plain = copy(config)
        plain.return_dict_in_generate = False  # neither scores by step nor a cache are kept
        plain.do_sample = False  # sampled beams are drawn from scores, which `generate`'s processors have shaped
        opening = Opening.of(model, ids, plain, call, once)
        self.batch = Batch(ids, opening.prompts, processors, criteria, plain)

    def run(self, decoder: Decoder, seed: int) -> tuple[Any, Stats]:
        away = decoder.target.device != self.batch.ids.device
        requests = [replace(request, beams=self.beams) for request in self.batch.requests(seed, away)]
        searches = beam_search(replace(decoder, batch_size=len(requests)), requests)
        for search in searches:
            if search.error:
                raise search.error.cause or FloatingPointError(search.error)
        stats = sum((search.stats for search in searches), Stats())
        hypotheses, requested = [list(search.hypotheses()) for search in searches], self.beams.num_return_sequences
        for some in hypotheses:  # where fewer were found than requested, empty ones fill the places
            some += [Hypothesis((), NO_SCORE, "length")] * (requested - len(some))
        texts, ids, ends = [each for some in hypotheses for each in some], self.batch.ids, self.config._eos_token_tensor
        fill = -1 if ends is None else self.batch.pad or int(ends[0])  # as in `generate`, to which a pad of 0 is unset
        longest = max(len(each.tokens) for each in texts)
        padded = [[*each.tokens, *[fill] * (longest - len(each.tokens))] for each in texts]
        output = torch.tensor(padded, dtype=torch.long, device=ids.device)
        sequences = torch.cat([ids.repeat_interleave(self.beams.num_return_sequences, 0), output], 1)
        if not self.config.return_dict_in_generate:
            return sequences, stats
        scores = torch.tensor([each.score for each in texts], device=ids.device) if self.config.output_scores else None
        return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=scores), stats


Source: TypeAlias = str | Path | PreTrainedModel  # A hub name, a folder or a loaded model


def custom_generate(
    draft: Source, gamma: int | str | Controller = 5, *, verifier: Rule | Verifier = TOKEN, seed: int | None = None
) -> CustomGenerate:
    """Make transformers' `generate` speculative: the same law, fewer calls of the model.

    >>> speculate = custom_generate("path/or/name/of/a/draft", gamma=5)  # doctest: +SKIP
    >>> model.generate(**inputs, custom_generate=speculate, max_new_tokens=64, do_sample=True)  # doctest: +SKIP

    `draft` is a loaded model, used as it is, a folder or hub name, loaded at the first call with the model's device and
    dtype, or what drafts from texts alone ("lookup", ...). `gamma` is how many tokens to draft per round, "auto", or a
    controller; `verifier` a rule of `slipstream.decoding.rules`, or a verifier. `seed=None` takes a seed from torch's
    global generator whenever a call samples (see `torch.manual_seed`); an integer gives every call the same randomness.

    Returns what `generate` returns: token ids (rows, longest), prompt included, padded on the right; or a
    `GenerateDecoderOnlyOutput` with `sequences`, and `scores` and `logits` if requested: one (rows, vocab) per
    position, where a row that has ended shows its certain pad token; and with the cache, as `generate` leaves
    it, which costs one more pass of the model over what was emitted (none with `use_cache=False`).

    Logits processors and stopping criteria are honoured. Your own must not keep a state (processors see drafts,
    which may be rejected) nor mix rows: they see one row at a time, repeated to the size of the batch.

    `cache` (a DynamicCache or StaticCache; `past_key_values` before transformers 5.24) may hold the beginning of the
    prompts, and holds their continuations afterwards, for the next turn of a chat. Pass whole prompts with it, as
    chats do: the draft cannot read tokens that are only in the cache, and its guesses are worse. `inputs_embeds` are
    read by the model; the draft reads the tokens nearest to them.

    With `num_beams`, beam search finds what `generate` finds: `sequences` and `sequences_scores`, without scores by
    step and without a cache. Sampled beams have the law that they have there, but not the same texts: each prompt draws
    by itself.

    Keep the callable to keep the draft and both caches; it serves one call at a time. `.stats` holds the counts of the
    last call, over all its rows. It can be copied and pickled: its settings and a draft given as a model go along, the
    caches do not. Raises ValueError in one sentence for what it cannot honour: groups of beams and other modes,
    an assistant, quantized and offloaded caches, other model inputs of your own, attentions and hidden states,
    guidance.
    """
    if not isinstance(verifier, Rule) and not callable(verifier):
        raise ValueError(f"verifier={verifier!r} is not possible: give one of slipstream.decoding.rules or a verifier.")
    rule = verifier if isinstance(verifier, Rule) else Rule("own", verifier)
    if rule.paths:
        raise ValueError(f"verifier={rule.name!r} is not possible: `generate` runs chains; use slipstream.load.")
    return CustomGenerate(draft, controller(gamma), rule, None if seed is None else whole_number("seed", seed, 0))


class CustomGenerate:
    """The callable that `custom_generate` returns; see there. `stats` are the counts of the last call."""

    def __init__(self, draft: Source, controller: Controller, rule: Rule, seed: int | None) -> None:
        self.stats = Stats()
        term = parse(draft) if isinstance(draft, str) and not Path(draft).exists() else DrafterTerm("model")
        self._by_text = not (isinstance(term, DrafterTerm) and term.kind in ("model", "embedded"))
        self._source: Any = draft if self._by_text else merged(draft)
        self._controller, self._rule, self._seed = controller, rule, seed
        self._forget()

    __signature__ = SignatureWithTokenizer()

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
        call = withheld(model)
        streamer = call.get("streamer") if streamer is None else streamer
        if streamer is not None and len(input_ids) > 1:
            raise ValueError("a streamer needs a single row: the rows of a batch advance at different paces.")
        refuse_mode(model, generation_config, call)
        refuse_inputs(logits_processor, model_kwargs)
        if beams_of(generation_config) is not None:
            handed = (logits_processor, stopping_criteria, generation_config)
            searching = BeamCall(model, input_ids, handed, call, model_kwargs)
            with self._locked(model):
                decoder = Decoder(*self._pair(model), controller=self._controller)
                result, self.stats = searching.run(decoder, self._seed_of(searching.config))
                return result
        opening = Opening.of(model, input_ids, generation_config, call, model_kwargs)
        batch = Batch(input_ids, opening.prompts, logits_processor, stopping_criteria, generation_config)
        with self._locked(model):
            return self._decode(model, batch, opening, streamer)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings alone: a copy loads a draft given by name or folder again, and has caches of its own."""
        kept = ("stats", "_source", "_by_text", "_controller", "_rule", "_seed")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._loaded: PreTrainedModel | None = None
        self._scorers: tuple[CausalScorer, ...] = ()
        self._named: Drafter | None = None
        self._made_for: tuple[Any, ...] = ()
        self._busy, self._experience = threading.Lock(), Experience()

    def _models(self, model: PreTrainedModel) -> tuple[PreTrainedModel, ...]:
        """Return the target, and the draft if that is a model."""
        if self._by_text or isinstance(self._source, PreTrainedModel):
            return (model,) if self._by_text else (model, self._source)
        if self._loaded is None:
            self._loaded = load_model(self._source, dtype=model.dtype, device=str(model.device))
        return model, self._loaded

    def _pair(self, model: PreTrainedModel) -> tuple[CausalScorer, Drafter]:
        """Return the target's Scorer and a drafter; new ones for another model, or if one was moved or converted."""
        models = self._models(model)
        for each in models:
            refuse_missing(each)
        key = tuple((each, each.device, each.dtype) for each in models)
        if self._made_for != key:
            self._scorers = tuple(map(CausalScorer, models))
            self._named = drafter(self._source, BuildContext(self._scorers[0])) if self._by_text else None
            self._made_for = key
        parts = Traits.of(self._named).drafters or [self._named] if self._named else ()
        if not all(Traits.of(each).by_text for each in parts):
            raise ValueError(
                f"draft={self._source!r} runs beside targets that slipstream.load has loaded alone: use that."
            )
        return self._scorers[0], self._named or ModelDrafter(self._scorers[-1], self._scorers[0].vocab)

    def _decode(self, model: PreTrainedModel, batch: Batch, opening: Opening, streamer: Any) -> Any:
        (target, drafts), rule = self._pair(model), self._rule
        away = any(scorer.device != batch.ids.device for scorer in self._scorers)
        requests = batch.requests(self._seed_of(batch.config), away)
        check_requests(target, requests)
        read = opening.read(model, batch)
        decoder = Decoder(
            target, drafts, rule.verify, self._controller, len(requests), rule.rng, experience=self._experience
        )
        rows = _run(_after_prompts(read, decoder, requests), requests, streamer)
        if not batch.pads_ended:
            _to_one_length(decoder, read, rows)
        if any(row.context_full for row in rows):
            warnings.warn(f"the text ends at the {target.context} tokens that {target.name} holds.", stacklevel=2)
        self.stats = sum((row.stats for row in rows), Stats())
        sequences = batch.sequences(rows)
        if read is not None:
            read.take_in(sequences, sequences.shape[1] - batch.ids.shape[1], target.context)
        return batch.result(rows, sequences, read and read.cache)

    def _seed_of(self, config: Any) -> int:
        if self._seed is not None:
            return self._seed
        # Greedy decoding must not advance the generator: `generate` would not either.
        return int(torch.randint(2**63 - 1, ())) if config.do_sample else 0

    @contextmanager
    def _locked(self, model: PreTrainedModel) -> Iterator[None]:
        """Hold the lock of this callable, with both models in evaluation mode for so long."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this callable is already decoding: give each thread a custom_generate(...) of its own.")
        training: list[torch.nn.Module] = []
        try:
            training += [module for each in self._models(model) for module in each.modules() if module.training]
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            self._busy.release()


def _run(decoder: Decoder, requests: Sequence[Request], streamer: Any = None) -> list[Row]:
    """Decode to the end -> rows in order. The streamer gets each token on its own, as from `generate`."""
    rows: dict[int, Row] = {}
    with closing(cast("Any", rounds(decoder, requests))) as stream:  # closed also if a streamer or a criterion raises
        for round in stream:
            rows.update({row.index: row for row in round.rows})
            for token in round.tokens[0] if streamer is not None else ():
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return succeeded(rows[index] for index in range(len(requests)))


def _after_prompts(
    read: ReadPrompt | None, decoder: Decoder, requests: Sequence[Request], rows: Sequence[int] | None = None
) -> Decoder:
    """Return a decoder whose target continues prompts that the model itself has read; `decoder` if `read` is None.
    `requests` are those of `rows`, whose texts have grown since (None: of all rows, whose texts have not)."""
    if read is None:
        return decoder
    counts = [len(request.prompt) for request in requests]
    places = range(len(requests)) if rows is None else rows
    target: Any = Continued(cast("CausalScorer", decoder.target), read, places, counts, all=rows is None)
    return replace(decoder, target=target)


def _to_one_length(decoder: Decoder, read: ReadPrompt | None, rows: Sequence[Row]) -> None:
    """Decode the shorter rows up to the longest: without an EOS token, `generate` ends all rows together."""
    longest = max(len(row.output) for row in rows)
    missing = [(row, longest - len(row.output)) for row in rows if not row.context_full and len(row.output) < longest]
    if not missing:
        return
    more_of = [replace(row.request, prompt=tuple(row.tokens), max_new_tokens=n, stop=None) for row, n in missing]
    decoder = _after_prompts(read, decoder, [row.request for row, _ in missing], [row.index for row, _ in missing])
    for (row, _), more in zip(missing, _run(decoder, more_of), strict=True):
        row.finish_reason = "length" if more.context_full else row.finish_reason
        row.tokens += more.output
        row.stats += more.stats
