"""Prompts that evaluation harnesses let the server score: the log-likelihoods of transformers."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve.conftest import ServerProcess
from slipstream.models.loading.pairings import EMBEDDED

TARGET = EMBEDDED / "target"
ITEMS = [  # texts with two continuations each, of which the first is the better one
    ("def add(a, b):\n    return", " a + b", " import os"),
    ("import", " os", " self"),
    ("for i in", " range(3):", " return x"),
    ("x = [1, 2,", " 3]", " def"),
    ("while", " True:", " class"),
    ("if x is", " None:", " for"),
    ("class", " Foo:", " (("),
    ("return", " self.x", " ]]"),
    ("print(", "x)", " :"),
    ('"""Return the', ' value."""', ' naïve 日本."""'),
]


@cache
def loaded() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(TARGET), model.eval()


def scores(ids: Sequence[int]) -> torch.Tensor:
    """The log-probabilities (tokens - 1, vocab) of transformers' own model after every token of a text but the last."""
    with torch.inference_mode():
        return loaded()[1](torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)


def likelihood(text: str, continuation: str) -> float:
    tokenizer = loaded()[0]
    before, ids = tokenizer.encode(text), tokenizer.encode(text + continuation)
    logs = scores(ids).gather(-1, torch.tensor(ids[1:])[:, None])
    return float(logs[len(before) - 1 :].sum())


def test_echo_with_logprobs_scores_the_prompt(http: httpx.Client) -> None:
    tokenizer, prompts = loaded()[0], [text + more for text, *two in ITEMS[:4] for more in two]
    ids = [tokenizer.encode(each) for each in prompts]
    harness = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answers = [
        http.post("/v1/completions", json={**harness, "prompt": prompt, "max_tokens": most}).json()["choices"]
        for prompt, most in ((ids, 1), (ids, 0), (prompts, 0))
    ]
    for place, (one, nothing, texts) in enumerate(zip(*answers, strict=True)):
        found, want = one["logprobs"], scores(ids[place])
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        own = want.gather(-1, torch.tensor(ids[place][1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:-1]), own, atol=1e-3, rtol=1e-4)
        tops = [max(top.values()) for top in found["top_logprobs"][1:-1]]
        is_best = [own == best for own, best in zip(found["token_logprobs"][1:-1], tops, strict=True)]
        assert is_best == (own == want.max(-1).values).tolist()
        assert found["text_offset"] == sorted(found["text_offset"])
        assert found["text_offset"][-1] == len(prompts[place]) and one["text"].startswith(prompts[place])
        assert "".join(found["tokens"]) == one["text"]
        assert nothing["text"] == texts["text"] == prompts[place]
        assert nothing["logprobs"]["tokens"] == texts["logprobs"]["tokens"] == found["tokens"][:-1]
        assert (nothing["finish_reason"], len(nothing["logprobs"]["tokens"])) == ("length", len(ids[place]))


def test_a_stream_scores_the_prompt_with_its_first_chunk(server: ServerProcess) -> None:
    client, asked = server.client(), {"model": "embedded", "prompt": "def f(x):\n", "logprobs": 2, "echo": True}
    for most in (0, 5):
        whole = client.completions.create(**asked, max_tokens=most, temperature=0).choices[0]
        chunks = client.completions.create(**asked, max_tokens=most, temperature=0, stream=True)
        parts = [chunk.choices[0] for chunk in chunks]
        assert "".join(part.text for part in parts) == whole.text
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            found = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
            assert found == getattr(whole.logprobs, name)


def test_without_echo_a_token_has_to_be_written(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0, "logprobs": 1})
    only = http.post("/v1/completions", json={"prompt": "x =", "max_tokens": 0, "echo": True}).json()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert (only["choices"][0]["text"], only["choices"][0]["logprobs"]) == ("x =", None)
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="lm_eval is not installed")
def test_lm_eval_gives_the_log_likelihoods_of_transformers(server: ServerProcess, tmp_path: Path) -> None:
    """The harness itself, on a task of ten items."""
    lines = [json.dumps({"question": text, "choices": two, "answer": 0}) for text, *two in ITEMS]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}}}
    columns = {"doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer"}
    measure = {"output_type": "multiple_choice", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    task = {"task": "ten", "test_split": "test", **data, **columns, **measure}
    (tmp_path / "ten.yaml").write_text(json.dumps(task))
    model = f"model=embedded,base_url={server.url}/v1/completions,tokenizer={TARGET}"
    where = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks", "ten", *where]
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    ran = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    [file] = (tmp_path / "out").rglob("samples_ten_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ITEMS)
    for sample, (text, *two) in zip(samples, ITEMS, strict=True):
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx([likelihood(text, each) for each in two], abs=1e-3)
