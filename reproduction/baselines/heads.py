"""Parallel heads: several next tokens from one hidden state of the target, in one call (blockwise parallel decoding).

As in Stern, Shazeer and Uszkoreit (arXiv 1811.03115): besides the target's own head, k more outputs come from one
feed-forward layer with a residual connection, and share the target's projection to the vocabulary. Verification of one
round and prediction of the next share one pass: the state is the one behind the last token that this pass kept. A
head's law does not depend on the tokens drafted before; it is still the law its token was really sampled from, so
drafting stays exact.
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

from slipstream.core.draft import Draft
from slipstream.core.protocols import Drafter, HasModel
from slipstream.core.round import Context
from slipstream.core.values import check_least
from slipstream.drafters.following import read_by_target
from slipstream.drafters.sampled import sample_block
from slipstream.files import TensorFileKind, save_tensors
from slipstream.models.heads.hidden_states import LAST
from slipstream.models.heads.scorer import RecordsStates
from slipstream.text.jsontext import json_text

FILE = "heads.safetensors"
KIND = TensorFileKind("parallel heads", "slipstream heads", "3", "train them again")


@dataclass(frozen=True)
class Sizes:
    """The sizes of parallel heads: `heads` outputs for hidden states of size `width`, each with `inner` hidden units.
    `target` is the name of the model they were trained on. Raises ValueError for sizes below 1."""

    heads: int
    width: int
    inner: int
    target: str = ""

    def __post_init__(self) -> None:
        check_least(self, heads=1, width=1, inner=1)


class ParallelHeads(nn.Module):
    """Maps hidden states (n, width) to states (n, heads, width), one per head.

    Each head has its own matrices (block-diagonal in the paper's one layer), so the cost per head does not depend on
    their number. Before training, every head returns the hidden state itself, so its logits are the target's own.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.up = nn.Linear(sizes.width, sizes.heads * sizes.inner)
        self.down = nn.Parameter(torch.zeros(sizes.heads, sizes.inner, sizes.width))

    def forward(self, hidden: Tensor, first: int | None = None) -> Tensor:
        """Return the states of the `first` heads (None: of all)."""
        count = self.sizes.heads if first is None else first
        seen = functional.rms_norm(hidden, (self.sizes.width,))
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
        with KIND.contents(Path(folder) / FILE) as (weights, notes):
            heads = ParallelHeads(Sizes(**json.loads(notes["sizes"])))
            heads.load_state_dict(weights)
        return heads.eval()


class HeadsDrafter(Drafter):
    """Drafts up to one token per head from one hidden state of the target; none for rows without recorded states."""

    def __init__(self, target: HasModel, heads: ParallelHeads) -> None:
        assert isinstance(target, RecordsStates), "the target shows its hidden states"
        self._project = target.model.get_output_embeddings()
        self.scorer = target
        self.heads = heads.to(self._project.weight.device, target.model.dtype)
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
        places = torch.tensor([[len(row.tokens) - 2] for row in context.rows], device=self._project.weight.device)
        hidden = self._states.of(places)[:, 0].to(self.scorer.model.dtype)
        return self._project(self.heads(hidden, first))
