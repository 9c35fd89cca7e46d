"""A task whose answers resemble their sources: Python functions with typing errors, to be corrected."""

from __future__ import annotations

import ast
import keyword
import random
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reproduction.standins import python_prompts as writing
from reproduction.standins.corpora import Pairs
from reproduction.standins.models import save
from reproduction.standins.tuning import STATE, Lesson, Say, tune

NAME = "edits"
OPENING, CLOSING = "# Broken:\n", "\n# Corrected:\n"
"""The text before and after the broken function in a prompt."""

SHORTEST, LONGEST = 60, 260  # characters of a function
SLIPS = 3  # the most typing errors of a text
NAMES = re.compile(r"[A-Za-z_]{3,}")


def pairs(seed: int = 0, most: int = 20_000_000) -> Pairs:
    """Return prompts with functions of the standard library, each broken by a few slips, and the correct functions.

    `most` characters of files are read; functions of modules outside the embedded pair's training text are held out.
    """
    rng = random.Random(seed)
    held_out = list(functions((writing.library() / name).read_text(encoding="utf-8") for name in writing.HELD_OUT))
    rng.shuffle(held_out)
    excluded = set(held_out)
    known = [text for text in functions(writing.texts(most)) if text not in excluded]
    train, test = ([(prompt(broken(text, rng)), text) for text in texts] for texts in (known, held_out))
    return Pairs(NAME, tuple(train), tuple(test))


def functions(files: Iterable[str]) -> Iterator[str]:
    """Yield the short functions without decorators in the texts of source files, each once."""
    seen = set[str]()
    for source in files:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
                if SHORTEST <= len(text) <= LONGEST and text.startswith("def ") and text not in seen:
                    seen.add(text)
                    yield text


def broken(text: str, rng: random.Random) -> str:
    """Return the text with one to three slips: letters swapped, a letter or sign left out, a word doubled or replaced
    by another one of the text."""
    for _ in range(rng.randint(1, SLIPS)):
        text = rng.choice((_swapped, _left_out, _without_sign, _doubled, _mistaken))(text, rng)
    return text


def _word(text: str, rng: random.Random) -> re.Match[str]:
    return rng.choice(list(NAMES.finditer(text)))


def _put(text: str, word: re.Match[str], new: str) -> str:
    return text[: word.start()] + new + text[word.end() :]


def _swapped(text: str, rng: random.Random) -> str:
    word = _word(text, rng)
    place, name = rng.randrange(len(word[0]) - 1), word[0]
    return _put(text, word, name[:place] + name[place + 1] + name[place] + name[place + 2 :])


def _left_out(text: str, rng: random.Random) -> str:
    word = _word(text, rng)
    place = rng.randrange(1, len(word[0]))
    return _put(text, word, word[0][:place] + word[0][place + 1 :])


def _without_sign(text: str, rng: random.Random) -> str:
    places = [place for place, sign in enumerate(text) if sign in ":(),=.[]"]
    place = rng.choice(places)
    return text[:place] + text[place + 1 :]


def _doubled(text: str, rng: random.Random) -> str:
    word = _word(text, rng)
    return _put(text, word, f"{word[0]} {word[0]}")


def _mistaken(text: str, rng: random.Random) -> str:
    word = _word(text, rng)
    others = [name for name in NAMES.findall(text) if name != word[0] and not keyword.iskeyword(name)]
    return _put(text, word, rng.choice(others)) if others else text


def prompt(source: str) -> str:
    return f"{OPENING}{source}{CLOSING}"


def source_of(prompts: Sequence[str], encode: Callable[[str], Sequence[int]]) -> Callable[[Sequence[int]], list[int]]:
    """Return a function from the tokens of one of the prompts to the tokens of its broken text.

    The latter need not be a part of the former: the tokenizer may split the text differently within the prompt.
    """
    sources = {tuple(encode(each)): list(encode(each[len(OPENING) : -len(CLOSING)])) for each in prompts}
    return lambda ids: sources[tuple(ids)]


@dataclass(frozen=True)
class Editing:
    """The training data of the task: token ids of prompts, and of answers that end with EOS."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]

    @staticmethod
    def of(known: Sequence[tuple[str, str]], tokenizer: Any) -> Editing:
        prompts, answers = zip(*known, strict=True)
        eos = [tokenizer.eos_token_id]
        return Editing(
            tokenizer(list(prompts))["input_ids"], [[*answer, *eos] for answer in tokenizer(list(answers))["input_ids"]]
        )

    def batch(self, lesson: Lesson, step: int) -> tuple[Tensor, Tensor]:
        """Return token ids and labels (rows, longest) of a step; prompts and padding have no loss (label -100)."""
        rng = random.Random(lesson.seed * 1_000_003 + step)
        some = sorted(rng.sample(range(len(self.prompts)), min(8 * lesson.rows, len(self.prompts))), key=self._length)
        start = rng.randrange(max(1, len(some) - lesson.rows + 1))  # neighbours are of similar length
        texts = [(list(self.prompts[i]), list(self.answers[i])) for i in some[start : start + lesson.rows]]
        width = max(len(ask) + len(answer) for ask, answer in texts)
        rows = [ask + answer + [0] * (width - len(ask) - len(answer)) for ask, answer in texts]
        labels = [[-100] * len(ask) + answer + [-100] * (width - len(ask) - len(answer)) for ask, answer in texts]
        return torch.tensor(rows), torch.tensor(labels)

    def _length(self, place: int) -> int:
        return len(self.prompts[place]) + len(self.answers[place])


def train(model: Any, tokenizer: Any, editing: Editing, lesson: Lesson, folder: Path, say: Say) -> None:
    """Train a causal model to write the correct functions, and save it in `folder`, unless it is there already."""
    if (folder / "config.json").is_file():
        return

    def loss_of(step: int, used: float) -> tuple[Tensor, int]:
        tokens, labels = editing.batch(lesson, step)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return model(input_ids=tokens, labels=labels, use_cache=False).loss, tokens.numel()

    tune(model, loss_of, lesson, folder.with_name(f"{folder.name}-{STATE}"), (f"{NAME}, {folder.name}", say))
    save(model, tokenizer, folder)
