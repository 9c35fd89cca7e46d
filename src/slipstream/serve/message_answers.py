"""The answers of Anthropic's Messages API: a message of content blocks, and the events of one that is streamed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from slipstream.serve.answers import Answer, AnswerMetrics, Sometimes, Timings


class ContentBlock(Answer):
    """A part of the message: a text, a thought, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: Sometimes[str] = None
    thinking: Sometimes[str] = None
    signature: Sometimes[str] = None
    id: Sometimes[str] = None
    name: Sometimes[str] = None
    input: Sometimes[dict[str, Any]] = None


class MessageUsage(Answer):
    """The numbers of tokens; those read from the prefix cache are not among the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(Answer):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Sometimes[AnswerMetrics] = None
    timings: Sometimes[Timings] = None


class MessageEvent(Answer):
    model_config = ConfigDict(extra="allow")

    type: str


class Counted(Answer):
    input_tokens: int


class MessageError(Answer):
    type: str
    message: str
    param: Sometimes[str] = None
    code: Sometimes[str] = None


class MessageFault(Answer):
    """The body of every error of these endpoints."""

    type: Literal["error"] = "error"
    error: MessageError
