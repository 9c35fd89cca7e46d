"""Clients from the registries against a real server: text, streams, structured answers and loops with a tool.

SLIPSTREAM_CLIENTS names Pythons that have some of them, and folders with node_modules, with colons between; those that
none of them has are skipped. `SLIPSTREAM_CLIENTS_PAGE=1 pytest -m slow tests/serve/clients` writes docs/clients.md.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatting import CALL, SUM, save_chatting
from serve.clients.loops import CLIENTS, FEATURES, MISSING
from serve.conftest import ServerProcess
from slipstream.models.loading.pairings import EMBEDDED

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "clients.md"
NODE = ["openai for JavaScript", "ai, @ai-sdk/openai", "ai, @ai-sdk/openai, chat", "ai, @ai-sdk/openai-compatible"]
ALL = [*CLIENTS, *NODE]
ONLY = {"instructor": ["structured"], "aiperf": ["text", "stream"]}
WITHIN = 600

Results = dict[str, dict[str, Any]]  # what each client got by feature, and its version
HEAD = """# Clients

Every cell was run against a real server, with a tiny model whose template and calls are Qwen3's: an answer, its stream,
an answer by a schema, and a loop of two turns with a tool that the model decides to call, whole and streamed. The loops
send back what they got. Those of `openai, Responses` go on with `previous_response_id` too.

`SLIPSTREAM_CLIENTS_PAGE=1 pytest -m slow tests/serve/clients` writes the table.

|client|version|text|stream|structured|tool loop|streamed tool loop|
|---|---|---|---|---|---|---|
"""


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_chatting(tmp_path_factory.mktemp("models") / "tiny")
    with ServerProcess.start("--target", str(folder), "--served-model-name", "tiny") as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """What the clients got; written to the page if that is wanted and all have run."""
    found: Results = {}
    yield found
    if os.environ.get("SLIPSTREAM_CLIENTS_PAGE") and found.keys() == set(ALL):
        PAGE.write_text(HEAD + "".join(row(client, found[client]) for client in ALL), encoding="utf-8")


def row(client: str, got: dict[str, Any]) -> str:
    return f"|{'|'.join([client, got['version'], *('yes' if each in got else '-' for each in FEATURES)])}|\n"


def commands(client: str) -> Iterator[list[str]]:
    for place in [*filter(None, os.environ.get("SLIPSTREAM_CLIENTS", "").split(os.pathsep)), sys.executable]:
        if client in CLIENTS and not Path(place).is_dir():
            yield [place, str(HERE / "loops.py")]
        elif client in NODE and Path(place).is_dir() and shutil.which("node"):
            yield ["node", str(HERE / "loops.mjs"), place]


def run(client: str, url: str) -> Any:
    """What a client printed; skipped where nobody has the client."""
    for command in commands(client):
        env = {**os.environ, "TOKENIZER": str(EMBEDDED / "target")}
        done = subprocess.run([*command, url, client], capture_output=True, text=True, timeout=WITHIN, env=env)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == MISSING, done.stderr[-3000:]
    pytest.skip(f"{client} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("client", ALL)
def test_a_client_gets_what_the_model_says(client: str, chatting: str, results: Results) -> None:
    got = run(client, chatting)
    expected = dict.fromkeys(FEATURES, CALL) | dict.fromkeys(("tools", "streamed_tools"), SUM)  # marks are text
    for feature in ONLY.get(client, FEATURES):
        if feature == "structured":
            assert got[feature]["color"] in ("red", "blue") and 0 <= got[feature]["count"] <= 9
        else:
            assert got[feature] == expected[feature], feature
    results[client] = got


def test_the_page_has_every_client() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(HEAD)
    rows = page.removeprefix(HEAD).splitlines(keepends=True)
    versions = [line.split("|")[2] for line in rows]
    works = [
        {"version": version, **dict.fromkeys(ONLY.get(client, FEATURES))}
        for client, version in zip(ALL, versions, strict=True)
    ]
    assert rows == [row(client, each) for client, each in zip(ALL, works, strict=True)]
