"""Converts a call of transformers' `generate` to requests, and the decoded rows to what that call returns.

Processors and stopping criteria receive what `generate` would pass: padding, and as many rows as the batch has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation import logits_process as hf

from slipstream.core.draws import request_key
from slipstream.core.request import Request, Row
from slipstream.decoding.sampling import PREFIX_FREE, Processor, Sampling
from slipstream.execution.names import CACHE

# Processors that treat every row alike: one row at a time, they do what they do in a batch.
ROW_FREE = PREFIX_FREE | {
    *(hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.NoRepeatNGramLogitsProcessor),
    *(hf.SequenceBiasLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.ForcedBOSTokenLogitsProcessor),
    *(hf.ForcedEOSTokenLogitsProcessor, hf.ExponentialDecayLengthPenalty, hf.TopHLogitsWarper),
    *(hf.SuppressTokensAtBeginLogitsProcessor, hf.WatermarkLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor),
}


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and the form in which `generate` would pass a text that begins with them to processors.
    It passes `head`, then the text without its first `hidden` tokens: usually the padding, and the whole text."""

    tokens: tuple[int, ...]
    head: tuple[int, ...] = ()
    hidden: int = 0

    @staticmethod
    def of(ids: Tensor, pads: Sequence[int]) -> list[Prompt]:
        """Make a prompt of each row of ids (rows, width), which has `pads[r]` padding tokens at its left."""
        rows = zip(map(tuple, ids.tolist()), pads, strict=True)
        return [Prompt(row[count:], row[:count]) for row, count in rows]


@dataclass(frozen=True, eq=False)
class _InBatch:
    """Calls a processor with what `generate` would pass: the row with its padding, among as many rows as the batch has.
    The other rows are copies of this one, so that a processor finds what it keeps per row at the right place."""

    processor: Processor
    batch: Batch
    row: int
    copies: int  # the size of the batch, or 1 for processors that treat every row alike
    ours: bool  # known to take any text; other processors are not called with texts that generate would never pass

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = self.batch.shown(self.row, input_ids)
        if not self.ours and self.batch.is_over(ids):
            return scores
        done = self.processor(ids.repeat(self.copies, 1), scores.to(ids.device).repeat(self.copies, 1))
        place = self.row if self.copies > 1 else 0
        return done[place : place + 1].to(scores.device)


