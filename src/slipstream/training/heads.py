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

from slipstream.core.values import check_least
from slipstream.drafters.heads import FILE, ParallelHeads, Sizes
from slipstream.drafters.heads import KIND as HEADS
from slipstream.kernels.packing import plain_weight
from slipstream.models.families import longest_text
from slipstream.models.heads.hidden_states import LAST, HiddenStates
from slipstream.models.memory import Memory
from slipstream.training.lessons import TextWindows
from slipstream.training.trainer import KIND, Checkpoint, Diverged, Steps, Trainer, Watch, trapezoid

STATE = "training.safetensors"  # the file with the state of the training, in the folder of the heads
FILES = {FILE: HEADS, STATE: KIND}  # the files that a training writes to its folder, with their kinds


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training of heads: a step reads `rows` windows of `length` tokens.
    The learning `rate` warms up and decays. Raises ValueError for impossible values."""

    heads: int = 4
    inner: int = 0  # the hidden units of a head; 0 takes those of a layer of the target
    pending: bool = True
    steps: int = 1000
    rows: int = 4
    length: int = 256
    rate: float = 2e-3
    seed: int = 0
    bfloat16: bool = False  # multiply in bfloat16: faster where the processor can
    save_every: int = 50

    def __post_init__(self) -> None:
        check_least(self, heads=1, steps=1, rows=1, save_every=1)
        if self.length < self.heads + 2:
            raise ValueError(
                f"length={self.length} is too short for {self.heads} heads: give {self.heads + 2} or more."
            )
        if not 0 < self.rate < 1:
            raise ValueError(f"rate={self.rate} is not possible: it must be between 0 and 1.")

    def check_target(self, model: Any, name: str) -> None:
        """Raise ValueError if heads cannot be trained on this model, or its context is shorter than a window."""
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder: heads are for causal models.")
        context = longest_text(model.config.get_text_config())
        if context and self.length > context:
            raise ValueError(
                f"length={self.length} is too long: {name} holds {context} tokens, so give {context} or less."
            )


class HeadTrainer:
    """Trains heads for a target on a text. `train` resumes after an interruption, also in a new process."""

    def __init__(
        self, model: Any, name: str, tokens: Sequence[int] | np.ndarray, folder: str | Path, settings: TrainingSettings
    ) -> None:
        """Make new heads, or resume the training in `folder`; `tokens` is the whole text."""
        settings.check_target(model, name)
        self.model, self.folder, self.settings = model.eval(), Path(folder), settings
        self.windows = TextWindows(tokens, settings.length)
        torch.manual_seed(settings.seed)
        width = plain_weight(model.get_output_embeddings()).shape[-1]
        inner = settings.inner or getattr(model.config.get_text_config(), "intermediate_size", None) or 4 * width
        self.heads = ParallelHeads(Sizes(settings.heads, width, inner, settings.pending, name)).to(model.device)
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

        If interrupted, it saves its state. Raises FloatingPointError, and saves nothing, if the target or the heads
        compute numbers that are not finite.
        """

        def loss(step: int, used: float) -> tuple[Tensor, int]:
            p, log_q = self._laws(self.windows.random(self.settings.rows, self.settings.seed, step))
            return -(p * log_q).sum(-1).mean(), self.settings.rows * self.settings.length

        try:
            self._trainer.train(loss, watch)
        except Diverged as fault:
            raise self._diverged() from fault
        report = self.report()
        self._trainer.save()
        self.heads.eval().save(self.folder, report)
        return self.heads

    def report(self, windows: int = 16) -> dict[str, Any]:
        """Measure the heads on the held-out end of the text -> `alpha` of each head, and the settings of the training.

        `alpha` is the mean of sum_x min(p(x), q(x)) against the target's law. Raises FloatingPointError if it is not
        finite.
        """
        kept = torch.zeros(self.settings.heads, dtype=torch.float64)
        for window in self.windows.to_measure(windows):
            with torch.inference_mode():
                p, log_q = self._laws(window[None])
                kept += torch.minimum(p, log_q.exp()).sum(-1).mean((0, 1)).double().cpu()
                if not kept.isfinite().all():
                    raise self._diverged()
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
            with torch.no_grad():
                with self._states.watching() as seen:
                    logits = self.model(input_ids=tokens, use_cache=False).logits
                following = self.model.get_input_embeddings()(tokens[:, 1 : last + 1])
            hidden = seen[LAST][:, :last].to(self.heads.down.dtype)
            states = self.heads(hidden, following.to(hidden.dtype))
            ours = self.model.get_output_embeddings()(states.to(self.model.dtype))
        p = logits.float().softmax(-1)
        if not p.isfinite().all():
            fault = (
                f"{self.heads.sizes.target} gives non-finite logits: the weights are damaged or overflow in this dtype"
            )
            raise FloatingPointError(f"{fault} (try bfloat16 or float32).")
        later = torch.stack([p[:, k : k + last] for k in range(1, count + 1)], 2)
        return later, functional.log_softmax(ours.float(), -1)

    def _diverged(self) -> FloatingPointError:
        less = ", or leave out bfloat16" if self.settings.bfloat16 else ""
        fault = f"the heads diverged after {self.step} steps: give a rate below {self.settings.rate:g}"
        return FloatingPointError(f"{fault}{less}, and another folder.")
