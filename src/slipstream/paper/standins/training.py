"""Training a T5-type model on pairs, or a draft on its target's laws: with progress, resuming where it stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import T5ForConditionalGeneration

from slipstream.files import atomic_write
from slipstream.paper.standins.models import EOS, PAD, SPECIAL

IGNORED = -100
HASTE = 10.0  # of embeddings: T5's begin with a spread of 1, and would hardly move at the rate of the other weights
SOFT = 32  # tokens of a law that are kept for a draft to learn from


@dataclass(frozen=True)
class Example:
    """Token ids with </s>. `laws`: of every target position, the likeliest tokens and their probabilities."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    laws: tuple[Tensor, Tensor] | None = None  # (positions, SOFT) both


@dataclass(frozen=True)
class Plan:
    """How long and how fast: passes over the examples, pairs per step, learning rate and where it ends."""

    epochs: float
    batch: int = 128
    rate: float = 1e-3
    last: float = 0.0  # share of the rate that is left at the end
    warm: int = 200  # steps until the full rate
    seed: int = 0


def copies(count: int, vocab: int, longest: int = 16, seed: int = 0) -> list[Example]:
    """Random tokens, to be said again. A model that copies these finds its way in sources of words; without them one
    of a few million weights does not come upon copying in an hour."""
    rng = random.Random(seed)
    texts = (tuple(rng.randrange(SPECIAL, vocab) for _ in range(rng.randint(4, longest))) for _ in range(count))
    return [Example((*text, EOS), (*text, EOS)) for text in texts]


Watch = Callable[[int, int, float], object]
"""(steps done, steps in all, loss): called after every step."""


class Learner:
    """A model in training. `learn` goes on after an interruption, also in a new process."""

    def __init__(self, model: T5ForConditionalGeneration, examples: Sequence[Example], plan: Plan, file: Path) -> None:
        """`file` keeps the state; raises ValueError if it belongs to another training."""
        self.model, self.examples, self.plan, self.file = model, examples, plan, file
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device).train()
        self.optimizer = torch.optim.AdamW(_groups(model), lr=plan.rate, betas=(0.9, 0.98), fused=True)
        self.steps = max(1, round(plan.epochs * len(examples) / plan.batch))
        self.step = 0
        if file.exists():
            self._resume()

    def learn(self, watch: Watch = lambda step, steps, loss: None, save_every: int = 100) -> None:
        """The steps that are left. Interrupted, it saves first."""
        try:
            while self.step < self.steps:
                loss = self._learn(self._batch())
                self.step += 1
                watch(self.step, self.steps, loss)
                if self.step % save_every == 0:
                    self._save()
        finally:
            self._save()
        self.model.eval().cpu()

    def _learn(self, batch: Sequence[Example]) -> float:
        torch.manual_seed(self.plan.seed * 1_000_003 + self.step)  # of dropout
        source = padded([example.source for example in batch], PAD).to(self.device)
        labels = padded([example.target for example in batch], IGNORED).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            begun = self.model.prepare_decoder_input_ids_from_labels(labels)
            logits = self.model(input_ids=source, attention_mask=source != PAD, decoder_input_ids=begun).logits
        loss = _loss(logits.float(), labels, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate * group["haste"] * _rate(self.step, self.steps, self.plan)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _batch(self) -> list[Example]:
        """Pairs of similar length; they depend on the seed and the step alone, so resuming changes nothing."""
        size, count = self.plan.batch, len(self.examples)
        epoch, place = divmod(self.step, max(1, count // size))
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, rng = epoch, random.Random(self.plan.seed * 7919 + epoch)
            lengths = [len(example.source) + len(example.target) for example in self.examples]
            order = [(lengths[i] + rng.random() * 4, i) for i in rng.sample(range(count), count)]
            chunks = [sorted(order[start : start + 32 * size]) for start in range(0, count, 32 * size)]
            places = [i for chunk in chunks for _, i in chunk]
            self._batches = [places[start : start + size] for start in range(0, count - size + 1, size)] or [places]
            rng.shuffle(self._batches)
        return [self.examples[i] for i in self._batches[place]]

    # ---- state ----

    def _save(self) -> None:
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.file) as part:
            torch.save(state, part)

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self.file, map_location=self.device, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise ValueError(f"{self.file} belongs to a training with another plan: delete it, or give the same plan.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _groups(model: T5ForConditionalGeneration) -> list[dict[str, Any]]:
    """Embeddings, matrices and scales: how fast each learns, and what decays."""
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.dim() > 1 and weight is not embedding]
    scales = [weight for weight in model.parameters() if weight.dim() < 2]
    return [
        {"params": [embedding], "weight_decay": 0.0, "haste": HASTE},
        {"params": matrices, "weight_decay": 0.01, "haste": 1.0},
        {"params": scales, "weight_decay": 0.0, "haste": 1.0},
    ]


def _loss(logits: Tensor, labels: Tensor, batch: Sequence[Example]) -> Tensor:
    """Cross entropy against the text, or against the target's laws where they are known. Mean over tokens.

    Of a law only the SOFT likeliest tokens are kept; what little lies outside teaches nothing.
    """
    if batch[0].laws is None:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    logs = logits.log_softmax(-1)
    tokens = padded_laws([example.laws[0] for example in batch if example.laws], logits.shape[1]).to(logits.device)
    shares = padded_laws([example.laws[1] for example in batch if example.laws], logits.shape[1]).to(logits.device)
    inside = -(shares.float() * logs.gather(-1, tokens.long())).sum(-1)
    real = labels != IGNORED
    return inside[real].mean()


def _rate(step: int, steps: int, plan: Plan) -> float:
    """A warm-up, then half a cosine down to `last`."""
    falling = 0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * step / steps)).item()
    return min(1.0, (step + 1) / plan.warm) * (plan.last + (1 - plan.last) * falling)


def padded(texts: Sequence[Sequence[int]], value: int) -> Tensor:
    """(rows, longest)."""
    width = max(map(len, texts))
    return torch.tensor([[*text, *[value] * (width - len(text))] for text in texts])


def padded_laws(laws: Sequence[Tensor], width: int) -> Tensor:
    """(rows, width, SOFT)."""
    return torch.stack([functional.pad(law, (0, 0, 0, width - len(law))) for law in laws])


@torch.no_grad()
def with_laws(
    model: T5ForConditionalGeneration,
    sources: Sequence[tuple[int, ...]],
    texts: Sequence[tuple[int, ...]],
    batch: int | None = None,
    watch: Callable[[int, int], object] = lambda done, of: None,
) -> list[Example]:
    """Texts to sources, with the model's laws (T=1) at every position of theirs."""
    order = sorted(range(len(sources)), key=lambda i: (len(texts[i]), len(sources[i])))
    found: dict[int, Example] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch or (256 if device.type == "cuda" else 16)  # few, so that a CPU's caches hold what layers hand on
    model.to(device).eval()
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        heard = padded([sources[i] for i in places], PAD).to(device)
        said = padded([texts[i] for i in places], IGNORED).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            begun = model.prepare_decoder_input_ids_from_labels(said)
            logits = model(input_ids=heard, attention_mask=heard != PAD, decoder_input_ids=begun).logits
        law = logits.float().softmax(-1).topk(SOFT)
        tops, shares = law.indices.to(torch.int16).cpu(), law.values.to(torch.bfloat16).cpu()
        for row, i in enumerate(places):
            end = len(texts[i])
            found[i] = Example(sources[i], texts[i], (tops[row, :end].clone(), shares[row, :end].clone()))
        watch(len(found), len(order))
    return [found[i] for i in range(len(order))]
