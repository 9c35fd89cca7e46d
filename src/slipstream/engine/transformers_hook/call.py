"""The arguments of a call of `generate`, also those it does not pass on, and errors for those we cannot honour."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from slipstream.decoding.sampling import Processor
from slipstream.engine.transformers_hook.batch import Batch, Prompt
from slipstream.engine.transformers_hook.cache import ReadPrompt, nearest_tokens, refuse_cache
from slipstream.execution.names import CACHE
from slipstream.kernels.placement import is_sharded

# Parts of names, since not every version of transformers has all of them.
STATEFUL = ("ClassifierFreeGuidance", "SynthIDText", "WhisperNoSpeech", "EOSDelayPattern")


# Inputs that `generate` itself adds, or that change no result.
HARMLESS = {
    *("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"),
    *("return_dict", "tokenizer", "inputs_embeds"),
}


def withheld(model: PreTrainedModel) -> dict[str, Any]:
    """Return arguments of `generate` that it does not pass on to callables, read from its frame; {} without a frame.

    Up to 5.23 at least, `_extract_generation_mode_kwargs` replaces the dict that holds the streamer, synced_gpus
    and assistant_model; a text streamer would wait for its end forever.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    for frame in _frames():
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return {name: frame.f_locals.get(name) for name in ("streamer", "synced_gpus", "assistant_model", "kwargs")}
    return {}


class SignatureWithTokenizer:
    """The signature of a callable; when `generate` reads it, the tokenizer is put back into its arguments.

    Up to 5.23 at least, `_extract_generation_mode_kwargs` takes the tokenizer out of the arguments and drops it when
    it is given a callable, unless it finds it there after reading the signature. Stop strings and token healing
    need it.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is None:  # the class itself has no signature of this kind
            raise AttributeError("__signature__")
        code = GenerationMixin._extract_generation_mode_kwargs.__code__
        for frame in _frames():
            if frame.f_code is code:
                tokenizer = frame.f_locals.get("generation_mode_kwargs", {}).get("tokenizer")
                if tokenizer is not None:
                    frame.f_locals["kwargs"].setdefault("tokenizer", tokenizer)
                break
        usual = inspect.signature(owner.__call__)
        own = [parameter for name, parameter in usual.parameters.items() if name != "self"]
        tokenizer_too = inspect.Parameter("tokenizer", inspect.Parameter.KEYWORD_ONLY, default=None)
        return usual.replace(parameters=[*own[:-1], tokenizer_too, own[-1]])


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def refuse_mode(model: PreTrainedModel, config: Any, call: dict[str, Any]) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError("custom_generate needs a causal language model, but this one is an encoder-decoder.")
    if is_sharded(model):
        raise ValueError(
            "custom_generate decodes in one process, and this model lies on several: use slipstream.load with its name "
            "and tp_plan='auto'."
        )
    if call.get("assistant_model") is not None:
        raise ValueError("custom_generate has a draft already: leave out assistant_model.")
    mode = config.get_generation_mode(None)
    if mode not in ("greedy_search", "sample", "beam_search", "beam_sample"):
        raise ValueError(
            f"custom_generate decodes greedily, by sampling or with beams, but these settings ask for {mode.value}."
        )
    if any(part in (config.cache_implementation or "") for part in ("offloaded", "quantized")):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be honoured: custom_generate keeps a whole "
            "cache where the model is, so leave it out."
        )
    if call.get("synced_gpus"):
        raise ValueError("synced_gpus=True cannot be honoured: the ranks would make different numbers of calls.")


def refuse_inputs(processors: Sequence[Processor], model_kwargs: dict[str, Any]) -> None:
    input_names = {name for name, value in model_kwargs.items() if value is not None and value is not False}
    if extra := sorted(input_names - HARMLESS):
        raise ValueError(
            f"{', '.join(extra)} cannot be honoured: custom_generate feeds tokens or embeddings alone, so leave it out."
        )
    for processor in processors:
        if any(part in kind.__name__ for part in STATEFUL for kind in type(processor).__mro__):
            name = type(processor).__name__
            raise ValueError(f"{name} cannot be honoured: it keeps a state, and drafted tokens may be rejected.")


@dataclass(frozen=True, eq=False)
class Opening:
    """The beginning of decoding: a prompt for each row, and whether the model itself has to read them.
    The first `pads[r]` places of row r are padding; `inputs` are what `generate` keeps for the model's calls."""

    prompts: list[Prompt]
    pads: list[int]
    inputs: dict[str, Any]
    by_model: bool

    @staticmethod
    def of(model: PreTrainedModel, ids: Tensor, config: Any, call: dict[str, Any], inputs: dict[str, Any]) -> Opening:
        """Make it of ids (rows, width) from `generate`; `inputs` hold embeddings, mask, positions and cache."""
        embeddings, cache, mask = (inputs.get(name) for name in ("inputs_embeds", CACHE, "attention_mask"))
        held = 0 if cache is None else int(cache.get_seq_length())
        width = (ids if embeddings is None else embeddings).shape[1]
        if mask is not None:
            width = mask.shape[1]
        elif held and embeddings is None:  # a mask of ones, which generate has dropped
            width = max(width, getattr(config, "_mask_length", width))
        if config.token_healing:
            inputs = {**inputs, "position_ids": _after_healing(model, inputs, width)}
        pads = _padding(len(ids), width, mask, inputs.get("position_ids"))
        users = held or getattr(cache, "_is_user_defined", False) or CACHE in (call.get("kwargs") or {})
        if cache is not None and users:
            refuse_cache(cache, len(ids), width)
        kept = config.return_dict_in_generate and config.use_cache and cache is not None
        by_model = bool(kept or embeddings is not None or (cache is not None and users))
        if by_model and not config.use_cache:
            raise ValueError(f"use_cache=False cannot be honoured with {CACHE}: leave out one of the two.")
        inputs = {name: value for name, value in inputs.items() if name != "tokenizer"}
        return Opening(_prompts(model, ids, pads, (embeddings, held, width)), pads, inputs, by_model)

    def read(self, model: PreTrainedModel, batch: Batch) -> ReadPrompt | None:
        """Run the model on the prompts with its own cache, if `by_model`; None otherwise."""
        if not self.by_model:
            return None
        return ReadPrompt.read(model, batch.ids, batch.config, self.inputs, self.pads)


