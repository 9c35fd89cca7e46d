"""Chats that a model cannot answer: the error says what can be done instead."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import slipstream
from slipstream.engine.worker import Capacity
from slipstream.serve.call import Call
from slipstream.serve.chats import begun
from slipstream.serve.faults import BadRequest
from slipstream.serve.schema import ChatRequest
from slipstream.serve.settings import ServeSettings
from slipstream.serve.state import ServerState

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "add"}}]}
WITHOUT_TOOLS = "{% for message in messages %}{{ message.content }}{% endfor %}"
WITH_TOOLS = "{{ tools }}" + WITHOUT_TOOLS


@pytest.fixture
def template(engine: slipstream.Engine) -> Iterator[Callable[[str], None]]:
    """Gives the embedded target a chat template, as long as a test runs."""
    before = engine.tokenizer.chat_template
    yield lambda source: setattr(engine.tokenizer, "chat_template", source)
    engine.tokenizer.chat_template = before


def ask(engine: slipstream.Engine, *more: Any, **fields: Any) -> Call:
    state = ServerState.new(engine, ServeSettings(names=("tiny",)), Capacity(rows=1), None)
    state.worker.ready = True
    app = SimpleNamespace(state=SimpleNamespace(server=state))
    request: Any = SimpleNamespace(app=app, state=SimpleNamespace(ignored=[]))
    return asyncio.run(begun(ChatRequest.model_validate({**CHAT, **fields}), request, *more))[0]


def test_without_a_chat_template_the_error_names_an_endpoint_that_works(engine: slipstream.Engine) -> None:
    with pytest.raises(BadRequest, match=r"tiny has no chat template.* /v1/completions") as caught:
        ask(engine)
    assert caught.value.param == "messages"
    with pytest.raises(BadRequest) as caught:
        ask(engine, "input")
    assert caught.value.param == "input"
    [ticket] = ask(engine, "input", "hi").tickets
    assert list(ticket.generation.request.prompt) == engine.tokenizer.encode("hi")


def test_tools_that_the_template_ignores_are_refused(engine: slipstream.Engine, template: Any) -> None:
    template(WITH_TOOLS)
    assert len(ask(engine, **TOOLS).tickets) == 1
    template(WITHOUT_TOOLS)
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("none", "required", named):  # without a call, or with one that the grammar alone decides
        [ticket] = ask(engine, **TOOLS, tool_choice=choice).tickets
        assert engine.decode(ticket.generation.request.prompt) == "hi"
    for choice, tools in (("auto", TOOLS["tools"]), ("required", TOOLS["tools"] * 2)):
        with pytest.raises(BadRequest, match=r"the chat template of .* does not write them") as caught:
            ask(engine, tools=tools, tool_choice=choice)
        assert caught.value.param == "tools"


def test_messages_that_clients_send_back_are_read(engine: slipstream.Engine, template: Any) -> None:
    template(
        "{% for m in messages %}[{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}]{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "yes"}]
    more = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    [ticket] = ask(engine, messages=[*CHAT["messages"], *more, {"role": "assistant", "content": said}]).tickets
    assert engine.decode(ticket.generation.request.prompt).endswith('[{"a": 1}][][no\nyes]')


def test_errors_name_what_was_sent(engine: slipstream.Engine, template: Any) -> None:
    template(WITHOUT_TOOLS)
    with pytest.raises(BadRequest) as caught:
        ask(engine, chat_template_kwargs={"messages": "x"})
    assert caught.value.param == "chat_template_kwargs"
    template("")
    with pytest.raises(BadRequest, match="which tiny knows"):
        ask(engine, "input", (4096,))


def test_a_request_that_no_chat_can_be_is_a_400() -> None:
    with pytest.raises(BadRequest, match="top_p") as caught:
        ChatRequest.of({**CHAT, "top_p": 0.0})
    assert caught.value.param == "top_p"
