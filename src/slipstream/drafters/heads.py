"""Parallel heads: several next tokens from one hidden state of the target, in one call (blockwise parallel decoding).

As in Stern, Shazeer and Uszkoreit (arXiv 1811.03115): besides the target's own head, k more outputs come from one
feed-forward layer with a residual connection, and share the target's projection to the vocabulary. Verification of one
round and prediction of the next share one pass: the state is the one behind the last token that this pass kept.

The token drawn from that state is pending: when it is sampled, the state does not determine it. So its embedding is an
input besides the state (as in Hydra, arXiv 2402.05109), unless the heads are made without it. A head's law does not
depend on the tokens drafted before; it is still the law its token was really sampled from, so drafting stays exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.core.draft import Draft, padded
from slipstream.core.protocols import Drafter, HasModel, Traits
from slipstream.core.round import Context, Round
from slipstream.core.values import check_least
from slipstream.drafters.following import Follower, read_by_target
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.sampled import sample_block
from slipstream.files import TensorFileKind, save_tensors
from slipstream.models.heads.dflash import DFlashScorer
from slipstream.models.heads.hidden_states import LAST
from slipstream.models.heads.scorer import Head, HeadScorer, RecordsStates
from slipstream.models.loading.twins import CutHead
from slipstream.text.jsontext import json_text

FILE = "heads.safetensors"
KIND = TensorFileKind("parallel heads", "slipstream heads", "2", "train heads with `slipstream draft build`")


@dataclass(frozen=True)
class Sizes:
    """The sizes of parallel heads: `heads` outputs for hidden states of size `width`, each with `inner` hidden units.

    `pending`: the embedding of the pending token is an input too. `target` is the name of the model they were trained
    on. Raises ValueError for sizes below 1.
    """

    heads: int
    width: int
    inner: int
    pending: bool = True
    target: str = ""

    def __post_init__(self) -> None:
        check_least(self, heads=1, width=1, inner=1)


class ParallelHeads(nn.Module):
    """Maps hidden states (n, width) and the embeddings of the next tokens to states (n, heads, width), one per head.

    Each head has its own matrices (block-diagonal in the paper's one layer), so the cost per head does not depend on
    their number. Before training, every head returns the hidden state itself, so its logits are the target's own.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.up = nn.Linear(sizes.width * (1 + sizes.pending), sizes.heads * sizes.inner)
        self.down = nn.Parameter(torch.zeros(sizes.heads, sizes.inner, sizes.width))

    def forward(self, hidden: Tensor, following: Tensor, first: int | None = None) -> Tensor:
        width, count = (self.sizes.width,), self.sizes.heads if first is None else first
        parts = [hidden, following] if self.sizes.pending else [hidden]
        seen = torch.cat([functional.rms_norm(part, width) for part in parts], -1)
        up = functional.linear(seen, *(each[: count * self.sizes.inner] for each in (self.up.weight, self.up.bias)))
        inner = functional.relu(up).unflatten(-1, (count, self.sizes.inner))
        return hidden.unsqueeze(-2) + torch.einsum("...ki,kiw->...kw", inner, self.down[:count])

    def save(self, folder: str | Path, report: dict[str, Any] | None = None) -> Path:
        """Write the heads to their file in `folder`, atomically, with `report` in its header -> the file's path."""
        weights = {name: weight.detach().cpu().contiguous() for name, weight in self.state_dict().items()}
        notes = {"sizes": json_text(asdict(self.sizes)), "report": json_text(report or {})}
        file = Path(folder) / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, KIND, weights, notes)
        return file

    @staticmethod
    def load(folder: str | Path) -> ParallelHeads:
        file = Path(folder) / FILE
        if not file.is_file():
            raise ValueError(f"there is no {file}: {KIND.remedy}.")
        with KIND.contents(file) as (weights, notes):
            heads = ParallelHeads(Sizes(**json.loads(notes["sizes"])))
            heads.load_state_dict(weights)
        return heads.eval()


