"""Files of llama.cpp (.gguf): found by what users write, with metadata and the places of tensors, read once."""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import Tensor
from transformers.utils import cached_file

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of metadata that are numbers, by llama.cpp's number for the type."""
TEXT, LIST = 8, 9
EMBEDDINGS, TOKENS = "token_embd.weight", "tokenizer.ggml.tokens"
USUAL = {"unknown": 0, "bos": 1, "eos": 2}
LENGTH = struct.Struct("<Q")
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: llama.cpp's number of its format, its shape, and its mapped bytes (rows, bytes of a row)."""

    name: str
    format: int
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class GgufFile:
    """A model in one file, or in several whose names end in -00001-of-00003.gguf and so on."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]
    maps: tuple[mmap.mmap, ...]

    @staticmethod
    def read(path: Path) -> GgufFile:
        """Read a file and its other parts; the last ones read are remembered. Raises ValueError for a damaged one."""
        paths = _paths(path)
        return _read(path, tuple((each, each.stat().st_mtime_ns, each.stat().st_size) for each in paths))

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def value(self, key: str, default: Any = None) -> Any:
        """Return what the metadata say of the family's `key`, as "rope.freq_base"; of all layers' equal numbers one."""
        found = self.metadata.get(f"{self.architecture}.{key}", default)
        same = isinstance(found, list) and len(set(found)) == 1 and not key.endswith("pattern")
        return found[0] if same else found

    def special(self, key: str) -> int | None:
        """Return the number of a special token, as "eos"; if it is not told or lies outside the vocabulary, as -1 does,
        what llama.cpp takes in a vocabulary of SentencePiece, else None."""
        rows = self.tensors[EMBEDDINGS].shape[0] if EMBEDDINGS in self.tensors else 0
        sizes = len(self.metadata.get(TOKENS, ())), rows
        usual = USUAL.get(key) if self.metadata.get("tokenizer.ggml.model") == "llama" else None
        number = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return number if number in range(min(filter(None, sizes), default=0)) else usual

    def forget_pages(self) -> None:
        """Let the system take back the memory that holds the file's bytes; they are read again if they are used."""
        for each in self.maps:
            each.madvise(mmap.MADV_DONTNEED)


@functools.lru_cache(maxsize=4)
def _read(path: Path, stamps: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    """Read a model in files with their times of change and sizes, by which changed files are told from known ones."""
    parts = [_part(each) for each, _, _ in stamps]
    metadata = parts[0].metadata
    if "general.architecture" not in metadata:
        raise ValueError("it does not name its architecture: it holds no model, or only a part of one")
    count = metadata.get("split.count", 1) or 1
    if count != len(parts):
        raise ValueError(f"it is one of {count} parts, whose names have to end in -00001-of-{count:05}.gguf and so on")
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    return GgufFile(path, metadata, tensors, tuple(each for part in parts for each in part.maps))


def _paths(path: Path) -> list[Path]:
    found = PART.search(path.name)
    if not found:
        return [path]
    stem, count = path.name[: found.start()], int(found[2])
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.is_file()]:
        raise ValueError(f"{len(missing)} of its {count} parts are missing ({missing[0]}): put all into one folder")
    return paths


