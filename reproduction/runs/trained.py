"""The methods in the plane of baselines that need trained models, which are loaded from the folder of the copies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reproduction.baselines.exits import Exits
from reproduction.baselines.heads import ParallelHeads
from reproduction.runs.calibrating import thresholds
from reproduction.runs.methods import Method, blockwise, early_exits
from reproduction.runs.subjects import Loading, Subject
from reproduction.standins.copies import Copies
from reproduction.standins.tuning import HEADS, TARGET
from slipstream.engine.engine import Engine
from slipstream.engine.load import load


@dataclass
class Trained:
    """The methods that need trained models, each of which is trained if missing and loaded once."""

    copies: Copies
    how: Loading
    _engines: dict[str, Engine] = field(default_factory=dict)
    _exits: Exits | None = None

    def blockwise(self, subject: Subject) -> list[Method]:
        """Return Blockwise Parallel Decoding with the frozen base and with the fine-tuned one."""
        frozen, tuned = self.copies.frozen_heads, self.copies.blockwise
        base = self._engine(str(tuned / TARGET))
        return blockwise(subject, ParallelHeads.load(frozen), (base, ParallelHeads.load(tuned / HEADS)))

    def early_exits(self, subject: Subject, found: dict[str, Any]) -> list[Method]:
        return early_exits(subject, self._leaving(), found["thresholds"])

    def calibrate(self, subject: Subject, first: int, texts: int, say: Callable[[str], Any]) -> dict[str, Any]:
        """Calibrate thresholds for CALM on `texts` sources from `first` on, which are not measured later."""
        return thresholds(subject, self._leaving(), first, texts, say)

    def _leaving(self) -> Exits:
        self._exits = self._exits or Exits(self._engine(str(self.copies.exits)).decoder.target)  # type: ignore[arg-type]
        return self._exits

    def _engine(self, folder: str) -> Engine:
        if folder not in self._engines:
            self._engines[folder] = load(folder, None, dtype=self.how.dtype, device=self.how.device)
        return self._engines[folder]
