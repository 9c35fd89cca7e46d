"""Readers: how the text of a model becomes an assistant's message, piece by piece."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from slipstream.engine.generation import Piece
from slipstream.serve import answers
from slipstream.serve.regions import Regions, new_call
from slipstream.text.detokenize import Detokenizer
from slipstream.text.jsontext import json_text

Reader = Callable[[Piece], list[answers.Delta]]  # the last piece of a text has its completion


def verbatim(piece: Piece) -> list[answers.Delta]:
    return [answers.Delta(content=piece.text)] if piece.text else []


def one_call(name: str) -> Reader:
    begun = False

    def read(piece: Piece) -> list[answers.Delta]:
        nonlocal begun
        if begun and not piece.text:
            return []
        more = answers.ToolCallAnswer(function=answers.FunctionCallAnswer(arguments=piece.text), index=0)
        call, begun = more if begun else new_call(name, piece.text), True
        return [answers.Delta(tool_calls=[call])]

    return read


def many_calls() -> Reader:
    """Return a reader of a JSON array of calls, objects with a tool's name and parameters, each once it is complete.

    If the text was cut before the first, the message has no call.
    """
    text, count = "", 0

    def read(piece: Piece) -> list[answers.Delta]:
        nonlocal text, count
        text += piece.text
        calls = list[answers.ToolCallAnswer]()
        while True:
            rest = text.lstrip(" \t\r\n[,")
            try:
                call, end = json.JSONDecoder().raw_decode(rest)
            except json.JSONDecodeError:
                break
            text = rest[end:]
            if not isinstance(call, dict):
                break
            calls.append(new_call(call["name"], json_text(call["parameters"]), count))
            count += 1
        return [answers.Delta(tool_calls=calls)] if calls else []

    return read


class ByFamily:
    """Divides the text into reasoning, content and calls by the marks of the model's family.

    It reads the text that was emitted, which ends before stop strings. `hidden` are the texts of the tokens that are
    not printed, which may be marks: each is put to its place in the text of those that are, which `printed` makes.
    """

    def __init__(self, regions: Regions, printed: Detokenizer, hidden: Mapping[int, str]) -> None:
        self._regions, self._printed, self._hidden = regions, printed, hidden
        self._length = 0  # the length of the text of all tokens
        self._read = 0  # the length of the text that was read
        self._marks: deque[tuple[int, str]] = deque()  # tokens that are not printed, behind the text that was read

    def __call__(self, piece: Piece) -> list[answers.Delta]:
        if piece.token is not None:
            if mark := self._hidden.get(piece.token):
                self._length += len(self._printed.flush())
                self._marks.append((self._length, mark))
            else:
                self._length += len(self._printed.push(piece.token))
        text, begin = piece.text, self._read
        self._read += len(text)
        deltas = list[answers.Delta]()
        while self._marks and self._marks[0][0] <= self._read:
            place, mark = self._marks.popleft()
            deltas += self._regions.feed(text[: place - begin])
            deltas += self._regions.feed(mark, hidden=True)
            text, begin = text[place - begin :], place
        deltas += self._regions.feed(text)
        return [*deltas, *self._regions.finish()] if piece.completion else deltas


def joined(deltas: Sequence[answers.Delta]) -> list[answers.Delta]:
    """Merge texts of one kind that follow each other into one delta, so that fewer are sent."""
    merged: list[answers.Delta] = []
    for delta in deltas:
        for kind in ("content", "reasoning_content"):
            before, text = getattr(merged[-1], kind) if merged else None, getattr(delta, kind)
            if before is not None and text is not None:
                merged[-1] = answers.Delta(**{kind: before + text})
                break
        else:
            merged.append(delta)
    return merged


def parts_of(delta: answers.Delta) -> Iterator[tuple[str, str, answers.ToolCallAnswer | None]]:
    """Yield the kind of each part of a delta ("reasoning", "content", "call"), its text, and a call that it begins."""
    if delta.reasoning_content:
        yield "reasoning", delta.reasoning_content, None
    if delta.content:
        yield "content", delta.content, None
    for call in delta.tool_calls or ():
        yield "call", call.function.arguments, call if call.function.name is not None else None


def as_message(deltas: Sequence[answers.Delta]) -> answers.AssistantMessage:
    content = [delta.content for delta in deltas if delta.content is not None]
    reasoning = [delta.reasoning_content for delta in deltas if delta.reasoning_content is not None]
    calls: dict[int, answers.ToolCallAnswer] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        place = call.index or 0
        if place in calls:
            calls[place].function.arguments += call.function.arguments
        else:
            calls[place] = call.model_copy(update={"index": None}, deep=True)
    return answers.AssistantMessage(
        content="".join(content) if content or not calls else None,
        reasoning_content="".join(reasoning) or None,
        tool_calls=list(calls.values()) or None,
    )
