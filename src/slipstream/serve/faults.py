"""Errors in OpenAI's form: a message, the field of the request it is about, and the HTTP status."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException

from slipstream.engine import queued

LONGEST = 2000  # most characters of an error's message


class ServeError(HTTPException):
    """An error sent to the client, with HTTP `status`; `param` names the field of the request it is about.
    An HTTPException, because FastAPI lets no others through where it reads a body."""

    status = 500
    kind = "server_error"
    code: str | None = None
    more: Mapping[str, str] = MappingProxyType({})  # headers of the answer

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(self.status, message, dict(self.more))
        self.message, self.param = message, param

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.kind, self.param, self.code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    if len(message) > LONGEST:  # it repeats what the client sent
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


MESSAGES = "/v1/messages"  # path of Anthropic's interface, and the beginning of those below it
KINDS = {  # types of errors in Anthropic's interface, by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def for_path(body: dict[str, Any], status: int, path: str) -> dict[str, Any]:
    """Return an error as the clients of a path expect it: those of /v1/messages in Anthropic's form."""
    if not path.startswith(MESSAGES):
        return body
    about = {name: value for name, value in body["error"].items() if value is not None}
    if about.get("param") == "thread":  # without which Anthropic's client goes on once it is told so
        about["details"] = {"error_code": "thread_unsupported_request"}
    return {
        "type": "error",
        "error": {**about, "type": KINDS.get(status, "api_error" if status >= 500 else KINDS[400])},
    }


class BadRequest(ServeError):
    """The request cannot be served as it is (400)."""

    status, kind = 400, "invalid_request_error"


class ContextExceeded(BadRequest):
    """The prompt is longer than the model can hold (400)."""

    code = "context_length_exceeded"


class WrongKey(ServeError):
    """No valid bearer key was sent (401)."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"
    more = MappingProxyType({"WWW-Authenticate": "Bearer"})


class WrongHost(ServeError):
    """The request names a host that is not this server's: a page of another site may have sent it (403)."""

    status, kind, code = 403, "invalid_request_error", "host_not_allowed"


class TooSlow(ServeError):
    """The body of the request did not come in time (408)."""

    status, kind, code = 408, "invalid_request_error", "request_timeout"


class NotServed(ServeError):
    """The model that the request names is not served here (404)."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"the model {name[:LONGEST]!r} is not served here; served is {served!r}.", "model")


class TooLarge(ServeError):
    """The body of the request is longer than the server takes (413)."""

    status, kind, code = 413, "invalid_request_error", "request_too_large"


class HeadersTooLarge(ServeError):
    """The headers of the request are longer than the server takes (431)."""

    status, kind, code = 431, "invalid_request_error", "headers_too_large"


class TooManyRequests(ServeError, queued.QueueFull):
    """The queue is full: `max_queue` requests wait already (429)."""

    status, kind, code = 429, "rate_limit_error", "queue_full"
    more = MappingProxyType({"Retry-After": "1"})


class ServiceUnavailable(ServeError, queued.Unavailable):
    """The server is starting, ending, or has lost the thread that runs the models (503)."""

    status, kind, code = 503, "server_error", "unavailable"