class _Record:
    """A processor that changes nothing and keeps the scores that it receives, by text length.

    The target's scores come after the draft's, and later rounds overwrite rejected tokens': those that stay are the
    target's.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen[input_ids.shape[1]] = scores.float()
        return scores


class Batch:
    """One call of `generate`: its prompts as requests, and the rows as its result."""

    def __init__(
        self,
        ids: Tensor,
        prompts: Sequence[Prompt],
        processors: Sequence[Processor],
        criteria: Sequence[Any],
        config: Any,
    ) -> None:
        self.ids, self.prompts = ids, prompts
        self.processors, self.criteria, self.config = processors, criteria, config
        ends = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
        self.eos = frozenset(int(token) for end in ends for token in torch.as_tensor(end).flatten())
        self.pads_ended = bool(ends)  # otherwise generate lets rows that have ended run on with the others
        limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
        self.limit = max(ids.shape[1] + 1, min(limits, default=2**62))
        self.pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
        wanted = config.return_dict_in_generate
        self.scores = [_Record() for _ in prompts] if wanted and config.output_scores else []
        self.logits = [_Record() for _ in prompts] if wanted and config.output_logits else []
        if self.pads_ended and self.pad is None and len(prompts) > 1:
            raise ValueError("rows that end early are padded, but pad_token_id is not set: pass one.")

    def shown(self, row: int, text: Tensor) -> Tensor:
        """Return a text of the row, (1, length), as `generate` would pass it to processors and criteria."""
        prompt = self.prompts[row]
        head = torch.tensor([prompt.head], dtype=torch.long, device=self.ids.device)
        return torch.cat([head, text[:, prompt.hidden :].to(self.ids.device)], 1)

    def is_over(self, ids: Tensor) -> bool:
        """Whether a text (1, length) continues after its end, as drafts may: nothing of it will be emitted."""
        return ids.shape[1] >= self.limit or not self.eos.isdisjoint(ids[0, self.ids.shape[1] :].tolist())

    def requests(self, seed: int, away: bool) -> list[Request]:
        """Return one request per row. `away`: a model is on another device than the token ids and the processors."""
        samplings: dict[Any, Sampling] = {}
        copies: Counter[tuple[int, ...]] = Counter()
        simple = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in self.criteria)
        room = self.limit - self.ids.shape[1]
        requests = []
        alone = self.scores or self.logits or not all(map(_treats_rows_alike, self.processors))
        prefix_free = all(type(processor) in PREFIX_FREE for processor in self.processors)
        for row, prompt in enumerate(each.tokens for each in self.prompts):
            # Rows of the same kind share their Sampling, so that their laws are computed together.
            kind: Any = row if alone else () if prefix_free else (self.prompts[row].head, self.prompts[row].hidden)
            if kind not in samplings:
                chain = [self._adapt(processor, row, away) for processor in self.processors]
                chain = [*self.logits[row : row + 1], *chain, *self.scores[row : row + 1]]
                samplings[kind] = Sampling(temperature=float(bool(self.config.do_sample)), processors=chain)
            eos, stop = (self.eos, None) if simple else (frozenset[int](), self._stop(row))
            key = request_key(prompt, copies[prompt])
            salt = f"row {row}"  # equal tokens may stand for different embeddings: each row is read for itself
            requests.append(Request(prompt, samplings[kind], room, eos, seed, key, stop, cache_salt=salt))
            copies[prompt] += 1
        return requests

    def _adapt(self, processor: Any, row: int, away: bool) -> Processor:
        """Return the processor for one row: itself if it reads the text alone, else called as `generate` would."""
        kind, known = type(processor), type(processor) in ROW_FREE
        own: Any = processor
        if kind is hf.PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            own = kind(lambda _, text: allowed(row, text), 1)
        elif known and not _treats_rows_alike(processor):  # it keeps something for each row
            own = copy(processor)
            own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
        as_it_is = not (self.prompts[row].head or self.prompts[row].hidden)
        if known and not away and (kind in PREFIX_FREE or as_it_is):
            return own
        alone = known or kind is hf.PrefixConstrainedLogitsProcessor
        return _InBatch(own, self, row, 1 if alone else len(self.prompts), known)

    def _stop(self, row: int) -> Callable[[list[int]], str | None]:
        rows, criteria = len(self.prompts), cast("Any", self.criteria)
        start = len(self.prompts[row].tokens)

        def stop(tokens: list[int]) -> str | None:
            ids = self.shown(row, torch.tensor([tokens])).repeat(rows, 1)
            seen = [record.seen for record in self.scores[row : row + 1]]  # criteria are given the scores, if kept
            scores = tuple(seen[0][at].repeat(rows, 1) for at in range(start, len(tokens))) if seen else None
            return "stop" if bool(criteria(ids, scores)[row]) else None

        return stop

    def sequences(self, rows: Sequence[Row]) -> Tensor:
        outputs = [row.output for row in rows]
        longest = max(map(len, outputs))
        padded = [[*output, *[self.pad or 0] * (longest - len(output))] for output in outputs]
        return torch.cat([self.ids, torch.tensor(padded, device=self.ids.device)], 1)

    def result(self, rows: Sequence[Row], sequences: Tensor, cache: Any = None) -> Any:
        """Return token ids (rows, longest), or the record that holds them, scores, logits and the cache."""
        if not self.config.return_dict_in_generate:
            return sequences
        longest = sequences.shape[1] - self.ids.shape[1]
        scores, logits = (self._steps(records, rows, longest) for records in (self.scores, self.logits))
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE: cache})

    def _steps(self, records: Sequence[_Record], rows: Sequence[Row], longest: int) -> tuple[Tensor, ...] | None:
        """Return what was recorded at each emitted position, `longest` times (rows, vocab); None without records."""
        steps = []
        for record, row in zip(records, rows, strict=bool(records)):
            start, count = len(row.request.prompt), len(row.output)
            seen = [record.seen[start + i][0] for i in range(count)]
            record.seen.clear()  # the Sampling may be cached beyond the call, and the record with it
            ended = torch.full_like(seen[0], float("-inf"))
            ended[self.pad or 0] = 0.0
            steps.append(seen + [ended] * (longest - count))
        return tuple(torch.stack(step).to(self.ids.device) for step in zip(*steps, strict=True)) or None


def _treats_rows_alike(processor: Processor) -> bool:
    # The repetition penalty may have a number of tokens to ignore for each row.
    return type(processor) in ROW_FREE and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
