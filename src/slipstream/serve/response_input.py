"""The input of /v1/responses as a chat: its items become the messages, its other fields those of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.serve.response_schema import (
    Content,
    InputCall,
    InputImage,
    InputMessage,
    InputReasoning,
    InputRefusal,
    InputResult,
    Kept,
    ResponsesRequest,
)
from slipstream.serve.schema import ChatRequest


def as_chat(body: ResponsesRequest, items: Sequence[Kept]) -> ChatRequest:
    """Return the chat that a request means, with the items of its conversation as messages."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    choice: Any = body.tool_choice
    if choice is not None and not isinstance(choice, str):
        choice = {"type": "function", "function": {"name": choice.name}}
    form = body.text.format if body.text else None
    schema = form and form.schema_ and {"name": form.name or "answer", "schema": form.schema_}
    tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or ()]
    fields = {
        "messages": [*system, *_messages(items)],
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "max_tokens": body.max_output_tokens,
        "response_format": form and {"type": form.type, "json_schema": schema},
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
    }
    chat = ChatRequest.of({name: value for name, value in fields.items() if value is not None})
    chat.speculative = body.speculative
    return chat


# ---- items -----------------------------------------------------------------------------------------------------------


def _messages(items: Sequence[Kept]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for item in items:
        part = _message(item)
        last = messages[-1] if messages else {}
        whole = {"content", "tool_calls"} & last.keys()  # after which only calls go on with a message
        joins = part.get("tool_calls") or ("content" in part and not whole)
        if part["role"] == last.get("role") == "assistant" and joins:
            last |= {**part, "tool_calls": [*last.get("tool_calls", ()), *part.get("tool_calls", ())]}
        else:
            messages.append(part)
    return messages


def _message(item: Kept) -> dict[str, Any]:
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": _content(item.content)}
    if isinstance(item, InputResult):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    assert isinstance(item, InputReasoning)
    return {"role": "assistant", "reasoning_content": "".join(part.text for part in item.content or item.summary or ())}


def _content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputImage):
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
        else:
            text = part.refusal if isinstance(part, InputRefusal) else part.text
            parts.append({"type": "text", "text": text})
    return parts
