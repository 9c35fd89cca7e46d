"""Copies of the embedded target that other papers' methods are trained into: exits after every layer, parallel heads
with a base that learns along. Both learn the target's own law; an interrupted training goes on where it stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.drafters.heads import ParallelHeads, Sizes
from slipstream.paper.standins.models import save
from slipstream.training.trainer import Checkpoint, Loss, Steps, Trainer

TARGET, HEADS, STATE = "target", "heads", "training.safetensors"
"""In the folder of a copy: the folders of the model and of its heads, and the file of an unfinished training."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Lesson:
    """How a copy is taught: `rows` windows of `length` tokens, or so many pairs of texts, make a step."""

    steps: int = 200
    rows: int = 8
    length: int = 128
    rate: float = 3e-4
    seed: int = 0
    save_every: int = 25


@dataclass(frozen=True)
class Teaching:
    """What a copy is made of: the target with its tokenizer, the tokens of a text, and where progress is told."""

    model: Any
    tokenizer: Any
    text: Tensor
    say: Say


def tune(module: nn.Module, loss_of: Loss, lesson: Lesson, file: Path, said: tuple[str, Say]) -> None:
    """Train a module, of which `file` keeps the state. `said`: what it is called in messages, and who takes these."""
    name, say = said
    optimizer = torch.optim.AdamW(module.parameters(), lr=lesson.rate, betas=(0.9, 0.95), weight_decay=0.01)
    known = {field: value for field, value in asdict(lesson).items() if field != "save_every"}
    budget = Steps(lesson.steps, lesson.save_every)
    trainer = Trainer(module.train(), [optimizer], _factor, budget, Checkpoint(file, known))

    def watch(progress: Any, loss: float) -> None:
        if progress.steps % 20 == 0 or progress.steps == lesson.steps:
            say(f"{name}: step {progress.steps} of {lesson.steps}, loss {loss:.3f}")

    trainer.train(loss_of, watch)
    trainer.save()
    module.eval()


def _factor(step: int, used: float) -> float:
    """A short warm-up, then a straight line to zero."""
    return min(1.0, used / 0.1 + 0.05, (1.0 - used) / 0.7)


def windows(text: Tensor, lesson: Lesson, step: int) -> Tensor:
    """Random windows (rows, length) of a text. They depend on seed and step alone, so resuming changes nothing."""
    rng = np.random.default_rng([lesson.seed, step])
    starts = torch.from_numpy(rng.integers(0, len(text) - lesson.length + 1, lesson.rows))
    return text[starts[:, None] + torch.arange(lesson.length)]


# ---- exits -----------------------------------------------------------------------------------------------------------


def exits(folder: Path, teaching: Teaching, lesson: Lesson) -> Path:
    """The folder of a copy whose every layer can be the last, as CALM's authors train theirs (arXiv 2207.07061, eq. 6):
    the loss is the sum of the layers' losses, each weighted by its number."""
    if not (folder / TARGET / "config.json").is_file():
        student, teacher = copy.deepcopy(teaching.model), teaching.model.eval()

        def loss_of(step: int, used: float) -> tuple[Tensor, int]:
            tokens = windows(teaching.text, lesson, step)
            with torch.autocast(tokens.device.type, torch.bfloat16):
                with torch.no_grad():
                    p = teacher(input_ids=tokens, use_cache=False).logits.float().softmax(-1)
                loss = weighted_loss(p, logits_by_layer(student, tokens))
            return loss, tokens.numel()

        tune(student, loss_of, lesson, folder / STATE, ("exits", teaching.say))
        save(student, teaching.tokenizer, folder / TARGET)
    return folder / TARGET


def logits_by_layer(model: Any, tokens: Tensor) -> list[Tensor]:
    """What each layer would say if it were the last one: (rows, n, vocab) each, by the model's own norm and head."""
    out, norm, head = (
        model(input_ids=tokens, output_hidden_states=True, use_cache=False),
        model.model.norm,
        model.lm_head,
    )
    return [*(head(norm(states)) for states in out.hidden_states[1:-1]), out.logits]


def weighted_loss(p: Tensor, logits: Sequence[Tensor]) -> Tensor:
    """Cross entropy of every layer against the law p (rows, n, vocab), the mean weighted by the layers' numbers."""
    losses = [_against(p, each) for each in logits]
    total = sum(range(1, len(losses) + 1))
    return torch.stack([number / total * loss for number, loss in enumerate(losses, 1)]).sum()


def _against(p: Tensor, logits: Tensor) -> Tensor:
    """The cross entropy of a law p and logits, a mean over positions."""
    return functional.cross_entropy(logits.float().flatten(0, -2), p.flatten(0, -2))


# ---- blockwise -------------------------------------------------------------------------------------------------------


class Blockwise(nn.Module):
    """A base and `heads` more outputs that learn together, as in the fine-tuned setting of arXiv 1811.03115."""

    def __init__(self, base: Any, heads: int, name: str) -> None:
        super().__init__()
        config = base.config.get_text_config()
        self.base = base
        self.heads = ParallelHeads(Sizes(heads, config.hidden_size, config.intermediate_size, False, name))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (rows, n, 1 + heads, vocab): entry [t, k] is about the token k + 1 places behind t."""
        out = self.base(input_ids=tokens, output_hidden_states=True, use_cache=False)
        hidden = out.hidden_states[-1]  # behind the final norm
        states = self.heads(hidden, hidden[..., :0])
        return torch.cat([out.logits.unsqueeze(2), self.base.get_output_embeddings()(states)], 2)


def blockwise(folder: Path, teaching: Teaching, lesson: Lesson, heads: int) -> Path:
    """The folder of a copy that learned to serve its parallel heads, which lie beside it."""
    if not (folder / TARGET / "config.json").is_file():
        torch.manual_seed(lesson.seed)
        student = Blockwise(copy.deepcopy(teaching.model), heads, "blockwise base")

        def loss_of(step: int, used: float) -> tuple[Tensor, int]:
            tokens = windows(teaching.text, lesson, step)
            last = tokens.shape[1] - heads
            with torch.autocast(tokens.device.type, torch.bfloat16):
                with torch.no_grad():
                    p = teaching.model(input_ids=tokens, use_cache=False).logits.float().softmax(-1)
                logits = student(tokens)[:, :last]
            later = torch.stack([p[:, k : k + last] for k in range(1 + heads)], 2)
            return _against(later, logits), tokens.numel()

        tune(student, loss_of, lesson, folder / STATE, ("blockwise, base fine-tuned", teaching.say))
        student.heads.save(folder / HEADS)
        save(student.base, teaching.tokenizer, folder / TARGET)
    return folder
