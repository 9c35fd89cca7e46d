"""Tools: which tools the model may or must call, the grammar of calls, and what reads its answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.protocols import HasModel
from slipstream.decoding.grammar import ANSWER, WHITE, Grammars, plain
from slipstream.serve.faults import BadRequest
from slipstream.serve.readers import CALLS, KINDS, ByFamily, Reader, many_calls, one_call, verbatim
from slipstream.serve.response_format import AnswerForm
from slipstream.serve.schema import ChatRequest, ResponseFormat, Tool, ToolChoice
from slipstream.serve.state import ServerState
from slipstream.text.detokenize import Detokenizer
from slipstream.text.jsontext import json_text

SPACE, ANY = r"/\s{0,2}/", r"/(.|\n)*/"
PIECES = re.compile(r"(\\s\*|\(\?P<name>[^)]*\))")  # white space, and the name of a function, in the pattern of a mark
UNKNOWN = re.compile(r"(?<!\\)[\[\](){}*+?^$|.]|\\\w")  # what else a pattern may have, which is not understood here
LITERAL = re.compile(r'"([^"\\]|\\.)*"')  # a text in Lark


@dataclass(frozen=True)
class CallGrammar:
    """Writes the calls of the tools of a form as Lark. `grammars` know which tokens are special."""

    form: AnswerForm
    grammars: Grammars

    def lark(self, parallel: bool) -> str | None:
        """Return rules for an answer of calls, or of another form, perhaps after a thought; None if it has no calls.
        Arguments that the family writes as JSON fit the schemas of the tools; all others are the model's own."""
        fields = self.form.template.fields
        field = fields.get(CALLS)
        calls = [self._call(field, tool["function"]) for tool in self.form.tools or ()] if field else []
        if not calls or None in calls:
            return None
        thought = next((each for name, each in fields.items() if KINDS.get(name, "content") != "content"), None)
        marks = [self._mark(thought, side) for side in ("open", "close")] if thought else [None]
        begin = "" if None in marks else f"({marks[0]} {_until('thought', marks[1])} {SPACE})? "
        many = "+" if parallel and field.repeats else ""
        rules = [f"start: {begin}({ANSWER} | call{many})", f"call: {' | '.join(map(str, calls))}"]
        ends = {"text": self._mark(field, "close"), "thought": marks[-1]}
        for name, end in ends.items():  # any text up to an end, which the rule holds if that is a text itself
            literal = LITERAL.match(end or "")
            rules.append(f"{name}[suffix={literal[0]}]: {ANY}" if literal else f"{name}: {ANY}")
        return "\n".join(rules)

    def _call(self, field: Any, function: dict[str, Any]) -> str | None:
        begin, end = (self._mark(field, side, function["name"]) for side in ("open", "close"))
        if begin is None or end is None:
            return None
        if field.content != "json" or field.content_args:  # a dialect
            delimiters = {mark for pair in field.content_args.get("string_delims", ()) for mark in pair}
            marks = "".join(f"{self._text(each)} text " for each in sorted(delimiters))
            return f"{begin} text ({marks})* {end}" if marks else f"{begin} {_until('text', end)}"
        schema = _alone(function.get("parameters") or {"type": "object"}, function["name"])
        keys = field.transform["function"]
        if keys == "{content}":
            keys = {name: f"{{{name}}}" for name in ("name", "arguments")}
        if keys["arguments"] != "{content}":
            schema = _object({keys["name"][1:-1]: {"const": function["name"]}, keys["arguments"][1:-1]: schema})
        if field.transform_each:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return f"{begin} {SPACE} %json {json_text(plain({**schema, 'x-guidance': WHITE}))} {SPACE} {end}"

    def _mark(self, field: Any, side: str, name: str = "") -> str | None:
        """Return a mark of a region, with the name of a function; "" for none, None for one that is not understood."""
        literals, pattern = getattr(field, f"{side}_literals"), getattr(field, f"{side}_re")
        if pattern is None:
            return ""
        if literals:
            return self._text(literals[0])
        made = []
        for piece in PIECES.split(pattern.pattern):
            if UNKNOWN.search(piece) and not PIECES.fullmatch(piece):
                return None
            written = name if piece.startswith("(?P<") else re.sub(r"\\(.)", r"\1", piece)
            made.append(SPACE if piece == r"\s*" else self._text(written))
        return " ".join(made)

    def _text(self, text: str) -> str:
        ids = {str(token): number for number, token in self.form.tokenizer.added_tokens_decoder.items()}
        special = sorted((each for each, number in ids.items() if self.grammars.special(number)), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(f"<[{ids[part]}]>" if part in special else json_text(part) for part in parts if part)


def _until(name: str, end: str | None) -> str:
    """Return a text and its end, by the rule of that name."""
    return f"{name} {LITERAL.sub('', end or '', 1)}"


FREE = ResponseFormat(type="text")  # format of an answer that has none


class Tools:
    """The tools of a request and how the model may use them: "none", "auto", "required", or one by name.

    `formed` says that the answer has another form, unless it is calls. Raises BadRequest for a choice that the tools or
    the form do not allow.
    """

    def __init__(self, body: ChatRequest, state: ServerState) -> None:
        self.state, self.tools, self.parallel = state, tuple(body.tools or ()), body.parallel_tool_calls is not False
        self.choice: str | ToolChoice = body.tool_choice or ("auto" if self.tools else "none")
        self.formed = body.structured_outputs is not None or (body.response_format or FREE).type != FREE.type
        self.named = self.choice.function.name if isinstance(self.choice, ToolChoice) else None
        if self.choice in ("none", "auto"):
            return
        if not self.tools:
            raise BadRequest("tool_choice needs tools.", "tool_choice")
        if self.named is not None and self.named not in {tool.function.name for tool in self.tools}:
            raise BadRequest(f"tool_choice names {self.named!r}, which is none of the tools.", "tool_choice")
        if body.structured_outputs is not None:
            raise BadRequest("tool_choice decides what the answer is: leave structured_outputs out.", "tool_choice")

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools to tell the model of: none if its template writes none, and the only call is demanded."""
        template, only = self.state.engine.encoder.template, self.choice == "required" and len(self.tools) == 1
        if self.choice == "none" or ((self.named or only) and template is not None and not template.takes_tools):
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools] or None

    def schema(self) -> dict[str, Any] | None:
        if self.named is not None:
            return next(_parameters(tool) for tool in self.tools if tool.function.name == self.named)
        if self.choice != "required":
            return None
        calls = [
            _object({"name": {"const": tool.function.name}, "parameters": _parameters(tool)}) for tool in self.tools
        ]
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}

    def reader(self, prompt: Sequence[int]) -> Reader:
        if self.named is not None:
            return one_call(self.named)
        if self.choice == "required":
            return many_calls()
        form = self._form()
        if form is None or (self.formed and self.calls() is None):
            return verbatim
        spelling = self.state.engine.spelling
        assert spelling is not None, "a chat has a tokenizer"
        before = [token for token in prompt if token not in spelling.hidden]
        regions = form.regions([] if self.formed else prompt, None if self.parallel else 1, self.formed)
        return ByFamily(regions, Detokenizer(spelling.decode, before), spelling.hidden)

    def calls(self) -> str | None:
        form = self._form() if self.formed and self.choice == "auto" else None
        return None if form is None else CallGrammar(form, self.state.grammars).lark(self.parallel)

    def _form(self) -> AnswerForm | None:
        target, tokenizer = self.state.engine.decoder.target, self.state.engine.tokenizer
        assert isinstance(target, HasModel), "a chat is answered by a model"
        return AnswerForm.of(target.model, tokenizer, self.for_template())


def _parameters(tool: Tool) -> dict[str, Any]:
    return _alone(tool.function.parameters or _object({}), tool.function.name)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _alone(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of a tool with an address, so that its references are to itself inside another schema."""
    return {"$id": f"urn:tool:{name}", **schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}
