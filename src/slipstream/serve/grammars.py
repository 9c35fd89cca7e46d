"""Grammars for requests: from the fields of a request that fix the form of its answer."""

from __future__ import annotations

from typing import Any

from slipstream.decoding.grammar import Grammars
from slipstream.serve.faults import BadRequest
from slipstream.serve.schema import Decoding
from slipstream.serve.state import ServerState
from slipstream.serve.tools import Tools

MAKERS = {"json_": Grammars.json_schema, "regex": Grammars.regex, "choice": Grammars.choice, "grammar": Grammars.lark}
"""The forms of `structured_outputs` -> what makes a grammar of each."""


def constraint(body: Decoding, state: ServerState, calls: str | None = None) -> dict[str, Any]:
    """Return the engine's option for `response_format` or `structured_outputs`; {} if the answer is free text.

    `calls` are the rules by which the answer may be calls of tools instead. Raises BadRequest, which names the field,
    for a form that is not possible.
    """
    form, outputs = body.response_format, body.structured_outputs
    formed = form is not None and form.type != "text"
    if formed and outputs is not None:
        raise BadRequest("response_format and structured_outputs exclude each other.", "structured_outputs")
    if not formed and outputs is None:
        return {}
    with state.refusing("response_format" if formed else "structured_outputs"):
        if outputs is not None:
            forms = {name: value for name, value in vars(outputs).items() if value is not None}
            if len(forms) != 1:
                kinds = "give one of json, regex, choice and grammar."
                raise ValueError(f"structured_outputs has {len(forms)} forms: {kinds}")
            [(name, value)] = forms.items()
            made = MAKERS[name](state.grammars, value)
        else:
            assert form is not None
            named = form.json_schema.schema_ if form.json_schema else None
            schema = form.schema_ if form.type == "json_object" else named
            if schema is None and form.type != "json_object":
                raise ValueError("response_format of type json_schema needs json_schema.schema, the schema itself.")
            made = state.grammars.json_object() if schema is None else state.grammars.json_schema(schema)
        return {"grammar": state.grammars.within(calls, made) if calls else made}


def tool_constraint(tools: Tools, state: ServerState) -> dict[str, Any]:
    """Return the engine's option for an answer that must be a call of a tool; {} if it may be text."""
    schema = tools.schema()
    if schema is None:
        return {}
    with state.refusing("tools"):
        return {"grammar": state.grammars.json_schema(schema)}
