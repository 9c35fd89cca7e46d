"""Hugging Face causal language models as Scorers, unmodified.

A Scorer feeds the model explicit positions and an explicit 4-D mask, and a `Cache` that writes each row at its own
slots; the model's own code is not touched. What cannot be rolled back, or does not obey positions and mask, is
refused at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from slipstream.cache.rows import RowCache
from slipstream.core.draft import Tree, padded
from slipstream.core.law import Law
from slipstream.core.protocols import Shape
from slipstream.core.source import Source, SourceForm
from slipstream.execution.draft_graphs import FED, Fused, Room, Wish
from slipstream.execution.encoder_graphs import CompiledReader
from slipstream.execution.graphs import LEAST
from slipstream.execution.inductor import Compiled
from slipstream.execution.masks import Sight, mask_kinds
from slipstream.execution.passes import Cross, Execution, Pass
from slipstream.kernels.packing import shared_columns
from slipstream.models.encoder_decoder import SourceDecoder, Sources
from slipstream.models.families import PROVEN, longest_text, probe, refuse_unsupported

PREFILL_TOKENS = 512
"""Columns of one prefill pass: bounds the memory of masks and activations for long prompts."""


class _HFCache(Cache):
    """transformers' Cache interface over a RowCache."""

    def __init__(self, rows: RowCache) -> None:
        super().__init__(layers=[])
        self.rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.rows.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.rows.past

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.rows.end, 0


