"""`slipstream batch`: every prompt is answered exactly once, whatever interrupts it, with the texts of the engine."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import slipstream
from processes import Command
from slipstream.serve.batch.journal import Journal
from slipstream.serve.batch.lines import BatchLine, ServerReply
from terminal import run
from test_house import SERVER

PROMPTS = ["x =", "import", "class A", "def f(x):", "for i in", "return"]


def prompts(folder: Path, *more: dict[str, Any], count: int = len(PROMPTS)) -> str:
    path = folder / "prompts.jsonl"
    own = [
        {"id": f"p{i}", "prompt": PROMPTS[i % len(PROMPTS)], "temperature": i % 2, "max_tokens": 4 + i % 5}
        for i in range(count)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in [*own, *more]))
    return str(path)


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_engines_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    wrong = {"id": "wrong", "prompt": "x", "nonsense": 1}
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    long = {"id": "long", "tokens": [1] * 5000}
    result = run("batch", prompts(tmp_path, wrong, chat, long), "--out", str(tmp_path / "out.jsonl"), "--json")
    assert result.exit_code == 2, "some prompts have no answer"
    found = answers(tmp_path / "out.jsonl")
    assert [each.get("id", "") for each in found[:6]] == [f"p{i}" for i in range(6)]
    engine = slipstream.load()
    for i in (0, 2, 4):
        assert found[i]["text"] == engine.generate(PROMPTS[i], max_new_tokens=4 + i % 5, plain=True)[0].text
    assert found[6] == {"index": 6, "id": "wrong", "error": "nonsense: no such field is known here: leave it out."}
    assert found[7]["response"]["body"]["usage"]["completion_tokens"] == 2 and found[7]["error"] is None
    assert "5000" in found[8]["error"]
    summary = json.loads(result.stdout)
    assert (summary["prompts"], summary["answered"], summary["failed"], summary["resumed"]) == (9, 9, 2, 0)
    assert "prompt 7: nonsense: no such field is known here" in result.stderr


def test_a_run_goes_on_where_it_was_and_texts_do_not_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    file = prompts(tmp_path)
    assert run("batch", file, "--out", str(whole), "--max-rows", "4").exit_code == 0
    write, written, deadly = Journal.write, list[int](), True

    def write_and_die(journal: Journal, line: BatchLine, answer: ServerReply) -> None:
        write(journal, line, answer)
        written.append(line.index)
        if deadly and len(written) % 2 == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "write", write_and_die)
    assert run("batch", file, "--out", str(parts), "--max-rows", "2").exit_code == 130
    assert run("batch", file, "--out", str(parts), "--max-rows", "2").exit_code == 130
    deadly = False
    assert run("batch", file, "--out", str(parts)).exit_code == 0
    assert sorted(written) == list(range(6)), "each is answered once, also those that end beside an interrupt"
    assert whole.read_text() == parts.read_text(), "the same texts, in batches of other sizes, in three runs"


OWN = [
    {"prompt": "x =", "temperature": 1, "max_tokens": 9},
    {"id": "n", "prompt": "def f(x):", "max_tokens": 9, "n": 2, "temperature": 1, "logit_bias": {"5": -100}},
    {"tokens": [3, 4, 5], "max_tokens": 7, "stop": ["\n"], "top_k": -1},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    {"prompt": 3},
    {"prompt": "import", "max_tokens": 4, "speculative": {"verify": "block", "gamma": 2}, "temperature": 0.7},
    {"prompt": "x", "top_p": 0, "max_tokens": 2},
]


def test_our_own_lines_need_nothing_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its libraries are missing, the command writes the texts that the application writes."""
    file, template = tmp_path / "own.jsonl", tmp_path / "template"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in OWN))
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    more = ["--chat-template", str(template), "--max-rows", "2"]
    assert run("batch", str(file), "--out", str(tmp_path / "whole"), *more).exit_code == 2
    for name in SERVER:
        monkeypatch.setitem(sys.modules, name, None)
    ended = run("batch", str(file), "--out", str(tmp_path / "own"), *more)
    assert ended.exit_code == 2 and "2 of them with an error" in ended.stderr, ended.stderr
    found, want = answers(tmp_path / "own"), answers(tmp_path / "whole")
    assert found[:6] == want[:6] and "top_p" in found[6]["error"] and "top_p" in want[6]["error"]
    assert not (tmp_path / "own.partial").exists()


