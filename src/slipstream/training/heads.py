"""Teaching parallel heads on a frozen target: text in, heads out, with progress, resuming after any interruption.

Head k learns, at every position of the text, what the target itself says k tokens later: cross entropy against the
target's law there, which carries more than the one token that follows in the text. The target runs once per batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.drafters.heads import FILE, ParallelHeads, Sizes, Tap
from slipstream.drafters.heads import KIND as HEADS
from slipstream.files import Kind, load_tensors, save_tensors
from slipstream.models.families import longest_text
from slipstream.text.jsontext import json_text

STATE = "training.safetensors"
KIND = Kind("training of heads", "slipstream heads in training", "2", "give another folder to begin anew")

FILES = {FILE: HEADS, STATE: KIND}
"""What a training writes to its folder."""

HELD_OUT = 0.02
"""Share of the text, at its end, that is only measured on."""


@dataclass(frozen=True)
class Lesson:
    """How heads are taught. `rows` windows of `length` tokens make a step; the learning `rate` warms up and decays.

    Raises ValueError for what is impossible.
    """

    heads: int = 4
    inner: int = 0  # hidden units of a head; 0: as many as a layer of the target
    pending: bool = True
    steps: int = 1000
    rows: int = 4
    length: int = 256
    rate: float = 2e-3
    seed: int = 0
    bfloat16: bool = False  # multiply in bfloat16: faster where the processor can
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("heads", "steps", "rows", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not possible: it must be 1 or more.")
        if self.length < self.heads + 2:
            raise ValueError(
                f"length={self.length} is too short for {self.heads} heads: give {self.heads + 2} or more."
            )
        if not 0 < self.rate < 1:
            raise ValueError(f"rate={self.rate} is not possible: it must be between 0 and 1.")

    def check_target(self, model: Any, name: str) -> None:
        """Raises ValueError if heads cannot be taught on this model, or its context is shorter than a window."""
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder: heads are for causal models.")
        context = longest_text(model.config.get_text_config())
        if context and self.length > context:
            raise ValueError(
                f"length={self.length} is too long: {name} holds {context} tokens, so give {context} or less."
            )


Watch = Callable[[int, float], None]
"""(steps done, loss): called after every step."""


class Teacher:
    """A target, a text and heads in training. `teach` goes on after an interruption, also in a new process."""

    def __init__(self, model: Any, name: str, tokens: Sequence[int] | np.ndarray, folder: str | Path, lesson: Lesson):
        """`tokens` is the whole text. Raises ValueError if it is too short, if `folder` holds another training, or if
        the model cannot be taught on windows of this length."""
        lesson.check_target(model, name)
        self.model, self.folder, self.lesson = model.eval(), Path(folder), lesson
        text = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
        cut = len(text) - max(lesson.length, int(HELD_OUT * len(text)))
        if cut < 2 * lesson.length:
            raise ValueError(f"{len(text)} tokens of text are too few: give at least {4 * lesson.length}.")
        self.text, self.held_out = text[:cut], text[cut:]
        torch.manual_seed(lesson.seed)
        width = model.get_output_embeddings().weight.shape[-1]
        inner = lesson.inner or getattr(model.config.get_text_config(), "intermediate_size", None) or 4 * width
        self.heads = ParallelHeads(Sizes(lesson.heads, width, inner, lesson.pending, name)).to(model.device)
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=lesson.rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0
        self._tap = Tap(model)
        if (self.folder / STATE).exists():
            self._resume()

    def teach(self, watch: Watch = lambda step, loss: None) -> ParallelHeads:
        """Learn for the steps that are left, save the heads with a report -> the heads. Interrupted, it saves first.

        Raises FloatingPointError, and saves nothing, if target or heads compute what is no finite number.
        """
        try:
            while self.step < self.lesson.steps:
                loss = self._learn()
                watch(self.step, loss)
                if self.step % self.lesson.save_every == 0:
                    self._save()
            report = self.report()
        except FloatingPointError:
            raise  # to go on would end here again
        except BaseException:
            self._save()
            raise
        self._save()
        self.heads.eval().save(self.folder, report)
        return self.heads

    def report(self, windows: int = 16) -> dict[str, Any]:
        """On the end of the text: `alpha` of every head, the mean of sum_x min(p(x), q(x)) against the target's law.

        Raises FloatingPointError if that is no finite number.
        """
        starts = np.linspace(0, len(self.held_out) - self.lesson.length, windows).astype(int).tolist()
        kept = torch.zeros(self.lesson.heads, dtype=torch.float64)
        for start in starts:
            with torch.inference_mode():
                p, q = self._laws(self.held_out[None, start : start + self.lesson.length])
                kept += torch.minimum(p, q.exp()).sum(-1).mean((0, 1)).double().cpu()
                if not kept.isfinite().all():
                    raise self._not_finite(p)
        alpha = (kept / len(starts)).tolist()
        return {"alpha": alpha, "steps": self.step, "lesson": asdict(self.lesson), "text_tokens": len(self.text)}

    def _learn(self) -> float:
        """One step on random windows -> the loss. They depend on seed and step alone, so resuming changes nothing."""
        lesson = self.lesson
        rng = np.random.default_rng([lesson.seed, self.step])
        starts = torch.from_numpy(rng.integers(0, len(self.text) - lesson.length + 1, lesson.rows))
        p, log_q = self._laws(self.text[starts[:, None] + torch.arange(lesson.length)])
        loss = -(p * log_q).sum(-1).mean()
        loss.backward(inputs=list(self.heads.parameters()))  # the target stays as it is
        steepness = torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        if not torch.isfinite(loss.detach() + steepness):
            raise self._not_finite(p)
        for group in self.optimizer.param_groups:
            group["lr"] = lesson.rate * _rate(self.step / lesson.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def _laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the target's laws p and the heads' log q along windows of text (rows, length).

        Both are of shape (rows, positions, heads, vocab).

        Entry [t, k] is about the token k + 2 places behind t: the next one is pending when the heads are asked.
        """
        tokens, count = tokens.to(self.model.device), self.lesson.heads
        last = tokens.shape[1] - count
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.lesson.bfloat16):
            with torch.no_grad():
                logits = self.model(input_ids=tokens, use_cache=False).logits
                following = self.model.get_input_embeddings()(tokens[:, 1 : last + 1])
            hidden = self._tap.hidden[:, :last].to(self.heads.down.dtype)
            states = self.heads(hidden, following.to(hidden.dtype))
            ours = self.model.get_output_embeddings()(states.to(self.model.dtype))
        p = logits.float().softmax(-1)
        later = torch.stack([p[:, k : k + last] for k in range(1, count + 1)], 2)
        return later, functional.log_softmax(ours.float(), -1)

    def _not_finite(self, p: Tensor) -> FloatingPointError:
        """The error to raise when laws `p` of the target led to what is no finite number."""
        name, lesson = self.heads.sizes.target, self.lesson
        if not p.isfinite().all():
            fault = f"{name} gives non-finite logits: the weights are damaged or overflow in this dtype"
            return FloatingPointError(f"{fault} (try bfloat16 or float32).")
        fault = f"the heads diverged after {self.step} steps: give a rate below {lesson.rate:g}"
        return FloatingPointError(f"{fault}{', or leave out bfloat16' if lesson.bfloat16 else ''}, and another folder.")

    # ---- the state of a training ----

    def _save(self) -> None:
        weights = {name: weight.detach().cpu() for name, weight in self.heads.named_parameters()}
        for name, weight in self.heads.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq") if weight in self.optimizer.state else ():
                weights[f"{name}.{moment}"] = self.optimizer.state[weight][moment].cpu()
        lesson = json_text({**asdict(self.lesson), "text_tokens": len(self.text)})
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self.folder / STATE, KIND, weights, {"step": str(self.step), "lesson": lesson})

    def _resume(self) -> None:
        weights, notes = load_tensors(self.folder / STATE, KIND)
        ours = {**asdict(self.lesson), "text_tokens": len(self.text)}
        theirs = json.loads(notes.get("lesson", "{}"))
        differ = [name for name in ours if ours[name] != theirs.get(name) and name != "save_every"]
        if differ:
            raise ValueError(
                f"{self.folder / STATE} belongs to a training with another {', '.join(differ)}: "
                "give the same settings to resume it, or another folder."
            )
        self.step = int(notes["step"])
        for name, weight in self.heads.named_parameters():
            weight.data.copy_(weights[name])
            if f"{name}.exp_avg" in weights:
                moments = {
                    moment: weights[f"{name}.{moment}"].to(weight.device) for moment in ("exp_avg", "exp_avg_sq")
                }
                self.optimizer.state[weight] = {"step": torch.tensor(float(self.step)), **moments}


def teach(
    model: Any, name: str, tokens: Sequence[int] | np.ndarray, folder: str | Path, lesson: Lesson | None = None
) -> ParallelHeads:
    """Teach heads for a model on a text of tokens and save them in `folder`; see `Teacher`."""
    return Teacher(model, name, tokens, folder, lesson or Lesson()).teach()


def _rate(fraction: float) -> float:
    """A short warm-up, then a straight line to zero."""
    return min(1.0, fraction / 0.02 + 0.05, (1.0 - fraction) / 0.6)
