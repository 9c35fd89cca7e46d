"""Where a model comes from: a hub name, a folder, or a .gguf file in one, and whether its own code may run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Origin:
    """What a user named, and how transformers is asked for it: a place, and options for all that is read there."""

    source: str | Path
    place: str | Path
    options: dict[str, Any]

    @staticmethod
    def of(source: str | Path, trust_remote_code: bool = False) -> Origin:
        """The origin that a source names. Code that lies there runs only where it is trusted; nobody is asked."""
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        path = Path(source).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return Origin(source, path.parent, {**options, "gguf_file": path.name})
        return Origin(source, source, options)


def source_name(source: Any) -> str | None:
    """How a model is called in messages; None for a loaded one, which knows its name."""
    return Path(source).name if isinstance(source, Path) else source if isinstance(source, str) else None
