"""Prompts that transformers' own code reads: embeddings, texts that begin in a user's cache, caches to hand back.

The model reads the prompt into transformers' cache, as `generate` would. We copy its keys and values into our cache
and decode there; at the end the model reads what was emitted, so that the cache is as `generate` leaves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from slipstream.core.draft import Tree
from slipstream.core.source import Source
from slipstream.execution.names import CACHE, state_in
from slipstream.models.causal import CausalScorer

KNOWN_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}


def refuse_cache(cache: Any, rows: int, width: int) -> None:
    layers = getattr(cache, "layers", None)
    kinds = sorted({type(layer).__name__ for layer in layers or () if type(layer) not in KNOWN_LAYERS})
    if layers is None or kinds or getattr(cache, "offloading", False):
        kind = ", ".join(kinds) or type(cache).__name__
        raise ValueError(f"{CACHE} of {kind} cannot be honoured: pass a DynamicCache or a StaticCache.")
    held = int(cache.get_seq_length())
    sizes = {layer.keys.shape[0] for layer in layers if layer.is_initialized}
    if held and sizes != {rows}:
        raise ValueError(f"{CACHE} holds {max(sizes)} rows, but there are {rows} prompts: one row for each.")
    if held >= width:
        raise ValueError(
            f"{CACHE} holds {held} tokens, but the prompt has {width}: crop the cache, so that at least one "
            "token of the prompt is not in it."
        )


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A batch of prompts in transformers' cache, with the logits (rows, 1, vocab) of what comes next.
    `pads[r]` of the `width` places of row r are padding; `inputs` are what `generate` keeps for the model's calls."""

    model: PreTrainedModel
    inputs: dict[str, Any]
    cache: Any
    logits: Tensor
    pads: Sequence[int]
    width: int

    @staticmethod
    def read(model: PreTrainedModel, ids: Tensor, config: Any, inputs: dict[str, Any], pads: Sequence[int]) -> Any:
        """Run the model on the prompt and keep its cache and logits; ids (rows, width) are those of `generate`."""
        outputs = model._prefill(ids, config, inputs)
        cache = state_in(outputs)
        return ReadPrompt(model, inputs, cache, outputs.logits[:, -1:].clone(), pads, int(cache.get_seq_length()))

    def states(self, row: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys and values (heads, count, head_dim) by layer, of the row's last tokens, without padding."""
        real, by_layer = self.width - self.pads[row], {}
        for index, layer in enumerate(self.cache.layers):
            if layer.is_initialized:
                keys, values = (states[row, :, : self.width] for states in (layer.keys, layer.values))
                count = min(real, keys.shape[1])  # a sliding window keeps only the last tokens
                by_layer[index] = keys[:, keys.shape[1] - count :], values[:, values.shape[1] - count :]
        return by_layer

    def take_in(self, sequences: Tensor, count: int, context: int | None) -> None:
        """Read emitted tokens into the cache, as `generate` leaves it: sequences (rows, length) without the last token.
        `count` tokens were emitted; rows that have ended are padded, as they are for `generate`."""
        if count < 2:
            return
        inputs: dict[str, Any] = {**self.inputs, CACHE: self.cache}
        inputs = self.model._update_model_kwargs_for_generation({}, inputs, num_new_tokens=count - 1)
        if context and inputs.get("position_ids") is not None:  # padding may stand beyond the last learned position
            inputs["position_ids"] = inputs["position_ids"].clamp(max=context - 1)
        fed = self.model.prepare_inputs_for_generation(sequences[:, :-1], next_sequence_length=count - 1, **inputs)
        self.model(**fed, return_dict=True)


class Continued:
    """A target whose rows begin where a `ReadPrompt` ends (see `protocols.Scorer` for the contract).

    `rows` are the places of its texts in the batch, and `counts[i]` how many tokens of text i the prompt covers. It may
    cover more, hidden from the decoding loop: the tokens of a user's cache before the new ones. If it covers `all` of
    every text, also the last token, the logits after it are known.
    """

    def __init__(
        self, scorer: CausalScorer, prompt: ReadPrompt, rows: Sequence[int], counts: Sequence[int], all: bool
    ) -> None:
        self.scorer, self.prompt, self.rows = scorer, prompt, rows
        self.name, self.vocab, self.device, self.source_form = scorer.name, scorer.vocab, scorer.device, None
        self.prefill, self.scrub, self.fix_shape = scorer.prefill, scorer.scrub, scorer.fix_shape
        covered = [prompt.width - prompt.pads[row] for row in rows]
        self._unseen = [have - count for have, count in zip(covered, counts, strict=True)]
        self._before: list[int] = []  # the hidden tokens before each row that is in the cache
        self.context = scorer.context and scorer.context - max(self._unseen)
        # The logits of the prompt's last token, until `extend` has returned them.
        self._next = prompt.logits[list(rows)].to(self.device) if all else None

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in the cache, per row, without those before the text."""
        return [have - before for have, before in zip(self.scorer.lengths, self._before, strict=True)]

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        """Append the next rows, filled with the keys and values of their prompts."""
        self.scorer.add(rows, sources)
        for place in range(len(self._before), len(self._before) + rows):
            row = self.rows[place]
            self.scorer.fill(place, self.prompt.states(row), self.prompt.width - self.prompt.pads[row])
            self._before.append(self._unseen[place])

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens -> logits (rows, n, vocab); the prompt's last token has been read and is not fed again."""
        if self._next is None:
            return self.scorer.extend(tokens, counts, first, tree)
        known, self._next = self._next, None
        if tokens.shape[1] == 1:
            return known
        return torch.cat([known, self.scorer.extend(tokens[:, 1:], [count - 1 for count in counts], first, tree)], 1)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.scorer.rollback([length + before for length, before in zip(lengths, self._before, strict=True)])

    def fork(self, rows: Sequence[int]) -> None:
        self.scorer.fork(rows)
        self._before += [self._before[row] for row in rows]

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.scorer.keep([start + before for start, before in zip(starts, self._before, strict=True)], paths)

    def free(self, rows: Sequence[int]) -> None:
        self.scorer.free(rows)
        self._before = [before for row, before in enumerate(self._before) if row not in set(rows)]


def nearest_tokens(model: PreTrainedModel, embeddings: Tensor) -> Tensor:
    """Return the tokens (rows, width) whose embeddings are nearest to embeddings (rows, width, size)."""
    table = model.get_input_embeddings().weight[: model.config.get_text_config().vocab_size]
    rows = [(each.to(table) @ table.T - table.square().sum(1) / 2).argmax(1) for each in embeddings]
    return torch.stack(rows).to(embeddings.device)
