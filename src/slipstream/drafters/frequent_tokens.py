"""Counts the tokens that a target writes most often, so that a draft's head can be cut to them and run faster.

Most tokens of a large vocabulary are rarely written, while the projection to it is a large part of a small model
(FR-Spec, arXiv 2502.14856; VocabTrim, arXiv 2506.22694). The counted text is written by the target itself, because a
draft has to predict that. A cut draft's law q is zero at the other tokens, and is the law its tokens are drawn from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.drafters.datastore.drafter import fingerprint
from slipstream.files import TensorFileKind, save_tensors, user_cache

KIND = TensorFileKind(
    "table of token counts", "slipstream token counts", "1", "make it with `slipstream draft build vocabulary`"
)


@dataclass(frozen=True)
class TokenCounts:
    """How often a target wrote each of its tokens, `counts` (vocab,), in how many `texts`, by which `tokenizer`."""

    counts: Tensor
    texts: int
    target: str
    tokenizer: str = ""

    @staticmethod
    def of(texts: Iterable[Sequence[int]], vocab: int, target: str, tokenizer: Any = None) -> TokenCounts:
        written = [torch.tensor(text, dtype=torch.long) for text in texts]
        counts = torch.bincount(torch.cat(written), minlength=vocab) if written else torch.zeros(vocab).long()
        return TokenCounts(counts, len(written), target, fingerprint(tokenizer))

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def different(self) -> int:
        return int((self.counts > 0).sum())

    def most_frequent(self, size: int) -> Tensor:
        """Return the ids (size,) of the most frequent tokens, ascending; ties go to the lowest, as in tokenizers."""
        return self.counts.argsort(descending=True, stable=True)[:size].sort().values

    def share(self, kept: Tensor) -> float:
        return float(self.counts[kept].sum()) / max(1, self.total)

    def save(self, path: str | Path) -> None:
        about = {"target": self.target, "tokenizer": self.tokenizer, "texts": str(self.texts)}
        save_tensors(path, KIND, {"counts": self.counts}, about)

    @staticmethod
    def load(path: str | Path) -> TokenCounts:
        with KIND.contents(path) as (tensors, about):
            return TokenCounts(tensors["counts"], int(about["texts"]), about["target"], about["tokenizer"])


def kept_counts(target: str, vocab: int, tokenizer: Any) -> Path:
    name = hashlib.sha256(repr((target, vocab, fingerprint(tokenizer))).encode()).hexdigest()[:16]
    return user_cache() / "token_counts" / f"{name}.safetensors"


@dataclass(frozen=True)
class FrequentTokens:
    """The tokens to which a draft's head is cut: the `size` most frequent ones (None: all that were written), by the
    counts in `file` (None: in the target's default file)."""

    size: int | None = None
    file: str | None = None

    @staticmethod
    def parse(text: str) -> FrequentTokens:
        """Parse "2048", "FILE" or "2048:FILE". Raises ValueError for anything else."""
        size, colon, file = text.partition(":")
        if not size.isdecimal():
            return FrequentTokens(None, text)
        if int(size) < 1 or (colon and not file):
            raise ValueError(text)
        return FrequentTokens(int(size), file or None)

    def choose(self, target: str, vocab: int, tokenizer: Any) -> tuple[Tensor, str]:
        path = Path(self.file) if self.file else kept_counts(target, vocab, tokenizer)
        if self.file is None and not path.is_file():
            raise ValueError(
                f"which tokens {target} writes most often was not counted yet: run `slipstream draft build "
                f"vocabulary FILE` with this target once, or name a file of counts, draft_vocab={self.size}:FILE."
            )
        counts, name = TokenCounts.load(path), fingerprint(tokenizer)
        other = bool(name and counts.tokenizer) and name != counts.tokenizer
        if other or len(counts.counts) != vocab:
            raise ValueError(f"{path} counts the tokens of {counts.target}, and {target} has others: count its own.")
        size = self.size or max(1, counts.different)
        if size >= vocab:
            raise ValueError(f"draft_vocab={size} cuts nothing: {target} has {vocab} tokens; take fewer.")
        kept = counts.most_frequent(size)
        about = f"{counts.share(kept):.1%} of {counts.total} tokens that {counts.target} wrote in {counts.texts} texts"
        return kept, f"the draft knows {size} of {vocab} tokens, which make up {about}."
