"""How the text of a model becomes an assistant's message, piece by piece: reasoning, content and calls of tools."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slipstream.engine.generation import Piece
from slipstream.serve import answers
from slipstream.serve.answers import new_call_id
from slipstream.serve.families import END
from slipstream.text.detokenize import Detokenizer
from slipstream.text.jsontext import json_text

KINDS = {  # fields of response templates that are texts -> the fields of a message that they become
    **dict.fromkeys(("content", "response"), "content"),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "reasoning_content"),
}

CALLS = "tool_calls"
ParseCalls = Callable[[str], list[tuple[str, str]]]  # region -> names and arguments, else ValueError


class Regions:
    """Reads a growing text by a `ResponseTemplate` of transformers -> parts of an assistant's message.

    No printed text is lost. A region that `parse` refuses, or that does not end, is content, as are the marks of calls
    where there is no `parse`; a mark that may come once is content the second time. Tokens that are not printed serve
    as marks only. After `most` calls, further ones are dropped. Content that is `formed` by a grammar has no marks.
    """

    def __init__(
        self, template: Any, parse: ParseCalls | None = None, most: int | None = None, formed: bool = False
    ) -> None:
        known = {*KINDS, CALLS, END} if parse else {*KINDS}
        self._fields = [field for field in template.fields.values() if field.open_re and field.name in known]
        self._outside = KINDS.get(template.implicit)  # None: text outside all regions is no part of the message
        self._parse, self._most = parse, most
        self._formed, self._ended = formed, False  # whether no further marks are looked for
        self._buffer, self._from = "", 0  # the text that is not divided yet; where marks are looked for in it
        self._hidden: list[tuple[int, int]] = []  # begins and ends of tokens in it that are not printed
        self._field: Any = None  # that of the region being read
        self._mark = 0  # the length of the mark that a region of calls begins with
        self._used: set[str] = set()
        self._count = 0
        self._gap: str | None = None  # white space behind a call, which is content if more content follows
        self._lost: str | None = ""  # the text outside all regions: the content of a message that has no other part

    def begin(self, prompt: str, anchor: Any) -> None:
        """Read the beginning of the message that the prompt ends with, behind the last match of a pattern.
        Without a match it is a mark, if the prompt ends with one."""
        opened = (match for field in self._fields for match in field.open_re.finditer(prompt))
        begins = [match.start() for match in opened if not prompt[match.end() :].strip()]
        if found := [match.end() for match in anchor.finditer(prompt)] or begins:
            list(self.feed(prompt[found[-1] :]))
        if self._field is None:
            self._buffer, self._from = "", 0
        self._lost = ""

    def feed(self, text: str, hidden: bool = False) -> Iterator[answers.Delta]:
        if hidden:
            self._hidden.append((len(self._buffer), len(self._buffer) + len(text)))
        self._buffer += text
        return self._divide(final=False)

    def finish(self) -> Iterator[answers.Delta]:
        yield from self._divide(final=True)
        if self._lost and not self._lost.isspace():
            yield answers.Delta(content=self._lost)

    def _divide(self, final: bool) -> Iterator[answers.Delta]:
        while True:
            match, held = self._find(final)
            if self._field is not None and self._field.name == CALLS:
                whole = match is not None or self._field.close_re is None
                if match is None and not final:
                    self._from = held
                    return
                yield from self._end_calls(len(self._buffer) if match is None else match[2], whole)
                continue
            yield from self._text(self._take(match[1] if match else held))
            if match is None:
                return
            if self._ended:
                continue
            field, begin, end = match
            if field.name == CALLS:
                self._mark = self._from = end - begin
            else:
                self._take(end - begin)
            self._field = None if self._field is field else field
            self._used.add(field.name)

    def _find(self, final: bool) -> tuple[tuple[Any, int, int] | None, int]:
        """Return the next mark in the buffer as (field, begin, end), and where one begins that may become complete."""
        if self._ended:
            marks = []
        elif self._field is None:
            marks = [
                (field, field.open_re, field.open_literals and not field.open_literal_can_extend)
                for field in self._fields
                if (field.repeats or field.name not in self._used) and (field.name != END or self._gap is not None)
            ]
        elif self._field.close_re is None:
            marks = []
        else:
            fixed = self._field.close_literals and not self._field.close_literal_can_extend
            marks = [(self._field, self._field.close_re, fixed)]
        held, best = len(self._buffer), None
        for field, pattern, fixed in marks:
            match = pattern.search(self._buffer, self._from, partial=not final)
            if match is None:
                continue
            if not final and (match.partial or (match.end() == len(self._buffer) and not fixed)):
                held = min(held, match.start())
            elif best is None or (match.start(), -match.end()) < (best[1], -best[2]):
                best = (field, match.start(), match.end())
        return (None if best is not None and best[1] >= held and not final else best), held

    def _end_calls(self, end: int, whole: bool) -> Iterator[answers.Delta]:
        """End a region of calls. If it holds none, its mark is text, and what follows is read again."""
        assert self._parse is not None
        self._field, self._from = None, 0
        try:
            calls = self._parse(self._buffer[:end]) if whole else []
        except ValueError:
            calls = []
        if not calls:
            yield from self._text(self._take(self._mark))
            return
        self._take(end)
        self._gap, self._lost = "", None
        for name, arguments in calls if self._most is None else calls[: max(0, self._most - self._count)]:
            yield answers.Delta(tool_calls=[new_call(name, arguments, self._count)])
            self._count += 1

    def _text(self, text: str) -> Iterator[answers.Delta]:
        kind = self._outside if self._field is None else KINDS.get(self._field.name)
        self._ended |= self._formed and self._field is None and bool(text.strip())
        if kind is None:
            self._lost = None if self._lost is None else self._lost + text
            return
        if kind == "content" and self._gap is not None:
            text, self._gap = self._gap + text, None
            if not text.strip():
                self._gap, text = text, ""
        if text:
            self._lost = None
            yield answers.Delta(**{kind: text})

    def _take(self, length: int) -> str:
        text, place = "", 0
        for begin, end in self._hidden:
            text += self._buffer[place : min(begin, length)]
            place = max(place, min(end, length))
        text += self._buffer[place:length]
        self._hidden = [(max(0, begin - length), end - length) for begin, end in self._hidden if end > length]
        self._buffer = self._buffer[length:]
        return text


def new_call(name: str, arguments: str, index: int = 0) -> answers.ToolCallAnswer:
    function = answers.FunctionCallAnswer(name=name, arguments=arguments)
    return answers.ToolCallAnswer(id=new_call_id(), function=function, index=index)


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
    If the text was cut before the first, the message has no call."""
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


def read_all(reader: Reader, pieces: Sequence[Piece]) -> list[answers.Delta]:
    """Read pieces; texts of one kind that follow each other are merged into one delta, so that fewer are sent."""
    merged: list[answers.Delta] = []
    for delta in (delta for piece in pieces for delta in reader(piece)):
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
