"""Confident adaptive language modeling (CALM, arXiv 2207.07061): a pass exits after the first confident layer.

The skipped layers get keys and values from the state at the exit (section 3.2 there: states are copied upwards), so
that later tokens attend to every token in every layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from slipstream.core.draft import Draft
from slipstream.core.protocols import HasModel
from slipstream.core.round import Context, Round
from slipstream.execution.names import CACHE
from slipstream.models.layers import find_layers

STEEPNESS = 4.0
"""The rate at which the threshold falls along a text (tau of eq. 5)."""

Confidence = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], float]
"""A function of the states before and after a layer, (1, 1, width), and of the norm and head, that returns the
confidence of exiting there, 0 to 1."""


def softmax_gap(before: Tensor, behind: Tensor, head: Callable[[Tensor], Tensor]) -> float:
    """Return the difference between the two highest token probabilities if this layer were the last."""
    first, second = head(behind).float().softmax(-1).topk(2).values.flatten().tolist()
    return first - second


def saturation(before: Tensor, behind: Tensor, head: Callable[[Tensor], Tensor]) -> float:
    """Return the cosine similarity of the states before and after the layer."""
    return float(functional.cosine_similarity(before.flatten(), behind.flatten(), dim=0))


@dataclass(frozen=True)
class ExitRule:
    """The rule to exit after a layer whose confidence reaches `threshold`, which falls along `length` output tokens."""

    confidence: Confidence
    threshold: float
    length: int

    def bar(self, place: int) -> float:
        """Return the threshold for token `place` of the output, counted from 0 (eq. 5)."""
        falling = math.exp(-STEEPNESS * place / self.length)
        return min(1.0, max(0.0, 0.9 * self.threshold + 0.1 * falling))


class Exits:
    """A model that may exit after any of its layers while it decodes a text; without a `rule` it runs all layers.

    The model is changed permanently. Passes over several tokens, such as prefill, run all layers.
    """

    def __init__(self, target: HasModel) -> None:
        """Raises ValueError for a model whose layers are not Llama's."""
        self.target, self.model = target, target.model
        layers = find_layers(self.model, target.name)[1]
        if not all(isinstance(layer, LlamaDecoderLayer) for layer in layers):
            raise ValueError(f"{target.name} is no Llama: early exits are made for the embedded target's kind.")
        self.layers = len(layers)
        self.rule: ExitRule | None = None
        self.place = 0  # the position in the output of the token being decoded
        self.passes, self.layers_run = 0, 0  # counts over passes that decode one token
        self._exited = False  # in the current pass
        for number in range(self.layers):
            layers[number] = _Leaving(layers[number], number, self)

    def runs(self, number: int, hidden: Tensor) -> bool:
        """Return whether a layer runs in this pass, and count it."""
        if number == 0:
            self._exited = False
            self.passes += hidden.shape[1] == 1
        self.layers_run += not self._exited and hidden.shape[1] == 1
        return not self._exited

    def look(self, number: int, before: Tensor, behind: Tensor) -> None:
        """Exit after this layer if its confidence suffices and the pass decodes one token."""
        if self.rule is not None and before.shape[:2] == (1, 1) and number < self.layers - 1:
            self._exited = self.rule.confidence(before, behind, self._head) >= self.rule.bar(self.place)

    def _head(self, states: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(states))


class _Leaving(nn.Module):
    """A layer that either runs, or only writes keys and values computed from the state at the exit."""

    def __init__(self, layer: LlamaDecoderLayer, number: int, exits: Exits) -> None:
        super().__init__()
        self.layer, self.number = layer, number
        self._exits = (exits,)  # in a tuple, so that torch does not register it

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        exits = self._exits[0]
        if not exits.runs(self.number, hidden_states):
            self._copy(hidden_states, inputs["position_embeddings"], inputs[CACHE])
            return hidden_states
        behind = self.layer(hidden_states, **inputs)
        exits.look(self.number, hidden_states, behind)
        return behind

    def _copy(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: Any) -> None:
        attention = self.layer.self_attn
        states, shape = self.layer.input_layernorm(hidden), (*hidden.shape[:-1], -1, attention.head_dim)
        keys, values = (each(states).view(shape).transpose(1, 2) for each in (attention.k_proj, attention.v_proj))
        cache.update(apply_rotary_pos_emb(keys, keys, *rotation)[1], values, attention.layer_idx)


class ExitClock:
    """A drafter that drafts nothing, and sets the rule and the output position of `Exits`; for one row at a time."""

    def __init__(self, exits: Exits, rule: ExitRule | None) -> None:
        self.exits, self.rule = exits, rule

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Set the rule and the position for this round, and return an empty draft."""
        (row,) = context.rows
        self.exits.rule, self.exits.place = self.rule, len(row.output)
        return Draft.empty(1, torch.device("cpu"))

    def observe(self, round: Round) -> None:
        self.exits.rule = None
