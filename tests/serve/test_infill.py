"""Filling in: /infill as editor plugins call it, and `suffix` in completions, with a toy model that has the tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.conftest import ServerProcess
from slipstream.serve.routes.infill import Infill
from slipstream.serve.schema import ExtraFile
from tongues import byte_level, marked
from toys import FAMILIES, tiny

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"


def with_tokens(tokenizer: Any, tokens: tuple[str, ...]) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def test_the_parts_of_a_prompt_stand_behind_their_tokens() -> None:
    tokenizer = with_tokens(byte_level(420), QWEN)
    fill = Infill.of(tokenizer)
    assert fill is not None
    assert tokenizer.decode(fill.prompt("ab", "cd")) == "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
    extra = [ExtraFile(filename="a.py", text="x"), ExtraFile(text="y")]
    assert tokenizer.decode(fill.prompt("ab", "", extra)) == (
        "<|repo_name|>project\n<|file_sep|>a.py\nx<|file_sep|>file\ny<|file_sep|>this file\n"
        "<|fim_prefix|>ab<|fim_suffix|><|fim_middle|>"
    )
    assert {tokenizer.decode([token]) for token in fill.ends} == {"<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"}


def test_families_have_tokens_of_their_own() -> None:
    deepseek = with_tokens(byte_level(420), ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"))
    fill = Infill.of(deepseek)
    assert fill is not None
    assert deepseek.decode(fill.prompt("ab", "cd")) == "<｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>"
    codestral = with_tokens(marked(420, prepend=True), ("[PREFIX]", "[SUFFIX]"))  # the suffix first, no middle
    fill = Infill.of(codestral)
    assert fill is not None
    ids = fill.prompt("ab", "cd", [ExtraFile(text="x")])
    assert codestral.decode(ids).replace(" ", "") == "<s>\n\n---snippet---\n\nx[SUFFIX]cd[PREFIX]ab"
    assert ids.count(codestral.bos_token_id) == 1
    assert Infill.of(with_tokens(byte_level(420), ("<|fim_prefix|>",))) is None


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("models") / "toy-coder"
    tokenizer = with_tokens(byte_level(420), QWEN)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    tiny(FAMILIES["llama"], eos_token_id=tokenizer.eos_token_id, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    allowed = ("--allow-origin", "https://editor.example")
    with ServerProcess.start("--target", str(folder), *allowed) as server, server.http() as http:
        yield http


ASKED: dict[str, Any] = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 8, "temperature": 0}


def test_an_editor_gets_the_middle(filling: httpx.Client) -> None:
    editor = {"samplers": ["top_k"], "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 60_000, "id_slot": 0}
    answer = filling.post("/infill", json={**ASKED, **editor, "cache_prompt": True, "stop": []})
    found = answer.json()
    assert answer.status_code == 200, found
    assert found["stop"] is True and found["tokens_predicted"] <= 8 and found["timings"]["predicted_n"] <= 8
    assert "samplers" in answer.headers["x-slipstream-ignored"]
    asked = {"prompt": PREFIX, "max_tokens": 8, "temperature": 0}
    completed = filling.post("/v1/completions", json={**asked, "suffix": SUFFIX}).json()
    assert completed["choices"][0]["text"] == found["content"]
    assert completed["usage"]["prompt_tokens"] == found["tokens_evaluated"]
    plain = filling.post("/v1/completions", json=asked).json()
    assert plain["usage"]["prompt_tokens"] < completed["usage"]["prompt_tokens"]
    picked = filling.post("/infill", json={**ASKED, "response_fields": ["content", "timings/predicted_n", "no"]}).json()
    assert picked == {"content": found["content"], "timings/predicted_n": found["timings"]["predicted_n"]}
    with filling.stream("POST", "/infill", json={**ASKED, "stream": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert "".join(chunk["content"] for chunk in chunks) == found["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_what_cannot_be_filled_in_is_refused(filling: httpx.Client, http: httpx.Client) -> None:
    for body in ({"prompt": PREFIX, "echo": True}, {"prompt": [1, 2]}):
        answer = filling.post("/v1/completions", json={**body, "suffix": SUFFIX})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    completion = ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix")
    for path, body, field in (("/infill", ASKED, "input_suffix"), completion):  # the embedded pair has no such tokens
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert http.post("/v1/completions", json={"prompt": "x", "suffix": "", "max_tokens": 1}).status_code == 200


def test_a_folder_is_called_by_its_name(filling: httpx.Client) -> None:
    assert [model["id"] for model in filling.get("/models").json()["data"]] == ["toy-coder"]
    assert filling.post("/infill", json={**ASKED, "model": "toy-coder", "n_predict": 1}).json()["model"] == "toy-coder"


def test_only_allowed_origins_may_read_answers(filling: httpx.Client, http: httpx.Client) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    header = "access-control-allow-origin"
    for origin, allowed in (("https://editor.example", True), ("https://other.example", False)):
        before = filling.options("/v1/completions", headers={"Origin": origin, **asked})
        after = filling.get("/v1/models", headers={"Origin": origin})
        assert [before.headers.get(header), after.headers.get(header)] == [origin if allowed else None] * 2
        assert before.is_success == allowed
    assert header not in http.get("/v1/models", headers={"Origin": "https://editor.example"}).headers
