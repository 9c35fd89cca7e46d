"""Images and sounds over HTTP: in the request, images from hosts that the operator allowed too; never a file."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

import slipstream
from audios import input_audio, rounded, save_audio, sound, wav
from serve.conftest import ServerProcess
from slipstream.serve.chats import check_host, fetch
from slipstream.serve.settings import ServeSettings
from visions import data_url, picture, png, save_llava

QUESTION = {"type": "text", "text": "What is this?"}


class Files(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        moved = {"/here": "/picture.png", "/away": "http://localhost:9/picture.png", "/file": "file:///etc/passwd"}
        moved["/loop"] = "/loop"
        if self.path in moved:
            self.send_response(302)
            self.send_header("Location", moved[self.path])
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # the client has gone
                for _ in range(100):
                    self.wfile.write(b".")
                    time.sleep(0.02)
        elif self.path == "/picture.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png(picture(1)))
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def files() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        server.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def host(files: ThreadingHTTPServer) -> str:
    return f"127.0.0.1:{files.server_address[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_audio("qwen2-audio", tmp_path_factory.mktemp("hears"))


@pytest.fixture(scope="module")
def seeing(folder: Path, host: str) -> Iterator[httpx.Client]:
    arguments = ("--target", str(folder), "--draft", "lookup", "--allow-image-host", host)
    with ServerProcess.start(*arguments) as started, started.http() as client:
        yield client


@pytest.fixture(scope="module")
def hearing(ears: Path) -> Iterator[httpx.Client]:
    with ServerProcess.start("--target", str(ears), "--draft", "lookup") as started, started.http() as client:
        yield client


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "original"}}


def ask(client: httpx.Client, *parts: dict[str, Any]) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": [*parts, QUESTION]}], "max_tokens": 10, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def as_the_engine(client: httpx.Client, engine: slipstream.Engine, parts: list[Any], own: dict[str, Any]) -> None:
    """Each part, as a client writes it, gets the answer that the engine gives to `own`, and counts as many tokens."""
    [wanted] = engine.generate([[{"role": "user", "content": [own, QUESTION]}]], max_new_tokens=10)
    for part in parts:
        answer = ask(client, part)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == wanted.text
        assert answer.json()["usage"]["prompt_tokens"] == wanted.prompt_tokens
    counted = client.post("/tokenize", json={"messages": [{"role": "user", "content": [parts[0], QUESTION]}]})
    assert counted.json()["count"] == wanted.prompt_tokens


def refuses(client: httpx.Client, says: str, *parts: dict[str, Any]) -> None:
    answer = ask(client, *parts)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "messages"


def test_a_chat_about_an_image(seeing: httpx.Client, folder: Path, host: str) -> None:
    parts = [image(url) for url in (data_url(picture(1)), f"http://{host}/picture.png", f"http://{host}/here")]
    parts.append({"type": "image_url", "image_url": data_url(picture(1))})
    as_the_engine(seeing, slipstream.load(folder), parts, {"type": "image", "image": picture(1)})


def test_a_chat_about_a_sound(hearing: httpx.Client, ears: Path) -> None:
    samples = rounded(sound(1))
    as_the_engine(hearing, slipstream.load(ears), [input_audio(wav(samples))], {"type": "audio", "audio": samples})


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("/etc/passwd", "neither a data: URL nor a web address"),
        ("file:///etc/passwd", "neither a data: URL nor a web address"),
        ("http://localhost:9/picture.png", "does not fetch from"),
        ("data:image/png;base64,AAAA", "none that can be opened"),
        ("http://[", "an address that is none"),
    ],
)
def test_other_images_are_refused(seeing: httpx.Client, url: str, says: str) -> None:
    refuses(seeing, says, image(url))


def test_other_sounds_are_refused(hearing: httpx.Client) -> None:
    refuses(hearing, "is no base64", {"type": "input_audio", "input_audio": {"data": "/etc/passwd", "format": "wav"}})
    refuses(hearing, "holds no sound", input_audio(b"RIFF"))
    refuses(hearing, "at most 1800 s are taken", input_audio(wav(sound(1), rate=1)))
    for part in ({"type": "audio", "path": "/etc/passwd"}, {"type": "audio_url", "audio_url": {"url": "file:///a"}}):
        assert ask(hearing, part).status_code in (400, 422)


def test_a_model_says_how_many_it_takes_and_what_it_cannot_read(
    seeing: httpx.Client, hearing: httpx.Client, http: httpx.Client
) -> None:
    seen, heard = image(data_url(picture(1))), input_audio(wav(sound(1)))
    refuses(seeing, "holds 17 images, but at most 16", *[seen] * 17)
    refuses(hearing, "holds 17 sounds, but at most 16", *[heard] * 17)
    refuses(hearing, "holds images, but", seen)
    refuses(http, "reads text only", seen)
    refuses(http, "holds sounds, but", heard)


def test_redirects_stay_within_the_allowed_hosts(host: str, files: ThreadingHTTPServer) -> None:
    assert fetch(f"http://{host}/here", [host], 1 << 20) == png(picture(1))
    for path, says in (("away", "does not fetch from"), ("file", "neither a data"), ("loop", "redirects too often")):
        with pytest.raises(ValueError, match=says):
            fetch(f"http://{host}/{path}", [host], 1 << 20)


def test_what_is_fetched_is_bounded(host: str, files: ThreadingHTTPServer) -> None:
    with pytest.raises(ValueError, match="longer than the 100 bytes"):
        fetch(f"http://{host}/picture.png", [host], 100)
    with pytest.raises(ValueError, match="takes too long"):
        fetch(f"http://{host}/slow", [host], 1 << 20, seconds=0.2)
    with pytest.raises(ValueError, match="answers 404"):
        fetch(f"http://{host}/none", [host], 1 << 20)
    with pytest.raises(ValueError, match="does not answer"):
        fetch("http://127.0.0.1:9/x", ["127.0.0.1:9"], 1 << 20)


def test_hosts_are_allowed_by_name_and_port(host: str, files: ThreadingHTTPServer) -> None:
    check_host("https://Images.example.org/a.png", ["images.EXAMPLE.org"])
    check_host("http://images.example.org:8080/a.png", ["images.example.org:8080"])
    for url in (
        "http://images.example.org:8080/a.png",
        "http://images.example.org.evil.org/a.png",
        "http://evil.org/images.example.org",
        "http://user@images.example.org/a.png",
        "http://evil.org#@images.example.org/a.png",
    ):
        with pytest.raises(ValueError, match="does not fetch from"):
            check_host(url, ["images.example.org"])
    before = list(files.seen)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="does not fetch from"):
        fetch(f"http://{host}/picture.png", [], 1 << 20)
    assert files.seen == before  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="is no host"):
        ServeSettings(("x",), image_hosts=("http://x.org",))
