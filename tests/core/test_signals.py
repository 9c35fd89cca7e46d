"""Signals that end a command: also where a library drops the exception while it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

DROPS = """
import os, signal
try:
    os.kill(os.getpid(), signal.{kind})
except BaseException:
    pass
"""
"""A module that drops whatever comes while it is imported."""

COMMAND = """
import signal, sys
from slipstream.core.signals import end_commands
for kind in (signal.SIGINT, signal.SIGTERM):
    signal.signal(kind, signal.default_int_handler)  # a background shell would have Ctrl-C ignored
if {handled}:
    end_commands()
print("begun")
import drops
print("went on")
"""


@pytest.mark.parametrize(
    ("kind", "handled", "code", "told"),
    [
        ("SIGTERM", True, 130, ("begun\n", "slipstream: interrupted.\n")),
        pytest.param("SIGINT", True, 130, ("begun\n", "slipstream: interrupted.\n"), marks=pytest.mark.slow),
        ("SIGTERM", False, 0, ("begun\nwent on\n", "")),  # what Python does by itself
    ],
)
def test_a_signal_while_a_module_is_imported_ends_a_command(
    kind: str, handled: bool, code: int, told: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "drops.py").write_text(DROPS.format(kind=kind))
    command = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + COMMAND.format(handled=handled)
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (done.returncode, (done.stdout, done.stderr)) == (code, told)
