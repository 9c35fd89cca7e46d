"""Every table and figure by the name users give, and the function that makes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from reproduction import figures, ideal, plane, tables
from reproduction.lab import Inputs, Lab
from reproduction.pages.draw import draw
from reproduction.pages.page import write_page
from reproduction.pages.sheet import Sheet, read_sheets, write_json
from reproduction.runs.subjects import Loading
from slipstream.files import JsonObject, Recognisable, TextFileKind, atomic_write

MAKERS: dict[str, Callable[[Lab], Sheet]] = {
    "table1": lambda lab: ideal.table1(),
    "table2": tables.table2,
    "table3": tables.table3,
    "table4": tables.table4,
    "table5": tables.table5,
    "figure1": figures.figure1,
    "figure2": lambda lab: ideal.figure2(),
    "figure3": lambda lab: ideal.figure3(),
    "figure4": lambda lab: ideal.figure4(),
    "figure5": figures.figure5,
    "gamma": figures.gamma,
    "iid": figures.iid,
    "bleu": tables.bleu,
    "baselines": plane.baselines,
}
ALL = "all"

ALONE = ("table1", "figure1", "figure2", "figure3", "figure4")
"""Tables and figures that need no corpora."""

STORY_PAGE = "figure1.html"


def outputs(names: Sequence[str]) -> dict[str, Recognisable]:
    """Return the files that `make` may write for these names, each with the kind that tells it from other files."""
    files: dict[str, Recognisable] = {STORY_PAGE: TextFileKind("page", "<!DOCTYPE html>")} if "figure1" in names else {}
    for name in names:
        files[f"{name}.json"] = JsonObject("table or figure of the paper", {"name": name, "columns": None})
        files[f"{name}.svg"] = TextFileKind("picture", "<svg")
    return files


def make(name: str, lab: Lab) -> Sheet:
    """Make a table or figure that names the command for it, and write its files if the lab has a folder."""
    quick = " --quick" * lab.scale.quick
    options = "" if name in ALONE else f"{_options(lab.inputs)}{_types(lab.how)}"
    compiled = " --compile" * (lab.how.compile and name in ("table2", "table4", "figure5"))
    command = f"python -m reproduction {name}{options}{compiled}{quick} --out reproduction/paper"
    sheet = replace(MAKERS[name](lab), command=command)
    if lab.out:
        _write(sheet, lab, lab.out)
    return sheet


def _options(inputs: Inputs) -> str:
    places = {"standins": "FOLDER", "pairs": "FOLDER", "articles": "FILE", "texts": "FILE"}
    names = [f" --{name} {place}" for name, place in places.items() if getattr(inputs, name)]
    models = [f" --target {inputs.target}"] * bool(inputs.target) + [f" --draft {draft}" for draft in inputs.drafts]
    return "".join([*names, *models])


def _types(how: Loading) -> str:
    defaults = Loading()
    target = "" if how.dtype == defaults.dtype else f" --dtype {how.dtype}"
    others = {"encoder-dtype": how.encoder_dtype, "draft-dtype": how.draft_dtype}
    return target + "".join(f" --{name} {dtype}" for name, dtype in others.items() if dtype)


def _write(sheet: Sheet, lab: Lab, out: Path) -> None:
    write_json(sheet.as_dict(), out / f"{sheet.name}.json")
    if sheet.drawn:
        draw(sheet, out / f"{sheet.name}.svg")
    if sheet.name == "figure1":
        with atomic_write(out / STORY_PAGE) as part:
            part.write_text(lab.story()["html"], encoding="utf-8")
    write_page(read_sheets(out, tuple(MAKERS)), out)
