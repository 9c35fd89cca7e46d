"""Tools: which tools the model may or must call, and what reads its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.protocols import HasModel
from slipstream.serve.call_grammar import CallGrammar
from slipstream.serve.faults import BadRequest
from slipstream.serve.readers import ByFamily, Reader, many_calls, one_call, verbatim
from slipstream.serve.response_format import AnswerForm
from slipstream.serve.schema import ChatRequest, ResponseFormat, Tool, ToolChoice
from slipstream.serve.state import ServerState
from slipstream.text.detokenize import Detokenizer

FREE = ResponseFormat(type="text")
"""The format of an answer that has none."""


@dataclass(frozen=True)
class Tools:
    """The tools of a request and how the model may use them: "none", "auto", "required", or one by name.

    `formed` says that the answer has another form, unless it is calls.
    """

    tools: tuple[Tool, ...]
    choice: str | ToolChoice
    parallel: bool
    formed: bool
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
        formed = body.structured_outputs is not None or (body.response_format or FREE).type != FREE.type
        if choice not in ("none", "auto") and formed:
            raise BadRequest("tool_choice decides what the answer is: leave the other format out.", "tool_choice")
        return Tools(tools, choice, body.parallel_tool_calls is not False, formed, state)

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
            return one_call(self.choice.function.name)
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
        """Return the grammar, in Lark, by which an answer of another form may be calls instead; None if it may not."""
        form = self._form() if self.formed and self.choice == "auto" else None
        return None if form is None else CallGrammar(form, self.state.grammars).lark(self.parallel)

    def _form(self) -> AnswerForm | None:
        """Return the form of the answers of the model's family; None if it has none."""
        target, tokenizer = self.state.engine.decoder.target, self.state.engine.tokenizer
        assert isinstance(target, HasModel), "a chat is answered by a model"
        return AnswerForm.of(target.model, tokenizer, self.for_template())


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
