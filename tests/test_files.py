"""A file is whole or not there, whatever ends its writing; what is read is what its header says, or an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream import files
from slipstream import files as tensorfiles
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.heads import FILE, ParallelHeads, Sizes
from slipstream.drafters.ngram_model import NgramModel
from slipstream.engine.plan_file import Plan
from slipstream.files import Kind, load_tensors, save_tensors, whole

KIND = Kind("toy", "slipstream.toy", "1", "make it again")
TENSORS = {"a": torch.arange(6).to(torch.uint16), "b": torch.tensor([[0.5]], dtype=torch.bfloat16)}


class Killed(BaseException):
    """What ends the writing of a file in its middle."""


def dies(*_: Any) -> None:
    """In the place of a step of the writing."""
    raise Killed


# ---- writing ----------------------------------------------------------------------------------------------------


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text in ("old", "new"):
        with whole(file) as part:
            part.write_text(text)
            assert part.parent == tmp_path and (not file.exists() if text == "old" else file.read_text() == "old")
        assert file.read_text() == text and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("where", ["block", "sync", "rename"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "old").write_text("old")
    if where == "sync":
        monkeypatch.setattr(files.os, "fsync", dies)
    if where == "rename":
        monkeypatch.setattr(Path, "replace", dies)
    for name in ("old", "new"):
        with pytest.raises(Killed), whole(tmp_path / name) as part:
            part.write_text("half a")
            if where == "block":
                dies()
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"


def test_what_is_renamed_has_reached_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the other order a loss of power could leave an empty file under the name."""
    steps: list[str] = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda number: (steps.append("sync"), sync(number))[1])
    monkeypatch.setattr(Path, "replace", lambda path, to: (steps.append("rename"), rename(path, to))[1])
    save_tensors(tmp_path / "file", KIND, TENSORS, {})
    assert steps == ["sync", "rename"]


WRITE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell would have it ignored
from slipstream.files import whole
with whole(sys.argv[1]) as part:
    part.write_text("half a")
    print("written", flush=True)
    sys.stdin.read()  # killed here, before the rename
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_the_old_file(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "file").write_text("old")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None and process.stdout.readline().strip() == b"written"
        process.send_signal(how)
        process.wait(30)
    assert (tmp_path / "file").read_text() == "old"
    if how is signal.SIGINT:
        assert os.listdir(tmp_path) == ["file"]


def some_heads(seed: int) -> ParallelHeads:
    """Heads whose matrices differ by the seed."""
    torch.manual_seed(seed)
    return ParallelHeads(Sizes(1, 2, 3))


PLAN = Plan("org/big", "org/small", {1: 5}, 101)
SAVERS: dict[str, Callable[[Path, int], Any]] = {
    "corpus": lambda folder, seed: Corpus.build([[seed, 2]], 5).save(folder / "file"),
    "n-gram model": lambda folder, seed: NgramModel.fit([[seed, 2, 3]], 2, 5).save(folder / "file"),
    "heads": lambda folder, seed: some_heads(seed).save(folder),
    "plan": lambda folder, seed: replace(PLAN, vocab=seed).save(folder / "file"),
}


@pytest.mark.parametrize("kind", SAVERS)
def test_all_files_are_written_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    SAVERS[kind](tmp_path, 1)
    (file,) = tmp_path.iterdir()
    old = file.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(files.os, "fsync", dies)
        SAVERS[kind](tmp_path, 2)
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == old
    SAVERS[kind](tmp_path, 2)
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() != old


# ---- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KIND, replace(KIND, version=None)], ids=["version", "no version"])
def test_tensors_come_back_with_their_header(tmp_path: Path, kind: Kind) -> None:
    save_tensors(tmp_path / "file", kind, TENSORS, {"size": "6"})
    tensors, about = load_tensors(tmp_path / "file", kind)
    assert tensors.keys() == TENSORS.keys() and about["size"] == "6"
    assert all(tensors[name].dtype == TENSORS[name].dtype for name in TENSORS)
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_tensors_are_mapped_not_read(tmp_path: Path) -> None:
    """What is written to the file afterwards is seen; a copy in memory would not change."""
    save_tensors(tmp_path / "file", KIND, TENSORS, {})
    tensors, _ = load_tensors(tmp_path / "file", KIND)
    data = (tmp_path / "file").read_bytes()
    with open(tmp_path / "file", "r+b") as file:
        file.seek(data.index(TENSORS["a"].numpy().tobytes()))
        file.write(bytes(12))
    assert not tensors["a"].any()


OURS, NAMELESS = {"format": "slipstream.toy", "version": "1"}, replace(KIND, format="slipstream toy 1", version=None)


@pytest.mark.parametrize(
    ("kind", "head", "says"),
    [
        (KIND, {**OURS, "format": "other"}, "is other version 1, this release reads slipstream.toy version 1"),
        (KIND, {**OURS, "version": "2"}, "is slipstream.toy version 2, this release reads slipstream.toy version 1"),
        (KIND, {"format": "slipstream.toy"}, "is slipstream.toy, this release reads slipstream.toy version 1"),
        (KIND, None, "is of an unknown format, this release reads slipstream.toy version 1"),
        (NAMELESS, {"format": "slipstream toy 2"}, "is slipstream toy 2, this release reads slipstream toy 1"),
        (NAMELESS, {**OURS, "format": "slipstream toy 1"}, "is slipstream toy 1 version 1, this release reads"),
    ],
)
def test_another_format_or_version_is_named(tmp_path: Path, kind: Kind, head: dict[str, str], says: str) -> None:
    save_file(TENSORS, tmp_path / "file", head)
    with pytest.raises(ValueError, match=says) as error:
        load_tensors(tmp_path / "file", kind)
    assert str(error.value).startswith(str(tmp_path / "file")) and str(error.value).endswith(": make it again.")


def test_a_file_cut_anywhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_tensors(path, KIND, TENSORS, {})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"is damaged or no toy \(.*\): make it again\.$") as error:
            load_tensors(path, KIND)
        assert "\n" not in str(error.value)
    path.write_bytes(data)
    load_tensors(path, KIND)


def test_a_file_that_is_not_there_is_no_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "absent", KIND)


def test_damage_is_told_with_what_to_do() -> None:
    assert str(KIND.damaged("a/file", "it lacks 'a'")) == "a/file is damaged (it lacks 'a'): make it again."


def test_heads_are_read_as_they_were_written_before(tmp_path: Path) -> None:
    """The header of heads has no version of its own."""
    file = some_heads(1).save(tmp_path)
    assert file == tmp_path / FILE
    with tensorfiles.safe_open(file, "pt") as opened:
        assert opened.metadata().keys() == {"format", "sizes", "report"}
