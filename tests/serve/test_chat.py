"""/v1/chat/completions and /v1/responses of a real server process, through OpenAI's own client."""

import json
from typing import Any

import openai
import pytest

from toys import closed

MESSAGES: Any = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "add two numbers"}]
NUMBER = {"type": "integer", "maximum": 99}
DEFINED: Any = {**closed(a=NUMBER, b={"$ref": "#/definitions/number"}), "definitions": {"number": NUMBER}}
DEFINED["propertyNames"] = {"type": "string"}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": DEFINED}
ADD: Any = {"type": "function", "function": FUNCTION}
ASKED: dict[str, Any] = {"model": "embedded", "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0}


def test_an_answer_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 16 and whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_the_template_is_what_the_model_reads(client: openai.OpenAI) -> None:
    prompt = "# system: You write Python.\n# user: add two numbers\n# assistant:"
    chat = client.chat.completions.create(**ASKED).choices[0].message.content
    text = client.completions.create(model="embedded", prompt=prompt, max_tokens=16, temperature=0).choices[0].text
    assert chat == text


def test_fields_for_the_template_reach_it(client: openai.OpenAI) -> None:
    user, opened = {"role": "user", "content": "add"}, {"role": "assistant", "content": "def add(a"}
    for messages, more, prompt in (
        ([user, opened], {"continue_final_message": True}, "# user: add\n# assistant: def add(a"),
        ([user], {"add_generation_prompt": False}, "# user: add\n"),
    ):
        answer = client.chat.completions.create(**{**ASKED, "messages": messages, "extra_body": more})
        asked = {"model": "embedded", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        assert answer.choices[0].message.content == client.completions.create(**asked).choices[0].text


def test_logprobs_come_with_every_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs.content
    assert len(found) == 16 and all(len(each.top_logprobs) == 2 for each in found)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in found)  # greedy: the first is the best
    assert all(bytes(each.bytes).decode() == each.token for each in found)
    chunks = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [each for part in parts if part for each in part.content]
    assert [each.token for each in streamed] == [each.token for each in found]


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    asked |= {"max_completion_tokens": 64, "response_format": {"type": "json_object"}}  # a format of texts
    choice = client.chat.completions.create(**asked).choices[0]
    [call] = choice.message.tool_calls
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "add" and calls[0].id
    assert "".join(each.function.arguments for each in calls) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI) -> None:
    other = {"type": "function", "function": {"name": "nothing"}}
    asked = {**ASKED, "tools": [ADD, other], "tool_choice": "required", "parallel_tool_calls": False}
    asked["max_completion_tokens"] = 96
    [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert (call.function.name, {*json.loads(call.function.arguments)}) in (("add", {"a", "b"}), ("nothing", set()))


def test_json_by_a_schema(client: openai.OpenAI) -> None:
    schema = closed(color={"enum": ["red", "green"]}, count={"type": "integer", "minimum": 0, "maximum": 9})
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**{**ASKED, "max_completion_tokens": 64}, response_format=form)
    found = json.loads(answer.choices[0].message.content)
    assert found["color"] in ("red", "green") and 0 <= found["count"] <= 9
    assert answer.choices[0].finish_reason == "stop"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
        "response_format",
    ),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "form": ({"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
    "two forms": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    "message that says nothing": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "tool that is not there": ({"tools": [ADD], "tool_choice": {**ADD, "function": {"name": "sub"}}}, "tool_choice"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "unknown": ({"temprature": 1}, "temprature"),
    "open and new": ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_a_400_that_names_the_field(client: openai.OpenAI, case: str) -> None:
    more, field = WRONG[case]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASKED, "extra_body": more})
    assert caught.value.param == field, caught.value.message


def test_predicted_outputs_are_counted(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**ASKED)
    text = plain.choices[0].message.content
    predicted = client.chat.completions.create(**ASKED, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
