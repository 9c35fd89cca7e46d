"""Answers in the form that each family of models publishes, read by the marks of its chat template, in any pieces."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.models.loading.pairings import EMBEDDED
from slipstream.serve.families import FAMILIES, form_of
from slipstream.serve.readers import as_message
from slipstream.serve.response_format import AnswerForm

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
    },
}
B = 'x}"] é'
PAIR = [json.dumps({"a": a, "b": B}, ensure_ascii=False) for a in (7, 8)]
THINK = "<think>let me see</think>"


def listed(name: str, arguments: str) -> str:
    return "[" + ", ".join(f'{{"{name}": "add", "{arguments}": {each}}}' for each in PAIR) + "]"


def tagged(each: str, begin: str = "", end: str = "", thought: str = THINK) -> str:
    """A thought, a word and both calls in tags; `each` has {a} and {b}."""
    return f"{thought}Now:{begin}" + "\n".join(each.format(a=a, b=B) for a in (7, 8)) + end


ANSWERS: dict[str, tuple[str, str]] = {  # a part of the chat template, and what the model writes
    "gpt-oss": (
        "<|channel|>",
        "<|channel|>analysis<|message|>let me see<|end|><|start|>assistant<|channel|>commentary<|message|>Now:<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{PAIR[0]}<|call|>"
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{PAIR[1]}<|call|>",
    ),
    "deepseek-v3.2": (
        "<｜DSML｜function_calls>",
        tagged(
            '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">{a}</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="true">{b}</｜DSML｜parameter>\n</｜DSML｜invoke>',
            "\n\n<｜DSML｜function_calls>\n",
            "\n</｜DSML｜function_calls>",
        ),
    ),
    "deepseek": (
        "<｜tool▁call▁begin｜>",
        THINK + "Now:<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{PAIR[0]}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{PAIR[1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral": (
        "[TOOL_CALLS][ARGS]",
        f"[THINK]let me see[/THINK]Now:[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{PAIR[0]}[TOOL_CALLS]add[ARGS]{PAIR[1]}",
    ),
    "mistral-lists": ("[TOOL_CALLS]", f"[THINK]let me see[/THINK]Now:[TOOL_CALLS] {listed('name', 'arguments')}"),
    "cohere": (
        "<|START_ACTION|>",
        "<|START_THINKING|>let me see<|END_THINKING|><|START_RESPONSE|>Now:<|END_RESPONSE|><|START_ACTION|>\n"
        + listed('tool_call_id": "0", "tool_name', "parameters")
        + "<|END_ACTION|>",
    ),
    "command-r": ("Action:```json [{tool_name", f"Now:Action: ```json\n{listed('tool_name', 'parameters')}\n```"),
    "kimi": (
        "<|tool_call_begin|>",
        THINK
        + "Now:<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.add:{place}<|tool_call_argument_begin|>{each}<|tool_call_end|>"
            for place, each in enumerate(PAIR)
        )
        + "<|tool_calls_section_end|>",
    ),
    "glm": (
        "<arg_key>",
        tagged(
            "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>{b}</arg_value>\n</tool_call>"
        ),
    ),
    "minimax": (
        "<minimax:tool_call>",
        tagged(
            '<invoke name="add">\n<parameter name="a">{a}</parameter>\n<parameter name="b">{b}</parameter>\n</invoke>',
            "\n<minimax:tool_call>\n",
            "\n</minimax:tool_call>",
        ),
    ),
    "qwen-xml": (
        "<function=name><parameter=key>",
        tagged(
            "\n<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
    ),
    "seed": (
        "<seed:tool_call><parameter=key>",
        tagged(
            "<seed:tool_call>\n<function=add>\n<parameter=a>{a}</parameter>\n<parameter=b>{b}</parameter>\n</function>\n"
            "</seed:tool_call>",
            thought="<seed:think>let me see</seed:think>",
        ),
    ),
    "minicpm": (
        "<function name=><param name=>",
        tagged('<function name="add"><param name="a">{a}</param><param name="b">{b}</param></function>'),
    ),
    "gigachat": ("<|function_call|>", THINK + f'Now:<|function_call|>{{"name": "add", "arguments": {PAIR[0]}}}'),
    "functionary": ("<function=name>", "Now:" + "".join(f"<function=add>{each}</function>" for each in PAIR)),
    "pythonic": (
        "<|tool_list_start|>",
        THINK + f"Now:<|tool_call_start|>[add(a=7, b={B!r}), add(a=8, b={json.dumps(B)})]<|tool_call_end|>",
    ),
    "phi and others": (
        "<|tool_call|><|/tool_call|>",
        THINK + f"Now:<|tool_call|>{listed('name', 'arguments')}<|/tool_call|>",
    ),
    "granite": ("<|tool_call|>", THINK + f"<response>Now:</response><|tool_call|>{listed('name', 'arguments')}"),
    "hermes": (
        "<tool_call>",
        f"{THINK}Now:"
        + "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {each}}}\n</tool_call>' for each in PAIR),
    ),
    "llama": (
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        f'Now:<|python_tag|>{{"name": "add", "parameters": {PAIR[0]}}}; {{"name": "add", "parameters": {PAIR[1]}}}',
    ),
    "thinking alone": ("</think>", THINK + "Now:"),
}
SILENT = ("command-r", "functionary", "llama")  # which publish no form of reasoning
NUMBERS = {"thinking alone": (), "gigachat": (7,)}  # of the calls in an answer, where they are not both


@cache
def form(family: str) -> AnswerForm:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    tokenizer.chat_template = ANSWERS[family][0]
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="toy"))
    found = AnswerForm.of(model, tokenizer, [ADD])
    assert found is not None
    return found


def read(family: str, parts: list[str]) -> tuple[Any, Any, list[tuple[str, Any]]]:
    regions = form(family).regions([])
    message = as_message([delta for part in parts for delta in regions.feed(part)] + [*regions.finish()])
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return message.content, message.reasoning_content, calls


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_read_whole_and_in_pieces(family: str) -> None:
    text, thought = ANSWERS[family][1], None if family in SILENT else "let me see"
    calls = [("add", {"a": a, "b": B}) for a in NUMBERS.get(family, (7, 8))]
    content, reasoning, found = whole = read(family, [text])
    assert ((content or "").strip(), reasoning, found) == ("Now:", thought, calls)
    assert read(family, list(text)) == whole
    assert read("thinking alone" if family != "thinking alone" else "llama", [text]) != whole  # another family's form


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_read_in_every_split_even_if_a_part_is_missing(family: str, step: int) -> None:
    answer = ANSWERS[family][1]
    for place in range(0, len(answer), step):
        for text in (answer, answer[:place] + answer[place + 9 :]):
            assert read(family, [text[:place], text[place:]]) == read(family, [text]), text


def test_a_turn_behind_the_results_of_calls_begins_anew() -> None:
    made, (_, answer) = form("deepseek"), ANSWERS["deepseek"]
    prompt = f"<｜Assistant｜>{answer}<｜tool▁output▁begin｜>15<｜tool▁output▁end｜>"
    regions = made.regions(made.tokenizer.encode(prompt, add_special_tokens=False), most=2)
    message = as_message([*regions.feed(answer), *regions.finish()])
    assert len(message.tool_calls or ()) == 2 and message.reasoning_content == "let me see"


@pytest.mark.parametrize("prompt", ["<role>ASSISTANT</role><think>\n", "<think></think><role>ASSISTANT</role>"])
def test_a_prompt_in_any_style_may_end_with_the_mark_of_a_thought(prompt: str) -> None:
    made = form("glm")
    regions = made.regions(made.tokenizer.encode(prompt, add_special_tokens=False))
    message = as_message([*regions.feed("let me see</think>Now:"), *regions.finish()])
    begun = prompt.endswith("<think>\n")
    assert (message.reasoning_content, message.content == "Now:") == ("let me see" if begun else None, begun)


def test_templates_without_marks_have_no_form() -> None:
    assert form_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
