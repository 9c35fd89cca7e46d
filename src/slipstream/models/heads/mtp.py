"""Heads for multi-token prediction that a model was trained with, from its own checkpoint.

transformers leaves their weights out when it loads the model. Its `MtpModel` reads those of DeepSeek-V3, GLM-4-MoE and
others with `num_mtp_layers`; Qwen3-Next and Qwen3.5 store theirs under `mtp.` in the same shape. Each head is a decoder
layer of the model's own kind, which reads the embedding of a token and the hidden state of the token before it;
embeddings and vocabulary head are the model's.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from slipstream.core.values import first_sentence
from slipstream.execution.names import CACHE
from slipstream.models.heads.hidden_states import LAST
from slipstream.models.heads.scorer import Behind
from slipstream.models.loading.dropped_tensors import tensor_names

WINDOWED = "sliding_attention"
KNOWN_KINDS = {"full_attention", "attention", WINDOWED}


class MtpHeads:
    """A model's own heads as a `Head`: layer k drafts the token k + 2 places after the last that the target has read.

    They read the target's states after its final norm. Sources disagree about Qwen3.5: those that measured both found
    more tokens accepted after the norm (llama.cpp 24025: 0.69 to 0.71 of the drafted tokens and faster; LightLLM 1402:
    1.80 to 2.74 tokens a pass), and vLLM, SGLang and transformers read there for all families. The states that a head
    passes to the next one, or to itself, are normed as well.
    """

    places: tuple[int, ...] = (LAST,)
    targets = None

    def __init__(self, layers: Any, target: PreTrainedModel) -> None:
        """Wrap transformers' MtpModel `layers` of a target. Raises ValueError if their state cannot be rolled back."""
        self.network, self.depth = layers, len(layers.layers)
        self._dtype = target.dtype
        self.vocab = int(target.config.get_text_config().vocab_size)
        kinds = getattr(layers.config, "layer_types", None) or ["full_attention"] * self.depth
        if unknown := set(kinds) - KNOWN_KINDS:
            raise ValueError(
                f"the heads of this checkpoint are layers of the kind {', '.join(sorted(unknown))}, whose state cannot "
                "be rolled back: use another draft."
            )
        self._kinds = kinds
        window = getattr(layers.config, "sliding_window", None)
        self._windows = [window if kind == WINDOWED else None for kind in kinds]

    def combine(self, states: Tensor) -> Tensor:
        return states.to(self._dtype)

    def __call__(self, step: int, tokens: Tensor, hidden: Tensor, behind: Behind) -> Tensor:
        net = self.network
        embeds = net.embed_tokens(tokens).to(hidden.dtype)
        options = {"layer_type": self._kinds[step]} if net.has_per_layer_rope else {}
        turned = (
            net.rotary_emb(embeds, position_ids=behind.positions, **options) if net.rotary_emb is not None else None
        )
        made = net.layers[step](
            embeds,
            hidden,
            position_embeddings=turned,
            position_ids=behind.positions,
            attention_mask=behind.mask(self._windows[step], hidden.dtype),
            **{CACHE: behind.cache},
        )
        return net.shared_post_norm(made) if net.use_shared_post_norm else made

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network._project_to_logits(hidden)

    own_logits = logits


def load_mtp(model: PreTrainedModel, name: str) -> MtpHeads:
    """Load the heads in the checkpoint that a model was loaded from, in its dtype and on its device."""
    try:
        from transformers.modeling_layers import MtpModel  # newer than the oldest transformers that we run with
    except ImportError as error:
        raise ValueError("this transformers does not run heads for several tokens: install 5.23 or newer.") from error
    described = _Described(model, name)
    with _quiet():
        try:
            net = MtpModel.from_pretrained(described, device_map={"": model.device})
        except Exception as error:  # the files come from elsewhere, and damaged ones raise errors of any type
            raise ValueError(
                f"the heads for several tokens in the checkpoint of {name} cannot be loaded: {first_sentence(error)}."
            ) from error
    net.config._attn_implementation = "sdpa"  # the model's own may only serve its packed twin
    net.layers.to(model.device, model.dtype).eval()
    return MtpHeads(net, model)


class _Described:
    """A model whose configuration is completed by the facts about its heads; everything else is the model's own."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        source = model.config.name_or_path
        if not source:
            raise ValueError(f"{name} was not loaded from a checkpoint, so there are no heads stored with it.")
        self._model, self.config = model, copy.deepcopy(model.config)
        text = self.config.get_text_config()
        behind = text.num_hidden_layers  # heads are either under `mtp.`, or layers numbered after the last one
        names = tensor_names(source)
        own = _numbers(names, r"^(?:model\.)?mtp\.layers\.(\d+)\.")
        last = _numbers(names, r"^(?:model\.)?layers\.(\d+)\.", behind)
        count = len(own or last)
        if not count:
            raise ValueError(
                f"the checkpoint of {name} ({source}) has no heads for several tokens: there are no weights mtp.* and "
                f"none of a layer {behind}; use another draft."
            )
        text.num_mtp_layers = count
        for entry in ("layer_types", "mlp_layer_types"):
            if getattr(text, entry, None) is not None and getattr(text, f"mtp_{entry}", None) is None:
                usual = "full_attention" if entry == "layer_types" else getattr(text, entry)[-1]
                setattr(text, f"mtp_{entry}", [usual] * count)
        patterns = [r"^(model\.)?mtp\."] if own else [rf"layers\.{behind + place}\." for place in range(count)]
        self._keys_to_ignore_on_load_unexpected = patterns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _numbers(names: Sequence[str], pattern: str, least: int = 0) -> set[int]:
    matches = (re.match(pattern, name) for name in names)
    return {number for match in matches if match and (number := int(match[1])) >= least}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the table that transformers prints of what it loads; missing weights raise an error anyway."""
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
