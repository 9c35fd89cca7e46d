"""Encoder-decoder models, unmodified, as decoders that run like causal language models.

The encoder reads every source once. The decoder gets from it the keys and values of cross-attention, which are fixed
from then on: they lie in a `RowCache` of their own, a row per source, and only self-attention rolls back. Decoders
count positions from one offset that all rows share; ours have lengths of their own, so `SourceDecoder` runs a twin of
the model, with the same weights, that receives every row's positions.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from slipstream.cache.rows import RowCache
from slipstream.cache.stores import FloatStore, Store
from slipstream.core.draft import padded
from slipstream.core.source import Source, SourceForm
from slipstream.execution.names import with_cache
from slipstream.execution.passes import Cross, additive
from slipstream.kernels.placement import input_device

States = list[tuple[Tensor, Tensor]]
"""Keys and values (rows, heads, source, head_dim) of cross-attention by layer, as the model computes them."""


@dataclass
class Where:
    """The positions (rows, n) of the running pass, and the distances (rows, n, end) to everything in the cache.
    Both are None outside of our passes."""

    own: Tensor | None = None
    back: Tensor | None = None


class RowPositions(nn.Module):
    """Replaces a decoder's table of positions, so that every row has positions of its own."""

    def __init__(self, table: Any, where: Where) -> None:
        super().__init__()
        self.table: Any = table
        self.where = where
        # M2M100's sinusoids skip the row of padding, which they give to the padding token alone.
        self.padding: int | None = table.padding_idx if hasattr(table, "weights") else None
        if self._weights.is_meta:
            raise ValueError("its table of positions is loaded only while it runs, as by device_map, and is not read")
        self.offset = int(getattr(table, "offset", 0)) if self.padding is None else self.padding + 1

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings (rows, n, width) of the pass's own positions; without a pass, those of the table."""
        if self.where.own is None:
            return self.table(*args, **kwargs)
        places = self.where.own + self.offset
        if self.padding is not None:
            places = places.where(args[0] != self.padding, self.padding)
        return nn.functional.embedding(places, self._weights)

    @property
    def _weights(self) -> Tensor:
        return self.table.weight if self.padding is None else self.table.weights


