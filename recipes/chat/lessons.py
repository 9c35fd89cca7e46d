"""The loss of an EAGLE-3 draft on stored chats: what it drafts, token after token, against the target's own law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from chat.writing import PLACES
from slipstream.models.heads.eagle3 import Eagle3

FADE, TILT = 0.8, 0.6  # the weight of each further token; the share of total variation in the loss at the end
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Drafted:
    """What is drafted at one level: log q, and log p of the target, at the places of answers, (n, known tokens)."""

    log_q: Tensor
    log_p: Tensor

    def loss(self, used: float) -> Tensor:
        """Return the cross-entropy, blended into total variation over the budget."""
        p = self.log_p.exp()
        entropy, distance = -(p * self.log_q).sum(-1), (p - self.log_q.exp()).abs().sum(-1)
        return ((1 - TILT * used) * entropy + TILT * used * distance).mean()

    @property
    def alpha(self) -> float:
        """The mean of sum_x min(p(x), q(x))."""
        return float(torch.minimum(self.log_p.exp(), self.log_q.exp()).sum(-1).mean())

    @property
    def likeliest(self) -> float:
        """The share of places at which both take the same token for the likeliest."""
        best, place = self.log_p.exp().max(-1)
        known = best >= 1 - self.log_p.exp().sum(-1)  # else the target's likeliest may be one the draft does not know
        return float((known & (self.log_q.argmax(-1) == place)).float().mean())


def drafted(net: Eagle3, head: Tensor, batch: dict[str, Tensor], levels: int, kinds: tuple[int, ...]) -> list[Drafted]:
    """Draft `levels` tokens after every place of chats, with the target's states up to there, as when decoding.

    `head` (known tokens, width) is the target's; `kinds` are those of the answers that count.
    """
    tokens, rows = batch["tokens"].long(), len(batch["tokens"])
    states = batch["states"].unflatten(-1, (len(PLACES), -1))
    hidden, seen, found = net.combine(states[:, :-1].flatten(2)), list[Pair](), list[Drafted]()
    embedded = net.embed_tokens(tokens[:, 1:])
    for level in range(levels):
        count = tokens.shape[1] - 2 - level
        positions = torch.arange(level, level + count).expand(rows, -1)
        hidden = _step(net, embedded[:, level : level + count], hidden[:, :count], positions, seen)
        counts = torch.isin(batch["answer"][:, level + 2 :], torch.tensor(kinds, dtype=torch.uint8))
        place = slice(level + 1, level + 1 + count)
        with torch.no_grad():
            log_p = (states[:, place, -1][counts] @ head.T).float() - batch["total"][:, place][counts][:, None]
        found.append(Drafted(net.own_logits(hidden[counts]).float().log_softmax(-1), log_p))
    return found


def loss_of(found: list[Drafted], used: float) -> Tensor:
    return torch.stack([each.loss(used) * FADE**level for level, each in enumerate(found)]).sum()


def _step(net: Eagle3, embedded: Tensor, hidden: Tensor, positions: Tensor, seen: list[Pair]) -> Tensor:
    """Run the layer at one level, and add its keys and values to those `seen`.

    The first level attends to the text; later ones to the text before their draft, and to the draft's earlier tokens.
    """
    layer: Any = net.layers[0]
    attention, normed = layer.self_attn, layer.hidden_norm(hidden)
    inputs, shape = (
        torch.cat([layer.input_layernorm(embedded), normed], -1),
        (*hidden.shape[:2], -1, attention.head_dim),
    )
    query, key, value = (
        each(inputs).view(shape).transpose(1, 2) for each in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *net.rotary_emb(query, positions))
    seen.append((key, value))
    if len(seen) == 1:
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        count = query.shape[2]
        (keys, values), own = seen[0], [(key[:, :, :count], value[:, :, :count]) for key, value in seen[1:]]
        mask = torch.full((count, count), -torch.inf).triu(1)
        scores = [(query @ keys[:, :, :count].mT).float() * attention.scaling + mask]
        scores += [(query * key).sum(-1, keepdim=True).float() * attention.scaling for key, _ in own]
        shares = torch.cat(scores, -1).softmax(-1).to(value.dtype)
        mixed = shares[..., :count] @ values[:, :, :count]
        for place, (_, value) in enumerate(own, count):
            mixed = mixed + shares[..., place, None] * value
    residual = normed + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return residual + layer.mlp(layer.post_attention_layernorm(residual))
