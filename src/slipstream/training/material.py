"""Material: documents divided into what a draft learns from and what it is measured on, and the target's own texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.core.protocols import HasModel, LiesOnRanks
from slipstream.engine.engine import Engine
from slipstream.training.lessons import Lessons, Tokens, windows
from slipstream.training.writing import WrittenTexts, openings

SEQUENCE = "sequence"
"""The objective of sequence-level distillation: the tokens of the target's texts, not its laws."""

WRITTEN = "written.safetensors"
"""The file in the folder of a training that keeps what the target wrote."""

HELD_OUT = 0.02
"""Share of the text, at its end, that nothing is learnt from."""

PROMPTS, PROMPT_TOKENS = 16, 48
"""How many prompts a draft is measured on, and how long they are."""

MOST_TOKENS = 1_000_000
"""Tokens of documents that are learnt from at most: the target's laws are kept in memory, 1 GB for so many."""


@dataclass(frozen=True)
class Material:
    """What a draft learns from: lessons on documents that were `read`, and on texts that the target has `written`; and
    the `prompts` (token ids), kept aside, that it is measured on."""

    read: Lessons
    written: Lessons
    prompts: tuple[tuple[int, ...], ...]


def target_of(engine: Engine) -> HasModel:
    """The target of an engine, whose model is asked for its laws. Raises ValueError for one that cannot be asked."""
    target = engine.decoder.target
    if not isinstance(target, HasModel) or isinstance(target, LiesOnRanks) or target.source_form is not None:
        raise ValueError(f"{target.name} is no causal model in one piece: no draft can be distilled for it.")
    return target


@dataclass(frozen=True)
class Divided:
    """Documents as token ids: those to learn from, and the prompts kept aside."""

    documents: list[np.ndarray]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """How many tokens there are to learn from."""
        return sum(map(len, self.documents))


def divide(documents: Sequence[Tokens]) -> Divided:
    """Keep the end of all documents aside. Raises ValueError if that leaves too little."""
    arrays = [np.asarray(document, dtype=np.int64) for document in documents]
    total, least = sum(map(len, arrays)), PROMPT_TOKENS + PROMPTS
    kept = max(least, int(HELD_OUT * total))
    if total < 4 * least:
        raise ValueError(f"{total} tokens of text are too few to distil on: give at least {4 * least}.")
    stream, left, parts = np.concatenate(arrays), total - kept, list[np.ndarray]()
    for document in arrays:
        if left > 0:
            parts.append(document[:left])
        left -= len(document)
    starts = np.linspace(total - kept, total - PROMPT_TOKENS, PROMPTS).astype(int)
    prompts = tuple(tuple(stream[start : start + PROMPT_TOKENS].tolist()) for start in starts)
    return Divided(parts, prompts)


@dataclass(frozen=True)
class Amount:
    """How much there is to learn from: texts of `length` tokens, as many `read` as that (tokens), and as many `written`
    by the target. With `laws` the target is asked what it says at every position."""

    length: int
    read: int
    written: int
    laws: bool = True
    seed: int = 0


def gather(
    engine: Engine,
    divided: Divided,
    amount: Amount,
    folder: Path,
    watch: Callable[[int], object] = lambda tokens: None,
) -> Material:
    """Let the target write, go on where it was stopped, and make lessons of it all; `watch` is called with the number
    of tokens written so far. `folder` keeps what was written."""
    target = target_of(engine)
    settings = {"target": target.name, "length": str(amount.length), "text_tokens": str(divided.tokens)}
    written = WrittenTexts(folder / WRITTEN, settings)

    def more(texts: WrittenTexts) -> bool:
        watch(texts.tokens)
        return texts.tokens < amount.written

    if more(written):
        prompts = openings(divided.documents, max(256, amount.written // amount.length), amount.seed)
        written.write(engine, prompts, more, amount.length, seed=amount.seed)

    def ask(tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return target.model(input_ids=tokens, use_cache=False).logits

    most = min(amount.read, MOST_TOKENS) // amount.length
    stream = np.concatenate(divided.documents)
    read = windows(stream, min(amount.length, len(stream)), most, amount.seed) if amount.read else []
    asked = ask if amount.laws else None
    own = written.texts if amount.written else []
    return Material(
        Lessons(read, amount.length, target.vocab, asked),
        Lessons(own, amount.length, target.vocab, asked),
        divided.prompts,
    )
