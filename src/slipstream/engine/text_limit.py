"""`TextLimit`: the length beyond which a text cannot fit a model, known before it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.values import PromptTooLong
from slipstream.engine.media import FIELDS, part_modality


@dataclass(frozen=True)
class TextLimit:
    """The limit of a text's characters for a model that holds `tokens` tokens, each of `longest` characters at most.

    Tokenizing takes time and memory for every character; so a text that cannot fit is refused before.
    """

    tokens: int
    longest: int

    @staticmethod
    def of(tokenizer: Any, tokens: int | None) -> TextLimit | None:
        if not tokens or not hasattr(tokenizer, "get_vocab"):
            return None
        return TextLimit(tokens, max(map(len, tokenizer.get_vocab()), default=1))

    def check(self, value: Any, where: str) -> None:
        """Raise ValueError if the texts in a value, but images and sounds, together have too many characters."""
        count, left, most = 0, [value], self.tokens * self.longest
        while left:
            each = left.pop()
            if isinstance(each, str):
                count += len(each)
            elif isinstance(each, Mapping) and not part_modality(each):
                left += (part for name, part in each.items() if name not in FIELDS.values())
            elif isinstance(each, list | tuple):
                left += each
        if count > most:
            raise PromptTooLong(
                f"{where} has {count} characters, but the model holds {self.tokens} tokens of at most {self.longest} "
                f"characters each: shorten it to at most {most} characters."
            )
