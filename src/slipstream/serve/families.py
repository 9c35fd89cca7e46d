"""The forms in which families of models write reasoning and calls of tools, by the marks of their chat templates.

They are response templates of transformers, for models whose tokenizers come without one.
"""

from __future__ import annotations

import re
from typing import Any

ANCHOR = (
    r"<\|im_start\|>(?:assistant|ai)\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|<\|header_start\|>assistant"
    r"<\|header_end\|>\n\n|<｜Assistant｜>|<｜tool▁outputs?▁end｜>|\[/INST\]|\[/TOOL_RESULTS\]|<\|start\|>assistant|<\|assistant\|>|<\|CHATBOT_TOKEN\|>|<\|im_assistant"
    r"\|>assistant<\|im_middle\|>|<\|start_of_role\|>assistant<\|end_of_role\|>|\]~b\]ai\n|<start_of_turn>model\n"
)
"""What the message of an assistant begins with, in any family."""

OBJECT = r'(?P<object>\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|(?&object))*\})'
"""An object in JSON, with others inside."""

Field = dict[str, Any]
END = "end_of_calls"
"""The field of a mark behind all calls, which is no content."""


def _region(open: str | list[str], close: str | list[str]) -> Field:
    return {"open": open, "close": close}


def _function(name: str = "{name}", arguments: str = "{content}") -> Field:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _named(open: str, close: str, **more: Any) -> Field:
    """Return the field of calls whose name is in the mark before them, and whose arguments are the content."""
    usual = {"content": "json", "repeats": True, "transform": _function()}
    return {"open_pattern": open, "close_pattern": close, **usual, **more}


def _behind(mark: str) -> dict[str, Field]:
    return {END: {"open_pattern": mark, "close_pattern": ""}}


def _list(open: str, name: str, arguments: str, **close: str) -> Field:
    calls = {"content": "json", "transform_each": True, "transform": _function(f"{{{name}}}", f"{{{arguments}}}")}
    return {"open_pattern": open, **close, **calls}


def _tags(pattern: str) -> Field:
    """Return the settings of arguments in tags: a value that is not JSON is a text."""
    loose = {"name": "json", "args": {"allow_non_json": True}}
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": loose}}


THINK = _region("<think>", "</think>")
HARMONY_CALL = (
    r"(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.(?P<name>[\w-]+)\s*(?:<\|channel\|>(?:commentary|analysis))?"
    r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
)
JSON_CALL = (
    r'(?:<\|python_tag\|>\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
    r'"(?:parameters|arguments)"\s*:\s*' + OBJECT + r"\s*\}"
)

