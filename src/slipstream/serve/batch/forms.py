"""The formats of answers: our own, and that of OpenAI's batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

UNCHANGED = ("logprobs", "tool_calls", "explained")  # fields that our own format takes over from the server's


@dataclass(frozen=True)
class ServerReply:
    """An answer of the server: the status and the JSON object of its body."""

    status: int
    body: Mapping[str, Any]
    request_id: str = ""

    @property
    def error(self) -> str:
        return "" if self.status < 300 else str(self.body.get("error", {}).get("message") or f"status {self.status}")

    @property
    def tokens(self) -> int:
        usage = self.body.get("usage") or {}
        return usage.get("completion_tokens", usage.get("output_tokens", 0))


def refused(message: str) -> ServerReply:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return ServerReply(400, {"error": error})


@dataclass(frozen=True)
class AnswerFormat:
    """A format of answers: `record` makes the JSON object of one, from the index and the id of its line.

    `columns` are those of a table of answers, with the names of their Arrow types.
    """

    name: str
    record: Callable[[int, str | int | None, ServerReply], dict[str, Any]]
    columns: Mapping[str, str]


def _plain(index: int, id: str | int | None, answer: ServerReply) -> dict[str, Any]:
    head = {"index": index} if id is None else {"index": index, "id": id}
    if answer.error:
        return {**head, "error": answer.error}
    samples = []
    for choice in answer.body["choices"]:  # of /v1/completions or /v1/chat/completions
        message = choice.get("message") or {}
        text = choice["text"] if "text" in choice else message.get("content") or ""
        more = {name: part[name] for part in (message, choice) for name in UNCHANGED if part.get(name)}
        samples.append({"text": text, "finish_reason": choice["finish_reason"], **more})
    usage = {name: answer.body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {**head, **samples[0], **usage, **({"samples": samples} if len(samples) > 1 else {})}


def _openai(index: int, id: str | int | None, answer: ServerReply) -> dict[str, Any]:
    number = hashlib.sha256(f"{index}/{id}".encode()).hexdigest()[:24]
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": dict(answer.body)}
    error = {"code": str(answer.status), "message": answer.error} if answer.error else None
    return {"id": f"batch_req_{number}", "custom_id": id, "response": response, "error": error}


_NUMBERS = dict.fromkeys(("index", "prompt_tokens", "completion_tokens"), "int64")
_TEXTS = dict.fromkeys(("id", "text", "finish_reason", "error", "samples", *UNCHANGED), "string")

PLAIN = AnswerFormat("plain", _plain, _NUMBERS | _TEXTS)
OPENAI = AnswerFormat("openai", _openai, dict.fromkeys(("id", "custom_id", "response", "error"), "string"))
