"""The form that an answer has to have: from the fields of a request to a grammar of the engine."""

from __future__ import annotations

from typing import Any

from slipstream.serve.schema import Decoding
from slipstream.serve.state import ServerState
from slipstream.serve.tools import Tools


def constraint(body: Decoding, state: ServerState) -> dict[str, Any]:
    return {}


def tool_constraint(tools: Tools, state: ServerState) -> dict[str, Any]:
    return {}
