"""The answers of /v1/responses: the objects of the newer form of OpenAI's interface."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from slipstream.serve.answers import Answer, AnswerMetrics, Error, Sometimes, Timings


class OutputText(Answer):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(Answer):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: str = "in_progress"
    content: list[OutputText]


class ReasoningText(Answer):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Answer):
    type: Literal["reasoning"] = "reasoning"
    id: str
    status: str = "in_progress"
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText]


class OutputCall(Answer):
    """A call of a function in the output of /v1/responses; its arguments are JSON text."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Answer):
    """The tokens of the input that came from the prefix cache."""

    cached_tokens: int


class OutputDetails(Answer):
    """The tokens of the output that are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Answer):
    """The numbers of tokens read and written, under the names of /v1/responses."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = Field(default_factory=OutputDetails)
    total_tokens: int


class Incomplete(Answer):
    """The reason why a response ended before it was complete."""

    reason: str


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    error: Error | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    metadata: dict[str, str] = Field(default_factory=dict)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    max_output_tokens: Sometimes[int] = None
    store: bool
    usage: Sometimes[ResponseUsage] = None
    metrics: Sometimes[AnswerMetrics] = None
    timings: Sometimes[Timings] = None


class ResponseDeleted(Answer):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(Answer):
    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