def _part(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError("it does not begin as GGUF files do: it is another kind of file, or damaged")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that may be written
    reader = _Reader(data, 24)
    try:
        version, count, pairs = struct.unpack_from("<IQQ", data, 4)
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version} of GGUF, or of another byte order, and 2 and 3 are read")
        metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(pairs)}
        places = [reader.place() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-reader.position // alignment) * alignment
        tensors = {name: _stored(data, start + at, name, format, shape) for name, shape, format, at in places}
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError("it ends too early or is damaged: copy or download it again") from error
    return GgufFile(path, metadata, tensors, (data,))


def _stored(data: mmap.mmap, start: int, name: str, format: int, shape: tuple[int, ...]) -> Stored:
    """Return a tensor at a place of a file. Raises IndexError if the file ends before it does."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if format not in {int(each) for each in GGML_QUANT_SIZES}:
        raise ValueError(f"{name} is in format {format}, which the installed gguf package does not know: upgrade it")
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType(format)]
    width = shape[-1] // inputs * size
    rows = math.prod(shape[:-1])
    if start + rows * width > len(data):
        raise IndexError(name)
    view = memoryview(data)[start : start + rows * width]
    flat = torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)
    return Stored(name, format, shape, flat.view(rows, width))


class _Reader:
    """Reads the values at the beginning of a file one after another."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def number(self, kind: str) -> Any:
        (found,) = self.numbers(kind, 1)
        return found

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        form = struct.Struct(f"<{count}{kind}")
        found = form.unpack_from(self.data, self.position)
        self.position += form.size
        return found

    def text(self) -> str:
        start = self.position + LENGTH.size  # without `number`, for vocabularies have 100,000 texts
        self.position = start + LENGTH.unpack_from(self.data, self.position)[0]
        if self.position > len(self.data):
            raise IndexError(start)
        return self.data[start : self.position].decode()

    def value(self, kind: int) -> Any:
        """Return the next value, of a type by llama.cpp's number; a list of values for a list."""
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            return self.number(NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            return list(self.numbers(NUMBERS[inner], count))
        return [self.value(inner) for _ in range(count)]

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, shape, format and offset of the next tensor; llama.cpp stores the last dimension first."""
        name, dimensions = self.text(), self.number("I")
        shape = tuple(reversed(self.numbers("Q", dimensions)))
        return name, shape, self.number("I"), self.number("Q")


HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<wanted>[\w./ -]+)")
"""A hub name with a file or a format: org/name:FILE.gguf or org/name:Q4_K_M."""


def gguf_path(source: str | Path) -> Path | None:
    """Return the path of the .gguf file that a source names, downloaded if it is on the hub; None if it names none."""
    path = Path(source).expanduser()
    if path.is_file():
        return path if is_gguf(path) else None
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        files = [] if has_config and [*path.glob("*.safetensors"), *path.glob("*.bin")] else files_in(path)
        if len(files) > 1:
            names = ", ".join(each.name for each in files)
            raise ValueError(f"cannot load the model {str(source)!r}: it has {len(files)} files ({names}): name one.")
        return files[0] if files else None
    found = HUB.fullmatch(source) if isinstance(source, str) else None
    return _of_hub(source, found["repo"], found["wanted"]) if found else None


def is_gguf(path: Path) -> bool:
    """Whether a file is one of llama.cpp: by its ending, or by how it begins, as in stores that name files by sums."""
    if path.suffix.lower() == ".gguf" or not os.access(path, os.R_OK):
        return path.suffix.lower() == ".gguf"
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def files_in(folder: Path) -> list[Path]:
    """Return the models of a folder in .gguf files, the first part of each."""
    return [each for each in sorted(folder.glob("*.[gG][gG][uU][fF]")) if each.is_file() and _begins(each.name)]


def _begins(name: str) -> bool:
    """Whether a file begins a model: it is no later part of one, and no encoder of images."""
    part = PART.search(name)
    return (part is None or int(part[1]) == 1) and "mmproj" not in name


def _of_hub(source: str | Path, repo: str, wanted: str) -> Path:
    """Return the path of a hub's file by its name or the format in it. Raises ValueError if none or several fit."""
    names = [each for each in _names(source, repo) if each.endswith(".gguf")]
    format = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-.]|$)", re.IGNORECASE)
    fitting = [each for each in names if each == wanted] or [
        each for each in names if format.search(each) and _begins(Path(each).name)
    ]
    if len(fitting) != 1:
        what = "several files fit" if fitting else f"{repo} has no such file or format"
        listed = ", ".join(fitting or names) or "no .gguf files"
        raise ValueError(f"cannot load the model {str(source)!r}: {what}; it has {listed}.")
    part = PART.search(fitting[0])
    stem = fitting[0][: part.start()] if part else None
    files = [each for each in names if part and each.startswith(f"{stem}-") and PART.search(each)] or fitting
    try:
        places = {each: cached_file(repo, each) for each in files}
    except OSError as error:
        raise ValueError(f"cannot load the model {str(source)!r}: {str(error).splitlines()[0]}.") from error
    return Path(str(places[fitting[0]]))


def _names(source: str | Path, repo: str) -> list[str]:
    try:
        return HfApi().list_repo_files(repo)
    except (OfflineModeIsEnabled, OSError) as error:
        if (
            isinstance(error, HfHubHTTPError)
            and error.response is not None
            and error.response.status_code in (401, 404)
        ):
            raise ValueError(f"cannot load the model {str(source)!r}: the hub has no {repo} for you.") from error
    try:
        folder = Path(snapshot_download(repo, allow_patterns="*.gguf", local_files_only=True))
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"cannot load the model {str(source)!r}: the hub cannot be reached, and no file of {repo} was downloaded."
        ) from error
    return [str(each.relative_to(folder)) for each in sorted(folder.rglob("*.gguf"))]
