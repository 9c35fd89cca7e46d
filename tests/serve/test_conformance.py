"""The server against its own /openapi.json: generated requests, valid and invalid, and what may come back."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import AcceptedNegativeData, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serve.conftest import ServerProcess


def what_is_invalid_is_rejected(context: Any, response: Any, case: Any) -> Any:
    """schemathesis' check; it takes a value that one form of a union forbids for invalid, though another takes it."""
    try:
        return negative_data_rejection(context, response, case)
    except AcceptedNegativeData:
        raw = case.operation.schema.raw_schema
        [content] = raw["paths"][case.path]["post"]["requestBody"]["content"].values()
        schema = {**content["schema"], "components": raw["components"]}
        if not jsonschema_rs.validator_for(schema).is_valid(case.body):
            raise


CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    what_is_invalid_is_rejected,
]
LENGTHS = {  # paths that write text, and the field that limits it
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
PLAIN: dict[str | None, Any] = {  # what is in place of required fields that a server cannot serve
    "prompt": "x",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1],
    "input": "x",
}
SHORT = 4
FORBIDDEN = 1 << 31  # least of the limits that are too great for the interface
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def interface(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json").json()


def operations(description: dict[str, Any]) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_dict(description).get_all_operations()]


def shortened(case: Any) -> Any:
    """The same request with a text of a few tokens at most, from the model that is served; a limit that is forbidden
    stays, since the request is invalid by it."""
    body, field = case.body, LENGTHS.get(case.path)
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "embedded"
    if isinstance(body, dict) and field is not None:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"):
            if isinstance(body.get(name), int) and SHORT < body[name] < FORBIDDEN:
                body[name] = SHORT
        if body.get(field) is None and body.get("max_tokens") is None:
            body[field] = SHORT
    return case


def made_plain(case: Any, answer: Any) -> bool:
    """Put something plain in the place of the field that an error names, or leave it out -> whether that was done."""
    body, named = case.body, re.split(r"[.\[]", answer.json()["error"]["param"] or "")[0]
    plain = SHORT if named == LENGTHS.get(case.path) else PLAIN.get(named)
    if not isinstance(body, dict) or body.get(named) in (None, plain):
        return False
    body[named] = plain
    return True


def answers(server: ServerProcess, case: Any, mode: GenerationMode) -> Iterator[Any]:
    """Send a request and check the answer; one that is valid is sent again, the field that an error names made plain,
    until it is answered."""
    while True:
        case = shortened(case)  # also where a limit was left out for being wrong
        yield (answer := case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=300))
        if mode is GenerationMode.NEGATIVE or answer.status_code != 400 or not made_plain(case, answer):
            return


def fuzz(server: ServerProcess, operation: Any, mode: GenerationMode, cases: int) -> Counter[int]:
    """Send generated requests and check every answer -> how often each status came. Raises what schemathesis finds.

    A schema cannot tell which tokens there are or which rules exist: the field that an error names is made plain, and
    the request is sent again, until it is answered.
    """
    statuses = Counter[int]()

    @settings(max_examples=cases, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        statuses.update(answer.status_code for answer in answers(server, case, mode))

    send()
    return statuses


def fuzz_all(server: ServerProcess, cases: int) -> dict[str, Counter[int]]:
    found = {}
    for operation in operations(interface(server)):
        found[operation.label] = fuzz(server, operation, GenerationMode.POSITIVE, cases)
        if operation.method == "post":
            found[operation.label] += fuzz(server, operation, GenerationMode.NEGATIVE, cases)
    return found


def check_variety(found: dict[str, Counter[int]]) -> None:
    for path in LENGTHS:
        statuses = found[f"POST {path}"]
        assert statuses[200] and statuses[400], (path, statuses)


def test_generated_requests_get_described_answers(conforming: ServerProcess) -> None:
    check_variety(fuzz_all(conforming, 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_generated_requests_get_described_answers(server: ServerProcess) -> None:
    found = fuzz_all(server, 330)
    check_variety(found)
    assert sum(found.values(), Counter()).total() >= 5000


NEEDED = {  # field that each of these paths requires
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}


def limited(server: ServerProcess, path: str, limit: float) -> Any:
    operation = next(each for each in operations(interface(server)) if each.label == f"POST {path}")
    body = {NEEDED[path]: PLAIN[NEEDED[path]], LENGTHS[path]: limit}
    return operation.Case(body=body, media_type="application/json")


def written(answer: Any) -> int:
    usage = answer.json()["usage"]
    return usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"]


@pytest.mark.parametrize("path", LENGTHS)
def test_limits_are_cut_where_that_makes_no_request_valid(server: ServerProcess, path: str) -> None:
    [cut] = answers(server, limited(server, path, FORBIDDEN - 1), GenerationMode.POSITIVE)
    [refused] = answers(server, limited(server, path, FORBIDDEN), GenerationMode.NEGATIVE)
    assert cut.status_code == 200 and written(cut) <= SHORT
    assert refused.status_code == 400 and refused.json()["error"]["param"] == LENGTHS[path]


@pytest.mark.parametrize("path", LENGTHS)
def test_texts_are_short_where_a_limit_is_refused(server: ServerProcess, path: str) -> None:
    refused, answer = answers(server, limited(server, path, 1000.0), GenerationMode.POSITIVE)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == LENGTHS[path]
    assert answer.status_code == 200 and written(answer) <= SHORT


def without_metrics(description: dict[str, Any]) -> None:
    del description["components"]["schemas"]["CompletionAnswer"]["properties"]["metrics"]


def without_refusals(description: dict[str, Any]) -> None:
    del description["paths"]["/v1/completions"]["post"]["responses"]["400"]


def with_another_type(description: dict[str, Any]) -> None:
    answered = description["paths"]["/v1/completions"]["post"]["responses"]["200"]
    answered["content"] = {"text/html": {"schema": {"type": "string"}}}


@pytest.mark.parametrize("spoil", [without_metrics, without_refusals, with_another_type])
def test_a_wrong_description_is_found(server: ServerProcess, spoil: Callable[[dict[str, Any]], None]) -> None:
    description = interface(server)
    spoil(description)
    operation = next(each for each in operations(description) if each.label == "POST /v1/completions")
    with pytest.raises(FailureGroup):
        fuzz(server, operation, GenerationMode.POSITIVE, 10)


def test_other_methods_are_a_405_that_names_the_right_one(conforming: ServerProcess) -> None:
    paths = interface(conforming)["paths"]
    with conforming.http() as http:
        for path, described in paths.items():
            for method in METHODS:
                if method.lower() not in described:
                    answer = http.request(method, path.replace("{name}", "embedded"))
                    assert answer.status_code == 405, (method, path)
                    assert answer.headers["Allow"].lower() in described
                    assert answer.json()["error"]["message"].endswith(f": send {answer.headers['Allow']}.")
        for path, hint in (("/chat/completions", "did you mean /v1"), ("/v1/embeddings", "GET /openapi.json lists")):
            answer = http.post(path, json={})
            assert answer.status_code == 404 and f"POST {path} is not" in answer.text and hint in answer.text


def test_the_description_knows_no_status_that_never_comes(conforming: ServerProcess) -> None:
    described = interface(conforming)
    assert all("422" not in each["responses"] for path in described["paths"].values() for each in path.values())
    assert "HTTPValidationError" not in described["components"]["schemas"]
