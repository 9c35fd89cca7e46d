"""Tools: which tools the model may or must call, and how calls and reasoning are parsed from its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.core.protocols import HasModel
from slipstream.engine.generation import Piece
from slipstream.serve import answers
from slipstream.serve.faults import BadRequest
from slipstream.serve.ids import new_id
from slipstream.serve.response_format import response_parser
from slipstream.serve.schema import ChatRequest, Tool, ToolChoice
from slipstream.serve.state import ServerState
from slipstream.text.detokenize import Decode, Detokenizer
from slipstream.text.jsontext import json_text


class Reader(Protocol):
    """Turns the text of the model, piece by piece, into parts of an assistant's message."""

    def read(self, piece: Piece) -> list[answers.Delta]:
        """Return what a piece adds to the message; the last piece of a text has its completion."""
        ...


class Verbatim:
    """Returns all text as the content of the message."""

    def read(self, piece: Piece) -> list[answers.Delta]:
        """Return the text of the piece as content."""
        return [answers.Delta(content=piece.text)] if piece.text else []


class OneCall:
    """Returns all text as the arguments of one tool; a grammar makes the text valid arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def read(self, piece: Piece) -> list[answers.Delta]:
        """Return the tool's name first, then its arguments as they come."""
        begin, self._name = self._name, None
        if begin is None and not piece.text:
            return []
        call = _call(begin, piece.text) if begin else _more(piece.text)
        return [answers.Delta(tool_calls=[call])]


class ManyCalls:
    """Parses a JSON array of calls, objects with a tool's name and parameters, and returns each once complete."""

    def __init__(self) -> None:
        self._text, self._count = "", 0

    def read(self, piece: Piece) -> list[answers.Delta]:
        """Return the calls that became complete. If the text was cut before the first, the message has no call."""
        self._text += piece.text
        calls = []
        while (call := self._next()) is not None:
            calls.append(_call(call["name"], json_text(call["parameters"]), self._count))
            self._count += 1
        return [answers.Delta(tool_calls=calls)] if calls else []

    def _next(self) -> dict[str, Any] | None:
        """Take the next complete call from the text read so far; None if there is none."""
        rest = self._text.lstrip(" \t\r\n[,")
        try:
            call, end = json.JSONDecoder().raw_decode(rest)
        except json.JSONDecodeError:
            return None
        self._text = rest[end:]
        return call if isinstance(call, dict) else None


class ByFamily:
    """Parses reasoning, content and calls in the format of the model's family, with a parser of transformers.

    The parser looks for marks that may be special tokens, so `decode` has to include those.
    """

    def __init__(self, parser: Any, decode: Decode) -> None:
        self._parser, self._texts, self._count = parser, Detokenizer(decode), 0

    def read(self, piece: Piece) -> list[answers.Delta]:
        """Return the parts of the message that the parser has completed."""
        text = self._texts.push(piece.token) if piece.token is not None else ""
        events = self._parser.feed(text + (self._texts.flush() if piece.completion else ""))
        if piece.completion:
            with suppress(ValueError):  # a text that was cut may lack parts that the family's texts have
                events = [*events, *self._parser.finalize()[1]]
        return [delta for event in events if (delta := self._delta(event))]

    def _delta(self, event: dict[str, Any]) -> answers.Delta | None:
        """Return what an event of the family's parser adds to the message; None for nothing."""
        field = event.get("field")
        if event["type"] == "region_close" and field == "tool_calls":
            function = event["value"]["function"]
            arguments = function["arguments"]
            written = arguments if isinstance(arguments, str) else json_text(arguments)
            self._count += 1
            return answers.Delta(tool_calls=[_call(function["name"], written, self._count - 1)])
        if event["type"] != "region_chunk" or event.get("dirty") or not event.get("text"):
            return None
        if field == "content":
            return answers.Delta(content=event["text"])
        return answers.Delta(reasoning_content=event["text"]) if field in ("reasoning_content", "thinking") else None


@dataclass(frozen=True)
class Tools:
    """The tools of a request and how the model may use them: "none", "auto", "required", or one by name."""

    tools: tuple[Tool, ...]
    choice: str | ToolChoice
    parallel: bool
    state: ServerState

    @staticmethod
    def of(body: ChatRequest, state: ServerState) -> Tools:
        """Read the fields of a request. Raises BadRequest for a choice that its tools or its format do not allow."""
        tools = tuple(body.tools or ())
        choice = body.tool_choice or ("auto" if tools else "none")
        if choice not in ("none", "auto") and not tools:
            raise BadRequest("tool_choice needs tools.", "tool_choice")
        if isinstance(choice, ToolChoice) and choice.function.name not in {tool.function.name for tool in tools}:
            raise BadRequest(f"tool_choice names {choice.function.name!r}, which is none of the tools.", "tool_choice")
        if choice == "required" and (body.response_format or body.structured_outputs):
            raise BadRequest("tool_choice decides what the answer is: leave the other format out.", "tool_choice")
        return Tools(tools, choice, body.parallel_tool_calls is not False, state)

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates take them; None if the template gets no tools."""
        if self.choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools] or None

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of an answer that must be a call; None if it may be text."""
        if isinstance(self.choice, ToolChoice):
            name = self.choice.function.name
            return next(_parameters(tool) for tool in self.tools if tool.function.name == name)
        if self.choice != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": _parameters(tool)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}

    def reader(self, prompt: Sequence[int]) -> Reader:
        """Return the parser for the answer to a prompt of these token ids."""
        if isinstance(self.choice, ToolChoice):
            return OneCall(self.choice.function.name)
        if self.choice == "required":
            return ManyCalls()
        target, tokenizer = self.state.engine.decoder.target, self.state.engine.tokenizer
        assert isinstance(target, HasModel), "a chat is answered by a model"
        parser = response_parser(target.model, tokenizer, prompt, self.for_template())
        if parser is None:
            return Verbatim()
        return ByFamily(parser, lambda tokens: tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def joined(deltas: Sequence[answers.Delta]) -> list[answers.Delta]:
    """Merge contents that follow each other into one delta, so that fewer are sent."""
    merged: list[answers.Delta] = []
    for delta in deltas:
        if merged and delta.content is not None and merged[-1].content is not None:
            merged[-1] = answers.Delta(content=merged[-1].content + delta.content)
        else:
            merged.append(delta)
    return merged


def as_message(deltas: Sequence[answers.Delta]) -> answers.AssistantMessage:
    """Return a whole message, merged from its deltas."""
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


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _call(name: str, arguments: str, index: int = 0) -> answers.ToolCallAnswer:
    function = answers.FunctionCallAnswer(name=name, arguments=arguments)
    return answers.ToolCallAnswer(id=f"call_{new_id()[:24]}", function=function, index=index)


def _more(arguments: str) -> answers.ToolCallAnswer:
    return answers.ToolCallAnswer(function=answers.FunctionCallAnswer(arguments=arguments), index=0)
