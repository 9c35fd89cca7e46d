"""What reaches a chat template: the messages of any client, in the forms that the template takes."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.chat_template import TOOL, ChatTemplate
from slipstream.engine.requests import Chat, Encoder
from tongues import byte_level

JOINS = """{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% for c in m.tool_calls or [] %}
{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{% endfor %}"""
"""Joins texts: contents and arguments have to be texts."""
PRINTS = JOINS.replace("' ' + c.function.arguments + ']'", "' ' ~ c.function.arguments ~ ']'")
"""Prints arguments, whatever they are: an object would come out as Python writes it."""
AS_JSON = """{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}
{{ '<' + m.role + '>' }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"""
AS_ITEMS = """{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls or [] %}
{% for key, value in c.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}{% endfor %}{% endfor %}"""
NAMES = "{% for m in messages %}{{ m.role }}({{ m.name }}){{ m.thinking }}{{ m.content }};{% endfor %}"
ROLES = (
    "{% for m in messages %}{% if m.role not in ('system', 'developer', 'user') %}{{ raise_exception('role') }}"
    "{% endif %}{{ m.role }};{% endfor %}"
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}
LOOP = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "7"},
]
"""What every agent sends in its second turn."""


def encoder(template: str | dict[str, str]) -> Encoder:
    tokenizer: Any = byte_level(300)
    tokenizer.chat_template = template
    return Encoder("toy", tokenizer)


def written(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    made = encoder(template)
    return str(made.tokenizer.decode(made.read(Chat(messages, **more))[0])).replace("\n", "")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (JOINS, '<user>add<assistant>[add {"a": [1, "é"]}]<tool>7'),
        (PRINTS, '<user>add<assistant>[add {"a": [1, "é"]}]<tool>7'),
        (AS_JSON, '<user>add<assistant>[add {"a": [1, "é"]}]<tool>7'),
        (AS_ITEMS, "useraddassistant<a>[1, 'é']tool7"),
    ],
)
@pytest.mark.parametrize("form", ["text", "object"])
def test_the_second_turn_of_an_agent_is_written(template: str, found: str, form: str) -> None:
    call = CALL if form == "text" else {**CALL, "function": {"name": "add", "arguments": {"a": [1, "é"]}}}
    assert written(template, [LOOP[0], {**LOOP[1], "tool_calls": [call]}, LOOP[2]]) == found


def test_arguments_that_are_none_or_no_json() -> None:
    def arguments(text: str) -> str:
        call = {**CALL, "function": {"name": "add", "arguments": text}}
        return written(AS_JSON, [LOOP[0], {"role": "assistant", "tool_calls": [call]}]).partition("[add ")[2]

    assert arguments("") == "{}]"
    assert arguments('{"a": ') == '"{\\"a\\": "]'
    assert arguments("[1]") == '"[1]"]' and arguments("[" * 10_000).startswith('"[[')


def test_developers_are_systems_where_only_these_are_known() -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert written(JOINS, messages) == "<system>x<user>y"
    assert written(ROLES, messages) == "developer;user;"
    named = "{# for developers #}" + ROLES.replace("'developer', ", "")  # the word is no role there
    ignored = "{% for m in messages if m.role != 'developer' %}{{ m.role }};{% endfor %}"
    assert written(named, messages) == written(ignored, messages) == "system;user;"


def test_ids_of_calls_are_nine_letters_where_only_such_are_taken() -> None:
    nine = (
        "{% for m in messages %}{% for id in [m.tool_call_id] + (m.tool_calls or []) | map(attribute='id') | list %}"
        "{% if id and id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ id or '' }};{% endfor %}{% endfor %}"
    )
    other = [{**LOOP[1], "tool_calls": [{**CALL, "id": "abcDEF123"}]}, {**LOOP[2], "tool_call_id": "abcDEF123"}]
    assert written(nine, [*LOOP, *other]) == ";;000000000;000000000;;abcDEF123;abcDEF123;"
    assert written(nine.replace("raise_exception('id')", "''"), LOOP) == ";;call_1;call_1;"


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(Path(os.environ.get("SLIPSTREAM_TEMPLATES", "none")).glob("*.jinja")), ids=str)
def test_published_templates_write_what_they_write_of_messages_in_their_own_forms(file: Path) -> None:
    """In the folder that the variable names: of the loop of an agent, with arguments as a template takes them."""
    made = encoder(file.read_text())
    made.tokenizer.bos_token = "<s>"
    native = list[str]()
    for form in (json.loads, str):
        function = {"name": "add", "arguments": form(CALL["function"]["arguments"])}
        call = {"id": "000000000", "type": "function", "function": function}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {**LOOP[2], "tool_call_id": "000000000", "name": "add"}
        with suppress(Exception):  # chat templates are programs and may raise any error
            options = {"tokenize": False, "add_generation_prompt": True}
            native.append(made.tokenizer.apply_chat_template([LOOP[0], asked, result], tools=[TOOL], **options))
    if made.template.takes_tools and any("7" in each for each in native):
        ours = made.tokenizer.decode(made.read(Chat(LOOP, [TOOL]))[0])
        assert ours.replace("call_1", "000000000") in native


def test_refusals_are_contents_and_empty_lists_of_calls_are_dropped() -> None:
    assert written(JOINS, [{"role": "assistant", "content": None, "refusal": "no"}]) == "<assistant>no"
    template = "{% for m in messages %}{{ 'tool_calls' in m }}{{ m.content }};{% endfor %}"
    assert written(template, [{"role": "assistant", "content": "x", "tool_calls": []}]) == "Falsex;"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_alone_is_a_message(name: str) -> None:
    message = {"role": "assistant", name: "hm"}
    assert written(AS_JSON, [message]) == "<assistant>(hm)"
    assert written(NAMES, [message]) == "assistant()hm;"
    assert written(JOINS, [message]) == "<assistant>"  # which has no place for it


def test_results_have_the_names_of_their_functions() -> None:
    assert written(NAMES, LOOP) == "user()add;assistant();tool(add)7;"
    assert written(NAMES, [*LOOP[:2], {**LOOP[2], "tool_call_id": "other"}]).endswith("tool()7;")
    nameless = {**LOOP[1], "tool_calls": [{"function": CALL["function"]}]}
    assert written(NAMES, [LOOP[0], nameless, {"role": "tool", "content": "7"}]).endswith("tool(add)7;")


def test_tools_that_a_template_ignores_are_an_error() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    assert written(AS_JSON, LOOP[:1], tools=[tool]).startswith("add;")
    with pytest.raises(ValueError, match="tools are given, but the chat template of toy does not write them"):
        written(JOINS, LOOP[:1], tools=[tool])
    assert written(JOINS, LOOP[:1], tools=[]) == "<user>add"
    late = "{% for m in messages %}{% if m.role == 'system' %}{{ tools }}{% endif %}{% endfor %}"
    assert ChatTemplate(encoder(late).tokenizer).takes_tools
    both = {"default": JOINS, "tool_use": AS_JSON}
    assert ChatTemplate(encoder(both).tokenizer).takes_tools


def test_a_template_that_is_replaced_is_looked_at_again() -> None:
    made = encoder(JOINS)
    assert made.template is made.template and not made.template.takes_tools
    made.tokenizer.chat_template = AS_JSON
    assert made.template.takes_tools
