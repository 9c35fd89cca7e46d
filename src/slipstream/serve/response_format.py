"""The forms in which families of models write reasoning and calls of tools, as transformers keeps them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from operator import getitem
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.chat_parsing.response_templates import load_response_template

from slipstream.serve.families import form_of
from slipstream.serve.readers import CALLS, Regions
from slipstream.serve.schema import TOOL_NAME
from slipstream.text.jsontext import json_text

BEGUN = 1024  # most tokens of a message that the prompt has begun; more are not looked at
XML = "xml-inline"  # content of a region that consists of tags; transformers skips what stands between them


@dataclass(frozen=True)
class AnswerForm:
    """The form of a family's answers: a `ResponseTemplate` of transformers, and the tokenizer that parses calls by it.
    `tools` give the types of their arguments."""

    template: Any
    tokenizer: Any
    tools: Sequence[dict[str, Any]] | None = None

    @staticmethod
    def of(model: PreTrainedModel, tokenizer: Any, tools: Sequence[dict[str, Any]] | None) -> AnswerForm | None:
        """Return the form of a model's answers: the tokenizer's `response_template`, else that of its chat template's
        marks, else that of the model's type; None if none is known."""
        written = getattr(tokenizer, "chat_template", None) or ""
        marks = form_of("\n".join(written.values()) if isinstance(written, dict) else written)
        spec = getattr(tokenizer, "response_template", None) or marks or _of_family(model, tokenizer)
        return None if spec is None else AnswerForm(load_response_template(spec), tokenizer, tools)

    def regions(self, prompt: Sequence[int], most: int | None = None, formed: bool = False) -> Regions:
        """Return what divides the answer to a prompt of these token ids; calls are parsed if there are tools.
        Where content is `formed` by a grammar, no marks are looked for in it."""
        regions = Regions(self.template, self.calls if self.tools else None, most, formed)
        regions.begin(self.tokenizer.decode(list(prompt[-BEGUN:])), self.template.start_anchor_re)
        return regions

    @cached_property
    def _typed(self) -> list[dict[str, Any]]:
        return [_typed(tool) for tool in self.tools or ()]

    def calls(self, region: str) -> list[tuple[str, str]]:
        """Return names and arguments, as JSON text, of the calls in a region. Raises ValueError if one is malformed."""
        field = replace(self.template.fields[CALLS], optional=True)
        template = replace(self.template, fields={CALLS: field}, implicit=None, defaults={})
        parser = self.tokenizer.get_response_parser(template, prefix="", tools=self._typed)
        try:
            parser.feed(region)
            found = parser.finalize()[0].get(CALLS)
        except Exception as error:  # of any type, depending on what the model wrote
            raise ValueError(f"this is no call: {error}") from None
        if field.content == XML:
            body = field.close_re.sub("", field.open_re.sub("", region, count=1), count=1)
            if re.sub(field.content_args["tag_pattern"], "", body, flags=re.DOTALL).strip():
                raise ValueError("this is no call: there is text between its parameters.")
        return [call for each in _listed(found) for call in _calls(each)]


def _of_family(model: PreTrainedModel, tokenizer: Any) -> Any:
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # without the packages of its server
        return None
    return get_response_template(tokenizer, model)


def _typed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool whose parameters have their types, which transformers does not find behind references."""
    root = tool["function"].get("parameters") or {}
    known: dict[str, dict[str, None]] = {}  # the types behind a reference; none while it is followed

    def types(schema: dict[str, Any]) -> dict[str, None]:
        if (place := schema.get("$ref")) is not None:
            if place not in known:
                known[place] = {}
                known[place] = types(reduce(getitem, place.split("/")[1:], root))
            return known[place]
        own = schema.get("type", [])
        unions = [types(each) for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name, ())]
        return dict.fromkeys([own] if isinstance(own, str) else own) | dict(chain(*map(dict.items, unions)))

    try:
        properties = {name: {**each, "type": [*types(each)]} for name, each in root.get("properties", {}).items()}
    except (AttributeError, KeyError, RecursionError, TypeError):  # it is no schema that is understood here
        return tool
    return {**tool, "function": {**tool["function"], "parameters": {"properties": properties}}}


def _listed(found: Any) -> list[Any]:
    return [call for each in found for call in _listed(each)] if isinstance(found, list) else [found]


def _call(found: Any) -> tuple[str, str]:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("this is no call: it has no name.")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not re.fullmatch(TOOL_NAME, function["name"]) or not isinstance(arguments, dict):
        raise ValueError("this is no call: its name or its arguments cannot be those of a tool.")
    return function["name"], json_text(arguments)


def _calls(found: Any) -> list[tuple[str, str]]:
    if not isinstance(found, str):
        return [_call(found)]
    try:
        body = ast.parse(found.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"this is no call: {error.msg}.") from None
    calls = list[tuple[str, str]]()
    for each in body.elts if isinstance(body, ast.List) else [body]:
        if not isinstance(each, ast.Call) or each.args or not all(word.arg for word in each.keywords):
            raise ValueError("this is no call: it has another form than name(argument=value).")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in each.keywords}
        calls.append(_call({"function": {"name": ast.unparse(each.func), "arguments": arguments}}))
    return calls
