"""The fields of requests: what is accepted, what is named as without effect, and what is said of a wrong one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic import ValidationError

from serve.fields_page import BODIES, table
from slipstream.serve.body import Body, complaint, ignored
from slipstream.serve.messages import MessagesRequest
from slipstream.serve.options import engine_options
from slipstream.serve.response_schema import ResponsesRequest
from slipstream.serve.schema import ChatRequest, CompletionRequest, InfillRequest, StructuredOutputs
from slipstream.serve.settings import ServeSettings

STATE: Any = SimpleNamespace(settings=ServeSettings(("m",)), longest=99)
USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"messages": [USER]}
SMALLEST: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: CHAT,
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": [USER], "max_tokens": 1},
    InfillRequest: {},
}
ANSWER = {  # A message as OpenAI's client sends it back
    "role": "assistant",
    "content": "x",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [{"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}],
}


def refused(model: type[Body], body: Any) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return complaint(caught.value.errors(), body)


def others(model: type[Body]) -> list[tuple[str, Any]]:
    return [(name, values) for name, values in model.others.items() if name not in model.model_fields]


@pytest.mark.parametrize("model", SMALLEST)
def test_null_is_no_field(model: type[Body]) -> None:
    body, schema = SMALLEST[model], model.model_json_schema()
    optional = {name: None for name in schema["properties"] if name not in schema.get("required", ())}
    read = model.model_validate({**optional, **body})
    assert read == model.model_validate(body) and list(ignored(read)) == []
    for needed in body:
        assert refused(model, {**body, needed: None})[1] == needed


def test_nested_nulls_are_no_fields() -> None:
    read = ChatRequest.model_validate({"messages": [ANSWER], "stream_options": {"include_usage": None}, "new": None})
    assert read.stream_options is not None and read.stream_options.include_usage is False
    assert list(ignored(read)) == ["messages[].annotations", "messages[].tool_calls[].index"]
    [message] = [each.model_dump(exclude_none=True) for each in read.messages]
    assert message.keys() == {"role", "content", "tool_calls"}  # the chat template sees nothing else


@pytest.mark.parametrize("model", SMALLEST)
def test_every_value_without_effect_is_accepted_and_named(model: type[Body]) -> None:
    for name, values in others(model):
        for value in ("anything", 5, {}) if values is None else values:
            assert list(ignored(model.model_validate({**SMALLEST[model], name: value}))) == [name]
        if values is not None:
            message, field = refused(model, {**SMALLEST[model], name: "something else"})
            assert field == name and "would change the answer" in message


def test_a_field_that_one_endpoint_serves_is_refused_by_others() -> None:
    assert InfillRequest.model_validate({"t_max_predict_ms": 5}).t_max_predict_ms == 5
    assert InfillRequest.model_json_schema()["properties"]["t_max_predict_ms"]["anyOf"][0]["type"] == "integer"
    assert refused(ChatRequest, {**CHAT, "t_max_predict_ms": 5})[1] == "t_max_predict_ms"


def test_true_is_not_one() -> None:
    assert refused(ChatRequest, {**CHAT, "skip_special_tokens": 1})[1] == "skip_special_tokens"
    assert refused(ChatRequest, {**CHAT, "mirostat": False})[1] == "mirostat"
    assert list(ignored(ChatRequest.model_validate({**CHAT, "mirostat": 0.0}))) == ["mirostat"]


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": list(parts)}]}


PART = "messages[1].content[0]"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({**CHAT, "temprature": 1}, "temprature", "did you mean temperature?"),
    ({**CHAT, "speculative": {"gama": 4}}, "speculative.gama", "did you mean gamma?"),
    ({"messages": [{**USER, "contents": "x"}]}, "messages[0].contents", "did you mean content?"),
    ({**CHAT, "qqqqqq": 1}, "qqqqqq", "leave it out."),
    ({**CHAT, "\ud800" * 9000: 1}, ("\\ud800" * 11)[:64], "leave it out."),
    ({**CHAT, "{x}": 1}, "{x}", "leave it out."),
    ({}, "messages", "Field required."),
    ({**CHAT, "tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "should be 'function'"),
    ({**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type", "be 'function'"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "string; or: Input should be a valid list.",
    ),
    ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content", "give a text, or parts."),
    (content({"type": "text", "text": 5}), f"{PART}.text", "valid string."),
    (content({"type": "text", "text": "x", "txt": 1}), f"{PART}.txt", "did you mean text?"),
    (content({"type": "image_url", "image_url": {"url": 5}}), f"{PART}.image_url.url", "valid string."),
    (content({"type": "image_url", "image_url": {}}), f"{PART}.image_url.url", "Field required."),
    (content({"type": "film"}), f"{PART}.type", "possible is 'text', 'refusal', 'image_url', 'input_audio'."),
    (content({}), f"{PART}.type", "missing."),
    (content(5), PART, "object"),
    ({**CHAT, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "Field required."),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({**CHAT, "structured_outputs": {"json": 5}}, "structured_outputs.json", "valid dictionary; or: "),
    ({**CHAT, "stop": ["a", 5]}, "stop[1]", "valid string."),
    ({**CHAT, "max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "one thing"),
    ({**CHAT, "guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "give one of them."),
]


@pytest.mark.parametrize(("body", "field", "words"), WRONG)
def test_a_wrong_field_is_named_by_its_path_in_words(body: dict[str, Any], field: str, words: str) -> None:
    message, named = refused(ChatRequest, body)
    assert named == field and words in message
    for inner in ("[tagged", "list[", "TextPart", "ToolChoice", "function-", "dict["):
        assert inner not in message


@pytest.mark.parametrize("body", [[], "text", 5, None])
def test_a_body_that_is_no_object_has_no_field(body: Any) -> None:
    assert refused(ChatRequest, body) == ("the body: Input should be an object.", None)


def test_two_names_for_one_value_agree() -> None:
    read = ChatRequest.model_validate({**CHAT, "max_completion_tokens": 6, "max_tokens": 6, "regex": "a"})
    assert read.max_tokens == 6 and read.structured_outputs == StructuredOutputs(regex="a")
    for name in ("max_tokens", "n_predict"):  # -1 is no limit
        assert engine_options(CompletionRequest(prompt="x", **{name: -1}), STATE, "")["max_new_tokens"] == 99


@pytest.mark.parametrize("model", SMALLEST)
def test_the_schema_says_what_is_accepted(model: type[Body]) -> None:
    validator = jsonschema_rs.validator_for(model.model_json_schema())
    for name, values in others(model):
        for value in ("anything", None) if values is None else (*values, None):
            assert validator.is_valid({**SMALLEST[model], name: value}), name
        if values is not None:
            assert not validator.is_valid({**SMALLEST[model], name: "something else"}), name
    assert validator.is_valid({**SMALLEST[model], "new": None})
    assert not validator.is_valid({**SMALLEST[model], "new": 1})


def test_the_page_of_fields_is_what_the_schema_says() -> None:
    written = Path(__file__).parents[2] / "docs" / "fields.md"
    assert written.read_text(encoding="utf-8").endswith(f"\n\n{table()}")
    assert all(f"| `{path}` |" in table() for path in BODIES)


def test_an_answer_names_what_had_no_effect(http: httpx.Client) -> None:
    header = "x-slipstream-ignored"
    asked = {"messages": [USER, ANSWER, USER], "max_tokens": 1, "reasoning_effort": "low"}
    sent = {**asked, "store": True, "user": "x", "chat_template_kwargs": {"enable_thinking": False}}
    for more in ({}, {"stream": True}):
        answer = http.post("/v1/chat/completions", json={**sent, **more})
        assert answer.status_code == 200, answer.text
        assert set(answer.headers[header].split(", ")) == {
            *("store", "user", "messages[].annotations", "messages[].tool_calls[].index"),
            *("reasoning_effort", "chat_template_kwargs.enable_thinking"),
        }
    assert header not in http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).headers
    wrong = http.post("/v1/completions", json={"prompt": "x", "user": "x", "n": 1000})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"


def salt(tenant: str, text: str | None) -> str:
    return engine_options(CompletionRequest(prompt="x", cache_salt=text), STATE, tenant)["cache_salt"]


def test_the_salt_of_the_cache_is_short_and_one_s_own() -> None:
    asked = [(tenant, text) for tenant in ("", "alice") for text in (None, "a", "b", "a" * 100_000)]
    salts = [salt(*each) for each in asked]
    assert len(set(salts)) == len(asked) and salts == [salt(*each) for each in asked]
    assert max(map(len, salts)) < 100