class RowBias:
    """Replaces `compute_bias` of T5's attention by the bias of every row's own distances.
    All distances from `relative_attention_max_distance` on share one bucket, so a table by distance holds them all."""

    def __init__(self, attention: nn.Module, where: Where) -> None:
        self.attention: Any = attention
        self.where = where
        self.shared = getattr(type(attention), "compute_bias")  # noqa: B009
        self.table: Tensor | None = None  # (distances from 0 on, heads)

    def __call__(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Tensor:
        if self.where.back is None:
            return self.shared(self.attention, query_length, key_length, device, past_seen_tokens)
        far = self.attention.relative_attention_max_distance
        if self.table is None:
            self.table = self.shared(self.attention, 1, far + 1, device, far)[0, :, 0].flip(-1).t()
        return self.table[self.where.back.clamp(0, far)].permute(0, 3, 1, 2)


class _SelfAndCross(EncoderDecoderCache):
    """A cache of self-attention, with keys and values of cross-attention that were computed before."""

    def __init__(self, own: Cache, ready: States) -> None:
        super().__init__(own, _FixedCache(layers=[SimpleNamespace(keys=keys, values=values) for keys, values in ready]))
        self.is_updated = dict.fromkeys(range(len(ready)), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, which nothing reads: every pass brings its own positions."""
        return 0


class _FixedCache(Cache):
    """A cache of fixed layers, to which no pass adds anything."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class _Projections:
    """The projections from the encoder's states to keys and values of cross-attention."""

    keys: nn.Module
    values: nn.Module
    head: int  # the width of a head

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project states (rows, source, width) -> keys and values (rows, heads, source, head_dim)."""
        shape = (*states.shape[:2], -1, self.head)
        keys, values = (part(states).view(shape).transpose(1, 2) for part in (self.keys, self.values))
        return keys, values


class SourceDecoder(nn.Module):
    """The decoder of an encoder-decoder, called like a causal language model with `cross` as one more argument."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.where = Where()
        # A copy of the modules over the same weights, so that the given model stays as it is.
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self._call = with_cache(self.model)
        decoder = self.model.get_decoder()
        if hasattr(decoder, "embed_positions"):
            decoder.embed_positions = RowPositions(decoder.embed_positions, self.where)
        self.relative = False
        for attention in decoder.modules():
            if getattr(attention, "has_relative_attention_bias", False) and hasattr(attention, "compute_bias"):
                attention.compute_bias = RowBias(attention, self.where)
                self.relative = True
        self._projections = _projections(decoder)

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache,
        cross: Cross,
        use_cache: bool = True,
    ) -> Any:
        """Run the decoder like a causal model with explicit positions and a 4-D mask -> logits (rows, n, vocab)."""
        unread = cross.mask.new_zeros(input_ids.shape[0], 1, 1)  # models only test whether encoder states are given
        self.where.own, self.where.back = position_ids, cross.back
        try:
            return self._call(
                encoder_outputs=BaseModelOutput(last_hidden_state=unread),
                attention_mask=cross.mask,
                decoder_input_ids=input_ids,
                decoder_attention_mask=attention_mask,
                cache=_SelfAndCross(cache, cross.seen),
                use_cache=True,
            )
        finally:
            self.where.own = self.where.back = None

    def states(self, sources: Sequence[Source]) -> States:
        states = encoded(self.model, sources)["encoder_outputs"].last_hidden_state
        return [project(states) for project in self._projections]


def encoded(model: Any, sources: Sequence[Source]) -> dict[str, Any]:
    """Run the encoder on sources -> its output and the mask over their padding, as arguments; features have no mask."""
    device, encoder = input_device(model), model.get_encoder()
    if isinstance(sources[0], Tensor):
        features = torch.stack([source for source in sources if isinstance(source, Tensor)]).to(device, model.dtype)
        # One recording is work enough for a CPU: so its states do not depend on others, and memory is used again.
        parts = features.split(1 if device.type == "cpu" else len(features))
        states = torch.cat([encoder(part).last_hidden_state for part in parts])
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
    texts = [source for source in sources if not isinstance(source, Tensor)]
    ids, mask = (padded(each, device) for each in (texts, [[1] * len(text) for text in texts]))
    return {"encoder_outputs": encoder(input_ids=ids, attention_mask=mask), "attention_mask": mask}


class Sources:
    """The sources of all rows for the decoder: keys and values of cross-attention, fixed per row."""

    def __init__(self, decoder: SourceDecoder, format: type[Store] = FloatStore) -> None:
        self._decoder = decoder
        self._rows = RowCache(format)
        self._known: dict[tuple[int | None, int | None], Cross] = {}  # by the bounds of a part of the rows
        self.form = source_form(decoder.model)

    @torch.inference_mode()
    def add(self, rows: int, sources: Sequence[Source | None]) -> None:
        """Read the sources of new rows, cut to the encoder's longest. Raises ValueError if a row has none."""
        cut_sources = [self.form.cut(source) for source in sources if source is not None]
        if len(cut_sources) != rows:
            raise ValueError(f"{type(self._decoder.model).__name__} is an encoder-decoder: every row needs a source.")
        first = len(self._rows.lengths)
        self._rows.add(rows)
        self._known.clear()
        states = self._decoder.states(cut_sources)
        longest = states[0][0].shape[2]
        self._rows.reserve(longest, first)
        for layer, (keys, values) in enumerate(states):
            self._rows.update(layer, keys, values)
        self._rows.advance([len(source) if isinstance(source, tuple) else longest for source in cut_sources])

    def fork(self, rows: Sequence[int]) -> None:
        self._rows.fork(rows)
        self._known.clear()

    def free(self, rows: Sequence[int]) -> None:
        self._rows.free(rows)
        self._known.clear()

    def cross(self, part: slice, back: Tensor | None) -> Cross:
        if known := self._known.get(name := (part.start, part.stop)):
            return replace(known, back=back)
        self._rows.reserve(0, part.start, part.stop)
        held = torch.arange(self._rows.end)[None] < torch.tensor(self._rows.lengths[part])[:, None]
        stores, mask = self._rows.taking_part, additive(held, self._decoder.dtype)
        self._known[name] = Cross(stores, mask[:, None, None].to(stores[0][0].device))
        return replace(self._known[name], back=back)


def source_form(model: PreTrainedModel) -> SourceForm:
    """Return the form of sources that an encoder-decoder reads. Raises ValueError for features other than Whisper's."""
    config = model.config
    if model.main_input_name not in {"input_ids", "input_features"} or (
        model.main_input_name == "input_features" and config.model_type != "whisper"
    ):
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}; encoder-decoders of text and Whisper are supported."
        )
    if model.main_input_name == "input_features":
        encoder = model.get_encoder()
        frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        return SourceForm(0, None, (config.num_mel_bins, frames))
    longest = getattr(config, "max_position_embeddings", None)
    # FSMT's encoder is a plain module without get_input_embeddings.
    embeddings = getattr(model.get_encoder(), "get_input_embeddings", model.get_input_embeddings)()
    return SourceForm(embeddings.num_embeddings, longest)


def _projections(decoder: nn.Module) -> list[_Projections]:
    """Return the cross-attention of every layer. Raises ValueError unless it is written like T5's or BART's."""
    projections: list[_Projections] = []
    for name, attention in decoder.named_modules():
        parts: Any = attention
        if name.endswith(".EncDecAttention"):
            projections.append(_Projections(parts.k, parts.v, parts.key_value_proj_dim))
        elif name.endswith(".encoder_attn"):
            projections.append(_Projections(parts.k_proj, parts.v_proj, parts.head_dim))
    if not projections:
        raise ValueError(
            f"{type(decoder).__name__} has no cross-attention like T5's (EncDecAttention) or BART's (encoder_attn), "
            "and no other kind is supported."
        )
    return projections