FAMILIES: dict[str, tuple[str, dict[str, Field]]] = {
    "gpt-oss": (
        r"<\|channel\|>",
        {
            "thinking": _region("<|channel|>analysis<|message|>", "<|end|>"),
            "response": _region("<|channel|>commentary<|message|>", "<|end|>"),
            "tool_calls": _named(HARMONY_CALL, r"<\|call\|>"),
            "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
        },
    ),
    "deepseek-v3.2": (
        "｜DSML｜",
        {
            "thinking": THINK,
            **_behind(r"</｜DSML｜(?:function|tool)_calls>"),
            "tool_calls": _named(
                r'\s*(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
                r"</｜DSML｜invoke>",
                **_tags(r'<｜DSML｜parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</｜DSML｜parameter>'),
            ),
        },
    ),
    "deepseek": (
        "<｜tool▁call▁begin｜>",
        {
            "thinking": THINK,
            **_behind("<｜tool▁calls▁end｜>"),
            "tool_calls": _named(
                r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+)"
                r"(?:<｜tool▁sep｜>|\n```json\n)",
                r"\s*(?:```\s*)?<｜tool▁call▁end｜>",
            ),
        },
    ),
    "mistral": (
        r"\[ARGS\]",
        {
            "thinking": _region("[THINK]", "[/THINK]"),
            "tool_calls": _named(
                r"\[TOOL_CALLS\]\s*(?P<name>[^\[{\s]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*" + OBJECT,
                "",
                content="text",
                transform=_function(arguments="{object}"),
            ),
        },
    ),
    "mistral-lists": (
        r"\[TOOL_CALLS\]",
        {"thinking": _region("[THINK]", "[/THINK]"), "tool_calls": _list(r"\[TOOL_CALLS\]", "name", "arguments")},
    ),
    "cohere": (
        r"<\|START_ACTION\|>",
        {
            "thinking": _region("<|START_THINKING|>", "<|END_THINKING|>"),
            "response": _region(["<|START_RESPONSE|>", "<|START_TEXT|>"], ["<|END_RESPONSE|>", "<|END_TEXT|>"]),
            "tool_calls": _list(r"<\|START_ACTION\|>", "tool_name", "parameters", close="<|END_ACTION|>"),
        },
    ),
    "command-r": (
        r"Action:.*tool_name",
        {"tool_calls": _list(r"Action:\s*```json", "tool_name", "parameters", close="```")},
    ),
    "kimi": (
        r"<\|tool_call_begin\|>",
        {
            "thinking": THINK,
            **_behind(r"<\|tool_calls_section_end\|>"),
            "tool_calls": _named(
                r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)"
                r"(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                r"<\|tool_call_end\|>",
            ),
        },
    ),
    "glm": (
        "<arg_key>",
        {
            "thinking": THINK,
            "tool_calls": _named(
                r"\s*<tool_call>\s*(?P<name>[^<\s]+)\s*",
                r"</tool_call>",
                **_tags(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
            ),
        },
    ),
    "minimax": (
        "<minimax:tool_call>",
        {
            "thinking": THINK,
            **_behind("</minimax:tool_call>"),
            "tool_calls": _named(
                r'\s*(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
                r"</invoke>",
                **_tags(r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
            ),
        },
    ),
    "qwen-xml": (
        "<parameter=",
        {
            "thinking": THINK,
            "tool_calls": _named(
                r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                r"</function>\s*</tool_call>",
                **_tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
            ),
        },
    ),
    "pythonic": (
        r"<\|tool_call_start\|>",
        {"thinking": THINK, "tool_calls": {**_region("<|tool_call_start|>", "<|tool_call_end|>"), "repeats": True}},
    ),
    "phi and others": (
        r"<\|/tool_call\|>|<TOOLCALL>|<tool_calls>",
        {
            "thinking": THINK,
            "tool_calls": _list(
                *(r"<\|tool_call\|>|<TOOLCALL>|<tool_calls>", "name", "arguments"),
                close_pattern=r"<\|/tool_call\|>|</TOOLCALL>|</tool_calls>",
            ),
        },
    ),
    "granite": (
        r"<\|tool_call\|>|functools",
        {
            "thinking": THINK,
            "response": _region("<response>", "</response>"),
            "tool_calls": _list(r"<\|tool_call\|>|functools", "name", "arguments"),
        },
    ),
    "hermes": (
        "<tool_call>",
        {
            "thinking": THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    ),
    "llama": (
        r"<\|python_tag\|>|<\|python_start\|>|\"parameters\": dictionary",
        {"tool_calls": _named(JSON_CALL, r"\s*;?", content="text", transform=_function(arguments="{object}"))},
    ),
    "thinking alone": (r"</think>", {"thinking": THINK}),
}
"""By family: a pattern that its chat templates have, and what they write beside the content; the first that fits."""


def form_of(chat_template: str) -> dict[str, Any] | None:
    """Return the form of answers to a chat template; None for a template without known marks."""
    for pattern, fields in FAMILIES.values():
        if re.search(pattern, chat_template, re.DOTALL):
            return {"start_anchor_pattern": ANCHOR, "fields": {"content": {}, **fields}}
    return None
