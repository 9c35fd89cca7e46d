"""`python -m reproduction` on the command line."""

import json
import resource
from pathlib import Path

import pytest

from terminal import reproduce


def test_tables_without_models_and_their_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "docs" / "paper"
    result = reproduce("table1", "figure3", "--out", str(out))
    assert result.exit_code == 0 and "6.86" in result.stdout and "best gamma" in result.stdout
    assert {file.name for file in out.iterdir()} == {"table1.json", "figure3.json", "figure3.svg"}
    page = (out.with_name("paper.md")).read_text(encoding="utf-8")
    assert "$ python -m reproduction table1 --out reproduction/paper" in page and "figure3.svg" in page
    assert json.loads((out / "table1.json").read_text())["rows"][0][0] == 0.6


def test_json_is_nothing_else() -> None:
    (table,) = json.loads(reproduce("table1", "--json").stdout)
    assert table["name"] == "table1" and len(table["rows"]) == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("table9",), "'table9' is no table or figure of the paper"),
        (("table2",), "needs encoder-decoders: give --standins FOLDER"),
        (("table5", "--standins", "nowhere"), "needs encoder-decoders"),
        (("table2", "--standins", "x", "--pairs", "nowhere"), "there is no file *train*.en"),
        (("table2", "--target", "t5-large", "--pairs", "x"), "--target needs its drafts"),
        (("table2", "--target", "t5-large", "--draft", "t5-small"), "--pairs FOLDER or --articles FILE"),
        (("bleu", "--standins", "x", "--articles", "nowhere.json"), "BLEU is of translations"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = reproduce(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and sentence in result.stderr


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of somebody else, in which commands run."""
    (tmp_path / "out").mkdir()
    for name in ("out/figure3.svg", "other.md", "notes.md"):
        (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "out", "says"),
    [
        ("figure3", "out", "out/figure3.svg: it exists and is no picture"),
        ("table1", "other", "other.md: it exists and is no page of the paper"),
        ("table1", "notes.md", "notes.md is no folder"),
    ],
)
def test_no_stranger_is_replaced(place: Path, name: str, out: str, says: str) -> None:
    before = contents(place)
    ended = reproduce(name, "--out", out)
    assert ended.exit_code == 2 and says in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
    assert contents(place) == before


def test_a_full_disk_is_one_sentence_and_keeps_what_was_there(place: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert reproduce("figure3", "--out", "mine").exit_code == 0
    before = contents(place)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        ended = reproduce("figure3", "--out", "mine", "--again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.exit_code == 2 and ended.stderr.startswith("slipstream: cannot write "), ended.stderr
    assert ended.stderr.endswith(": file too large.\n") and ended.stderr.count("\n") == 1, ended.stderr
    assert contents(place) == before
