"""Beam search inside transformers' own `generate`, whose rows are the prompts, each repeated for every beam."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateBeamDecoderOnlyOutput

from slipstream.core.beams import Beams, Hypothesis
from slipstream.core.stats import Stats
from slipstream.decoding.beam import beam_search
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.sampling import Processor
from slipstream.engine.transformers_hook.batch import Batch
from slipstream.engine.transformers_hook.call import Opening
from slipstream.execution.names import CACHE

NO_SCORE = -1e9  # the score that transformers gives a text that does not exist


def beams_of(config: Any) -> Beams | None:
    if not config.num_beams or config.num_beams == 1:
        return None
    texts, sampled = config.num_return_sequences or 1, bool(config.do_sample)
    return Beams(config.num_beams, config.length_penalty, config.early_stopping, texts, sampled)


class BeamCall:
    """One call of `generate` with beams: input_ids (prompts * num_beams, width) -> (prompts * texts, longest).

    Raises ValueError for what cannot be honoured: a prompt that is embeddings or lies in a cache, logits.
    """

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
        once = {name: _unrepeated(value, len(input_ids), beams.num_beams) for name, value in inputs.items()}
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
        for texts in hypotheses:  # where fewer were found than requested, empty ones fill the places
            texts += [Hypothesis((), NO_SCORE, "length")] * (requested - len(texts))
        return self._result(hypotheses), stats

    def _result(self, hypotheses: Sequence[Sequence[Hypothesis]]) -> Any:
        texts, ids, ends = [each for some in hypotheses for each in some], self.batch.ids, self.config._eos_token_tensor
        fill = -1 if ends is None else self.batch.pad or int(ends[0])  # as in `generate`, to which a pad of 0 is unset
        longest = max(len(each.tokens) for each in texts)
        padded = [[*each.tokens, *[fill] * (longest - len(each.tokens))] for each in texts]
        output = torch.tensor(padded, dtype=torch.long, device=ids.device)
        sequences = torch.cat([ids.repeat_interleave(self.beams.num_return_sequences, 0), output], 1)
        if not self.config.return_dict_in_generate:
            return sequences
        scores = torch.tensor([each.score for each in texts], device=ids.device) if self.config.output_scores else None
        return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=scores)


def _unrepeated(value: Any, rows: int, beams: int) -> Any:
    """Return every beams-th row of a tensor that was repeated for every beam; other values as they are."""
    return value[::beams] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
