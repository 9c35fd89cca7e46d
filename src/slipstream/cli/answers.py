"""Answers as JSON lines, each written as soon as it is finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from slipstream.core.signals import undisturbed
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.engine.generation import Completion


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


def answer_as_dict(completion: Completion) -> dict[str, Any]:
    names = ("text", "tokens", "finish_reason", "prompt_tokens", "context_full")
    record = {name: getattr(completion, name) for name in ("error", *names) if name != "error" or completion.error}
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(each) for each in completion.logprobs]
    if completion.score is not None:
        record["score"] = completion.score
    return {**record, "stats": completion.stats.as_dict()}
