"""The training text: Python's standard library and other files, the tokenizer, and random windows of the text."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.files import atomic_write

END = "<|endoftext|>"
VOCABULARY = 4096
HELD_OUT = (
    "calendar.py",
    "csv.py",
    "fnmatch.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/encoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "tempfile.py",
    "textwrap.py",
)
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
TABLE_SHARE = 0.6  # files in which a larger share of lines starts with a literal are tables, not worth learning from
COPIED = 0.2  # a file that shares at least this part of its longer lines with held-out modules is a copy
_TABLE_LINE = re.compile(r"\s*[bru]*['\"\d({\[]")
_IMPORT_LINE = re.compile(r"^(?:import|from) [\w ,.]+$", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:import|from|def|class|@)\b", re.MULTILINE)
# Line ends join the punctuation before them and indentation is a piece of its own, so a prompt
# that stops right after a newline is tokenized as it would be in the middle of a file.
_PIECES = r"[ .]?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Source:
    """One module: its path in the library or the package, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Library:
    """The modules to train on, and those held out for measuring."""

    train: list[Source]
    held_out: list[Source]


def is_table(text: str) -> bool:
    """Whether a file is mostly data (code pages, entity lists, help texts)."""
    lines = [line for line in text.splitlines() if line.strip()]
    literal = sum(bool(_TABLE_LINE.match(line)) for line in lines)
    return len(text) > 2000 and literal > TABLE_SHARE * len(lines)


def read_library() -> Library:
    """Read the standard library of the running Python, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[Source] = []
    held_out: list[Source] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if relative.as_posix() in HELD_OUT:
            held_out.append(Source(relative.as_posix(), text))
        elif text.strip() and not is_table(text):
            train.append(Source(relative.as_posix(), text))
    return Library(train, held_out)


def without_copies(sources: list[Source], held_out: list[Source]) -> list[Source]:
    """Leave out copies of the held-out modules: files that share a fifth of their longer lines or more with them."""
    known = {line for source in held_out for line in _longer_lines(source.text)}
    return [source for source in sources if not _share(_longer_lines(source.text), known) >= COPIED]


def _longer_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) > 30]


def _share(lines: list[str], known: set[str]) -> float:
    return sum(line in known for line in lines) / max(1, len(lines))


def train_tokenizer(sources: list[Source]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary on the training files."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((source.text for source in sources), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


class Windows(Protocol):
    """A text from which a training reads random windows."""

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
        """Return random windows of token ids (rows, length)."""
        ...


@dataclass(frozen=True)
class Mixture:
    """Two texts; a window is from the first one with probability `share`."""

    first: Windows
    second: Windows
    share: float

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
        """Return random windows of token ids (rows, length)."""
        of_first = int(rng.binomial(rows, self.share))
        return torch.cat([self.first.windows(rng, of_first, length), self.second.windows(rng, rows - of_first, length)])


class Stream:
    """All files as one row of tokens, each file preceded by the end-of-text token."""

    def __init__(self, tokens: np.ndarray, file_starts: np.ndarray, line_starts: np.ndarray) -> None:
        self.tokens = tokens.astype(np.int64)  # files hold 16-bit integers
        self.file_starts, self.line_starts = file_starts, line_starts

    @classmethod
    def stored(cls, file: Path, read: Callable[[], list[Source]], tokenizer: PreTrainedTokenizerFast) -> Stream:
        """Return the stream stored in the file; if there is no file yet, tokenize what `read` returns, and store it."""
        if not file.exists():
            made = cls.of(read(), tokenizer)
            with atomic_write(file) as part, part.open("wb") as out:
                np.savez(
                    out,
                    tokens=made.tokens.astype(np.uint16),
                    file_starts=made.file_starts,
                    line_starts=made.line_starts,
                )
        return cls(**np.load(file))

    @classmethod
    def of(cls, sources: list[Source], tokenizer: PreTrainedTokenizerFast) -> Stream:
        """Create a stream by tokenizing the sources."""
        core = tokenizer.backend_tokenizer
        end = tokenizer.eos_token_id
        parts: list[np.ndarray] = []
        file_starts: list[int] = []
        line_starts: list[int] = []
        size = 0
        for source, encoding in zip(sources, core.encode_batch([s.text for s in sources]), strict=True):
            file_starts.append(size)
            line_starts += [size + 1 + i for i in _top_level_tokens(source.text, encoding.offsets)]
            parts.append(np.array([end, *encoding.ids], dtype=np.int64))
            size += len(parts[-1])
        tokens = np.concatenate([*parts, np.array([end])])
        return cls(tokens, np.array(file_starts), np.array(line_starts))

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
        """Return random windows of token ids (rows, length): most start anywhere, some where a prompt would start."""
        kinds = rng.random(rows)
        starts = rng.integers(0, len(self.tokens), rows)
        starts = np.where(kinds < 0.30, rng.choice(self.line_starts, rows), starts)
        starts = np.where(kinds < 0.06, rng.choice(self.file_starts, rows), starts)
        starts = np.minimum(starts, len(self.tokens) - length)
        return torch.from_numpy(self.tokens[starts[:, None] + np.arange(length)])


def _top_level_tokens(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Return the indices of the tokens that begin a top-level import, def, class or decorator."""
    index = {start: i for i, (start, _) in enumerate(offsets)}
    starts = (match.start() for match in _TOP_LEVEL.finditer(text))
    return [index[start] for start in starts if start in index]


def function_headers(sources: list[Source]) -> list[str]:
    """Return prompts to complete: functions and methods cut after their docstring, dedented."""
    return [header for source in sources for header in _headers_of(source.text)]


def _headers_of(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines(keepends=True)
    headers = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        last = node.body[0].end_lineno or node.lineno
        indent = " " * node.col_offset
        cut = [line.removeprefix(indent) for line in lines[node.lineno - 1 : last]]
        headers.append("".join(cut))
    return headers


def prompts(sources: list[Source], text: Windows, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return prompts, as token ids, for the target to continue: functions, and openings of several lengths."""
    rng = np.random.default_rng(0)
    headers = function_headers(sources)
    imports = sorted({line for s in sources for line in _IMPORT_LINE.findall(s.text)})
    imported = [f"{rng.choice(imports)}\n\n\n{header}" for header in headers[::2]]
    openings = [text.windows(rng, 400, length).tolist() for length in (4, 8, 16, 32, 64, 96)]
    return [
        *tokenizer([*headers, *imported], verbose=False).input_ids,
        *(row for rows in openings for row in rows),
    ]
