"""A family of stand-ins in a folder: a target and its drafts, trained from pairs unless they exist."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from reproduction.standins import models as standins
from reproduction.standins.corpora import Pairs, crossed
from reproduction.standins.models import DRAFTS, DROPOUT, GROWN_INNER, TARGET, Size
from reproduction.standins.training import Example, Exercise, Plan, train, with_laws
from slipstream.core.garbage import keep_freed_memory
from slipstream.core.round import Round
from slipstream.engine.load import load
from slipstream.files import atomic_write
from slipstream.text.jsontext import json_text

TOGETHER = 32  # texts that the target answers in one batch


@dataclass(frozen=True)
class Recipe:
    """The recipe of a family: train the target, grow it, then train its drafts on its answers."""

    vocab: int = 4000
    first: Plan = field(default_factory=lambda: Plan(4, batch=32, rate=1.5e-3, warm=300, last=0.02))
    grown: Plan = field(default_factory=lambda: Plan(0.05, batch=32, rate=2e-4, warm=20, seed=1))
    inner: int = GROWN_INNER
    target: Size = TARGET
    drafts: dict[str, tuple[Size, Plan]] = field(
        default_factory=lambda: {
            "small": (DRAFTS["small"], Plan(40, batch=48, rate=4e-3)),
            "base": (DRAFTS["base"], Plan(5, batch=48, rate=3e-3)),
            "large": (DRAFTS["large"], Plan(1.3, batch=16, rate=2e-3)),
        }
    )
    longest: int = 128  # tokens of the target's answers
    crossed: int = 8_000  # sources of two halves, after the others, which the target has not memorized
    answered: dict[float, slice] = field(  # temperature -> the sources whose answers the drafts learn from
        default_factory=lambda: {0.0: slice(30_800, 40_800), 1.0: slice(34_800, 42_800)}
    )
    exercises: tuple[Exercise, ...] = ()  # before all else: for tasks that repeat parts of the source
    dropout: float = DROPOUT  # dropout of the target before it is grown


RECIPES = {
    "translation": Recipe(inner=24576),
    "lead": Recipe(
        inner=24576,
        exercises=(
            Exercise("copying", 20_000, 16, Plan(5, batch=64, rate=1.5e-3, warm=100, last=0.3)),
            Exercise("finding", 32_000, 48, Plan(1, batch=32, rate=1.5e-3, warm=100, last=0.3), 24),
            Exercise("finding far", 16_000, 160, Plan(1, batch=16, rate=1e-3, warm=50, last=0.3), 144, 0.5),
        ),
        dropout=0.0,
        first=Plan(6, batch=16, rate=1e-3, warm=100, last=0.02),
        grown=Plan(0.03, batch=16, rate=2e-4, warm=5, seed=1),
        drafts={
            "small": (DRAFTS["small"], Plan(20, batch=32, rate=2e-3)),
            "base": (DRAFTS["base"], Plan(12, batch=32, rate=2e-3)),
            "large": (DRAFTS["large"], Plan(3, batch=32, rate=2e-3)),
        },
        crossed=0,
        answered={0.0: slice(2_000), 1.0: slice(2_000, 4_000)},
        longest=144,
    ),
}
"""The recipes by task. Translation took about two hours on two cores. The target of lead took eight minutes on an
H100 that three other trainings used too, and its answers and drafts 100 minutes of work of one core."""


def tiny(longest: int, inner: int = 512) -> Recipe:
    """Return a recipe of models that learn little, in a minute or two: to check that everything runs."""
    plan = Plan(1.5, batch=64, rate=4e-3, warm=20)
    sizes = {"small": Size(16, 1, 16, 32, 1, 1), "base": Size(32, 2, 16, 64, 1, 1), "large": Size(64, 2, 32, 128, 1, 1)}
    return Recipe(
        *(2000, plan, replace(plan, epochs=0.1, rate=3e-4, seed=1), inner, Size(128, 4, 32, 256, 1, 2)),
        {name: (size, replace(plan, epochs=4.0)) for name, size in sizes.items()},
        longest,
        crossed=0,
        answered={0.0: slice(1_000), 1.0: slice(1_000, 2_000)},
    )


QUICK_RECIPES = {"translation": tiny(64), "lead": tiny(96)}
Say = Callable[[str], object]


def complete(folder: Path, recipe: Recipe) -> bool:
    return all((folder / name / "config.json").exists() for name in ("target", *recipe.drafts))


def make(pairs: Pairs, folder: Path, recipe: Recipe, say: Say = print) -> None:
    """Train what is missing in `folder`: target, answers, drafts. An interrupted run is resumed.

    Raises ValueError if the folder has models that were trained on other pairs.
    """
    family = Family(pairs, folder, recipe, say)
    family.claim()
    if not complete(folder, recipe):
        keep_freed_memory()  # or half of the time of training a grown target goes into clearing memory anew
        family.make()


@dataclass
class Family:
    """Trains the models of a family in a folder, unless they are there. The folder `training` holds what they need."""

    pairs: Pairs
    folder: Path
    recipe: Recipe
    say: Say

    def claim(self) -> None:
        about = json_text({"pairs": len(self.pairs.train), "sha256": self.pairs.digest()})
        file = self.work / "pairs.json"
        known = file.read_text() if file.exists() else ""
        if known != about and (known or self._has("target")):
            raise ValueError(
                f"the stand-ins in {self.folder} learned from other pairs than the given ones, or do not say which: "
                "give another folder, or delete this one to train them anew."
            )
        self.work.mkdir(parents=True, exist_ok=True)
        file.write_text(about)

    def make(self) -> None:
        if not self._has("target"):
            standins.save(self._target(), self.tokenizer, self.folder / "target")
        for name, (size, plan) in self.recipe.drafts.items():
            if not self._has(name):
                standins.save(self._draft(name, size, plan), self.tokenizer, self.folder / name)

    def _has(self, name: str) -> bool:
        return (self.folder / name / "config.json").exists()

    @property
    def work(self) -> Path:
        return self.folder / "training"

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        saved = self.work / "tokenizer"
        if not saved.exists():
            standins.new_tokenizer(self.pairs.texts(), self.recipe.vocab).save_pretrained(saved)
        return PreTrainedTokenizerFast.from_pretrained(saved)

    def _encoded(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(tokens) for tokens in self.tokenizer(list(texts))["input_ids"]]

    # ---- the target ----

    @cached_property
    def _examples(self) -> list[Example]:
        sources, targets = (self._encoded(texts) for texts in zip(*self.pairs.train, strict=True))
        return [Example(source, target) for source, target in zip(sources, targets, strict=True)]

    def _first(self) -> T5ForConditionalGeneration:
        """Return the target before it grows; its training is kept."""
        model = standins.new_model(self.recipe.target, len(self.tokenizer), dropout=self.recipe.dropout)
        self._exercise(model, "target")
        self._train(model, self._examples, self.recipe.first, "first", "target")
        return model

    def _target(self) -> T5ForConditionalGeneration:
        target = standins.grown(self._first(), self.recipe.inner)
        self._train(target, self._examples, self.recipe.grown, "grown", "grown target")
        return target

    # ---- its answers ----

    @cached_property
    def _answers(self) -> list[Example]:
        """The target's answers to sources of the pairs and to crossed ones, with its laws; they are kept in a file."""
        file, target = self.work / "answers.pt", self.folder / "target"
        if file.exists():
            return [Example(*kept) for kept in torch.load(file, weights_only=True)]
        texts = [source for source, _ in self.pairs.train]
        encoded = self._encoded([*texts, *crossed(texts, self.recipe.crossed)])
        sources, said = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for temperature, part in self.recipe.answered.items():
            sources += encoded[part]
            said += answers(target, encoded[part], temperature, self.recipe.longest, self.say)

        def watch(done: int, of: int) -> None:
            self.say(f"laws of answers: {done} of {of}")

        model = T5ForConditionalGeneration.from_pretrained(target, dtype=torch.float32)
        examples = with_laws(model, sources, said, watch=watch)
        with atomic_write(file) as written:
            torch.save([(example.source, example.target, example.laws) for example in examples], written)
        return examples

    # ---- the drafts ----

    def _draft(self, name: str, size: Size, plan: Plan) -> T5ForConditionalGeneration:
        draft = standins.new_model(size, len(self.tokenizer), dropout=0.0)
        self._exercise(draft, name, plan.rate)
        self._train(draft, self._answers, plan, name, name)
        return draft

    def _exercise(self, model: T5ForConditionalGeneration, name: str, rate: float | None = None) -> None:
        """Train a model on the exercises; `rate` is that of a draft, None for the target."""
        for exercise in self.recipe.exercises:
            plan = exercise.plan
            if rate:
                plan = replace(plan, rate=rate, epochs=plan.epochs * exercise.for_drafts)
            examples, what = exercise.examples(model.config.vocab_size), f"{name}-{exercise.name}".replace(" ", "-")
            self._train(model, examples, plan, what, f"{name}, {exercise.name}")

    def _train(
        self, model: T5ForConditionalGeneration, examples: Sequence[Example], plan: Plan, file: str, what: str
    ) -> None:
        """Train a model; `file` names its state in the folder of trainings, `what` names it in messages."""

        def watch(step: int, steps: int, loss: float) -> None:
            if step % 20 == 0 or step == steps:
                self.say(f"{what}: step {step} of {steps}, loss {loss:.3f}")

        train(model, examples, plan, self.work / f"{file}.safetensors", watch)


def answers(
    target: Path, sources: Sequence[tuple[int, ...]], temperature: float, most: int, say: Say = print
) -> list[tuple[int, ...]]:
    """Generate answers to every source by the model in a folder, in bfloat16. Sampled unless `temperature` is 0."""
    engine, done = load(target, dtype="bfloat16", batch_size=TOGETHER), 0

    def watch(round: Round) -> None:
        nonlocal done
        if ended := sum(bool(row.finish_reason) for row in round.rows):
            done += ended
            say(f"answers at temperature {temperature:g}: {done} of {len(sources)}")

    said = engine.generate(sources, max_new_tokens=most, temperature=temperature, on_round=watch)
    return [completion.tokens for completion in said]
