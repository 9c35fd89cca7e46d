"""The origin of a model: a hub name, a folder, or a .gguf file in one, and whether its own code may run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Origin:
    """The `source` of a model as the user gave it, and the `place` and `options` that `from_pretrained` gets for it."""

    source: str | Path
    place: str | Path
    options: dict[str, Any]

    @staticmethod
    def of(source: str | Path, trust_remote_code: bool = False) -> Origin:
        """Return the origin of a source. Code stored with it runs only if trusted, and without a prompt to the user."""
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        path = Path(source).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return Origin(source, path.parent, {**options, "gguf_file": path.name})
        return Origin(source, source, options)


def source_name(source: Any) -> str | None:
    """Return the name of a model for messages; None for a loaded model, whose configuration has its name."""
    return Path(source).name if isinstance(source, Path) else source if isinstance(source, str) else None
