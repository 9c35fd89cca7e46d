"""Calls models of transformers with their own caches, and encoder-decoders with the output of their encoder."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.core.source import Source, SourceForm
from slipstream.execution.names import state_in, with_cache
from slipstream.kernels.placement import input_device
from slipstream.models.encoder_decoder import encoded, source_form
from slipstream.models.families import refuse_dependence_on_passes
from slipstream.models.media.processor import run_with_media

UNLIKE_OTHERS = {  # the types of models that cannot be called as others are, with the reason for each
    "cpmant": "puts learned tokens of its own before every text, which its cache counts and its masks do not",
    "fsmt": "hides no later tokens from earlier ones in a pass with a cache, so it cannot score several at once",
    "kosmos-2.5": "generates with a count of positions of its own, which is not that of the positions it takes",
    "moshi": "looks beyond its window within a pass, but not behind it, so its logits depend on how a text is divided",
    "prophetnet": "predicts several tokens ahead in streams of their own, whose cache gives other logits than the text",
    "xlnet": "predicts a token from a blank in its place, so that what it has read says nothing of the next one",
}


def calls_of(model: PreTrainedModel) -> Calls:
    """Return the `Calls` for a model of any kind."""
    if reason := UNLIKE_OTHERS.get(model.config.model_type):
        raise ValueError(f"{type(model).__name__} ({model.config.model_type}) {reason}; use another model.")
    text = model.config.get_text_config()
    refuse_dependence_on_passes(text, type(model).__name__)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) looks at the later tokens of a pass too, so a draft "
            "would change what it knows of those before; use another model."
        )
    if "reference_sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"{type(model).__name__} gives what is read in its first pass another place than what follows, so that a "
            "prompt cannot be read in pieces; use another model."
        )
    return SourceCalls(model) if model.config.is_encoder_decoder else CausalCalls(model)


class CausalCalls:
    """Calls a causal language model, whose first pass over a row reads its images or sounds, too.
    `extra_inputs` are what the model reads besides the tokens: what `read` returns, or a row's media."""

    form: SourceForm | None = None
    joins_rows = True  # rows can share a pass

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self._takes = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in self._takes
        self._continue = with_cache(model)

    def read(self, source: Source | None) -> None:
        """Return None: there is no encoder."""

    def __call__(self, tokens: Tensor, state: Any, extra_inputs: Any, **options: Any) -> Any:
        """Return an output with logits (rows, n, vocab) of new tokens (rows, n) after a state (None: at the start)."""
        known = {name: option for name, option in options.items() if name in self._takes}
        if extra_inputs is not None:
            if state is None:  # the first pass reads the whole text (1, n) of a row with media
                known.pop("position_ids", None)  # the model computes positions that count the room of an image
                media = extra_inputs.media
                out, extra_inputs.shift = run_with_media(self.model, tokens[0].tolist(), media, use_cache=True, **known)
                return out
            known["position_ids"] = known["position_ids"] + extra_inputs.shift
        if state is None:  # the model makes one of its own kind
            return self.model(input_ids=tokens, use_cache=True, **known)
        return self._continue(input_ids=tokens, cache=state, use_cache=True, **known)

    def state(self, out: Any) -> Any:
        return state_in(out)

    def alone(self, text: Sequence[int], source: Source | None) -> Tensor:
        """Return the logits (1, n, vocab) of one text by the model itself, without cache.
        Positions are given as `generate` gives them: some models count from another number without them."""
        device = input_device(self.model)
        tokens, places = torch.tensor([text], device=device), torch.arange(len(text), device=device)[None]
        positions = {"position_ids": places} if self.takes_positions else {}
        return self.model(tokens, use_cache=False, **positions).logits


class SourceCalls:
    """Calls an encoder-decoder, whose encoder reads every source once."""

    takes_positions = False
    joins_rows = False  # each has a source of its own

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self._call = with_cache(model)
        self.form = source_form(model)

    def read(self, source: Source | None) -> dict[str, Any]:
        if source is None:
            raise ValueError(f"{type(self.model).__name__} is an encoder-decoder: every row needs a source.")
        return encoded(self.model, [self.form.cut(source)])

    def __call__(self, tokens: Tensor, state: Any, extra_inputs: Any, **options: Any) -> Any:
        return self._call(decoder_input_ids=tokens, cache=state, use_cache=True, **extra_inputs)

    def state(self, out: Any) -> Any:
        return state_in(out)

    def alone(self, text: Sequence[int], source: Source | None) -> Tensor:
        tokens = torch.tensor([text], device=input_device(self.model))
        return self.model(decoder_input_ids=tokens, use_cache=False, **self.read(source)).logits


Calls = CausalCalls | SourceCalls
