"""Prints the table of docs/fields.md, from the schemas of requests: python tests/serve/fields_page.py"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from slipstream.serve import messages, response_schema, schema
from slipstream.serve.routes import audio

BODIES = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatRequest,
    "/infill": schema.InfillRequest,
    "/v1/responses": response_schema.ResponsesRequest,
    "/v1/messages": messages.MessagesRequest,
    "/v1/audio/...": audio.AudioForm,
    "/tokenize": schema.TokenizeRequest,
}

ALIKE = ("/v1/completions", "/v1/chat/completions", "/infill")  # endpoints that have most fields in common
Kinds = tuple[dict[str, str], ...]


def kinds(described: dict[str, Any]) -> Kinds:
    """The fields of an object that are served, that have no effect, and that have none with the given values."""
    served, without, only = dict[str, str](), dict[str, str](), dict[str, str]()
    for name, field in sorted(described["properties"].items()):
        about = field.get("description", "")
        if about == "Accepted without effect.":
            without[name] = f"`{name}`"
        elif about.startswith("Accepted without effect"):
            only[name] = f"`{name}={'/'.join(json.dumps(value) for value in field['enum'] if value is not None)}`"
        elif about != "Not served.":
            served[name] = f"`{name}`"
    return served, without, only


def row(title: str, columns: Iterable[str]) -> str:
    return f"| {title} | {' | '.join(columns)} |"


def rows() -> Iterator[str]:
    """The lines of the table: what all texts have in common, what each endpoint has besides, and objects inside."""
    yield row("object", ["served", "without effect", "without effect with this value"])
    yield "|---|---|---|---|"
    bodies = {path: body.model_json_schema() for path, body in BODIES.items()}
    of = {path: kinds(described) for path, described in bodies.items()}
    columns_of_all = zip(*(of[path] for path in ALIKE), strict=True)
    shared = [
        ", ".join(t for name, t in one.items() if all(t == o.get(name) for o in more)) for one, *more in columns_of_all
    ]
    yield row(", ".join(f"`{path}`" for path in ALIKE), shared)
    for path, columns in of.items():
        told = ", ".join(shared).split(", ") if path in ALIKE else []
        yield row(f"`{path}`", (", ".join(text for text in column.values() if text not in told) for column in columns))
    inner: dict[tuple[str, ...], set[str]] = {}
    for name, each in sorted(
        (name, each) for described in bodies.values() for name, each in described.get("$defs", {}).items()
    ):
        without, only = (", ".join(column.values()) for column in kinds(each)[1:])
        inner.setdefault((without, only), set()).add(name)
    yield from (row(", ".join(sorted(names)), ["", *columns]) for columns, names in inner.items() if any(columns))


def table() -> str:
    return "\n".join(rows()) + "\n"


if __name__ == "__main__":
    print(table(), end="")
