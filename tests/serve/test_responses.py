"""/v1/responses: its input as a chat, the items and events of its output, and the responses that are kept."""

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from serve.conftest import ServerProcess
from slipstream.serve.response_output import Conversations, NoSuchResponse
from slipstream.serve.response_schema import InputMessage, ResponsesRequest
from slipstream.serve.routes.responses import as_chat

ASKED: dict[str, Any] = {"model": "embedded", "input": "add two numbers", "temperature": 0, "max_output_tokens": 16}
LIMITED = {"type": "integer", "maximum": 99}
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": LIMITED, "b": LIMITED}, "required": ["a", "b"]},
    "strict": True,
}
FORCED: dict[str, Any] = {
    **ASKED,
    "max_output_tokens": 64,
    "tools": [{**ADD, "parameters": {**ADD["parameters"], "additionalProperties": False}}],
    "tool_choice": {"type": "function", "name": "add"},
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    """OpenAI's client of one process: each replica keeps its own responses."""
    return server.client()


def test_a_response_is_the_chat_s_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASKED, instructions="You write Python.")
    messages: Any = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "add two numbers"}]
    chat = client.chat.completions.create(model="embedded", messages=messages, max_completion_tokens=16, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 16
    events = list(client.responses.create(**ASKED, instructions="You write Python.", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer.output_text
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_a_called_function_is_an_item_of_the_output(client: openai.OpenAI) -> None:
    answer = client.responses.create(**FORCED)
    [call] = answer.output
    assert call.type == "function_call" and call.status == "completed" and answer.status == "completed"
    assert call.name == "add" and set(json.loads(call.arguments)) == {"a", "b"}
    assert answer.tools[0].name == "add" and answer.tool_choice.name == "add" and not answer.parallel_tool_calls
    events = list(client.responses.create(**FORCED, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    begun, done = events[2].item, events[-2].item
    assert begun.arguments == "" and begun.status == "in_progress" and begun.call_id == done.call_id
    assert "".join(event.delta for event in events[3:-3]) == done.arguments == events[-3].arguments == call.arguments
    assert events[-1].response.output == [done]


def test_functions_of_a_namespace_are_called_by_both_names(client: openai.OpenAI) -> None:
    space = {"type": "namespace", "name": "maths", "description": "Sums.", "tools": FORCED["tools"]}
    [call] = client.responses.create(**{**FORCED, "tools": [space], "tool_choice": "required"}).output
    assert (call.type, call.namespace, call.name) == ("function_call", "maths", "add")
    [turn] = messages(call.to_dict(), tools=[space])
    assert turn["tool_calls"][0]["function"] == {"name": "maths__add", "arguments": call.arguments}


def second_turn(client: openai.OpenAI, **asked: Any) -> Any:
    return client.responses.create(**{**ASKED, "tools": FORCED["tools"], **asked})


def test_a_conversation_goes_on_in_every_way(client: openai.OpenAI) -> None:
    first = client.responses.create(**FORCED)
    [call] = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    begun: Any = {"role": "user", "content": ASKED["input"]}
    echoed = second_turn(client, input=[begun, call.model_dump(), result])
    in_parts = {**result, "output": [{"type": "input_text", "text": "7"}], "id": "x", "status": "completed"}
    for ways in (
        {"input": [begun, *first.output, result], "include": [], "truncation": "disabled", "store": False},
        {"input": [result], "previous_response_id": first.id},
        {"input": [begun, {"type": "item_reference", "id": call.id}, in_parts]},
        {"input": [begun, {"id": call.id}, in_parts]},
    ):
        answer = second_turn(client, **ways)
        assert answer.output_text == echoed.output_text and answer.usage.input_tokens == echoed.usage.input_tokens
    third = client.responses.create(**{**ASKED, "input": "and then?"}, previous_response_id=echoed.id)
    assert third.usage.input_tokens > echoed.usage.input_tokens + echoed.usage.output_tokens
    assert third.previous_response_id == echoed.id


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another response": ({"previous_response_id": "resp-none"}, "previous_response_id"),
    "another item": ({"input": [{"type": "item_reference", "id": "none"}]}, "input"),
    "nothing": ({"input": []}, "input"),
    "a tool that others run": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a tool that is not there": ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    "an unknown item": ({"input": [{"type": "computer_call"}]}, "input[0].type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_a_400_that_names_the_field(client: openai.OpenAI, case: str) -> None:
    more, field = WRONG[case]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASKED, **more})
    assert caught.value.param == field, caught.value.message


def test_what_is_not_to_be_stored_is_not_kept(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASKED, store=False)
    assert answer.store is False
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_kept_response_is_found_until_it_is_deleted(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASKED)
    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()
    client.responses.delete(answer.id)
    for again in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            again(answer.id)


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = ResponsesRequest.model_validate({"input": list(items), **fields})
    conversation = Conversations().resume(body, "", 0)
    return [each.model_dump(exclude_none=True) for each in as_chat(body, conversation.items).messages]


USER: dict[str, Any] = {"role": "user", "content": "x"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
THOUGHT["content"] = [{"type": "reasoning_text", "text": "hm"}]
SAID: dict[str, Any] = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "y", "annotations": [], "logprobs": []}],
}
CALLED: dict[str, Any] = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "add", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "1", "output": "7"}