class CausalScorer:
    """A causal language model and its cache (see `records.Scorer` for the contract and the shapes).

    Raises ValueError if the model's state cannot be rolled back or its attention ignores positions and masks.
    """

    def __init__(self, model: PreTrainedModel, name: str | None = None, execution: Execution | None = None) -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        self.model = model.eval()
        self._decoder = SourceDecoder(model) if model.config.is_encoder_decoder else None
        self._config = model.config.get_text_config()
        refuse_unsupported(model, self.name)
        self._kinds = mask_kinds(self._config)
        self._relative = self._decoder is not None and self._decoder.relative
        self._looks_at_distance = self._relative or any(map(any, self._kinds.values()))
        self.shape: Shape | None = None
        self.device = model.device  # where tokens go in and logits come out
        self._keeps = model._supports_logits_to_keep()  # looks at signatures: too slow for every pass
        # What runs the passes of an encoder-decoder is its decoder.
        self.execution = execution.of(cast(Any, self._decoder), self.name) if execution and self._decoder else execution
        if self._decoder and isinstance(execution, Compiled):
            self._decoder.reader = CompiledReader(self._decoder.reader, self.name, execution.progress)
        self.fused: Fused | None = None
        # Only where it is known that the layers of a pass see its tokens as (rows, n).
        self._columns = shared_columns(self._decoder or self.model) if self._config.model_type in PROVEN else None
        self._fresh()
        if self._config.model_type not in PROVEN:
            try:
                probe(self, self._config.model_type)
            finally:
                self._fresh()

    def _fresh(self) -> None:
        self._rows = RowCache()
        self._rows.least = self._least
        self._cache = _HFCache(self._rows)
        self._sources = Sources(self._decoder) if self._decoder else None

    @property
    def vocab(self) -> int:
        """Size of the logits."""
        head = self.model.get_output_embeddings()
        return int(getattr(head, "out_features", None) or self._config.vocab_size)

    @cached_property  # asked for several times per round
    def context(self) -> int | None:
        """The longest text it can hold; None if there is no limit."""
        return longest_text(self._config)

    @property
    def source_form(self) -> SourceForm | None:
        """What the encoder reads, if there is one."""
        return self._sources.form if self._sources else None

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return self._rows.lengths

    @property
    def bytes_per_token(self) -> int:
        """Of the cache; 0 before the first pass."""
        return self._rows.bytes_per_token

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        """Append empty rows; an encoder reads the source of each."""
        self._rows.add(rows)
        if self._sources and rows:
            self._sources.add(rows, sources)

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        self._rows.free(rows)
        if self._sources and rows:
            self._sources.free(rows)

    def fill(self, row: int, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> None:
        """Take over a text of `length` tokens: layers have keys and values (heads, count, head_dim) of its end, of as
        many tokens as they ever look back at."""
        self._rows.fill(row, layers, length)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything after `lengths[r]` tokens of each row."""
        self._rows.rollback(lengths)

    def scrub(self) -> None:
        """Zero what rolled-back tokens left in the cache."""
        self._rows.scrub()

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted tokens of a tree together."""
        self._rows.keep(starts, paths)

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens (rows, n), of which `counts[r]` are real -> logits (rows, n, vocab) in the model's dtype."""
        if self.shape:
            return self._extend_exactly(self.shape, tokens, counts, tree)
        rows, count = tokens.shape
        width = count
        if self.execution and tree is None:
            width = self.execution.width(rows, count)
            tokens = torch.nn.functional.pad(tokens, (0, width - count)) if width > count else tokens
        logits = self._forward(tokens, self._rows.place(width, first), keep=0, tree=tree)
        self._rows.advance(counts)
        return logits[:, :count]

    def fuse(self, sizes: Sequence[int], progress: Callable[[str], object] | None = None) -> None:
        """From now on draft by graphs, where that is possible: chains of these sizes by one."""
        self.fused = Fused(self._decoder or self.model, self.name, tuple(sizes), self._kinds, self._relative, progress)

    @torch.inference_mode()
    def chain(self, wish: Wish) -> tuple[Tensor, Law] | None:
        """Draft chains for all texts in the cache -> tokens (rows, gamma) and the law each was drawn from; None where
        that has to be done without graphs."""
        if self.fused is None:
            return None
        lengths, room = list(self.lengths), FED + sum(self.fused.steps(wish))
        if self.context and max(lengths) + room > self.context:
            return None
        if not self._rows.stores:  # nothing was ever fed: there is nothing yet for a graph to write to
            self._prefill([[0]] * len(lengths), 0, None)
            self._rows.rollback(lengths)
        self._rows.reserve(room)
        cross = self._sources.cross(self._rows.part, None) if self._sources else None
        found = self.fused.run(wish, Room(lengths, self._rows.end, self._rows.stores, cross))
        if found is not None:
            fed = zip(wish.fed, wish.gammas, strict=True)
            self._rows.advance([len(tokens) + max(gamma, 1) - 1 for tokens, gamma in fed])
        return found

    @torch.inference_mode()
    def alone(self, text: Sequence[int], source: Source | None = None) -> Tensor:
        """The logits (1, n, vocab) of one text by the model's own ways, without our cache."""
        tokens = torch.tensor([text], device=self.device)
        if self._decoder:
            assert source is not None
            return self._decoder.alone(tokens, source)
        return self.model(tokens, use_cache=False).logits

    @property
    def _least(self) -> int:
        """Slots that passes look at even if fewer are in use."""
        return self.shape.slots if self.shape else LEAST * bool(self.execution)

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape, so that no bit of the logits depends on how many rows and
        tokens are scored together (None: in the shape of the work at hand, which is faster)."""
        self.shape = shape
        self._rows.least = self._least

    def _extend_exactly(self, shape: Shape, tokens: Tensor, counts: Sequence[int], tree: Tree | None) -> Tensor:
        rows, width = tokens.shape
        assert rows <= shape.rows and width <= shape.width and tree is None, f"{tokens.shape} does not fit {shape}"
        self._rows.add(shape.rows - rows)
        fed = torch.nn.functional.pad(tokens, (0, shape.width - width, 0, shape.rows - rows))
        logits = self._forward(fed, self._rows.place(shape.width), keep=0)
        self._rows.free(range(rows, shape.rows))
        self._rows.advance(counts)
        return logits[:rows, :width]

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed whole texts, one for each row from `first` on, in passes of bounded width."""
        if self.shape:  # one by one, so that a row's keys do not depend on which rows it came with
            for row, text in enumerate(texts, first):
                self._prefill([text], first=row, stop=row + 1)
        else:
            self._prefill(texts, first, None)

    def _prefill(self, texts: Sequence[Sequence[int]], first: int, stop: int | None) -> None:
        for start in range(0, max(map(len, texts), default=0), PREFILL_TOKENS):
            parts = [text[start : start + PREFILL_TOKENS] for text in texts]
            counts = [len(part) for part in parts]
            slots = self._rows.place(max(counts), first, stop)
            with self._columns.only(counts, max(counts)) if self._columns else nullcontext():
                self._forward(padded(parts, self.device), slots, keep=1)
            self._rows.advance(counts)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, slots: Tensor, keep: int, tree: Tree | None = None) -> Tensor:
        work = self._pass(tokens, slots.to(self.device), tree)
        if self.execution and not keep and not self._rows.partial:
            logits = self.execution.run(work, self._rows.stores)
            if logits is not None:
                return logits
        out = (self._decoder or self.model)(
            input_ids=tokens,
            attention_mask=work.mask,
            position_ids=work.positions,
            past_key_values=self._cache,
            use_cache=True,
            **work.beside,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )
        return out.logits.to(self.device)

    def _pass(self, tokens: Tensor, slots: Tensor, tree: Tree | None) -> Pass:
        sight = self._sight(slots, tree)
        masks = {kind: sight.mask(*rule, self.model.dtype) for kind, rule in self._kinds.items()}
        positions = sight.own
        if self.context and self._rows.end > self.context:  # padding may stand beyond the last learned position
            positions = positions.clamp(max=self.context - 1)
        return Pass(tokens, positions, slots, masks, self._cross(sight))

    def _cross(self, sight: Sight) -> Cross | None:
        if self._sources is None:
            return None
        return self._sources.cross(self._rows.part, sight.back if self._relative else None)

    def _sight(self, slots: Tensor, tree: Tree | None) -> Sight:
        if tree is not None:
            return Sight.tree(slots, self._rows.end, tree)
        if slots.shape[1] == 1 and self._rows.last_sees_all and not self._looks_at_distance:
            return Sight.everything(slots, self._rows.end)  # a drafting step: nothing to compare
        return Sight.chain(slots, self._rows.end)
