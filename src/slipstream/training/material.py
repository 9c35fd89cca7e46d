"""Material of a distillation: documents divided into texts to learn from and prompts, and texts of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.core.protocols import HasModel, LiesOnRanks
from slipstream.engine.engine import Engine
from slipstream.files import TensorFileKind, load_tensors, save_tensors
from slipstream.training.lessons import HELD_OUT, Lessons, Tokens, windows

KIND = TensorFileKind(
    "collection of written texts", "slipstream written texts", "1", "delete it to let the target write again"
)

TEMPERATURES, SHARES = (0.0, 0.6, 1.0), (0.3, 0.1, 0.6)
"""The temperatures at which texts are written, with their shares, since drafts are used at any temperature."""

OPENINGS = (4, 8, 16, 32, 64, 96)
"""The lengths, in tokens, of prompts that are taken from documents for the target to continue."""

LONGEST = 0.75  # the greatest share of a text's length that its prompt may take


class WrittenTexts:
    """Texts (prompt and continuation, as token ids) in a file, which grows batch by batch."""

    def __init__(self, file: Path, settings: dict[str, str]) -> None:
        self.file, self.settings = file, settings
        self.texts: list[list[int]] = []
        if file.exists():
            tensors, about = load_tensors(file, KIND)
            differ = [name for name, value in settings.items() if about.get(name) != value]
            if differ:
                raise ValueError(f"{file} holds texts of another {', '.join(differ)}: {KIND.remedy}.")
            parts = tensors["tokens"].long().split(tensors["lengths"].tolist())
            self.texts = [part.tolist() for part in parts]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    def write(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        more: Callable[[WrittenTexts], bool],
        length: int,
        rows: int = 64,
        seed: int = 0,
    ) -> None:
        """Let an engine continue prompts (token ids) to texts of up to `length` tokens, while `more` returns true.

        It writes `rows` texts at a time. If it is stopped and resumed, it writes the same texts as without a stop.
        Raises ValueError if no prompt is short enough.
        """
        usable = sorted((list(prompt) for prompt in prompts if 0 < len(prompt) <= LONGEST * length), key=len)
        if not usable:
            raise ValueError(f"no prompt has {int(LONGEST * length)} tokens or fewer: the target has nothing to write.")
        while more(self):
            rng = np.random.default_rng([seed, len(self.texts)])
            start = int(rng.integers(0, max(1, len(usable) - rows + 1)))
            some = usable[start : start + rows]  # prompts of about the same length
            temperature = float(rng.choice(TEMPERATURES, p=SHARES))
            new = length - len(some[-1])
            done = engine.generate(
                some, temperature=temperature, max_new_tokens=new, seed=int(rng.integers(2**31)), plain=True
            )
            self.texts += [[*prompt, *one.tokens] for prompt, one in zip(some, done, strict=True)]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            flat = torch.tensor([token for text in self.texts for token in text], dtype=torch.int32)
            lengths = torch.tensor(list(map(len, self.texts)), dtype=torch.int32)
            save_tensors(self.file, KIND, {"tokens": flat, "lengths": lengths}, self.settings)


def openings(documents: Iterable[Tokens], count: int, seed: int = 0) -> list[list[int]]:
    """Return at most `count` prompts (token ids): beginnings of documents, and pieces from anywhere in them."""
    rng, prompts = np.random.default_rng([seed, 7]), list[list[int]]()
    known = [document for document in documents if len(document)]
    for place in range(count if known else 0):
        document = known[place % len(known)]
        length = int(rng.choice(OPENINGS))
        anywhere = rng.random() < 0.5 and len(document) > 2 * length
        start = int(rng.integers(0, len(document) - length)) if anywhere else 0
        prompts.append([int(token) for token in document[start : start + length]])
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]


SEQUENCE = "sequence"
"""The name of sequence-level distillation, which learns the tokens of the target's texts instead of its laws."""

WRITTEN = "written.safetensors"  # the file with the texts that the target wrote, in the folder of a training
PROMPTS, PROMPT_TOKENS = 16, 48  # the number of prompts that a draft is measured on, and their length in tokens
MOST_TOKENS = 1_000_000  # the most tokens of documents to learn from: the target's laws on them take 1 GB of memory


@dataclass(frozen=True)
class Material:
    """The material of a distillation: lessons on documents (`read`) and on texts that the target has `written`.
    `prompts` (token ids) are held out for measuring."""

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
    With `laws` the target's law is computed at every position; otherwise the law is the next token."""

    length: int
    read: int
    written: int
    laws: bool = True
    seed: int = 0


def gather(
    engine: Engine, divided: Divided, amount: Amount, folder: Path, watch: Callable[[int], object] = lambda tokens: None
) -> Material:
    """Let the target write its texts, resuming where it was stopped, and make lessons of these and of the documents.
    `watch` is called with the number of tokens written so far. The texts are stored in `folder`."""
    target = target_of(engine)
    if target.context and amount.length > target.context:
        raise ValueError(f"length={amount.length} is beyond the {target.context} tokens of {target.name}: take fewer.")
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
