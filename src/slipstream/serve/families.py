"""The forms in which families of models write reasoning and calls of tools, by the marks of their chat templates.

They are response templates of transformers, for models whose tokenizers come without one.
"""

import re
from typing import Any

ANCHOR = (  # what the message of an assistant begins with, in any family
    r"<\|im_start\|>(?:assistant|ai)\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|<\|header_start\|>assistant"
    r"<\|header_end\|>\n\n|<｜Assistant｜>|<｜tool▁outputs?▁end｜>|\[/INST\]|\[/TOOL_RESULTS\]|<\|start\|>assistant|<\|assistant\|>|<\|CHATBOT_TOKEN\|>|<\|im_assistant"
    r"\|>assistant<\|im_middle\|>|<\|start_of_role\|>assistant<\|end_of_role\|>|\]~b\]ai\n|<start_of_turn>model\n"
)

OBJECT = r'(?P<object>\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|(?&object))*\})'  # an object in JSON, with others inside
Field = dict[str, Any]
END = "end_of_calls"  # field of a mark behind all calls, which is no content


def _region(open: str | list[str], close: str | list[str]) -> Field:
    return {"open": open, "close": close}


THINK = _region("<think>", "</think>")


def _function(name: str = "{name}", arguments: str = "{content}") -> Field:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _named(open: str, close: str, **more: Any) -> Field:
    usual = {"content": "json", "repeats": True, "transform": _function()}
    return {"open_pattern": open, "close_pattern": close, **usual, **more}


def _list(open: str, name: str, arguments: str, **close: str) -> Field:
    calls = {"content": "json", "transform_each": True, "transform": _function(f"{{{name}}}", f"{{{arguments}}}")}
    return {"open_pattern": open, **close, **calls}


def _tags(pattern: str) -> Field:
    loose = {"name": "json", "args": {"allow_non_json": True}}
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": loose}}


def _functions(tag: str) -> Field:
    return _named(
        rf"\s*<{tag}>\s*<function=(?P<name>[^>\n]+)>",
        rf"</function>\s*</{tag}>",
        **_tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    )


def _family(
    marks: str, calls: Field | None, thinking: Field | None = THINK, end: str = "", **more: Field
) -> tuple[str, dict[str, Field]]:
    """Return a pattern of chat templates, and what is written: reasoning, perhaps a mark `end` behind calls, calls."""
    fields = {"thinking": thinking, **{name: field for name, field in more.items() if name != "content"}}
    fields |= {END: {"open_pattern": end, "close_pattern": ""} if end else None, "tool_calls": calls}
    fields |= {name: field for name, field in more.items() if name == "content"}
    return marks, {name: field for name, field in fields.items() if field is not None}


HARMONY_CALL = (
    r"(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.(?P<name>[\w-]+)\s*(?:<\|channel\|>(?:commentary|analysis))?"
    r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
)
JSON_CALL = (
    r'(?:<\|python_tag\|>\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
    r'"(?:parameters|arguments)"\s*:\s*' + OBJECT + r"\s*\}"
)

