"""A family of stand-ins in a folder: a target and its drafts, trained from pairs unless they exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from slipstream.core.round import Round
from slipstream.engine.load import load
from slipstream.files import atomic_write
from slipstream.paper.standins import models as standins
from slipstream.paper.standins.corpora import Pairs, crossed
from slipstream.paper.standins.models import DRAFTS, DROPOUT, GROWN_INNER, TARGET, Size
from slipstream.paper.standins.training import Example, Plan, copies, train, with_laws
from slipstream.training.memory import keep_freed_memory

COPIES = 20_000  # texts of random tokens
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
    copying: Plan | None = None  # on random tokens, before all else: for tasks that repeat parts of the source
    dropout: float = DROPOUT  # dropout of the target before it is grown


RECIPES = {
    "translation": Recipe(inner=24576),
    "lead": Recipe(
        copying=Plan(5, batch=64, rate=1.5e-3, warm=100, last=0.3),
        dropout=0.0,
        first=Plan(4, batch=16, rate=1e-3, warm=300, last=0.02),
        grown=Plan(0.02, batch=16, rate=2e-4, warm=5, seed=1),
        drafts={
            "small": (DRAFTS["small"], Plan(10, batch=32, rate=3e-3)),
            "base": (DRAFTS["base"], Plan(8, batch=32, rate=2e-3)),
            "large": (DRAFTS["large"], Plan(10, batch=32, rate=2e-3)),
        },
        crossed=0,
        answered={0.0: slice(3_000), 1.0: slice(3_000, 6_000)},
        longest=96,
    ),
}
"""The recipes by task; on two cores translation took about two hours and lead 85 minutes, not always alone."""


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
    """Whether all models of a family exist."""
    return all((folder / name / "config.json").exists() for name in ("target", *recipe.drafts))


def make(pairs: Pairs, folder: Path, recipe: Recipe, say: Say = print) -> None:
    """Train what is missing in `folder`: target, answers, drafts. An interrupted run is resumed."""
    if complete(folder, recipe):
        return
    keep_freed_memory()  # or half of the time of training a grown target goes into clearing memory anew
    work = folder / "training"
    tokenizer = _tokenizer(pairs, work, recipe.vocab)
    sides = (tokenizer(list(texts))["input_ids"] for texts in zip(*pairs.train, strict=True))
    examples = [Example(tuple(source), tuple(target)) for source, target in zip(*sides, strict=True)]
    if not (folder / "target" / "config.json").exists():
        standins.save(_target(examples, len(tokenizer), work, recipe, say), tokenizer, folder / "target")
    texts = [source for source, _ in pairs.train]
    encoded = tokenizer([*texts, *crossed(texts, recipe.crossed)])["input_ids"]
    labelled = _labelled(folder / "target", [*map(tuple, encoded)], work / "answers.pt", recipe, say)
    for name, (size, plan) in recipe.drafts.items():
        if not (folder / name / "config.json").exists():
            draft = standins.new_model(size, len(tokenizer), dropout=0.0)
            _copy(draft, name, recipe.copying and replace(recipe.copying, rate=plan.rate), work, say)
            train(draft, labelled, plan, work / f"{name}.safetensors", _watch(name, say))
            standins.save(draft, tokenizer, folder / name)


def _tokenizer(pairs: Pairs, work: Path, vocab: int) -> PreTrainedTokenizerFast:
    saved = work / "tokenizer"
    if not saved.exists():
        standins.new_tokenizer(pairs.texts(), vocab).save_pretrained(saved)
    return PreTrainedTokenizerFast.from_pretrained(saved)


def _target(examples: list[Example], vocab: int, work: Path, recipe: Recipe, say: Say) -> T5ForConditionalGeneration:
    first = standins.new_model(recipe.target, vocab, dropout=recipe.dropout)
    _copy(first, "target", recipe.copying, work, say)
    train(first, examples, recipe.first, work / "first.safetensors", _watch("target", say))
    target = standins.grown(first, recipe.inner)
    train(target, examples, recipe.grown, work / "grown.safetensors", _watch("grown target", say))
    return target


def _copy(model: T5ForConditionalGeneration, name: str, plan: Plan | None, work: Path, say: Say) -> None:
    """Train a model to copy random texts, if the recipe has a `copying` plan."""
    if plan:
        examples = copies(COPIES, model.config.vocab_size)
        train(model, examples, plan, work / f"{name}-copying.safetensors", _watch(f"{name}, copying", say))


def _labelled(target: Path, encoded: Sequence[tuple[int, ...]], file: Path, recipe: Recipe, say: Say) -> list[Example]:
    """Return examples of the target's answers to sources, with its laws; they are kept in a file."""
    if file.exists():
        return [Example(*labelled) for labelled in torch.load(file, weights_only=True)]
    sources, texts = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for temperature, part in recipe.answered.items():
        sources += encoded[part]
        texts += answers(target, encoded[part], temperature, recipe.longest, say)

    def watch(done: int, of: int) -> None:
        say(f"laws of answers: {done} of {of}")

    model = T5ForConditionalGeneration.from_pretrained(target, dtype=torch.float32)
    labelled = with_laws(model, sources, texts, watch=watch)
    with atomic_write(file) as written:
        torch.save([(example.source, example.target, example.laws) for example in labelled], written)
    return labelled


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


def _watch(name: str, say: Say) -> Callable[[int, int, float], None]:
    def watch(step: int, steps: int, loss: float) -> None:
        if step % 20 == 0 or step == steps:
            say(f"{name}: step {step} of {steps}, loss {loss:.3f}")

    return watch
