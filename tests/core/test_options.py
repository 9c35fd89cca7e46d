"""Options of a call: declared in one table, and found in every place where they can be given."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig

from slipstream.core.options import OPTIONS, SHAPES, table
from test_house import ROOT

# A process in which the table has one more line, `extra_p`. It prints where that option is found: with the places as
# they are, and with places whose names were written down before, as if by hand.
SCRIPT = r"""
import json, sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import slipstream

name, line = "slipstream.core.options", "    min_p: float = option("
path = Path(slipstream.__file__).parent / "core" / "options.py"
sys.modules[name] = table = ModuleType(name)
before = path.read_text()
assert before.count(line) == 1
extra = '    extra_p: float = option(0.0, "An extra one.", "between 0 (off) and 1", "[0, 1]", warps=True)\n'
exec(compile(before.replace(line, extra + line), str(path), "exec"), vars(table))

from typer.main import get_command
from typer.testing import CliRunner

from slipstream.cli import batch
from slipstream.cli.app import app
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.remote import messages
from slipstream.engine.options import read_options
from slipstream.serve import options, schema
from slipstream.serve.batch import run
from slipstream.serve.settings import Limits, ServeSettings

folder = Path(sys.argv[1])
(folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
taken = []

def stop(self, recipe, lines, sink, on_answer):
    taken.extend(line.body.get("extra_p") for line in lines)
    raise KeyboardInterrupt

run.Local.run = stop

def command(value):
    arguments = ["batch", str(folder / "prompts.jsonl"), "--out", str(folder / "out.jsonl"), "--extra-p", value]
    return CliRunner().invoke(app, arguments)

def refused(call):
    with suppress(ValueError):
        call()
        return False
    return True

def sent():
    opened = messages.OpenRow(1, messages.DraftMode.COUPLED, messages.settings_of(Sampling(extra_p=0.5)), (1,), 1)
    return messages.OpenRow.read(opened.frame(), 9).sampler().extra_p == 0.5

def engine(body):
    return options.engine_options(body, ServeSettings(("m",)), "t").get("extra_p") == 0.5

def found():
    commands = get_command(app).commands
    chat = {"messages": [{"role": "user", "content": "a"}]}
    places = {
        "Python": read_options({"extra_p": 0.5})[1] == {"extra_p": 0.5} and refused(lambda: Sampling(extra_p=2.0)),
        "the grown temperature": Sampling(extra_p=0.5, temperature=1.0).temperature_alone is None,
        "completions": engine(schema.CompletionRequest(prompt="a", extra_p=0.5)),
        "chats": engine(schema.ChatRequest(**chat, extra_p=0.5)),
        "bounds of requests": refused(lambda: schema.ChatRequest(**chat, extra_p=1.5)),
        "draft servers": sent(),
        "documents": "`extra_p`" in table.table(),
    }
    for each in ("generate", "chat", "batch", "check", "plan"):
        places[f"slipstream {each}"] = "extra_p" in [one.name for one in commands[each].params]
    first, again, other = command("0.5"), command("0.5"), command("0.25")
    places["lines of a batch"] = taken[:2] == [0.5, 0.5]
    places["a resumed batch"] = (first.exit_code, again.exit_code, other.exit_code) == (130, 130, 2)
    taken.clear()
    for file in folder.glob("out*"):
        file.unlink()
    return places

everywhere = found()
known = [each for each in table.SHAPES if each != "extra_p"]
messages.SHAPES = known
options.REQUEST_FIELDS = {each: field for each, field in table.REQUEST_FIELDS.items() if each != "extra_p"}
batch.REQUEST_FIELDS = options.REQUEST_FIELDS
print(json.dumps([everywhere, found()]))
"""


def test_an_option_that_is_declared_in_the_table_is_found_everywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    everywhere, by_hand = json.loads(done.stdout)
    assert [place for place, found in everywhere.items() if not found] == []
    by_hand_places = ["completions", "chats", "draft servers", "lines of a batch", "a resumed batch"]
    assert [place for place, found in by_hand.items() if not found] == by_hand_places  # a list of names forgets it


def test_the_documents_hold_the_table() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert table() in page, "write what `python -m slipstream.core.options` prints between the marks of the table"
    assert table().replace("top_k", "top_j") not in page


def test_names_in_transformers_are_its_own() -> None:
    names = [name if each.hf == "" else each.hf for name, each in OPTIONS.items() if each.hf is not None]
    assert len(names) > 15 and [name for name in names if not hasattr(GenerationConfig(), name)] == []
    assert not hasattr(GenerationConfig(), "top_j")


def test_numbers_are_possible_within_their_bounds_alone() -> None:
    for each in OPTIONS.values():
        if not each.is_number:
            continue
        assert each.default is None or each.default in each.possible
        each.check(each.default)
        for end in (each.possible.least, each.possible.most):
            if math.isfinite(end):
                beyond = end - 1 if end == each.possible.least else end + 1
                with pytest.raises(ValueError, match=f"^{each.name}={beyond!r} is not possible: it must be "):
                    each.check(beyond)
        with pytest.raises(ValueError, match=f"^{each.name}='x' is not possible"):
            each.check("x")
    assert "temperature" in SHAPES and "seed" not in SHAPES
