"""A real server process for the tests, and clients of it."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from processes import Command


@dataclass
class ServerProcess:
    """`slipstream serve ARGUMENTS` as a process, ready at `url`; `lines` are what it wrote to stderr so far."""

    process: Command | subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None
    clients: list[openai.OpenAI] = field(default_factory=list)

    @staticmethod
    def start(*arguments: str, within: float = 120) -> ServerProcess:
        """Start a server with the embedded pair, unless the arguments name another, and wait until it is ready."""
        pair = () if {"--target", "--plan"} & {*arguments} else ("--target", "embedded")
        return ServerProcess.of(Command("serve", "--port", "0", *pair, *arguments), within)

    @staticmethod
    def of(process: Command | subprocess.Popen[str], within: float = 120) -> ServerProcess:
        """The server in a process that was just started, as soon as it is ready, which may take so many seconds."""
        server, ready = ServerProcess(process), threading.Event()

        def follow() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                server.lines.append(line)
                if found := re.search(r"is ready at (http://\S+)", line):
                    server.url = found[1]
                    ready.set()
            ready.set()

        server.reader = threading.Thread(target=follow, daemon=True)
        server.reader.start()
        if not (ready.wait(within) and server.url):
            server.close()
            raise AssertionError("".join(server.lines))
        return server

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def client(self, **settings: Any) -> openai.OpenAI:
        usual: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        self.clients.append(openai.OpenAI(**usual | settings))
        return self.clients[-1]

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 300, **settings})

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.process.kill()
        self.process.wait()
        assert self.reader is not None and self.process.stderr is not None
        self.reader.join()
        self.process.stderr.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server with the embedded pair for all tests of this folder that do not end it."""
    with ServerProcess.start("--chat-template", str(TEMPLATE), "--allow-host", "here") as started:
        yield started


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="session")
def replicas() -> Iterator[ServerProcess]:
    """Two replicas of the same pair on a Ray cluster of their own."""
    more = ("--target", "embedded", "--ray", "--replicas", "2", "--max-rows", "2")
    with ServerProcess.of(Command("serve", "--port", "0", *more, "--chat-template", str(TEMPLATE)), 600) as started:
        yield started
        assert started.stop() == 0
        assert any("what was begun is finished" in line for line in started.lines)


@pytest.fixture(scope="session", params=["server", pytest.param("replicas", marks=pytest.mark.slow)])
def conforming(request: pytest.FixtureRequest) -> ServerProcess:
    """Whatever answers as the plain server does: itself, and replicas on a cluster."""
    served: ServerProcess = request.getfixturevalue(request.param)
    return served


@pytest.fixture(scope="session")
def client(conforming: ServerProcess) -> openai.OpenAI:
    return conforming.client()


TEMPLATE = Path(__file__).with_name("template.jinja")
