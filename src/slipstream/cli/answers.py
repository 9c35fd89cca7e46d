"""Answers as JSON lines, each written as soon as it is finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TextIO

from slipstream.core.signals import undisturbed
from slipstream.text.jsontext import json_text


@dataclass
class Answers:
    """A stream of JSON lines, one per prompt, in the order in which they finish."""

    stream: TextIO
    written: set[int] = field(default_factory=set)

    def write(self, index: int, answer: dict[str, Any]) -> None:
        line = json_text({"index": index, **answer}, ensure_ascii=False)
        with undisturbed():  # a line is written and counted, or neither
            self.stream.write(f"{line}\n")
            self.stream.flush()
            self.written.add(index)
