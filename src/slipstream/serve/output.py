"""The common parts of all routes: JSON answers, OpenAPI descriptions of errors and streams, and finish reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from slipstream.core.law import ModelFault
from slipstream.engine.generation import Completion, Piece
from slipstream.serve.answers import Answer, Common, ErrorAnswer
from slipstream.serve.faults import BadRequest, ServeError, ServiceUnavailable

DONE = "[DONE]"  # data of the last event of a stream
ERRORS: dict[int | str, dict[str, Any]] = {  # possible errors by status, for the OpenAPI description
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request cannot be served as it is; `param` names the field.",
        401: "No valid key was sent.",
        404: "The model is not served here.",
        413: "The body is too long.",
        429: "Too many requests wait; try again later.",
        500: "The text could not be finished.",
        503: "The server is starting, ending, or has lost its worker.",
    }.items()
}
ERRORS[401]["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
ERRORS[429]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "string"}}}


def streams(chunk: type[Answer]) -> dict[str, Any]:
    """Return the OpenAPI description of an answer sent whole or, with `stream`, in chunks as server-sent events."""
    forms = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (chunk, ErrorAnswer)]
    payload = {"contentMediaType": "application/json", "contentSchema": {"anyOf": forms}}
    data = {"type": "string", "anyOf": [{"const": DONE}, payload]}
    each = {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}
    return {
        "description": "The answer, or with `stream` its chunks as server-sent events.",
        "content": {"text/event-stream": {"itemSchema": each}},
    }


def answered(answer: Answer) -> Response:
    return Response(answer.json_text(), media_type="application/json")


def with_choices(answer: Common, choices: Sequence[Answer]) -> Response:
    """Return an answer, whose choices are empty, with these as an HTTP response.

    They become text one by one: while one does, no other thread runs.
    """
    text = ",".join(each.json_text() for each in choices)
    whole = answer.json_text().replace('"choices":[]', f'"choices":[{text}]', 1)
    return Response(whole, media_type="application/json")


def finish_reason(completion: Completion) -> str:
    """Return the finish reason under OpenAI's names.

    Raises ServeError for a text that was not finished: by the model's fault, by that of the request (BadRequest), such
    as a grammar that forbids every token, or because the server ended (Unavailable).
    """
    if completion.error:
        raise (ServeError if isinstance(completion.error, ModelFault) else BadRequest)(completion.error)
    if completion.finish_reason in ("abort", "interrupted"):
        raise ServiceUnavailable("the server ended before the text was finished: ask again later.")
    return "stop" if completion.finish_reason == "stop" else "length"


def completed(pieces: Sequence[Piece]) -> Completion:
    completion = pieces[-1].completion
    assert completion is not None, "the last piece of a text has its completion"
    return completion
