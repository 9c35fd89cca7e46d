"""/v1/messages of a real server process: Anthropic's Messages API, whole and as events."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.conftest import ServerProcess
from slipstream.serve.messages import MessagesRequest
from slipstream.serve.routes.messages import block_end
from toys import closed

USER: dict[str, Any] = {"role": "user", "content": "add two numbers"}
ASKED: dict[str, Any] = {"model": "embedded", "system": "You write Python.", "messages": [USER]}
ASKED |= {"max_tokens": 16, "temperature": 0}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD: dict[str, Any] = {"name": "add", "input_schema": closed(a=DIGIT, b=DIGIT)}


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "none", "anthropic-version": "2023-06-01"}) as client:
        yield client


def events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed message, each under its own name."""
    with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    found = [json.loads(line[6:]) for line in lines[1::2]]
    assert lines[::2] == [f"event: {each['type']}" for each in found]
    return found


def test_a_message_is_the_chats_answer(http: httpx.Client) -> None:
    message = http.post("/v1/messages", json=ASKED).json()
    system = {"role": "system", "content": ASKED["system"]}
    chat = {"messages": [system, USER], "max_tokens": 16, "temperature": 0, "cache_prompt": False}
    same = http.post("/v1/chat/completions", json=chat).json()
    assert message["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
    counted = http.post("/v1/messages/count_tokens", json={key: ASKED[key] for key in ("model", "system", "messages")})
    assert counted.json() == {"input_tokens": same["usage"]["prompt_tokens"]}
    thinking = {"thinking": {"type": "adaptive"}, "messages": [USER]}
    counted = http.post("/v1/messages/count_tokens", json=thinking)
    assert counted.headers["x-slipstream-ignored"] == "thinking"
    blocks = [{"type": "text", "text": "add two numbers", "cache_control": {"type": "ephemeral"}}]
    again = http.post("/v1/messages", json={**ASKED, "messages": [{"role": "user", "content": blocks}]})
    assert again.json()["content"] == message["content"]
    assert again.headers["x-slipstream-ignored"] == "messages[].content[].cache_control"
    stream = events(http, ASKED)
    assert [each["type"] for each in stream if each["type"] != "content_block_delta"] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    deltas = [each["delta"]["text"] for each in stream if each["type"] == "content_block_delta"]
    assert "".join(deltas) == message["content"][0]["text"]
    assert stream[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stream[-2]["usage"]["output_tokens"] == 16


def test_a_stop_sequence_is_told(http: httpx.Client) -> None:
    text = http.post("/v1/messages", json=ASKED).json()["content"][0]["text"]
    stop = text[6:9]
    found = http.post("/v1/messages", json={**ASKED, "stop_sequences": ["never", stop]}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "add"}, {"type": "any"}])
def test_tools_are_called_and_their_results_read(http: httpx.Client, choice: dict[str, Any]) -> None:
    asked = {**ASKED, "tools": [ADD], "tool_choice": choice, "max_tokens": 64}
    message = http.post("/v1/messages", json=asked).json()
    assert message["stop_reason"] == "tool_use"
    call = message["content"][0]
    assert call["type"] == "tool_use" and call["name"] == "add" and call["input"].keys() == {"a", "b"}
    stream = events(http, asked)
    begin = next(each["content_block"] for each in stream if each["type"] == "content_block_start")
    assert begin == {"type": "tool_use", "id": begin["id"], "name": "add", "input": {}}
    inputs: dict[int, str] = {}
    for each in stream:
        if each["type"] == "content_block_delta":
            inputs[each["index"]] = inputs.get(each["index"], "") + each["delta"]["partial_json"]
    assert list(inputs) == list(range(len(inputs))) and json.loads(inputs[0]).keys() == {"a", "b"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "5"}]}
    turns = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    answer = http.post("/v1/messages", json={**ASKED, "messages": turns, "tools": [ADD]})
    assert answer.status_code == 200, answer.text


def test_turns_become_the_messages_of_a_chat() -> None:
    turns = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "5", "is_error": False},
            {"type": "text", "text": "and"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ]},
    ]  # fmt: skip
    body = {**ASKED, "messages": turns, "tools": [{**ADD, "name": "m" * 128}], "thinking": {"type": "disabled"}}
    chat = MessagesRequest.model_validate(body).as_chat()
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "You write Python."},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ],
        },
    ]
    assert chat.reasoning_effort == "none" and not chat.continue_final_message
    assert "signature_delta" in block_end("reasoning", 1)  # without one, some clients do not send it back
    begun = {**ASKED, "messages": [USER, {"role": "assistant", "content": "def"}]}
    begun["output_format"] = {"type": "json_schema", "schema": DIGIT}
    chat = MessagesRequest.model_validate(begun).as_chat()
    assert chat.continue_final_message and chat.response_format.json_schema.schema_ == DIGIT


WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "other"}, 404, "not_found_error", "model"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"container": "x"}, 400, "invalid_request_error", "container"),
    ({"thread": {"type": "create"}}, 400, "invalid_request_error", "thread"),
    ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, 400, "invalid_request_error", "messages[0]"),
    ({"tools": [{**ADD, "name": "a b"}]}, 400, "invalid_request_error", "tools[0].name"),
    ({"system": "x = 1" * 2000}, 400, "invalid_request_error", "messages"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
]


@pytest.mark.parametrize(("more", "status", "kind", "field"), WRONG)
def test_errors_have_anthropics_form(http: httpx.Client, more: Any, status: int, kind: str, field: str) -> None:
    answer = http.post("/v1/messages", json={**ASKED, **more})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert answer.json()["type"] == "error" and error["type"] == kind and error["message"]
    assert error["param"].startswith(field) and ("details" in error) == (field == "thread")
