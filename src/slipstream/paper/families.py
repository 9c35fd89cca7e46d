"""A family of stand-ins in a folder: a target and its drafts, trained from pairs if they are not there yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from slipstream.files import whole
from slipstream.paper import standins
from slipstream.paper.corpora import Pairs
from slipstream.paper.standins import DRAFTS, DROPOUT, GROWN_INNER, TARGET, Size
from slipstream.paper.training import Example, Learner, Plan, answers, copies

COPIES = 20_000  # texts of random tokens


@dataclass(frozen=True)
class Recipe:
    """How a family is made: the target at first, then grown, then its drafts by what the target says."""

    vocab: int = 4000
    first: Plan = field(default_factory=lambda: Plan(10, batch=64, rate=1.5e-3, warm=300, last=0.02))
    grown: Plan = field(default_factory=lambda: Plan(0.15, batch=64, rate=2e-4, warm=20, seed=1))
    inner: int = GROWN_INNER
    target: Size = TARGET
    drafts: dict[str, tuple[Size, Plan]] = field(
        default_factory=lambda: {
            "small": (DRAFTS["small"], Plan(20, rate=3e-3)),
            "base": (DRAFTS["base"], Plan(10, rate=2e-3)),
            "large": (DRAFTS["large"], Plan(10, batch=64, rate=1.5e-3)),
        }
    )
    longest: int = 64  # tokens of what the target says
    heard: int = 20_000  # sources whose answers the drafts learn from
    greedy_share: float = 0.5  # of the sources that drafts learn from are answered greedily, the rest sampled
    copying: Plan | None = None  # of random tokens, before all else: for tasks that say parts of the source again
    dropout: float = DROPOUT  # of the target before it is grown


COPIER = Size(192, 6, 32, 896, 2, 2)  # the large draft of a task of copying: a wider one did not come upon it in time

RECIPES = {
    "translation": Recipe(),
    "lead": Recipe(
        copying=Plan(5, batch=64, rate=1.5e-3, warm=100, last=0.3),
        dropout=0.0,
        first=Plan(4, batch=16, rate=1e-3, warm=300, last=0.02),
        grown=Plan(0.02, batch=16, rate=2e-4, warm=5, seed=1),
        drafts={
            "small": (DRAFTS["small"], Plan(10, batch=32, rate=3e-3)),
            "base": (DRAFTS["base"], Plan(8, batch=32, rate=2e-3)),
            "large": (COPIER, Plan(10, batch=32, rate=2e-3)),
        },
        heard=6_000,
        longest=96,
    ),
}
"""On two cores translation took about 110 minutes, and lead about 85, both partly beside other work."""


def tiny(longest: int, inner: int = 512) -> Recipe:
    """Models that learn little, in a minute or two: to see that everything runs."""
    plan = Plan(1.5, batch=64, rate=4e-3, warm=20)
    sizes = {"small": Size(16, 1, 16, 32, 1, 1), "base": Size(32, 2, 16, 64, 1, 1), "large": Size(64, 2, 32, 128, 1, 1)}
    return Recipe(
        *(2000, plan, replace(plan, epochs=0.1, rate=3e-4, seed=1), inner, Size(128, 4, 32, 256, 1, 2)),
        {name: (size, replace(plan, epochs=4.0)) for name, size in sizes.items()},
        longest,
        heard=2000,
    )


QUICK_RECIPES = {"translation": tiny(64), "lead": tiny(96)}

Say = Callable[[str], object]


def complete(folder: Path, recipe: Recipe) -> bool:
    """Whether all models of a family are there."""
    return all((folder / name / "config.json").exists() for name in ("target", *recipe.drafts))


def make(pairs: Pairs, folder: Path, recipe: Recipe, say: Say = print) -> None:
    """Train what is missing in `folder`: target, answers, drafts. An interrupted run goes on where it stopped."""
    if complete(folder, recipe):
        return
    work = folder / "training"
    tokenizer = _tokenizer(pairs, work, recipe.vocab)
    sides = (tokenizer(list(texts))["input_ids"] for texts in zip(*pairs.train, strict=True))
    examples = [Example(tuple(source), tuple(target)) for source, target in zip(*sides, strict=True)]
    if not (folder / "target" / "config.json").exists():
        standins.save(_target(examples, len(tokenizer), work, recipe, say), tokenizer, folder / "target")
    target = T5ForConditionalGeneration.from_pretrained(folder / "target", dtype=torch.float32)
    told = _told(target, examples, work / "answers.pt", recipe, say)
    for name, (size, plan) in recipe.drafts.items():
        if not (folder / name / "config.json").exists():
            draft = standins.new_model(size, len(tokenizer), dropout=0.0)
            _copy(draft, name, recipe.copying and replace(recipe.copying, rate=plan.rate), work, say)
            Learner(draft, told, plan, work / f"{name}.pt").learn(_watch(name, say))
            standins.save(draft, tokenizer, folder / name)


def _tokenizer(pairs: Pairs, work: Path, vocab: int) -> PreTrainedTokenizerFast:
    saved = work / "tokenizer"
    if not saved.exists():
        standins.new_tokenizer(pairs.texts(), vocab).save_pretrained(saved)
    return PreTrainedTokenizerFast.from_pretrained(saved)


def _target(examples: list[Example], vocab: int, work: Path, recipe: Recipe, say: Say) -> T5ForConditionalGeneration:
    first = standins.new_model(recipe.target, vocab, dropout=recipe.dropout)
    _copy(first, "target", recipe.copying, work, say)
    Learner(first, examples, recipe.first, work / "first.pt").learn(_watch("target", say))
    target = standins.grown(first, recipe.inner)
    Learner(target, examples, recipe.grown, work / "grown.pt").learn(_watch("grown target", say))
    return target


def _copy(model: T5ForConditionalGeneration, name: str, plan: Plan | None, work: Path, say: Say) -> None:
    """What the recipe has before all else."""
    if plan:
        examples = copies(COPIES, model.config.vocab_size)
        Learner(model, examples, plan, work / f"{name}-copying.pt").learn(_watch(f"{name}, copying", say))


def _told(
    target: T5ForConditionalGeneration, examples: list[Example], file: Path, recipe: Recipe, say: Say
) -> list[Example]:
    """What the target says to the sources it learned from, some greedily and the rest sampled; kept in a file."""
    if file.exists():
        return [Example(*told) for told in torch.load(file, weights_only=True)]
    examples = examples[: recipe.heard]
    cut = int(recipe.greedy_share * len(examples))
    told: list[Example] = []
    for part, temperature in ((examples[:cut], 0.0), (examples[cut:], 1.0)):
        sources = [example.source for example in part]

        def watch(done: int, of: int, temperature: float = temperature) -> None:
            say(f"answers at temperature {temperature:g}: {done} of {of}")

        told += answers(target, sources, temperature, recipe.longest, watch=watch)
    with whole(file) as written:
        torch.save([(example.source, example.target, example.laws) for example in told], written)
    return told


def _watch(name: str, say: Say) -> Callable[[int, int, float], None]:
    def watch(step: int, steps: int, loss: float) -> None:
        if step % 20 == 0 or step == steps:
            say(f"{name}: step {step} of {steps}, loss {loss:.3f}")

    return watch
