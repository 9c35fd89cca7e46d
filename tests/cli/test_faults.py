"""Commands that write files: no stranger's file is touched, and whatever ends them, the old file or the new is whole.

Full disks are limits on the size of a file, set in the child. A kill comes at the moment when the new bytes are written
and not yet under their name, which the child itself announces.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from slipstream.cli import app as cli
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.ngram import NgramModel
from slipstream.engine.plan_file import Plan
from terminal import run

TEXT = "def add(a, b):\n    return a + b\n\n\n"


@dataclass(frozen=True)
class Writer:
    """A command, the file that it writes to the folder `out`, and how that file is read."""

    arguments: tuple[str, ...]
    file: str
    reads: Callable[[Path], object]


SMALL_PLAN = ("plan", "--quick", "--sample", "4", "--max-new-tokens", "16", "--gamma", "1", "--repetitions", "1")
WRITERS = {
    "ngram": Writer(("draft", "build", "ngram:out/mine.ngram", "text.txt"), "mine.ngram", NgramModel.load),
    "datastore": Writer(("draft", "build", "datastore:out", "text.txt"), "corpus.safetensors", Corpus.load),
    "plan": Writer((*SMALL_PLAN, "--save", "out/plan.json"), "plan.json", Plan.read),
}

LIMIT = 200  # bytes of a file on the full disk: less than any of these files has

# The child waits at the first rename of the wanted file, when the part is written, until it is killed.
WAIT = """
import os, sys, time
from pathlib import Path
from slipstream.cli import main
usual, wanted = Path.replace, os.environ.get("WAIT_AT")
def replace(self, target):
    if Path(target).name == wanted:
        print("written", flush=True)
        time.sleep(120)
    return usual(self, target)
Path.replace = replace
main()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "text.txt").write_text(TEXT * 40)
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "link").symlink_to("notes.md")
    (tmp_path / "out" / "notes.md").write_text("mine, too")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(arguments: tuple[str, ...], limit: int | None = None, wait: str = "") -> subprocess.Popen[str]:
    """The command in a process of its own; no file of it grows beyond `limit` bytes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WAIT_AT": wait}
    size = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)) if limit is not None else None
    return subprocess.Popen(
        [sys.executable, "-c", WAIT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=size,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def others(place: Path, writer: Writer) -> dict[str, bytes]:
    mine = {writer.file, "training.safetensors"}
    files = (path for path in place.rglob("*") if path.is_file() and path.name not in mine)
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def build(writer: Writer) -> None:
    code, errors = finish(start(writer.arguments))
    assert code == 0, errors


@pytest.mark.parametrize("name", ["ngram", "datastore"])
def test_a_full_disk_is_one_sentence(place: Path, name: str) -> None:
    """In this process, which is quick; all commands have their own process below."""
    writer, limits = WRITERS[name], resource.getrlimit(resource.RLIMIT_FSIZE)
    assert run(*writer.arguments).exit_code == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        ended = run(*writer.arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.exit_code == cli.WRONG and ended.stderr.startswith("slipstream: cannot write "), ended.stderr
    assert ended.stderr.endswith(": file too large.\n") and ended.stderr.count("\n") == 1, ended.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(place: Path, name: str) -> None:
    writer = WRITERS[name]
    build(writer)
    old, strangers = (place / "out" / writer.file).read_bytes(), others(place, writer)
    code, errors = finish(start(writer.arguments, limit=LIMIT))
    assert code == cli.WRONG and "Traceback" not in errors, errors
    assert "slipstream: cannot write " in errors and errors.rstrip().endswith(": file too large."), errors
    assert (place / "out" / writer.file).read_bytes() == old and others(place, writer) == strangers
    writer.reads(place / "out" / writer.file)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_killed_command_leaves_the_old_file(place: Path, name: str, how: signal.Signals) -> None:
    writer = WRITERS[name]
    build(writer)
    old, strangers = (place / "out" / writer.file).read_bytes(), others(place, writer)
    process = start(writer.arguments, wait=writer.file)
    assert process.stdout is not None
    assert any(line.strip() == "written" for line in process.stdout)
    process.send_signal(how)
    code, errors = finish(process)
    assert code in ({-how} if how is signal.SIGKILL else {-how, cli.INTERRUPTED}) and "Traceback" not in errors, errors
    assert (place / "out" / writer.file).read_bytes() == old
    left = {name: data for name, data in others(place, writer).items() if not name.endswith(".part")}
    assert left == strangers and (code < 0 or left == others(place, writer))
    build(writer)
    writer.reads(place / "out" / writer.file)


REFUSED = [
    (("draft", "build", "ngram:text.txt", "text.txt", "--force"), "text.txt: it is an input of this command"),
    (("draft", "build", "ngram:notes.md", "text.txt"), "notes.md: it exists and is no n-gram model"),
    (("draft", "build", "ngram:link", "notes.md", "--force"), "it is an input of this command"),
    (("draft", "build", "ngram:notes.md", "link", "--force"), "notes.md: it is an input of this command"),
    (("draft", "build", "ngram:/dev/full", "text.txt", "--force"), "/dev/full: it is a device or a pipe"),
    (("draft", "build", "ngram:notes.md", ".", "--force"), "notes.md: it is an input of this command"),
    (("draft", "build", "datastore:notes.md", "text.txt"), "notes.md is no folder"),
    (("draft", "build", "datastore:out", "text.txt"), "out/corpus.safetensors: it exists and is no corpus"),
    (("draft", "build", "datastore:out", "out/corpus.safetensors", "--force"), "it is an input of this command"),
    (("plan", "--save", "notes.md"), "notes.md: it exists and is no plan"),
    (("plan", "--save", "nowhere/plan.json"), "there is no folder nowhere; make it first"),
    (("plan", "--prompts", "text.txt", "--save", "text.txt", "--force"), "text.txt: it is an input of this command"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=lambda value: " ".join(value) if value is tuple else None)
def test_no_stranger_is_replaced(place: Path, arguments: tuple[str, ...], says: str) -> None:
    for name in ("corpus.safetensors",):
        (place / "out" / name).write_text("mine")
    (place / "other.md").write_text("mine")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    ended = run(*arguments)
    assert ended.exit_code == cli.WRONG and says in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_force_replaces_a_stranger_and_ours_need_none(place: Path) -> None:
    for force in (("--force",), ()):
        assert run("draft", "build", "ngram:notes.md", "text.txt", *force).exit_code == 0
        NgramModel.load(place / "notes.md")


def test_what_the_system_refuses_is_said_without_its_number(place: Path) -> None:
    ended = run("generate", "x", "--json-schema", "nowhere.txt")
    assert (ended.exit_code, ended.stderr) == (cli.WRONG, "slipstream: nowhere.txt: no such file or directory.\n")


def test_builds_name_what_they_skip(place: Path) -> None:
    for number in range(7):
        (place / "out" / f"{number}.txt").write_bytes(b"\xff")
    ended = run("draft", "build", "datastore:store", "out")
    assert ended.exit_code == 0 and ended.stderr == (
        "slipstream: note: of the folders 7 files were skipped, which are no text in UTF-8: "
        "out/0.txt, out/1.txt, out/2.txt, out/3.txt, out/4.txt, ...\n"
    )
    ended = run("draft", "build", "ngram:mine.ngram", "out")
    assert ended.exit_code == 0 and "7 files were skipped" in ended.stderr
