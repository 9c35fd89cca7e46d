"""The packages that the pair learns from besides the standard library: pure Python, permissive licences, pinned."""

from __future__ import annotations

import email
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .corpus import Source, is_table

LIST = Path(__file__).with_name("packages.txt")
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "_vendor", "vendor", "vendored", "_vendored", "migrations", "locale", "extern"}
)
# The comments at the top of a file are mostly licences, which repeat in thousands of files.
_HEADER = re.compile(r"\A(?:#.*\n|\s*\n)+")
SMALLEST, LARGEST = 200, 150_000  # bytes of a file: shorter ones say nothing, longer ones are mostly tables


@dataclass(frozen=True)
class Package:
    """A package's name, version and licence, and the text of its modules."""

    name: str
    version: str
    licence: str
    modules: list[Source]


def download(folder: Path) -> None:
    """Download the wheels of the list (packages.txt) with pip, unless all of them are in the folder."""
    here = {"==".join(wheel.name.lower().split("-")[:2]) for wheel in folder.glob("*.whl")}
    if not here.issuperset(LIST.read_text(encoding="utf-8").split()):
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        pure = ["--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none", "--python-version=3.12"]
        subprocess.run([*pip, *pure, f"--dest={folder}", f"--requirement={LIST}"], check=True)


def read_packages(folder: Path) -> list[Package]:
    """Read the packages from their wheels; a file that several hold is read once."""
    seen: set[bytes] = set()
    return [_read(wheel, seen) for wheel in sorted(folder.glob("*.whl"))]


def _read(wheel: Path, seen: set[bytes]) -> Package:
    name, version = wheel.stem.split("-")[:2]
    with zipfile.ZipFile(wheel) as files:
        about = next(place for place in files.namelist() if place.endswith(".dist-info/METADATA"))
        return Package(name, version, _licence(files.read(about)), list(_modules(files, seen)))


def _licence(metadata: bytes) -> str:
    """Return the licence that the metadata of a wheel states, in one line."""
    fields = email.message_from_bytes(metadata)
    stated = str(fields["License-Expression"] or fields["License"] or "").strip()
    if stated and "\n" not in stated and len(stated) < 80:
        return stated
    kinds = [str(kind) for kind in fields.get_all("Classifier", []) if str(kind).startswith("License ::")]
    return "; ".join(kind.split("::")[-1].strip() for kind in kinds) or stated.splitlines()[0]


def _modules(files: zipfile.ZipFile, seen: set[bytes]) -> Iterator[Source]:
    for place in sorted(files.namelist()):
        if not place.endswith(".py") or SKIPPED_FOLDERS.intersection(place.split("/")):
            continue
        content = files.read(place)
        digest = hashlib.sha256(content).digest()
        if digest in seen or not SMALLEST <= len(content) <= LARGEST:
            continue
        seen.add(digest)
        text = _HEADER.sub("", content.decode("utf-8", errors="ignore"))
        if not is_table(text):
            yield Source(place, text)
