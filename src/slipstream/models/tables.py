"""Scorers from plain functions and tables: toy models for tests, whose laws can be enumerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.core.protocols import Shape
from slipstream.core.source import Source, SourceForm

Table = Callable[[tuple[int, ...]], Sequence[float]]  # a function from a prefix to the probabilities of the next token


class TableScorer:
    """An autoregressive process given by a function of the prefix, in float64. The cache, `texts`, holds the tokens."""

    device = torch.device("cpu")
    source_form: SourceForm | None = None

    def __init__(self, table: Table, vocab: int, name: str = "table", context: int | None = None) -> None:
        self.table, self.vocab, self.name, self.context = table, vocab, name, context
        self.texts: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        self.texts += [[] for _ in range(rows)]

    def fork(self, rows: Sequence[int]) -> None:
        self.texts += [list(self.texts[row]) for row in rows]

    def free(self, rows: Sequence[int]) -> None:
        self.texts = [text for place, text in enumerate(self.texts) if place not in set(rows)]

    def rollback(self, lengths: Sequence[int]) -> None:
        assert len(lengths) <= len(self.texts), "one length per row, of the first rows"
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=False)), "rollback only shortens"
        for text, length in zip(self.texts, lengths, strict=False):
            del text[length:]

    def scrub(self) -> None:
        """Do nothing: a text that was freed leaves no state in a table."""

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens (rows, n) to the rows from `first` on -> log probabilities (rows, n, vocab)."""
        logits = torch.zeros(*tokens.shape, self.vocab, dtype=torch.float64)
        for r, (row, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            text = self.texts[first + r]
            held, seen = (0, None) if tree is None else tree.of_row(r)
            base = len(text) - held
            for j, new in enumerate(row[:count]):
                text.append(new)
                line = text[base:] if seen is None else [text[base + k] for k in seen[j].nonzero()[:, 0].tolist()]
                logits[r, j] = torch.tensor(self.table((*text[:base], *line)), dtype=torch.float64).log()
        return logits

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for text, start, path in zip(self.texts[: len(starts)], starts, paths, strict=True):
            text[start : start + len(path)] = [text[start + place] for place in path]

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        for text, new in zip(self.texts[first : first + len(texts)], texts, strict=True):
            text.extend(new)

    def fix_shape(self, shape: Shape | None) -> None:
        """Do nothing: a table gives the same numbers in any batch."""
