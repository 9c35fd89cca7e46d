"""A file is whole or not there, whatever ends its writing; what is read is what its header says, or an error."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slipstream import files
from slipstream.core.model_options import ModelOptions
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.ngram import NgramModel
from slipstream.engine import plan_file
from slipstream.engine.plan_file import Plan
from slipstream.files import (
    Recognisable,
    TensorFileKind,
    TextFileKind,
    WriteError,
    atomic_folder,
    atomic_write,
    check_folder,
    check_writable,
    load_tensors,
    save_tensors,
)

KIND = TensorFileKind("toy", "slipstream.toy", "1", "make it again")
TENSORS = {"a": torch.arange(6).to(torch.uint16), "b": torch.tensor([[0.5]], dtype=torch.bfloat16)}


class Killed(BaseException):
    """What ends the writing of a file in its middle."""


def dies(*_: Any) -> None:
    """In the place of a step of the writing."""
    raise Killed


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text in ("old", "new"):
        with atomic_write(file) as part:
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
        with pytest.raises(Killed), atomic_write(tmp_path / name) as part:
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
from slipstream.files import atomic_write
with atomic_write(sys.argv[1]) as part:
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


PLAN = Plan(ModelOptions("org/big", "org/small", verify="block"), {1: 5}, 101)
SAVERS: dict[str, Callable[[Path, int], Any]] = {
    "corpus": lambda folder, seed: Corpus.build([[seed, 2]], 5).save(folder / "file"),
    "n-gram model": lambda folder, seed: NgramModel.fit([[seed, 2, 3]], 2, 5).save(folder / "file"),
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


def test_tensors_come_back_with_their_header(tmp_path: Path) -> None:
    save_tensors(tmp_path / "file", KIND, TENSORS, {"size": "6"})
    tensors, about = load_tensors(tmp_path / "file", KIND)
    assert tensors.keys() == TENSORS.keys() and about["size"] == "6"
    assert all(tensors[name].dtype == TENSORS[name].dtype for name in TENSORS)
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


MAPPED: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda path: load_tensors(path, KIND)[0]["a"],
    "corpus": lambda path: Corpus.load(path).text,
    "n-gram model": lambda path: NgramModel.load(path).unigram,
}


@pytest.mark.parametrize("kind", MAPPED)
def test_tensors_are_mapped_not_read(tmp_path: Path, kind: str) -> None:
    """What is written to the file afterwards is seen, as it would not be in a copy; not what replaces the file."""
    path, savers = tmp_path / "file", {**SAVERS, "tensors": lambda *_: save_tensors(path, KIND, TENSORS, {})}
    savers[kind](tmp_path, 1)
    seen = np.asarray(MAPPED[kind](path))
    before, data = seen.tobytes(), path.read_bytes()
    with open(path, "r+b") as file:
        savers[kind](tmp_path, 2)
        assert seen.tobytes() == before
        file.seek(data.index(before))
        file.write(bytes(len(before)))
    assert not seen.any()


OURS = {"format": "slipstream.toy", "version": "1"}


@pytest.mark.parametrize(
    ("kind", "head", "says"),
    [
        (KIND, {**OURS, "format": "other"}, "is other version 1, this release reads slipstream.toy version 1"),
        (KIND, {**OURS, "version": "2"}, "is slipstream.toy version 2, this release reads slipstream.toy version 1"),
        (KIND, {"format": "slipstream.toy"}, "is slipstream.toy, this release reads slipstream.toy version 1"),
        (KIND, None, "is of an unknown format, this release reads slipstream.toy version 1"),
        (KIND, {"format": "slipstream.toy 1"}, "is slipstream.toy 1, this release reads slipstream.toy version 1"),
    ],
)
def test_another_format_or_version_is_named(
    tmp_path: Path, kind: TensorFileKind, head: dict[str, str], says: str
) -> None:
    save_file(TENSORS, tmp_path / "file", head)
    with pytest.raises(ValueError, match=says) as error:
        load_tensors(tmp_path / "file", kind)
    assert str(error.value).startswith(str(tmp_path / "file")) and str(error.value).endswith(": make it again.")


def test_a_file_cut_anywhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_tensors(path, KIND, TENSORS, {})
    data = path.read_bytes()
    for damaged in (*(data[:length] for length in range(len(data))), b"no tensors", b"\xff" * 400):
        path.write_bytes(damaged)
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


FORMATS = {  # formats of files that people keep: another one means that all must be built again
    "corpus": ("slipstream.corpus", "2"),
    "n-gram model": ("slipstream.ngram", "2"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_stay(tmp_path: Path, kind: str) -> None:
    SAVERS[kind](tmp_path, 1)
    (file,) = tmp_path.iterdir()
    with safe_open(file, "pt") as opened:
        head = opened.metadata()
    assert (head["format"], head["version"]) == FORMATS[kind] and len(head["checksum"]) == 8


@pytest.mark.parametrize("place", range(13))
def test_a_flipped_bit_is_noticed(tmp_path: Path, place: int) -> None:
    """Of the 12 bytes of one tensor, the 2 of the other, and what the header says besides."""
    path = tmp_path / "file"
    save_tensors(path, KIND, TENSORS, {"size": "6"})
    data = bytearray(path.read_bytes())
    where = data.index(b'"size":"6"') + 8 if place == 12 else len(data) - 1 - place
    data[where] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"is damaged \(its checksum does not fit its bytes\): make it again\.$"):
        load_tensors(path, KIND)


STRANGERS: dict[str, bytes] = {
    "text": b"# Notes\n",
    "bytes": bytes(range(256)),
    "short": b"\x01\x00\x00",
    "long header": b"\xff" * 64,
    "JSON": b'{"format": "another"}',
    "list": b'["slipstream plan"]',
    "other tensors": b"\x08\0\0\0\0\0\0\0{}      ",
}
KINDS: dict[str, Recognisable] = {"tensors": KIND, "plan": plan_file.KIND, "picture": TextFileKind("picture", "<svg")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_another_file_is_replaced_only_by_force(tmp_path: Path, kind: str, stranger: str) -> None:
    path = tmp_path / f"file.{kind}"
    path.write_bytes(STRANGERS[stranger])
    with pytest.raises(ValueError, match=rf"it exists and is no {KINDS[kind].what}; .* --force\.$"):
        check_writable(path, KINDS[kind])
    check_writable(path, KINDS[kind], force=True)
    with pytest.raises(ValueError, match="it is an input of this command"):
        check_writable(path, KINDS[kind], force=True, inputs=[path])
    with pytest.raises(ValueError, match="it is an input of this command"):
        check_writable(path, KINDS[kind], force=True, inputs=["dataset:x", tmp_path])
    assert path.read_bytes() == STRANGERS[stranger]


def test_what_we_wrote_may_be_replaced(tmp_path: Path) -> None:
    paths = {kind: tmp_path / kind for kind in ("tensors", "plan", "picture", "empty")}
    save_tensors(paths["tensors"], replace(KIND, version="0"), TENSORS, {})
    PLAN.save(paths["plan"])
    paths["empty"].touch()
    Figure(figsize=(1, 1)).savefig(paths["picture"], format="svg")
    for name, path in paths.items():
        check_writable(path, KINDS.get(name, KIND), inputs=[tmp_path] if name != "empty" else [])
    check_writable(tmp_path / "new", KIND, inputs=[tmp_path])
    with pytest.raises(ValueError, match="is an input"):  # whoever reads it cannot write it as well
        check_writable(paths["tensors"], KIND, force=True, inputs=[paths["tensors"]])


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(os.devnull)
    for name, says in {
        "pipe": "it is a device or a pipe",
        "link": "it is a device or a pipe",
        ".": "it is a folder",
        "nowhere/file": f"there is no folder {tmp_path / 'nowhere'}; make it first",
    }.items():
        with pytest.raises(ValueError, match=says):
            check_writable(tmp_path / name, KIND, force)
        if name != "nowhere/file":
            with pytest.raises(OSError), atomic_write(tmp_path / name):
                pass
    assert (tmp_path / "pipe").is_fifo() and sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_folders_are_made_later_but_their_files_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("notes")
    check_folder(tmp_path / "new" / "store", {"file": KIND})
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="file is no folder"):
        check_folder(tmp_path / "file" / "store", {"file": KIND})
    with pytest.raises(ValueError, match="is no toy"):
        check_folder(tmp_path, {"other": KIND, "file": KIND})


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_obey_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_tensors(tmp_path / "tensors", KIND, TENSORS, {})
        PLAN.save(tmp_path / "plan")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    PLAN.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and Plan.read(tmp_path / "file") == PLAN


@pytest.mark.parametrize("kind", ["tensors", "plan"])
def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        if kind == "tensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a part")

    monkeypatch.setattr("safetensors.torch.save_file" if kind == "tensors" else "pathlib.Path.write_text", full)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(WriteError) as error:
        save_tensors(path, KIND, TENSORS, {}) if kind == "tensors" else PLAN.save(path)
    assert str(error.value) == f"cannot write {path}: no space left on device." and error.value.errno == errno.ENOSPC
    with pytest.raises(WriteError, match="folder: no space left on device"), atomic_folder(tmp_path / "folder"):
        full()
    assert os.listdir(tmp_path) == ["file"] and path.read_bytes() == b"old"


def test_a_cache_folder_is_named_moved_or_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOYS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder("toys", "TOYS") == tmp_path / "slipstream" / "toys"
    for named, folder in (("~/mine", Path.home() / "mine"), ("off", None), ("", None)):
        monkeypatch.setenv("TOYS", named)
        assert files.cache_folder("toys", "TOYS") == folder


def test_the_files_used_last_stay(tmp_path: Path) -> None:
    for age, name in enumerate(("new.toy", "old.toy", "older.toy", "oldest.other")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    files.delete_oldest(tmp_path, "*.toy", 2)
    assert sorted(os.listdir(tmp_path)) == ["new.toy", "old.toy", "oldest.other"]
    files.delete_oldest(tmp_path / "none", "*.toy", 0)
