"""`torchrun -m slipstream ... --tensor-parallel`, for real: one rank prints, and a rank that is killed ends the job."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from urllib.request import Request, urlopen

import pytest

from ranks import SECONDS, TESTS, free_port
from terminal import run

pytestmark = pytest.mark.slow

SOON = 30  # seconds in which a job ends when a rank does
LINES = ("def add(a, b):", "class Button:", "import os", "x = 1")


@contextmanager
def torchrun(*command: str) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    how = ["--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "slipstream"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *how, *command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        for rank in ranks_of(process).values():
            os.kill(rank, signal.SIGKILL)
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process.pid:
                settings = dict(each.partition("=")[::2] for each in (folder / "environ").read_text().split("\0"))
                found[int(settings["RANK"])] = int(folder.name)
        except (OSError, KeyError):  # it has ended, or is none
            continue
    return found


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    end = monotonic() + SECONDS
    while not condition() and process.poll() is None and monotonic() < end:  # type: ignore[operator]
        sleep(0.05)


def generate(prompts: Path, *more: str) -> tuple[str, ...]:
    return ("generate", "--prompts", str(prompts), "--temperature", "0.8", "--verify", "coupled", *more)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(LINES))
    return tmp_path / "prompts.txt"


def answers(text: str) -> dict[int, str]:
    return {line["index"]: line["text"] for line in map(json.loads, text.splitlines())}


def test_rank_0_alone_prints_and_its_answers_are_those_of_one_process(prompts: Path) -> None:
    asked = generate(prompts, "--max-new-tokens", "24", "--json")
    with torchrun(*asked, "--tensor-parallel") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert answers(out) == answers(run(*asked).stdout) and len(out.splitlines()) == len(LINES)
    assert err.count("slipstream: ") == err.count("not packed for this processor") == 1


def test_a_batch_has_the_answers_of_one_process_and_rank_0_writes_them(prompts: Path, tmp_path: Path) -> None:
    asked = ("batch", str(prompts), "--temperature", "0.8", "--verify", "coupled", "--max-new-tokens", "16", "--json")
    with torchrun(*asked, "--out", str(tmp_path / "two.jsonl"), "--tensor-parallel") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["answered"] == len(LINES), "the tally is printed once"
    run(*asked, "--out", str(tmp_path / "one.jsonl"))
    assert answers((tmp_path / "two.jsonl").read_text()) == answers((tmp_path / "one.jsonl").read_text())


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_job_with_a_sentence_and_what_was_finished_stays(
    killed: int, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl.partial"
    prompts.write_text("\n".join(LINES * 100))
    asked = ("batch", str(prompts), "--max-new-tokens", "48", "--max-rows", "2", "--out", str(out.with_suffix("")))
    with torchrun(*asked, "--tensor-parallel") as process:
        wait_for(lambda: out.exists() and len(out.read_text().splitlines()) > 4, process)
        os.kill(ranks_of(process)[killed], signal.SIGKILL)
        began = monotonic()
        _, err = process.communicate(timeout=SECONDS)
    assert monotonic() - began < SOON
    who = "rank 1 ends: rank 0" if killed == 0 else "rank 1"
    assert f"slipstream: {who} of 2 has ended before all was done" in err and "start it again" in err, err
    finished = [line for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert len(finished) > 4 and all(json.loads(line) for line in finished)


def test_a_server_whose_rank_is_killed_while_it_waits_ends(tmp_path: Path) -> None:
    port = free_port()

    def answers_now() -> bool:
        asked = {"model": "embedded", "prompt": "def f(", "max_tokens": 8, "temperature": 0}
        request = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        try:
            return bool(json.load(urlopen(request, timeout=30))["choices"][0]["text"])
        except OSError:
            return False

    with torchrun("serve", "--target", "embedded", "--tensor-parallel", "--port", str(port)) as process:
        wait_for(answers_now, process)
        assert answers_now()
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        began = monotonic()
        _, err = process.communicate(timeout=SECONDS)
    assert monotonic() - began < SOON
    assert "rank 1 of 2 has ended before all was done" in err


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    with torchrun("generate", "x", "--target", str(tmp_path / "none"), "--tensor-parallel") as process:
        _, err = process.communicate(timeout=SECONDS)
    assert err.count("there is no such folder") == 1 and "Traceback" not in err.partition("torch/distributed")[0]
