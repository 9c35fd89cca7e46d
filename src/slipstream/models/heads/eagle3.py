"""EAGLE-3 drafts (arXiv 2503.01840) from checkpoints as speculators and SpecForge write them.

The network is a decoder layer, seldom more. At every position it reads three hidden states of the target, joined by
`fc` into one, and the embedding of the next token. Its output predicts the token after that, and replaces the target's
states where there are none yet. Its head has `draft_vocab_size` tokens; the others are never drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from slipstream.core.values import first_sentence
from slipstream.execution.names import CACHE
from slipstream.kernels.packing import plain_weight
from slipstream.models.heads.scorer import Behind
from slipstream.models.loading.dropped_tensors import read_record, read_tensors

LAYERS: dict[str, tuple[type[PreTrainedConfig], Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer),
}
"""The classes of the configuration and the layer, by the `model_type` of `transformer_layer_config`."""

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # switches, off by default
WRITE = "give a folder or a hub name of an EAGLE-3 draft in the format of speculators or SpecForge"


@dataclass(frozen=True)
class Eagle3Settings:
    """The settings in the config.json of an EAGLE-3 draft; `aux` are the places of hidden states (None: the usual)."""

    layer: PreTrainedConfig
    kind: Any
    draft_vocab: int
    target_width: int
    aux: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @staticmethod
    def read(record: Mapping[str, Any], name: str) -> Eagle3Settings:
        """Read the settings in either format: speculators nests the layer's settings, SpecForge does not."""
        inner = {**record, **record.get("eagle_config", {})}  # SpecForge stores some settings in eagle_config
        speculators = inner.get("speculators_model_type")
        kinds = [speculators] if speculators else inner.get("architectures") or ()
        if not any("eagle3" in kind.lower() for kind in kinds):
            what = ", ".join(kinds) or inner.get("model_type")
            raise ValueError(f"{name} is no EAGLE-3 draft (its config.json says {what}): {WRITE}.")
        plain = inner.get("transformer_layer_config") or record
        kind = plain.get("model_type", "llama")
        if kind not in LAYERS:
            raise ValueError(f"{name} has layers of the kind {kind!r}, but {', '.join(LAYERS)} are known.")
        config_class, layer = LAYERS[kind]
        known = {key: value for key, value in plain.items() if key not in {"architectures", "model_type"}}
        config = config_class(**known)
        config._attn_implementation = "sdpa"
        aux = inner.get("eagle_aux_hidden_state_layer_ids")
        return Eagle3Settings(
            layer=config,
            kind=layer,
            draft_vocab=inner.get("draft_vocab_size") or config.vocab_size,
            target_width=inner.get("target_hidden_size") or config.hidden_size,
            aux=tuple(aux) if aux else None,
            **{name: bool(inner.get(name)) for name in NORMS},
        )

    def places(self, layers: int) -> tuple[int, ...]:
        """Return the places of the hidden states it reads in a target of `layers` layers: those given, or the usual."""
        return self.aux or (2, layers // 2, layers - 3)


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads embeddings and hidden states, concatenated."""

    def __init__(self, settings: Eagle3Settings) -> None:
        super().__init__()
        config: Any = settings.layer
        layer = settings.kind(config, 0)
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, old.out_features, old.bias is not None))
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._norm_before_residual = settings.norm_before_residual

    def forward(self, embeds: Tensor, hidden: Tensor, **attention_inputs: Any) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embeds), normed], -1), **attention_inputs
        )
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3(nn.Module):
    """The network of an EAGLE-3 draft, with parameters named as in checkpoints.
    It uses the target's `lm_head` or `embed_tokens` if its checkpoint has none."""

    depth = 1
    targets: Tensor  # (draft vocabulary,): the target's id of each token of the draft

    def __init__(self, settings: Eagle3Settings, places: Sequence[int]) -> None:
        super().__init__()
        config: Any = settings.layer
        width, wide, aux = config.hidden_size, settings.target_width, len(places)
        self.settings, self.places, self.vocab = settings, tuple(places), config.vocab_size
        self.fc = nn.Linear(aux * wide, width, bias=False)
        whole = LlamaRMSNorm(aux * wide, eps=config.rms_norm_eps)
        self.input_norm = whole if settings.norm_before_fc else nn.Identity()
        norms = [LlamaRMSNorm(wide, eps=config.rms_norm_eps) for _ in range(aux * settings.fc_norm)]
        self.fc_norm = nn.ModuleList(norms)
        later = [settings.kind(config, place) for place in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([FirstLayer(settings), *later])
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, width)
        self.lm_head: Any = nn.Linear(width, settings.draft_vocab, bias=False)
        self.register_buffer("targets", torch.arange(settings.draft_vocab), persistent=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def combine(self, states: Tensor) -> Tensor:
        states = self.input_norm(states.to(self.fc.weight.dtype))
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def forward(self, step: int, tokens: Tensor, hidden: Tensor, behind: Behind) -> Tensor:
        embeds = self.embed_tokens(tokens).to(hidden.dtype)
        attention_inputs = {
            "position_embeddings": self.rotary_emb(hidden, behind.positions),
            "attention_mask": behind.mask(None, hidden.dtype),
            CACHE: behind.cache,
        }
        hidden = self.layers[0](embeds, hidden, **attention_inputs)
        for layer in self.layers[1:]:
            hidden = layer(hidden, position_ids=behind.positions, **attention_inputs)
        return self.norm(hidden) if self.settings.norm_output else hidden

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden if self.settings.norm_output else self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        own = self.own_logits(hidden)
        if own.shape[-1] == self.vocab:
            return own
        blank = own.new_full((*own.shape[:-1], self.vocab), float("-inf"))
        return blank.index_copy_(-1, self.targets, own)


def load_eagle3(source: str | Path, target: Any) -> Eagle3:
    """Load an EAGLE-3 draft from a folder or hub name, for a target of transformers, in its dtype and on its device."""
    record = read_record(source, "config.json")
    if record is None:
        raise ValueError(f"{str(source)!r} has no config.json: {WRITE}.")
    settings = Eagle3Settings.read(record, str(source))
    own, config = settings.layer, target.config.get_text_config()
    if (settings.target_width, own.vocab_size) != (config.hidden_size, config.vocab_size):
        raise ValueError(
            f"{source} was made for a target with hidden size {settings.target_width} and {own.vocab_size} tokens, but "
            f"this one has {config.hidden_size} and {config.vocab_size}: use the target that it was trained for."
        )
    # Some checkpoints also have computed tensors, or parts of the target; SpecForge calls the first layer `midlayer`.
    found = read_tensors(source, lambda name: not name.endswith("inv_freq") and not name.startswith("verifier_"))
    tensors = {
        name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): tensor for name, tensor in found.items()
    }
    net = Eagle3(settings, settings.places(config.num_hidden_layers))
    _fill(net, tensors, source, target)
    net.to(target.device, target.dtype)
    net.rotary_emb = LlamaRotaryEmbedding(own).to(target.device)  # in float32, for weights of any dtype
    return net.eval()


def _fill(net: Eagle3, tensors: dict[str, Tensor], source: str | Path, target: Any) -> None:
    """Load a checkpoint's tensors into a network, with the target's embeddings and head if the checkpoint has none."""
    offsets, known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = net.settings.draft_vocab
    if offsets is not None:
        net.targets = torch.arange(len(offsets)) + offsets
    elif known is not None:
        net.targets = known.nonzero()[:, 0]
    elif size != net.vocab:
        raise ValueError(f"{source} knows {size} of {net.vocab} tokens, but has no d2t that says which: it is damaged.")
    if net.targets.shape != (size,) or not 0 <= int(net.targets.min()) <= int(net.targets.max()) < net.vocab:
        raise ValueError(f"{source} is damaged: its d2t does not name {size} of {net.vocab} tokens.")
    if "embed_tokens.weight" not in tensors:
        if net.settings.target_width != net.settings.layer.hidden_size:
            raise ValueError(f"{source} lacks the weights embed_tokens.weight: copy or download it again.")
        net.embed_tokens = _Shared(target.get_input_embeddings())
    head = target.get_output_embeddings()
    if "lm_head.weight" not in tensors and size == net.vocab:
        net.lm_head = _Shared(head)
    elif "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = plain_weight(head)[net.targets]
    try:
        missing, extra = net.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"the weights of {source} do not fit its config.json: {first_sentence(error)}.") from error
    if missing:
        raise ValueError(f"{source} lacks the weights {', '.join(missing[:4])}: copy or download it again.")
    if extra:
        raise ValueError(f"{source} has weights that nothing is known of: {', '.join(extra[:4])}.")


class _Shared(nn.Module):
    """A layer of the target that is not a submodule, so its weights are not moved."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]

    def forward(self, inputs: Tensor) -> Tensor:
        return self._layer[0](inputs)
