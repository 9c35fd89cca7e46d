"""Finding a .gguf file by what users write: its path, a folder that holds one, or a hub name with a file or format."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers.utils import cached_file

from slipstream.models.loading.gguf_file import PART

HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<wanted>[\w./ -]+)")
"""A hub name with a file or a format: org/name:FILE.gguf or org/name:Q4_K_M."""


def gguf_path(source: str | Path) -> Path | None:
    """Return the path of the .gguf file that a source names, downloaded if it is on the hub; None if it names none."""
    path = Path(source).expanduser()
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else files_in(path)
        if len(files) > 1:
            names = ", ".join(each.name for each in files)
            raise ValueError(
                f"cannot load the model {str(source)!r}: it has {len(files)} files ({names}): name one of them."
            )
        return files[0] if files else None
    found = HUB.fullmatch(source) if isinstance(source, str) else None
    return _of_hub(source, found["repo"], found["wanted"]) if found else None


def files_in(folder: Path) -> list[Path]:
    """Return the models of a folder in .gguf files, the first part of each."""
    return [each for each in sorted(folder.glob("*.gguf")) if _begins(each.name)]


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
