"""Checks, before anything is measured, whether a plot can be written to a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipstream.files import Picture, check_writable


def check_plot(file: Path | str, force: bool = False, inputs: Iterable[str] = ()) -> None:
    """Raises ValueError, in one sentence, if no plot can be written there; `inputs` are never replaced."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'slipstream[plot]'.") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(file).suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot {file} has no kind of picture at its end: use one of {', '.join(sorted(kinds))}.")
    check_writable(Path(file), Picture(), force, inputs)