FAMILIES = {  # the first whose pattern fits
    "gpt-oss": _family(
        r"<\|channel\|>",
        _named(HARMONY_CALL, r"<\|call\|>"),
        _region("<|channel|>analysis<|message|>", "<|end|>"),
        response=_region("<|channel|>commentary<|message|>", "<|end|>"),
        content=_region("<|channel|>final<|message|>", ["<|return|>", "<|end|>"]),
    ),
    "deepseek-v3.2": _family(
        "｜DSML｜",
        _named(
            r'\s*(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
            r"</｜DSML｜invoke>",
            **_tags(r'<｜DSML｜parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</｜DSML｜parameter>'),
        ),
        end=r"</｜DSML｜(?:function|tool)_calls>",
    ),
    "deepseek": _family(
        "<｜tool▁call▁begin｜>",
        _named(
            r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+)"
            r"(?:<｜tool▁sep｜>|\n```json\n)",
            r"\s*(?:```\s*)?<｜tool▁call▁end｜>",
        ),
        end="<｜tool▁calls▁end｜>",
    ),
    "mistral": _family(
        r"\[ARGS\]",
        _named(
            r"\[TOOL_CALLS\]\s*(?P<name>[^\[{\s]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*" + OBJECT,
            "",
            content="text",
            transform=_function(arguments="{object}"),
        ),
        _region("[THINK]", "[/THINK]"),
    ),
    "mistral-lists": _family(
        r"\[TOOL_CALLS\]", _list(r"\[TOOL_CALLS\]", "name", "arguments"), _region("[THINK]", "[/THINK]")
    ),
    "cohere": _family(
        r"<\|START_ACTION\|>",
        _list(r"<\|START_ACTION\|>", "tool_name", "parameters", close="<|END_ACTION|>"),
        _region("<|START_THINKING|>", "<|END_THINKING|>"),
        response=_region(["<|START_RESPONSE|>", "<|START_TEXT|>"], ["<|END_RESPONSE|>", "<|END_TEXT|>"]),
    ),
    "command-r": _family(
        r"Action:.*tool_name", _list(r"Action:\s*```json", "tool_name", "parameters", close="```"), None
    ),
    "kimi": _family(
        r"<\|tool_call_begin\|>",
        _named(
            r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)"
            r"(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>",
        ),
        end=r"<\|tool_calls_section_end\|>",
    ),
    "glm": _family(
        "<arg_key>",
        _named(
            r"\s*<tool_call>\s*(?P<name>[^<\s]+)\s*",
            r"</tool_call>",
            **_tags(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ),
    ),
    "minimax": _family(
        "<minimax:tool_call>",
        _named(
            r'\s*(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
            r"</invoke>",
            **_tags(r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
        ),
        end="</minimax:tool_call>",
    ),
    "seed": _family("<seed:tool_call>", _functions("seed:tool_call"), _region("<seed:think>", "</seed:think>")),
    "qwen-xml": _family("<parameter=", _functions("tool_call")),
    "minicpm": _family(
        "<param name=",
        _named(
            r'\s*<function name="(?P<name>[^"]+)">',
            "</function>",
            **_tags(r'<param name="(?P<key>[^"]+)">(?P<value>.*?)</param>'),
        ),
    ),
    "gigachat": _family(
        r"<\|function_call\|>",
        {"open": "<|function_call|>", "content": "json", "transform": {"type": "function", "function": "{content}"}},
    ),
    "functionary": _family("<function=", _named(r"\s*<function=(?P<name>[^>\n]+)>", "</function>"), None),
    "pythonic": _family(
        r"<\|tool_(?:call|list)_start\|>", {**_region("<|tool_call_start|>", "<|tool_call_end|>"), "repeats": True}
    ),
    "phi and others": _family(
        r"<\|/tool_call\|>|<TOOLCALL>|<tool_calls>",
        _list(
            *(r"<\|tool_call\|>|<TOOLCALL>|<tool_calls>", "name", "arguments"),
            close_pattern=r"<\|/tool_call\|>|</TOOLCALL>|</tool_calls>",
        ),
    ),
    "granite": _family(
        r"<\|tool_call\|>|functools",
        _list(r"<\|tool_call\|>|functools", "name", "arguments"),
        response=_region("<response>", "</response>"),
    ),
    "hermes": _family(
        "<tool_call>",
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    ),
    "llama": _family(
        r"<\|python_tag\|>|<\|python_start\|>|\"parameters\": dictionary",
        _named(JSON_CALL, r"\s*;?", content="text", transform=_function(arguments="{object}")),
        None,
    ),
    "thinking alone": _family(r"</think>", None),
}


def form_of(chat_template: str) -> dict[str, Any] | None:
    for pattern, fields in FAMILIES.values():
        if re.search(pattern, chat_template, re.DOTALL):
            return {"start_anchor_pattern": ANCHOR, "fields": {"content": {}, **fields}}
    return None
