"""Divides what a model writes into reasoning, content and calls of tools, by the marks of its family, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slipstream.serve import answers
from slipstream.serve.families import END
from slipstream.serve.ids import new_call_id

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

        Without a match it is a mark, if the prompt ends with one.
        """
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
