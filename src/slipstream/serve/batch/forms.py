"""The formats of answers: our own, and that of OpenAI's batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.text.jsontext import json_text

UNCHANGED = ("logprobs", "tool_calls", "explained")
"""The fields that an answer in our own format has besides its text, if the server's answer has them."""


@dataclass(frozen=True)
class ServerReply:
    """An answer of the server: the status and the JSON object of its body."""

    status: int
    body: Mapping[str, Any]
    request_id: str = ""

    def as_text(self) -> str:
        """Return the answer as JSON text, to be sent to another process."""
        return json_text({"status": self.status, "body": self.body, "request_id": self.request_id})

    @staticmethod
    def from_text(text: str) -> ServerReply:
        """Read an answer that `as_text` has written."""
        return ServerReply(**json.loads(text))

    @property
    def error(self) -> str:
        """The reason why there is no text; empty if there is one."""
        return "" if self.status < 300 else str(self.body.get("error", {}).get("message") or f"status {self.status}")

    @property
    def tokens(self) -> int:
        """The number of tokens that were written."""
        usage = self.body.get("usage") or {}
        return usage.get("completion_tokens", usage.get("output_tokens", 0))


def refused(message: str) -> ServerReply:
    """Return the answer to a line that cannot be sent to an endpoint."""
    return ServerReply(
        400, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    )


class AnswerFormat(Protocol):
    """A format of answers: its `name`, and the `columns` of a table of answers, with the names of their Arrow types."""

    name: str
    columns: Mapping[str, str]

    def record(self, index: int, id: str | int | None, answer: ServerReply) -> dict[str, Any]:
        """Return the JSON object for an answer."""
        ...


PLAIN_COLUMNS: Mapping[str, str] = {
    "index": "int64",
    "id": "string",
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error": "string",
    "samples": "string",
    **dict.fromkeys(UNCHANGED, "string"),
}
OPENAI_COLUMNS: Mapping[str, str] = dict.fromkeys(("id", "custom_id", "response", "error"), "string")


class PlainForm:
    """Our own format: {"index", "id", "text", "finish_reason", "prompt_tokens", "completion_tokens"}.

    In place of the text, "error" says why there is none. With several samples, "samples" holds all of them.
    """

    name = "plain"
    columns = PLAIN_COLUMNS

    def record(self, index: int, id: str | int | None, answer: ServerReply) -> dict[str, Any]:
        """Return the JSON object for an answer."""
        head = {"index": index} if id is None else {"index": index, "id": id}
        if answer.error:
            return {**head, "error": answer.error}
        usage = answer.body["usage"]
        samples = [_sample(choice) for choice in answer.body["choices"]]
        record = {**head, **samples[0], **{name: usage[name] for name in ("prompt_tokens", "completion_tokens")}}
        return {**record, "samples": samples} if len(samples) > 1 else record


class OpenAIForm:
    """The format of OpenAI's batches: "id", "custom_id", "response" and "error", which is null if there is none.

    "response" holds the status code, the request's id and the body of the answer.
    """

    name = "openai"
    columns = OPENAI_COLUMNS

    def record(self, index: int, id: str | int | None, answer: ServerReply) -> dict[str, Any]:
        """Return the JSON object for an answer."""
        number = hashlib.sha256(f"{index}/{id}".encode()).hexdigest()[:24]
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": dict(answer.body)}
        error = {"code": str(answer.status), "message": answer.error} if answer.error else None
        return {"id": f"batch_req_{number}", "custom_id": id, "response": response, "error": error}


PLAIN, OPENAI = PlainForm(), OpenAIForm()


def _sample(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    text = choice["text"] if "text" in choice else message.get("content") or ""
    more = {name: part[name] for part in (message, choice) for name in UNCHANGED if part.get(name)}
    return {"text": text, "finish_reason": choice["finish_reason"], **more}
