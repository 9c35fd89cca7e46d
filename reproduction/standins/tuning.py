"""Trains copies of the embedded target for other papers' methods: exits after every layer, and parallel heads with a
fine-tuned base. Both learn the target's own law; an interrupted training is resumed."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from reproduction.baselines.heads import ParallelHeads, Sizes
from reproduction.standins.models import save
from slipstream.training.trainer import Checkpoint, Loss, Steps, Trainer

TARGET, HEADS, STATE = "target", "heads", "training.safetensors"
"""Names in the folder of a copy: the folders of the model and of its heads, and the file of an unfinished training."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Lesson:
    """The training settings of a copy; a step has `rows` windows of `length` tokens, or `rows` pairs of texts."""

    steps: int = 200
    rows: int = 8
    length: int = 128
    rate: float = 3e-4
    seed: int = 0
    save_every: int = 25


@dataclass(frozen=True)
class Teaching:
    """The inputs for training a copy: the target with its tokenizer, a text as token ids, and a progress callback."""

    model: Any
    tokenizer: Any
    text: Tensor
    say: Say


def tune(module: nn.Module, loss_of: Loss, lesson: Lesson, file: Path, said: tuple[str, Say]) -> None:
    """Train a module, or resume its training from the state in `file`.

    `said`: the module's name in progress messages, and the callback that gets them.
    """
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
    return min(1.0, used / 0.1 + 0.05, (1.0 - used) / 0.7)


def windows(text: Tensor, lesson: Lesson, step: int) -> Tensor:
    """Return random windows (rows, length) of a text, which depend only on seed and step, so resuming repeats them."""
    rng = np.random.default_rng([lesson.seed, step])
    starts = torch.from_numpy(rng.integers(0, len(text) - lesson.length + 1, lesson.rows))
    return text[starts[:, None] + torch.arange(lesson.length)]


# ---- exits -----------------------------------------------------------------------------------------------------------


def exits(folder: Path, teaching: Teaching, lesson: Lesson) -> Path:
    """Train a copy that can exit after every layer, as in CALM (arXiv 2207.07061, eq. 6) -> its folder.

    The loss is the sum of the layers' losses, each weighted by its number.
    """
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
    """Return the logits (rows, n, vocab) of each layer as if it were the last, by the model's own norm and head."""
    out, norm, head = (
        model(input_ids=tokens, output_hidden_states=True, use_cache=False),
        model.model.norm,
        model.lm_head,
    )
    return [*(head(norm(states)) for states in out.hidden_states[1:-1]), out.logits]


def weighted_loss(p: Tensor, logits: Sequence[Tensor]) -> Tensor:
    """Return the mean of all layers' cross entropies against the law p (rows, n, vocab), weighted by layer number."""
    losses = [_against(p, each) for each in logits]
    total = sum(range(1, len(losses) + 1))
    return torch.stack([number / total * loss for number, loss in enumerate(losses, 1)]).sum()


def _against(p: Tensor, logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), p.flatten(0, -2))


# ---- blockwise -------------------------------------------------------------------------------------------------------


class Blockwise(nn.Module):
    """A base model and `heads` more outputs, trained together as in the fine-tuned setting of arXiv 1811.03115."""

    def __init__(self, base: Any, heads: int, name: str) -> None:
        super().__init__()
        config = base.config.get_text_config()
        self.base = base
        self.heads = ParallelHeads(Sizes(heads, config.hidden_size, config.intermediate_size, name))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (rows, n, 1 + heads, vocab): entry [t, k] predicts the token k + 1 positions after t."""
        out = self.base(input_ids=tokens, output_hidden_states=True, use_cache=False)
        hidden = out.hidden_states[-1]  # after the final norm
        states = self.heads(hidden)
        return torch.cat([out.logits.unsqueeze(2), self.base.get_output_embeddings()(states)], 2)


def blockwise(folder: Path, teaching: Teaching, lesson: Lesson, heads: int) -> Path:
    """Train a copy together with its parallel heads -> its folder, which holds both."""
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
