"""The origin of a model: a hub name, a folder, or a .gguf file in one, its adapter, and whether its code may run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from slipstream.models.loading.adapters import base_of
from slipstream.models.loading.gguf_config import config_of
from slipstream.models.loading.gguf_file import GgufFile, gguf_path
from slipstream.models.loading.pairings import located


@dataclass(frozen=True)
class Origin:
    """The `source` of a model as the user gave it, and the `place` and `options` that `from_pretrained` gets for it.
    The `adapter` that is merged into its weights is a folder or a hub name."""

    source: str | Path
    place: str | Path
    options: dict[str, Any]
    adapter: str | Path | None = None

    @staticmethod
    def of(source: str | Path, trust_remote_code: bool = False, adapter: str | Path | None = None) -> Origin:
        """Return the origin of a source. Code stored with it runs only if trusted, and without a prompt to the user.

        A source that is an adapter itself has the place of its base. Raises ValueError in one sentence if it names no
        .gguf file of a folder or the hub, or several, or if an adapter's base is not there.
        """
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        place = located(source)
        if path := gguf_path(place):
            return Origin(source, path.parent, {**options, "gguf_file": path.name}, adapter)
        if (base := base_of(place)) is None:
            return Origin(source, place, options, adapter)
        if adapter is not None:
            raise ValueError(f"{source} is an adapter itself, so adapter={str(adapter)!r} has no model: name its base.")
        return replace(Origin.of(base, trust_remote_code, source), source=source)

    @property
    def gguf(self) -> Path | None:
        name = self.options.get("gguf_file")
        return Path(self.place) / name if name else None

    @property
    def file(self) -> str | Path:
        return self.gguf or self.place

    def config(self) -> PreTrainedConfig:
        """Return the model's configuration. Raises ValueError, whose message is only the fault, for a faulty .gguf."""
        if self.gguf:
            return config_of(GgufFile.read(self.gguf))
        return AutoConfig.from_pretrained(self.place, **self.options)


def source_name(source: Any) -> str | None:
    """Return the short name of a model: of a path its last part, else as given; None for a loaded or nameless one."""
    if not isinstance(source, str | Path) or not source:
        return None
    path = Path(source).expanduser()
    return path.resolve().name if isinstance(source, Path) or path.exists() else source
