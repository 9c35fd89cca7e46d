"""Options of a call: declared in one table, and found in every place where they can be given."""

import json
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from transformers import GenerationConfig
from typer.testing import CliRunner

from processes import OUTPUT, Command
from slipstream.cli.app import app
from slipstream.core.model_options import DRAFTS
from slipstream.core.options import OPTIONS, SHAPES, table
from slipstream.drafters.kinds import KINDS
from test_house import ROOT

# A fork in which both tables have one more line, `extra_p` and `extra_how`, and our modules come anew. It prints
# where these are found: with the places as they are, and with places whose names were written down before, by hand.
SCRIPT = r"""
import json, sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

for each in [each for each in sys.modules if each.partition(".")[0] == "slipstream"]:
    del sys.modules[each]
import slipstream

def add(name, line, extra):
    path = Path(slipstream.__file__).parent / "core" / f"{name}.py"
    table = sys.modules[f"slipstream.core.{name}"] = ModuleType(f"slipstream.core.{name}")
    before = path.read_text()
    assert before.count(line) == 1
    exec(compile(before.replace(line, extra + line), str(path), "exec"), vars(table))
    return table

extra = '    extra_p: float = option(0.0, "An extra one.", "between 0 (off) and 1", "[0, 1]", warps=True)\n'
table = add("options", "    min_p: float = option(", extra)
extra = '    extra_how: Any = model_option(None, "target", "An extra one.", "NAME")\n'
how = add("model_options", "    device_map: Any = model_option(", extra)

from typer.main import get_command
from typer.testing import CliRunner

from slipstream.cli import batch
from slipstream.cli.app import app
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.remote import messages
from slipstream.engine import load as loading, plan_file
from slipstream.engine.options import read_options
from slipstream.serve import options, schema
from slipstream.serve.batch import run
from slipstream.serve.recipe import Recipe
from slipstream.engine.worker import Capacity
from slipstream.serve.settings import ServeSettings

(folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
taken = []

def stop(recipe, lines, keep, on_load, progress):
    taken.extend(line.body.get("extra_p") for line in lines)
    raise KeyboardInterrupt

run.run = stop

def command(name, *values):
    for file in folder.glob("out*"):
        file.unlink()
    arguments = ["batch", str(folder / "prompts.jsonl"), "--out", str(folder / "out.jsonl"), name]
    return [CliRunner().invoke(app, [*arguments, value]).exit_code for value in values]

def refused(call):
    with suppress(ValueError):
        call()
        return False
    return True

def sent():
    opened = messages.OpenRow(1, messages.DraftMode.COUPLED, messages.settings_of(Sampling(extra_p=0.5)), (1,), 1)
    return messages.OpenRow.read(opened.frame(), 9).sampler().extra_p == 0.5

def loaded(call):
    # the further arguments of `load_model` when a target is loaded
    class Seen(Exception):
        pass

    def see(*_, **options):
        raise Seen(options)

    loading.load_scorer = see
    try:
        call()
    except Seen as seen:
        return seen.args[0].get("extra_how")

def planned():
    models = how.ModelOptions("t", verify="block", extra_how="x")
    plan_file.Plan(models, {1: 1}, 9).save(folder / "plan.json")
    return loaded(lambda: loading.load(plan=folder / "plan.json")) == "x"

def served():
    models = how.ModelOptions("t", extra_how="x")
    recipe = Recipe(models, ServeSettings(("m",)), Capacity(2))
    return loaded(replace(recipe, models=models).state) == "x"

def engine(body):
    return options.engine_options(body, Recipe(None, ServeSettings(("m",)), Capacity(2)), "t").get("extra_p") == 0.5

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
    names = {each: [one.name for one in commands[each].params] for each in commands}
    for each in ("generate", "chat", "batch", "check", "plan"):
        places[f"slipstream {each}"] = "extra_p" in names[each]
    taken.clear()
    places["a resumed batch"] = command("--extra-p", "0.5", "0.5", "0.25") == [130, 130, 2]
    places["lines of a batch"] = taken[:2] == [0.5, 0.5]
    places["load"] = loaded(lambda: slipstream.load("t", extra_how="x")) == "x"
    for each in ("generate", "chat", "batch", "serve", "check", "transcribe", "plan", "bench"):
        places[f"models of slipstream {each}"] = "extra_how" in names[each]
    places["a plan"], places["a server"] = planned(), served()
    places["models of a resumed batch"] = command("--extra-how", "x", "x", "y") == [130, 130, 2]
    return places

everywhere = found()
known = [each for each in table.SHAPES if each != "extra_p"]
messages.SHAPES = known
options.REQUEST_FIELDS = {each: field for each, field in table.REQUEST_FIELDS.items() if each != "extra_p"}
batch.REQUEST_FIELDS = options.REQUEST_FIELDS
batch.MODEL_OPTIONS = {each: one for each, one in how.MODEL_OPTIONS.items() if each != "extra_how"}
print(json.dumps([everywhere, found()]))
raise SystemExit
"""


def test_an_option_that_is_declared_in_the_table_is_found_everywhere(tmp_path: Path) -> None:
    with TemporaryFile("w+") as out:
        done = Command(streams={OUTPUT: out.fileno()}, first=partial(exec, SCRIPT, {"folder": tmp_path}))
        with done.stderr:
            errors = done.stderr.read()
        assert done.wait() == 0, errors
        out.seek(0)
        everywhere, by_hand = json.load(out)
    assert [place for place, found in everywhere.items() if not found] == []
    by_hand_places = ["completions", "chats", "draft servers", "a resumed batch", "lines of a batch"]
    by_hand_places += ["models of a resumed batch"]
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


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("generate --draft loo", ["lookup"]),
        ("plan --draft da", ["datastore:"]),
        ("bench --verify ", ["token", "block", "match", "coupled", "gbv:", "lenient:"]),
        ("serve --target smo", ["smollm2"]),
        ("chat --draft nonsense", []),
    ],
)
def test_shells_complete_drafts_and_rules(line: str, found: list[str]) -> None:
    words = f"slipstream {line}"
    asked = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(app, prog_name="slipstream", env=asked).stdout.split() == found


def test_the_help_names_the_drafts_that_there_are() -> None:
    """Completion must not wait for torch, which the table of drafts needs."""
    unnamed = {"model", "tls"}
    assert {form.partition(":")[0] for form in DRAFTS} == KINDS.keys() - unnamed
