"""Trains a T5-type model on pairs, or a draft on its target's laws; an interrupted training is resumed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import T5ForConditionalGeneration

from reproduction.standins.models import EOS, PAD, SPECIAL
from slipstream.training.trainer import Checkpoint, Steps, Trainer

IGNORED = -100
"""The label at positions after the end of a text, which the loss ignores."""


HASTE = 10.0
"""The factor on the learning rate of embeddings: T5's start with a standard deviation of 1, and would otherwise hardly
change."""


SOFT = 32
"""The number of likeliest tokens of a law that are kept for a draft to learn from."""


SAVE_EVERY = 100
"""The number of steps between saves of a training's state."""


@dataclass(frozen=True)
class Example:
    """A source and a target text as token ids ending with </s>, and the likeliest tokens at every target position.

    `laws` are these tokens' ids and their probabilities under the model that a draft learns from.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    laws: tuple[Tensor, Tensor] | None = None  # (positions, SOFT) both


@dataclass(frozen=True)
class Plan:
    """The schedule of a training: passes over the examples, pairs per step, and the course of the learning rate."""

    epochs: float
    batch: int = 128
    rate: float = 1e-3
    last: float = 0.0  # the share of the rate that is left at the end
    warm: int = 200  # warm-up steps until the full rate
    seed: int = 0


@dataclass(frozen=True)
class Exercise:
    """An exercise in copying random tokens, before a model learns from texts: all of a source, or a part of it.

    A model that has learned to copy random tokens also copies words of its sources; without them, one of a few million
    weights does not learn to copy in an hour. All of a source can be copied by counting positions, which fails where
    sources are longer. For a part that begins anywhere, the model has to find its place by the last words.
    """

    name: str
    count: int
    longest: int  # tokens of a source
    plan: Plan
    part: int | None = None  # the most tokens to copy, from a random place on; None: all
    for_drafts: float = 1.0  # the share of the passes that drafts take

    def examples(self, vocab: int, seed: int = 0) -> list[Example]:
        """Return the examples; a part has at least six tokens."""
        rng, shortest = random.Random(seed), 4 if self.part is None else 8
        lengths = (rng.randint(shortest, self.longest) for _ in range(self.count))
        texts = [[rng.randrange(SPECIAL, vocab) for _ in range(length)] for length in lengths]
        if self.part is None:
            return [Example((*text, EOS), (*text, EOS)) for text in texts]
        starts = [rng.randrange(len(text) - 6) for text in texts]
        parts = [text[start : start + self.part] for start, text in zip(starts, texts, strict=True)]
        return [Example((*text, EOS), tuple(part)) for text, part in zip(texts, parts, strict=True)]


Watch = Callable[[int, int, float], object]
"""A function of the steps done, the steps in all and the loss that is called after every step."""


def train(
    model: T5ForConditionalGeneration,
    examples: Sequence[Example],
    plan: Plan,
    file: Path,
    watch: Watch = lambda step, steps, loss: None,
) -> None:
    """Train a model on examples, on the GPU if there is one; an interrupted training is resumed.

    `file` holds the state. Raises ValueError if it was written with another plan.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = torch.optim.AdamW(_groups(model, plan.rate), betas=(0.9, 0.98), fused=True)
    steps = max(1, round(plan.epochs * len(examples) / plan.batch))
    batches = Batches(examples, plan.batch, plan.seed)

    def loss_of(step: int, used: float) -> tuple[Tensor, int]:
        torch.manual_seed(plan.seed * 1_000_003 + step)  # for dropout
        batch = batches.at(step)
        return _loss(model, batch), sum(len(example.target) for example in batch)

    trainer = Trainer(
        model,
        [optimizer],
        lambda step, used: _factor(step, steps, plan),
        Steps(steps, SAVE_EVERY),
        Checkpoint(file, asdict(plan)),
    )
    trainer.train(loss_of, lambda progress, loss: watch(progress.steps, steps, loss))
    trainer.save()
    model.eval().cpu()


