"""`slipstream paper` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from terminal import run


def test_tables_without_models_and_their_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "docs" / "paper"
    result = run("paper", "table1", "figure3", "--out", str(out))
    assert result.exit_code == 0 and "6.86" in result.stdout and "best gamma" in result.stdout
    assert {file.name for file in out.iterdir()} == {"table1.json", "figure3.json", "figure3.svg"}
    page = (out.with_name("paper.md")).read_text(encoding="utf-8")
    assert "$ slipstream paper table1 --out docs/paper" in page and "figure3.svg" in page
    assert json.loads((out / "table1.json").read_text())["rows"][0][0] == 0.6


def test_json_is_nothing_else() -> None:
    (table,) = json.loads(run("paper", "table1", "--json").stdout)
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
    result = run("paper", *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and sentence in result.stderr