@pytest.mark.parametrize("server", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_models_own_settings_come_before_the_defaults_of_lines(
    server: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the server's libraries; what a line or an option says comes before them."""
    for name in [] if server else SERVER:
        monkeypatch.setitem(sys.modules, name, None)
    GenerationConfig(do_sample=True, temperature=0.9, max_new_tokens=5).save_pretrained(tmp_path)
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "x ="}, {"prompt": "x =", "max_tokens": 3}, {"prompt": "x =", "temperature": 0}]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in lines))

    def found(*more: str) -> list[dict[str, Any]]:
        assert run("batch", str(file), "--out", str(tmp_path / "out"), "--force", *more).exit_code == 0
        return answers(tmp_path / "out")

    own, none = found("--generation-config", str(tmp_path)), found("--generation-config", "none")
    assert [each["completion_tokens"] for each in own] == [5, 3, 5]
    assert [each["completion_tokens"] for each in none] == [128, 3, 128]
    assert own[2]["text"] == none[2]["text"][: len(own[2]["text"])] != own[0]["text"], "greedy, and sampled"
    said = found("--generation-config", str(tmp_path), "--temperature", "0", "--max-new-tokens", "4")
    assert [each["completion_tokens"] for each in said] == [4, 3, 4] and said[0]["text"] == said[2]["text"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"prompt": "x", "logprobs": 1}, "prompt 2 (logprobs) needs fastapi"),
        ({"prompt": "x", "speculative": {"explain": True}}, "prompt 2 (speculative) needs fastapi"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "prompt 2 (messages) needs"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {}}, "prompt 2 (OpenAI's batch format) needs fastapi"),
        (None, ""),
    ],
)
def test_what_only_the_server_answers_is_said_before_any_work(
    line: dict[str, Any] | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    file = prompts(tmp_path, *([line] if line else []), count=1)
    result = run("batch", file, "--out", str(tmp_path / "out"))
    assert what in " ".join(result.stderr.split()) and result.exit_code == (2 if line else 0)
    assert (tmp_path / "out").exists() is (line is None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "{file}"], "it is an input of this command"),
        (["--out", "{folder}/none/out.jsonl"], "there is no folder"),
        (["--out", "{folder}"], "it is a folder"),
        (["--out", "{folder}/o", "--top-p", "2"], "less than or equal to 1"),
        (["--out", "{folder}/o", "--memory", "much"], "is no number of bytes"),
        (["--out", "{folder}/o", "--regex", "a", "--choice", "b"], "exclude each other"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    file = prompts(tmp_path)
    before = Path(file).read_bytes()
    result = run("batch", file, *[each.format(file=file, folder=tmp_path) for each in arguments])
    assert result.exit_code == 2 and sentence in " ".join(result.stderr.split())
    assert Path(file).read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_files_that_are_there_stay_unless_they_may_go(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"index": 0}\n')
    file = prompts(tmp_path, count=1)
    assert "--force" in run("batch", file, "--out", str(out)).stderr
    assert out.read_text() == '{"index": 0}\n'
    assert run("batch", file, "--out", str(out), "--force").exit_code == 0
    assert answers(out)[0]["id"] == "p0"
    for name in ("prompts.parquet", "thesis.txt"):  # which --force never replaces
        (other := tmp_path / name).write_text('{"prompt": "x"}\n')
        assert "is no file of answers" in run("batch", file, "--out", str(other), "--force").stderr
        assert other.read_text() == '{"prompt": "x"}\n'


@pytest.mark.slow
def test_options_of_the_command_hold_for_lines_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("pick:\npick again:\n")
    result = run("batch", str(tmp_path / "p.txt"), "--out", "-", "--choice", "red", "--choice", "green", "--n", "2")
    assert result.exit_code == 0
    found = sorted(map(json.loads, result.stdout.splitlines()), key=lambda each: each["index"])
    assert all(sample["text"] in ("red", "green") for each in found for sample in each["samples"])
    assert [len(each["samples"]) for each in found] == [2, 2]


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_answers_every_prompt_once(tmp_path: Path) -> None:
    file, whole, out = prompts(tmp_path, count=400), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run("batch", file, "--out", str(whole)).exit_code == 0
    journal, chance = out.with_name("out.jsonl.partial"), random.Random(0)
    kills = 0
    for _ in range(20):
        before = journal.stat().st_size if journal.exists() else 0
        process = Command("batch", file, "--out", str(out))
        while process.is_running and (not journal.exists() or journal.stat().st_size <= before):
            time.sleep(0.01)
        time.sleep(chance.random() / 10)
        process.kill()
        process.wait(60)
        process.stderr.close()
        kills += not out.exists()
    assert kills >= 10, "most of the runs were killed while they worked"
    if not out.exists():
        assert run("batch", file, "--out", str(out)).exit_code == 0
    assert out.read_text() == whole.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cluster_writes_the_same_file_though_an_actor_is_killed(tmp_path: Path) -> None:
    file, here, there = prompts(tmp_path, count=300), tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert run("batch", file, "--out", str(here)).exit_code == 0
    process, journal = Command("batch", file, "--out", str(there), "--ray", "--actors", "2"), Path(f"{there}.partial")
    while process.is_running and (not journal.exists() or journal.stat().st_size < 2000):
        time.sleep(0.05)
    actors = subprocess.run(["pgrep", "-f", "^ray::.*MapBatches"], capture_output=True, text=True).stdout.split()
    assert process.is_running and actors, "the run had not ended"
    os.kill(int(actors[0]), signal.SIGKILL)
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(300) == 0, said
    assert there.read_text() == here.read_text()
