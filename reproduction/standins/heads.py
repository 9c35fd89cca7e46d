"""Training parallel heads for a frozen target on a text, with progress, resuming after any interruption.

Head k learns, at every position of the text, the target's own law k tokens later: cross entropy against that law, which
holds more information than the one token that follows in the text. The target runs once per batch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from reproduction.baselines.heads import ParallelHeads, Sizes
from slipstream.core.values import check_least
from slipstream.kernels.packing import plain_weight
from slipstream.models.heads.hidden_states import LAST, HiddenStates
from slipstream.models.memory import Memory
from slipstream.training.lessons import TextWindows
from slipstream.training.trainer import Checkpoint, Steps, Trainer, Watch, trapezoid

STATE = "training.safetensors"  # the file with the state of the training, in the folder of the heads


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training of heads: a step reads `rows` windows of `length` tokens.
    The learning `rate` warms up and decays."""

    heads: int = 4
    inner: int = 0  # the hidden units of a head; 0 takes those of a layer of the target
    steps: int = 1000
    rows: int = 4
    length: int = 256
    rate: float = 2e-3
    seed: int = 0
    bfloat16: bool = False  # multiply in bfloat16: faster where the processor can
    save_every: int = 50

    def __post_init__(self) -> None:
        check_least(self, heads=1, steps=1, rows=1, length=self.heads + 2, save_every=1)


class HeadTrainer:
    """Trains heads for a target on a text. `train` resumes after an interruption, also in a new process."""

    def __init__(
        self, model: Any, name: str, tokens: Sequence[int] | np.ndarray, folder: str | Path, settings: TrainingSettings
    ) -> None:
        """Make new heads, or resume the training in `folder`; `tokens` is the whole text."""
        self.model, self.folder, self.settings = model.eval(), Path(folder), settings
        self.windows = TextWindows(tokens, settings.length)
        torch.manual_seed(settings.seed)
        width = plain_weight(model.get_output_embeddings()).shape[-1]
        inner = settings.inner or getattr(model.config.get_text_config(), "intermediate_size", None) or 4 * width
        self.heads = ParallelHeads(Sizes(settings.heads, width, inner, name)).to(model.device)
        self._states = HiddenStates(model, name, [LAST], Memory())
        rate = settings.rate
        optimizer = torch.optim.AdamW(self.heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        known = {**asdict(settings), "text_tokens": len(self.windows.text)}
        del known["save_every"]  # a training may be resumed with another value
        self._trainer = Trainer(
            self.heads,
            [optimizer],
            trapezoid(0.02, 0.6, first=0.05),
            Steps(settings.steps, settings.save_every),
            Checkpoint(self.folder / STATE, known),
        )

    @property
    def step(self) -> int:
        return self._trainer.progress.steps

    def train(self, watch: Watch = lambda progress, loss: None) -> ParallelHeads:
        """Take the steps that are left, and save the heads with a report -> the heads.

        If interrupted, it saves its state. Raises FloatingPointError, and saves nothing, if the heads compute numbers
        that are not finite.
        """

        def loss(step: int, used: float) -> tuple[Tensor, int]:
            p, log_q = self._laws(self.windows.random(self.settings.rows, self.settings.seed, step))
            return -(p * log_q).sum(-1).mean(), self.settings.rows * self.settings.length

        self._trainer.train(loss, watch)
        report = self.report()
        self._trainer.save()
        self.heads.eval().save(self.folder, report)
        return self.heads

    def report(self, windows: int = 16) -> dict[str, Any]:
        """Measure the heads on the held-out end of the text -> `alpha` of each head, and the settings of the training.

        `alpha` is the mean of sum_x min(p(x), q(x)) against the target's law.
        """
        kept = torch.zeros(self.settings.heads, dtype=torch.float64)
        for window in self.windows.to_measure(windows):
            with torch.inference_mode():
                p, log_q = self._laws(window[None])
                kept += torch.minimum(p, log_q.exp()).sum(-1).mean((0, 1)).double().cpu()
        alpha = (kept / windows).tolist()
        return {
            "alpha": alpha,
            "steps": self.step,
            "lesson": asdict(self.settings),
            "text_tokens": len(self.windows.text),
        }

    def _laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's laws p and the heads' log q on windows (rows, length).

        Both are (rows, positions, heads, vocab). Entry [t, k] is about the token k + 2 places after t: the next one is
        pending when the heads draft.
        """
        tokens, count = tokens.to(self.model.device), self.settings.heads
        last = tokens.shape[1] - count
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.settings.bfloat16):
            with torch.no_grad(), self._states.watching() as seen:
                logits = self.model(input_ids=tokens, use_cache=False).logits
            states = self.heads(seen[LAST][:, :last].to(self.heads.down.dtype))
            ours = self.model.get_output_embeddings()(states.to(self.model.dtype))
        p = logits.float().softmax(-1)
        later = torch.stack([p[:, k : k + last] for k in range(1, count + 1)], 2)
        return later, functional.log_softmax(ours.float(), -1)
