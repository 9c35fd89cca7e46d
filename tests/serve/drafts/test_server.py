"""`slipstream serve-draft` as users run it: ready, used, ended; and what cannot be is one sentence."""

import json
import signal
from pathlib import Path

import pytest

from processes import Command
from slipstream.engine.load import load
from slipstream.models.loading.pairings import EMBEDDED
from terminal import run


@pytest.mark.slow
def test_it_says_where_it_is_serves_and_ends(tmp_path: Path) -> None:
    """With a key from a file; a client without it is told, and SIGTERM ends the server with exit code 0."""
    (tmp_path / "key").write_text("secret\n")
    key = str(tmp_path / "key")
    server = Command("serve-draft", "--draft", "embedded", "--port", "0", "--key-file", key)
    try:
        url = next(line.split()[-1] for line in server.stderr if "drafts at" in line)
        engine = load(draft=f"{url}?key-file={key}&timeout-ms=20000", gamma=2)
        [made] = engine.generate("def f(x):", max_new_tokens=10)
        assert made.tokens == engine.generate("def f(x):", max_new_tokens=10, plain=True)[0].tokens
        assert made.stats.drafted and not made.stats.undrafted
        refused = run("generate", "x", "--draft", url)
        assert refused.exit_code == 2 and "keys of draft server and client differ" in refused.stderr
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft", "lookup"], "--tokenizer NAME"),
        (["--draft", "tcp://h:1"], "cannot pass on another one"),
        (["--draft", "lookup|embedded?draft_vocab=64"], "does not know the target whose tokens"),
        (["--draft", "nonsense/none"], "nonsense/none"),
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "a.pem", "--tls-key", "b.pem"], "no certificate and its key"),
        (["--key-file", "missing.key"], "missing.key"),
        (["--host", "203.0.113.7"], "cannot listen at 203.0.113.7"),
        (["--port", "99999"], "65535"),
        (["--max-rows", "0"], "max-rows"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(arguments: list[str], says: str) -> None:
    shown = run("serve-draft", "--port", "0", *arguments)
    assert shown.exit_code == 2 and says in shown.stderr and "Traceback" not in shown.stderr


def test_an_empty_key_file_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    shown = run("serve-draft", "--key-file", str(tmp_path / "empty"))
    assert shown.exit_code == 2 and "is empty" in shown.stderr


def test_a_summary_and_json_tell_why_rounds_had_no_draft() -> None:
    """Nobody is there: the text comes all the same, with a note, and the reason is counted."""
    place = ["--target", str(EMBEDDED / "target"), "--draft", "tcp://127.0.0.1:1?timeout-ms=50"]
    shown = run("generate", "def f(x):", "--max-new-tokens", "5", *place, "--json")
    assert shown.exit_code == 0 and "cannot be reached" in shown.stderr
    assert json.loads(shown.stdout)["stats"]["undrafted"]["disconnected"] > 0
    explained = run("generate", "def f(x):", "--max-new-tokens", "5", *place, "--explain")
    assert "rounds without the remote draft: disconnected" in " ".join(explained.output.split())
