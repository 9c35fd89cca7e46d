"""Anthropic's Messages API: bodies, the chats that they stand for, and answers, whole and in events."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from slipstream.serve import published
from slipstream.serve.answers import Answer, AnswerMetrics, Error, Sometimes, Timings
from slipstream.serve.body import Addressed, Body
from slipstream.serve.schema import ChatRequest, Count, Probability, SpeculationOptions, Text, ToolName
from slipstream.text.jsontext import json_text


class TextBlock(Body):
    others = published.BLOCK
    type: Literal["text"]
    text: str


class ImageSource(Body):
    """An image: base64 data with its media type, or the address of one."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    @property
    def address(self) -> str:
        return self.url or "" if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class ImageBlock(Body):
    others = published.BLOCK
    type: Literal["image"]
    source: ImageSource


class ToolUseBlock(Body):
    others = published.BLOCK
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    others = published.BLOCK
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None


class ThinkingBlock(Body):
    """What the assistant thought before its answer."""

    others = published.BLOCK
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """A thought that only its server can read: the model is not shown it."""

    others = published.BLOCK
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class Turn(Body):
    """A message of the user or the assistant."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OfferedTool(Body):
    others = published.TOOL
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AllowedTools(Body):
    """Which tools the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks before its answer, where its chat template can tell it to."""

    others = published.THINKING
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class JsonFormat(Body):
    """The schema of an answer in JSON."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How much the model thinks, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(Addressed):
    others = published.MESSAGES
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: AllowedTools | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="output_config.format, as it was called first.")

    def as_chat(self, **more: Any) -> ChatRequest:
        messages = [message for turn in self.messages for message in _messages(turn)]
        if self.system:
            messages.insert(0, {"role": "system", "content": _content(self.system)})
        tools = []
        for tool in self.tools or ():
            function = {"name": tool.name, "description": tool.description or None, "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
        chosen = self.tool_choice or AllowedTools(type="auto")
        forced = {"type": "function", "function": {"name": chosen.name or ""}}
        body = {"messages": messages, "tools": tools, "parallel_tool_calls": not chosen.disable_parallel_tool_use}
        if self.tool_choice is not None:
            body["tool_choice"] = {"any": "required", "tool": forced}.get(chosen.type, chosen.type)
        output = self.output_config or OutputConfig()
        if self.thinking is not None:
            body["reasoning_effort"] = "none" if self.thinking.type == "disabled" else output.effort or "high"
        if (form := output.format or self.output_format) is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            body["continue_final_message"] = True
        return ChatRequest.of(body | more)


class MessagesRequest(CountRequest):
    max_tokens: Count
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: Probability | None = None
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    speculative: bool | SpeculationOptions | None = None

    def as_chat(self, **more: Any) -> ChatRequest:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream", "speculative")
        same = {name: getattr(self, name) for name in names}
        return super().as_chat(**same, stop=self.stop_sequences or None, **more)


def _messages(turn: Turn) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content or "")}
        for block in turn.content
        if isinstance(block, ToolResultBlock)
    ]
    said = [block for block in turn.content if isinstance(block, TextBlock | ImageBlock)]
    thought = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock)) or None
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json_text(block.input)}}
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    message = {"role": turn.role, "content": _content(said), "tool_calls": calls or None, "reasoning_content": thought}
    return [*results, message] if said or calls or thought or not results else results


def _content(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if all(isinstance(block, TextBlock) for block in content):
        return "\n".join(block.text for block in content)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": {"url": block.source.address}}
        for block in content
    ]


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


class MessageFault(Answer):
    """The body of every error of these endpoints."""

    type: Literal["error"] = "error"
    error: Error
