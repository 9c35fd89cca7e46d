"""Grammars for requests: from the fields of a request that fix the form of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.decoding.grammar import Grammar, Grammars
from slipstream.serve.faults import BadRequest
from slipstream.serve.schema import Decoding, ResponseFormat, StructuredOutputs
from slipstream.serve.state import ServerState
from slipstream.serve.tools import Tools


def constraint(body: Decoding, state: ServerState, calls: str | None = None) -> dict[str, Any]:
    """Return the engine's option for `response_format` or `structured_outputs`; {} if the answer is free text.

    `calls` are the rules by which the answer may be calls of tools instead. Raises BadRequest, which names the field,
    for a form that is not possible.
    """
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        if outputs is not None:
            raise BadRequest("response_format and structured_outputs exclude each other.", "structured_outputs")
        return _made("response_format", lambda grammars: _by_format(form, grammars), state, calls)
    if outputs is not None:
        return _made("structured_outputs", lambda grammars: _by_outputs(outputs, grammars), state, calls)
    return {}


def tool_constraint(tools: Tools, state: ServerState) -> dict[str, Any]:
    """Return the engine's option for an answer that must be a call of a tool; {} if it may be text."""
    schema = tools.schema()
    return {} if schema is None else _made("tools", lambda grammars: grammars.json_schema(schema), state)


def _made(
    field: str, make: Callable[[Grammars], Grammar], state: ServerState, calls: str | None = None
) -> dict[str, Any]:
    """Return the option for the grammar that `make` makes. Raises BadRequest, which names the field, if it fails."""
    try:
        made = make(state.grammars)
        return {"grammar": state.grammars.within(calls, made) if calls else made}
    except ValueError as error:
        raise BadRequest(str(error), field) from None


def _by_format(form: ResponseFormat, grammars: Grammars) -> Grammar:
    if form.type == "json_object":
        return grammars.json_object() if form.schema_ is None else grammars.json_schema(form.schema_)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ValueError("response_format of type json_schema needs json_schema.schema, the schema itself.")
    return grammars.json_schema(form.json_schema.schema_)


def _by_outputs(outputs: StructuredOutputs, grammars: Grammars) -> Grammar:
    forms = {name: value for name, value in vars(outputs).items() if value is not None}
    if len(forms) != 1:
        raise ValueError(f"structured_outputs has {len(forms)} forms: give one of json, regex, choice and grammar.")
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json_": grammars.json_schema,
        "regex": grammars.regex,
        "choice": grammars.choice,
        "grammar": grammars.lark,
    }
    [(name, value)] = forms.items()
    return makers[name](value)