def _prompts(
    model: PreTrainedModel, ids: Tensor, pads: Sequence[int], read: tuple[Tensor | None, int, int]
) -> list[Prompt]:
    """Make a prompt of each row; `read` are the embeddings, and how many places the cache and all have."""
    embeddings, held, width = read
    if embeddings is not None and embeddings.shape[1] == width:
        texts = Prompt.of(nearest_tokens(model, embeddings), pads)
        heads = map(tuple, ids.tolist())
        return [Prompt(text.tokens, head, len(text.tokens)) for text, head in zip(texts, heads, strict=True)]
    if ids.shape[1] == width and embeddings is None:
        return Prompt.of(ids, pads)
    if embeddings is None and held + ids.shape[1] == width and max(pads) <= held:
        return [Prompt(tuple(row)) for row in ids.tolist()]  # the rest is in the cache, and its tokens are unknown
    raise ValueError(
        f"attention_mask has {width} columns for a prompt of {(ids if embeddings is None else embeddings).shape[1]} "
        f"tokens and {held} in {CACHE}: give it one for each of them, without padding between the two."
    )


def _after_healing(model: PreTrainedModel, inputs: dict[str, Any], width: int) -> Tensor | None:
    """Return positions for a prompt of `width` tokens: `generate` keeps those of the prompt before token healing.
    They are too high where healing has made the prompt shorter, which changes nothing for rotary positions."""
    positions = inputs.get("position_ids")
    if positions is None or positions.shape[-1] == width:
        return positions
    if getattr(model.config.get_text_config(), "rope_parameters", None) is None:
        raise ValueError(
            f"token_healing cannot be honoured here: it made {width} tokens of {positions.shape[-1]}, and generate "
            "keeps the old positions, so heal before: input_ids = model.heal_tokens(input_ids, tokenizer)."
        )
    return None


def _padding(rows: int, width: int, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """Return the padding tokens before each row of a prompt (rows, width). Raises ValueError for other masks."""
    seen = torch.ones(rows, width, dtype=torch.bool) if mask is None else mask != 0
    pads = (~seen).sum(1)
    if not torch.equal(seen, torch.arange(width, device=seen.device) >= pads[:, None]):
        raise ValueError("attention_mask must be zeros (padding), then ones: pad on the left, without holes.")
    usual = seen.long().cumsum(1) - 1
    if positions is not None and not (
        positions.dim() == 2
        and positions.shape[1] == usual.shape[1]
        and bool(((positions.to(seen.device) == usual) | ~seen).all())
    ):
        raise ValueError("position_ids must count every row from 0, as they do by default: leave them out.")
    return pads.tolist()
