"""Reading single tensors and JSON files of a checkpoint that transformers has no class for, or drops on loading."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from slipstream.core.values import first_sentence

NO_NAME = "there is no such folder, and the hub has no such names"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
DOWNLOADED: dict[str, Any] = {
    "local_files_only": True,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}


def read_record(source: str | Path, name: str) -> dict[str, Any] | None:
    """Read a JSON object of a folder or hub name; None if there is no such file. Raises ValueError if it is damaged."""
    file = checkpoint_file(source, name)
    if file is None:
        return None
    if fault := json_fault(file):
        raise ValueError(f"{name} of {str(source)!r} is damaged ({fault}).")
    record: dict[str, Any] = json.loads(file.read_bytes())
    return record


def read_tensors(source: str | Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint in safetensors for whose names `wanted` is true."""
    index = read_record(source, INDEX)
    files = {file for name, file in (index or {}).get("weight_map", {}).items() if wanted(name)}
    tensors: dict[str, Tensor] = {}
    for name in sorted(files) if index else [WEIGHTS]:
        with _opened(source, name) as weights:
            tensors |= {key: weights.get_tensor(key) for key in filter(wanted, weights.keys())}
    return tensors


@contextmanager
def _opened(source: str | Path, name: str) -> Iterator[Any]:
    file = checkpoint_file(source, name)
    if file is None:
        raise ValueError(f"{str(source)!r} has no {name}: its weights are read in safetensors only.")
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except SafetensorError as error:
        raise ValueError(f"{name} of {str(source)!r} is damaged ({first_sentence(error)}).") from error


def checkpoint_file(source: str | Path, name: str, download: bool = True) -> Path | None:
    """Return the path of a file of a folder or hub name; None if there is none, or none without a `download`."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        found = cached_file(
            str(source), name, _raise_exceptions_for_missing_entries=False, **({} if download else DOWNLOADED)
        )
    except (OSError, ValueError) as error:
        if download:
            fault = NO_NAME if "Repo id must" in str(error) else first_sentence(error).removesuffix(".")
            raise ValueError(f"cannot find {name} of {str(source)!r}: {fault}.") from error
        return None
    return Path(found) if found else None


def json_fault(path: Path) -> str | None:
    try:
        return None if isinstance(json.loads(path.read_bytes()), dict) else "it holds no JSON object"
    except UnicodeDecodeError:
        return "it is no text"
    except json.JSONDecodeError as error:
        return f"{error.msg}, line {error.lineno} column {error.colno}"
    except (OSError, RecursionError) as error:
        return getattr(error, "strerror", None) or "it is nested too deeply"


def tensor_names(source: str | Path) -> list[str]:
    index = read_record(source, INDEX)
    if index is not None:
        return sorted(index.get("weight_map", {}))
    with _opened(source, WEIGHTS) as weights:
        return sorted(weights.keys())
