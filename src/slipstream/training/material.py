"""Material of a distillation: documents divided into texts to learn from and prompts, and texts of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.core.protocols import HasModel, LiesOnRanks
from slipstream.engine.engine import Engine
from slipstream.training.lessons import HELD_OUT, Lessons, Tokens, windows
from slipstream.training.writing import WrittenTexts, openings

SEQUENCE = "sequence"
"""The name of sequence-level distillation, which learns the tokens of the target's texts instead of its laws."""

WRITTEN = "written.safetensors"  # the file with the texts that the target wrote, in the folder of a training
PROMPTS, PROMPT_TOKENS = 16, 48  # the number of prompts that a draft is measured on, and their length in tokens
MOST_TOKENS = 1_000_000  # the most tokens of documents to learn from: the target's laws on them take 1 GB of memory


@dataclass(frozen=True)
class Material:
    """The material of a distillation: lessons on documents (`read`) and on texts that the target has `written`.

    `prompts` (token ids) are held out for measuring.
    """

    read: Lessons
    written: Lessons
    prompts: tuple[tuple[int, ...], ...]


def target_of(engine: Engine) -> HasModel:
    """Return the target of an engine. Raises ValueError if it is not a causal model in one piece."""
    target = engine.decoder.target
    if not isinstance(target, HasModel) or isinstance(target, LiesOnRanks) or target.source_form is not None:
        raise ValueError(f"{target.name} is no causal model in one piece: no draft can be distilled for it.")
    return target


@dataclass(frozen=True)
class Divided:
    """Documents to learn from, as token ids, and the prompts held out for measuring."""

    documents: list[np.ndarray]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def divide(documents: Sequence[Tokens]) -> Divided:
    """Hold out the end of all documents, and take prompts from it. Raises ValueError if the text is too short."""
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
    """The amount of material: texts of `length` tokens, `read` tokens of documents, and `written` ones of the target.

    With `laws` the target's law is computed at every position; otherwise the law is the next token.
    """

    length: int
    read: int
    written: int
    laws: bool = True
    seed: int = 0


def gather(
    engine: Engine, divided: Divided, amount: Amount, folder: Path, watch: Callable[[int], object] = lambda tokens: None
) -> Material:
    """Let the target write its texts, resuming where it was stopped, and make lessons of these and of the documents.

    `watch` is called with the number of tokens written so far. The texts are stored in `folder`.
    """
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