class Batches:
    """Examples in batches of similar length. The batch of a step depends on the seed and the step alone."""

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        self.examples, self.size, self.seed = examples, size, seed
        self._epoch = -1
        self._batches: list[list[int]] = []

    def at(self, step: int) -> list[Example]:
        size, count = self.size, len(self.examples)
        epoch, place = divmod(step, max(1, count // size))
        if epoch != self._epoch:
            self._epoch, rng = epoch, random.Random(self.seed * 7919 + epoch)
            lengths = [len(example.source) + len(example.target) for example in self.examples]
            order = [(lengths[i] + rng.random() * 4, i) for i in rng.sample(range(count), count)]
            chunks = [sorted(order[start : start + 32 * size]) for start in range(0, count, 32 * size)]
            places = [i for chunk in chunks for _, i in chunk]
            self._batches = [places[start : start + size] for start in range(0, count - size + 1, size)] or [places]
            rng.shuffle(self._batches)
        return [self.examples[i] for i in self._batches[place]]


def _groups(model: T5ForConditionalGeneration, rate: float) -> list[dict[str, Any]]:
    """Return embeddings, matrices and scales (of norms) as parameter groups with learning rates and weight decay."""
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.dim() > 1 and weight is not embedding]
    scales = [weight for weight in model.parameters() if weight.dim() < 2]
    return [
        {"params": [embedding], "weight_decay": 0.0, "lr": rate * HASTE},
        {"params": matrices, "weight_decay": 0.01, "lr": rate},
        {"params": scales, "weight_decay": 0.0, "lr": rate},
    ]


def _loss(model: T5ForConditionalGeneration, batch: Sequence[Example]) -> Tensor:
    """Return the cross entropy against the text, or against the target's laws if given; a mean over tokens.

    Only the SOFT likeliest tokens of a law count; the small probability of the others is ignored.
    """
    sources, labels = [example.source for example in batch], [example.target for example in batch]
    logits, targets = _answers(model, sources, labels)
    if batch[0].laws is None:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    logs = logits.log_softmax(-1)
    tokens = padded_laws([example.laws[0] for example in batch if example.laws], logits.shape[1]).to(logits.device)
    shares = padded_laws([example.laws[1] for example in batch if example.laws], logits.shape[1]).to(logits.device)
    inside = -(shares.float() * logs.gather(-1, tokens.long())).sum(-1)
    return inside[targets != IGNORED].mean()


def _answers(
    model: T5ForConditionalGeneration, sources: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the model's logits (rows, longest, vocab), in float32, at every position of texts; and the texts.

    The texts (rows, longest) are padded with IGNORED.
    """
    inputs, labels = padded(sources, PAD).to(model.device), padded(texts, IGNORED).to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        shifted = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(input_ids=inputs, attention_mask=inputs != PAD, decoder_input_ids=shifted).logits
    return logits.float(), labels


def _factor(step: int, steps: int, plan: Plan) -> float:
    falling = 0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * step / steps)).item()
    return min(1.0, (step + 1) / plan.warm) * (plan.last + (1 - plan.last) * falling)


def padded(texts: Sequence[Sequence[int]], value: int) -> Tensor:
    width = max(map(len, texts))
    return torch.tensor([[*text, *[value] * (width - len(text))] for text in texts])


def padded_laws(laws: Sequence[Tensor], width: int) -> Tensor:
    return torch.stack([functional.pad(law, (0, 0, 0, width - len(law))) for law in laws])


@torch.no_grad()
def with_laws(
    model: T5ForConditionalGeneration,
    sources: Sequence[tuple[int, ...]],
    texts: Sequence[tuple[int, ...]],
    batch: int | None = None,
    watch: Callable[[int, int], object] = lambda done, of: None,
) -> list[Example]:
    """Return examples of texts for sources, with the model's laws (at temperature 1) at every position of the texts."""
    order = sorted(range(len(sources)), key=lambda i: (len(texts[i]), len(sources[i])))
    examples: dict[int, Example] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch or (256 if device.type == "cuda" else 16)  # few, so that layers' outputs fit a CPU's caches
    model.to(device).eval()
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        logits, _ = _answers(model, [sources[i] for i in places], [texts[i] for i in places])
        law = logits.softmax(-1).topk(SOFT)
        tops, shares = law.indices.to(torch.int16).cpu(), law.values.to(torch.bfloat16).cpu()
        for row, i in enumerate(places):
            end = len(texts[i])
            examples[i] = Example(sources[i], texts[i], (tops[row, :end].clone(), shares[row, :end].clone()))
        watch(len(examples), len(order))
    return [examples[i] for i in range(len(order))]
