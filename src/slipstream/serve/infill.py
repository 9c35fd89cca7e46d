"""Prompts for filling in the middle: prefix and suffix, between the tokens that a model was trained with for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from slipstream.serve.faults import BadRequest
from slipstream.serve.schema import ExtraFile
from slipstream.serve.state import ServerState


class Marks(NamedTuple):
    """The tokens before the prefix, the suffix and the middle. Without the last, the suffix comes before the prefix."""

    prefix: str
    suffix: str
    middle: str | None


MARKS = (  # marks of published families
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Marks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed
    Marks("<PRE>", "<SUF>", "<MID>"),
    Marks("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    Marks("[PREFIX]", "[SUFFIX]", None),  # Codestral
)

REPOSITORY = ("<|repo_name|>", "<reponame>", "<repo_name>", "<|repo|>")
FILE = ("<|file_sep|>", "<file_sep>", "<filename>")  # before the name of another file of the context
ENDS = (*FILE, *REPOSITORY, "<|fim_pad|>", "<fim_pad>", "▁<EOT>", "<EOT>")  # of what is filled in
SNIPPET = "\n\n--- snippet ---\n\n"  # line before a text of another file, for models without a token for that


@dataclass(frozen=True)
class Infill:
    """How a tokenizer marks the parts of a prompt for filling in; `begin` are the tokens before every text."""

    tokenizer: Any
    marks: tuple[int, int, int | None]
    begin: tuple[int, ...]
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=1)
    def of(tokenizer: Any) -> Infill | None:
        ids = tokenizer.get_vocab()
        marks = next((marks for marks in MARKS if all(mark is None or mark in ids for mark in marks)), None)
        if marks is None:
            return None
        middle = None if marks.middle is None else ids[marks.middle]
        text = tokenizer.encode("x", add_special_tokens=False)
        whole = tokenizer.encode("x")
        begin = whole[: len(whole) - len(text)] if text and whole[-len(text) :] == text else []
        repository, file = (next((ids[name] for name in names if name in ids), None) for names in (REPOSITORY, FILE))
        ends = tuple(ids[name] for name in ENDS if name in ids)
        return Infill(tokenizer, (ids[marks.prefix], ids[marks.suffix], middle), tuple(begin), repository, file, ends)

    def prompt(self, prefix: str, suffix: str, extra: Sequence[ExtraFile] = ()) -> tuple[int, ...]:
        before, after, middle = self.marks
        parts = ([before, *self._ids(prefix)], [after, *self._ids(suffix)])
        ordered = [*parts[1], *parts[0]] if middle is None else [*parts[0], *parts[1], middle]
        context = []
        if extra and self.repository is not None:
            context += [self.repository, *self._ids("project\n")]
        for file in extra:
            context += [*self._named(file.filename or "file"), *self._ids(file.text)]
        if extra and self.file is not None:
            context += self._named("this file")
        return (*self.begin, *context, *ordered)

    def _named(self, name: str) -> list[int]:
        return self._ids(SNIPPET) if self.file is None else [self.file, *self._ids(f"{name}\n")]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def infill_of(state: ServerState, field: str) -> Infill:
    """Return how the served model fills in. Raises BadRequest, which names `field`, for a model that does not."""
    found = Infill.of(state.engine.tokenizer) if state.engine.tokenizer is not None else None
    if found is None:
        raise BadRequest(
            f"{field} needs a model that fills in, and the tokenizer of {state.model} has no tokens for that: leave it "
            "out.",
            field,
        )
    return found