class HeadsDrafter(Drafter):
    """Drafts up to one token per head from one hidden state of the target; none for rows without recorded states."""

    def __init__(self, target: HasModel, heads: ParallelHeads, kept: Tensor | None = None) -> None:
        """Make the drafter of a target's heads; if the ids `kept` (n,) are given, only these are drafted."""
        if not isinstance(target, RecordsStates):
            raise ValueError(f"{target.name} shows no hidden states of its tokens: use another draft.")
        model, own = target.model, heads.sizes
        self._project, self._embed = model.get_output_embeddings(), model.get_input_embeddings()
        width = getattr(self._project, "in_features", None) or self._project.weight.shape[-1]
        if own.width != width or (own.pending and self._embed.weight.shape[-1] != width):
            raise ValueError(
                f"the heads were made for {own.target or 'a target'} with hidden size {own.width}, but "
                f"{target.name} has {width}: train heads for this target."
            )
        if kept is not None:
            self._project = CutHead(self._project, kept)
        self.scorer = target
        self.heads = heads.to(self._embed.weight.device, model.dtype)
        self._states = target.record([LAST])

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample at most `gammas[r]` tokens per row, at most one per head; none for rows the target has not read."""
        most = self.heads.sizes.heads
        lengths = read_by_target(self.scorer, context, [min(gamma, most) for gamma in gammas])
        if not any(lengths):
            return Draft.empty(len(context.rows), self.scorer.device)
        logits = self._logits(context, max(lengths)).to(self.scorer.device)
        return sample_block(context, logits, lengths, "heads")

    @torch.inference_mode()
    def _logits(self, context: Context, first: int) -> Tensor:
        """Return the logits (rows, first, vocab) of the first heads, from the states behind the pending tokens."""
        device = self._embed.weight.device
        following = self._embed(torch.tensor([row.tokens[-1] for row in context.rows], device=device))
        places = torch.tensor([[len(row.tokens) - 2] for row in context.rows], device=device)
        hidden = self._states.of(places)[:, 0].to(following.dtype)
        return self._project(self.heads(hidden, following, first))


AT_ONCE = 64  # the number of missing tokens fed with the first drafting step: accepted tokens are all read again


class HeadDrafter:
    """Samples chains from a network on the target's hidden states, token by token, like `ModelDrafter` from a model.

    It works only in the decoder of the target it was made for. Rows without recorded states of that target get no
    draft: rows of one token, and rows that the target has not read.
    """

    def __init__(self, target: HasModel, head: Head, name: str) -> None:
        """Raises ValueError if the target records no hidden states, or not those that the head reads."""
        if not isinstance(target, RecordsStates):
            raise ValueError(f"{target.name} shows no hidden states of its tokens: use another draft.")
        self.head, self._target, self.scorer = head, target, HeadScorer(target, head, name)
        self._drafter = ModelDrafter(self.scorer, target.vocab, AT_ONCE)
        self.traits = Traits((self.scorer,))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        return self._drafter.propose(context, read_by_target(self._target, context, gammas))

    def observe(self, round: Round) -> None:
        """Roll back all drafted tokens; accepted ones are read again with the target's hidden states."""
        self._drafter.observe(round)


class DFlashDrafter:
    """Drafts like `HeadDrafter`, but up to a block of tokens in one call, whose laws do not depend on each other."""

    def __init__(self, target: HasModel, net: Any, name: str) -> None:
        """Raises ValueError if the target records no hidden states, or not those that the network reads."""
        self._target, self.scorer = target, DFlashScorer(target, net, name)
        self._follower = Follower(self.scorer, AT_ONCE)
        self.traits = Traits((self.scorer,))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        gammas = read_by_target(self._target, context, [min(gamma, self.scorer.block_size - 1) for gamma in gammas])
        gammas = self._follower.begin(context, gammas)
        if not any(gammas):
            return Draft.empty(len(context.rows), self.scorer.device)
        missing = self._follower.lacking(0)
        logits = self.scorer.block(padded(missing, self.scorer.device), list(map(len, missing)))
        return sample_block(context, logits, gammas, self.scorer.name)

    def observe(self, round: Round) -> None:
        """Roll the cache back to the text; drafted tokens were never written to it."""
        self._follower.rollback(round)