def response(name: str) -> Any:
    return SimpleNamespace(id=name)


def test_items_of_one_turn_are_one_message() -> None:
    user, turn, result = messages(USER, THOUGHT, SAID, CALLED, {**CALLED, "call_id": "2"}, RESULT)
    assert user == USER and result == {"role": "tool", "tool_call_id": "1", "content": "7"}
    assert turn["reasoning_content"] == "hm" and turn["content"] == [{"type": "text", "text": "y"}]
    assert [call["id"] for call in turn["tool_calls"]] == ["1", "2"]
    turns = messages(SAID, SAID, CALLED, THOUGHT, CALLED, SAID)
    assert [sorted(each.keys() - {"role"}) for each in turns] == [
        ["content"],
        ["content", "tool_calls"],
        ["reasoning_content", "tool_calls"],
        ["content"],
    ]


def test_instructions_are_not_part_of_the_conversation_that_goes_on() -> None:
    kept = Conversations()
    body = ResponsesRequest.model_validate({"input": "x", "instructions": "be kind", "ignore_eos": True})
    conversation = kept.resume(body, "", 10)
    chat = as_chat(body, conversation.items)
    assert [each.role for each in chat.messages] == ["system", "user"] and chat.ignore_eos
    kept.keep(response("r"), conversation, {"msg_1": InputMessage(role="assistant", content="y")})
    body = ResponsesRequest.model_validate({"input": "z", "previous_response_id": "r"})
    said = as_chat(body, kept.resume(body, "", 10).items).messages
    assert [(each.role, each.content) for each in said] == [("user", "x"), ("assistant", "y"), ("user", "z")]


def test_few_conversations_are_kept_and_only_for_their_tenants() -> None:
    def again(name: str, tenant: str = "a", kind: str = "previous_response_id") -> Any:
        more = {kind: name} if kind == "previous_response_id" else {}
        given = "x" if more else [{"type": "item_reference", "id": name}]
        return kept.resume(ResponsesRequest.model_validate({"input": given, **more}), tenant, 1)

    def answer(name: str, size: int) -> None:
        conversation = kept.resume(ResponsesRequest.model_validate({"input": "x"}), "a", size)
        kept.keep(response(name), conversation, {f"msg_{name}": InputMessage(role="assistant", content="y")})

    kept = Conversations(most=3, size=100)
    for name in "1234":
        answer(name, 20)
    assert len(again("4").items) == 3 and len(again("msg_4", kind="item").items) == 1
    for wrong in (("1",), ("4", "b"), ("msg_1", "a", "item"), ("msg_4", "b", "item")):
        with pytest.raises(NoSuchResponse, match="send the whole conversation"):
            again(*wrong)
    answer("5", 80)  # more than 100 bytes with the last three: two of them are dropped
    assert again("4") and again("5")
    with pytest.raises(NoSuchResponse):
        again("3")
    answer("6", 200)  # too long to be kept
    for name in "456":
        with pytest.raises(NoSuchResponse):
            again(name)


def test_an_item_without_a_type_is_a_message_or_a_reference() -> None:
    assert ResponsesRequest.model_validate({"input": [USER]}).input == [InputMessage(**USER)]
    for wrong in ({"type": "message", "id": "x"}, {"id": 5}, "x", {}, {"type": 5, "id": "x"}):
        with pytest.raises(ValidationError):
            ResponsesRequest.model_validate({"input": [wrong]})
