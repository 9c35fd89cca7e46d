"""The lines of a batch, prompts in files -> requests to the server's endpoints, and the formats of answers."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.core.options import REQUEST_FIELDS
from slipstream.engine.engine import Engine
from slipstream.text.jsontext import json_text, read_json
from slipstream.text.prompts import prompt_in, read_unpacked

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
    `columns` are those of a table of answers, with the names of their Arrow types."""

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
PATHS = {"prompt": "/v1/completions", "tokens": "/v1/completions", "messages": "/v1/chat/completions"}  # by field
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # in OpenAI's format


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch: the `body` for the endpoint at `path`; or, in `error`, why it cannot be sent.

    `index` counts from 0; `id` is the user's own name for it, None without one. `form` is the format of the answer.
    `fallback` has the fields for which the generation config of the model, if it sets them, comes first.
    """

    index: int
    id: str | int | None = None
    path: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    form: AnswerFormat = PLAIN
    error: str = ""
    fallback: Mapping[str, Any] = field(default_factory=dict)

    def body_for(self, engine: Engine) -> dict[str, Any]:
        """Return the body of the request to an engine's model."""
        own = {REQUEST_FIELDS.get(name): value for name, value in engine.defaults.settings.items()}
        return {**{name: own.get(name, value) for name, value in self.fallback.items()}, **self.body}

    @property
    def name(self) -> str:
        return str(self.index if self.id is None else self.id)

    @property
    def facts(self) -> list[Any]:
        return [self.index, self.id, self.path, dict(self.body), self.form.name, self.error]


Keep = Callable[[BatchLine, ServerReply], object]  # stores the answer to a line


@dataclass(frozen=True)
class LineDefaults:
    """The request fields for lines that do not set them.

    `body` is for all lines, `plain` for those in our own format, whose lengths and temperatures have other defaults
    than OpenAI's, where the model has none. The seeds of sampled lines are derived from `seed`.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def complete(self, line: BatchLine) -> BatchLine:
        """Return the line with a full body. A sampled line gets a seed from its name, unless it has one.
        Its text then depends neither on what runs with it nor on how often the run was interrupted."""
        if line.error:
            return line
        body = {**self.body, **line.body}
        fallback = {name: value for name, value in self.plain.items() if line.form is PLAIN and name not in body}
        if "max_completion_tokens" in line.body and "max_tokens" not in line.body:
            body.pop("max_tokens", None)  # two names of one field
            fallback.pop("max_tokens", None)
        if body.get("temperature") != 0 and body.get("seed") is None and line.path != "/v1/responses":
            hashed = hashlib.sha256(f"{self.seed}/{line.name}".encode()).digest()
            body["seed"] = int.from_bytes(hashed[:8]) >> 1
        return replace(line, body=body, fallback=fallback)


def read_lines(path: str | Path, chat: bool = False) -> list[BatchLine]:
    """Read a file of prompts: JSON lines in our format or OpenAI's, plain text, or Parquet -> its lines, in order.

    The file - is standard input. A line that cannot be sent has an error. `chat` makes messages of texts. Raises
    ValueError for a file that cannot be read, that holds no line, or where two lines have one id; OSError as the system
    does.
    """
    records = list(_parquet_records(path) if str(path).endswith(".parquet") else _text_records(str(path)))
    if not records:
        raise ValueError(f"{path} holds no prompt.")
    lines = [_line(index, record, chat) for index, record in enumerate(records)]
    seen: dict[str, int] = {}
    for line in lines:
        if line.id is not None and seen.setdefault(str(line.id), line.index) != line.index:
            first = seen[str(line.id)] + 1
            raise ValueError(f"{path}: prompts {first} and {line.index + 1} both have the id {line.id!r}: change one.")
    return lines


def fingerprint(values: Iterable[Any]) -> str:
    hashed = hashlib.sha256()
    for value in values:
        hashed.update(json_text(value, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()[:32]


def _text_records(name: str) -> Iterator[dict[str, Any] | ValueError]:
    data, name = read_unpacked(name)
    lines = [line for line in data.splitlines() if line.strip()]
    is_json = name.endswith((".jsonl", ".json", ".ndjson")) or bool(lines and lines[0].lstrip().startswith(b"{"))
    for line in lines:
        try:
            record = read_json(line) if is_json else {"prompt": line.decode()}
            yield record if isinstance(record, dict) else ValueError("the line is no JSON object.")
        except UnicodeDecodeError as error:
            yield ValueError(f"byte {error.start + 1} is not UTF-8.")
        except ValueError as error:
            yield error


def _parquet_records(path: str | Path) -> Iterator[dict[str, Any] | ValueError]:
    if not find_spec("pyarrow"):
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'slipstream[parquet]'.")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for group in file.iter_batches():
                for row in group.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}
    except ArrowException as error:
        raise ValueError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _line(index: int, record: dict[str, Any] | ValueError, chat: bool) -> BatchLine:
    if isinstance(record, ValueError):
        return BatchLine(index, error=str(record))
    openai = "custom_id" in record
    form, id = (OPENAI, record["custom_id"]) if openai else (PLAIN, record.get("id"))
    if id is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
        return BatchLine(index, form=form, error=f"the id is {json_text(id)}, but a text or whole number is expected.")
    try:
        path, body = _openai_request(record) if openai else _plain_request(record, chat)
        if body.get("stream"):
            raise ValueError("stream cannot be used in a batch: leave it out.")
    except ValueError as error:
        return BatchLine(index, id, form=form, error=str(error))
    return BatchLine(index, id, path, body, form)


def _openai_request(record: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if record.get("method", "POST") != "POST":
        raise ValueError(f"the method is {json_text(record['method'])}, but only POST is possible.")
    if record.get("url") not in URLS:
        raise ValueError(f"the url is {json_text(record.get('url'))}, but only {', '.join(URLS)} are possible.")
    if not isinstance(record.get("body"), dict):
        raise ValueError('"body" must be the JSON object of the request.')
    return record["url"], record["body"]


def _plain_request(record: Mapping[str, Any], chat: bool) -> tuple[str, dict[str, Any]]:
    form, prompt = prompt_in(record)
    kind = form
    if not prompt:
        raise ValueError("the prompt is empty.")
    if chat and kind == "tokens":
        raise ValueError("--chat cannot wrap token ids.")
    if chat and kind == "prompt":
        kind, prompt = "messages", [{"role": "user", "content": prompt}]
    others = {name: value for name, value in record.items() if name not in (form, "id")}
    return PATHS[kind], {**others, ("messages" if kind == "messages" else "prompt"): prompt}
