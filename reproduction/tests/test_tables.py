"""Every table and figure from families that are trained in seconds, through the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_training import PAIRS, RECIPE, aligned, sentences

from reproduction import catalogue, lab, published, tables
from reproduction.pages.page import page
from reproduction.pages.sheet import read_sheets
from reproduction.runs import speeds
from reproduction.runs.speeds import Course, SpeedCosts
from reproduction.standins import python_prompts
from terminal import reproduce

TINY = lab.Scale(40, 12, 4, Course(1, 2, 1), {published.TRANSLATION: RECIPE, published.SUMMARIES: RECIPE}, quick=True)
NAMES = ("table2", "table3", "table4", "table5", "figure1", "figure5", "gamma", "iid")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where everything lies; the tables are made once."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("paper")
    documents = replace(PAIRS, held_out=tuple(sentences(16)))  # four of four sentences
    found = ["--standins", str(folder / "standins"), "--pairs", str(aligned(folder / "pairs", documents))]
    found += ["--quick", "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "QUICK", TINY)
        patch.setattr(lab.trails, "REPLICATES", 100)
        patch.setattr(lab, "LENGTHS", {published.TRANSLATION: 10})
        patch.setattr(python_prompts, "texts", lambda: ["def f(x):\n    return x\n"])
        result = reproduce(*NAMES, *found)
    assert result.exit_code == 0, result.stderr
    return found


@pytest.fixture
def out(arguments: list[str]) -> Path:
    return Path(arguments[-1])


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a sheet by their heads; of equal heads, the last."""
    record = json.loads((out / f"{name}.json").read_text())
    heads = [column["name"] for column in record["columns"]]
    return [dict(zip(heads, row, strict=True)) for row in record["rows"]]


def test_all_sheets_are_on_the_page(out: Path) -> None:
    sheets = read_sheets(out, tuple(catalogue.MAKERS))
    assert [made.name for made in sheets] == [name for name in catalogue.MAKERS if name in NAMES]
    assert out.with_name("out.md").read_text(encoding="utf-8") == page(sheets, "out")
    assert all(made.quick and made.environment and made.rows for made in sheets)
    commands = {made.name: made.command for made in sheets}
    assert (
        commands["table2"]
        == "python -m reproduction table2 --standins FOLDER --pairs FOLDER --quick --out reproduction/paper"
    )
    assert {file.name for file in out.glob("*.svg")} == {"figure5.svg", "gamma.svg", "iid.svg"}
    assert "<html>" in (out / "figure1.html").read_text(encoding="utf-8")


def test_speeds_follow_from_what_was_measured(out: Path) -> None:
    table2, table4 = rows(out, "table2"), rows(out, "table4")
    assert [(row["task"], row["draft"], row["T"]) for row in table2] == [("translation", "small", t) for t in (0, 1)]
    for row, expected in zip(table2, table4, strict=True):
        assert row["gamma"] in published.GAMMAS and 0 <= row["alpha"] <= 1
        assert expected["measured"] == row["x plain"]
        theorem = tables.walltime_factor(row["alpha"], row["gamma"], expected["c"])
        assert expected["Exp"] == pytest.approx(theorem)
        assert expected["measured / expected - 1"] == pytest.approx(row["x plain"] / expected["+ the race's texts"] - 1)
        assert expected["Exp recomputed"] == pytest.approx(expected["Exp, paper"], abs=0.08)


def test_rounds_of_the_race_are_those_of_the_walk_along_its_texts(out: Path) -> None:
    """Greedily nothing is left to chance; at temperature 1 the walk sums over all rounds that may come."""
    measured = {t: json.loads((out / "measured" / f"speeds-translation-{t}.json").read_text()) for t in (0, 1)}
    greedy, sampled = (measured[t]["drafts"]["small"] for t in (0, 1))
    assert greedy["tokens_per_call"] == pytest.approx(greedy["tokens_per_call_raced"])
    assert sampled["tokens_per_call_raced"] >= 1
    texts = json.loads((out / "measured" / "raced-translation-0.json").read_text())["drafts"]
    assert set(texts) == {"small"} and texts["small"]["positions"] <= 2 * 10  # two sources of the race


def test_alphas_of_one_measurement_agree(out: Path) -> None:
    strict = {(row["task"], row["draft"]): row["T=1, ours"] for row in rows(out, "table3")}
    assert {draft for task, draft in strict if task == "translation"} == {"unigram", "bigram", "small"}
    assert {draft for task, draft in strict if task == "embedded"} == {"unigram", "bigram", "embedded draft"}
    measured = json.loads((out / "measured" / "alphas-translation-1.json").read_text())["drafts"]
    for row in (row for row in rows(out, "table5") if row["T"] == 1):
        figures = measured[row["draft"]]
        assert figures["lenient"]["1"] == pytest.approx(strict["translation", row["draft"]], abs=1e-5)
        assert figures["lenient"]["0.1"] == row["ours"] >= figures["lenient"]["1"]


def test_the_timeline_ends_where_its_calls_do(out: Path) -> None:
    record = json.loads((out / "figure5.json").read_text())
    for lane, row in zip(record["lanes"], rows(out, "figure5"), strict=True):
        ends = [end for _, end, _ in lane["calls"]]
        assert ends == sorted(ends) and ends[-1] == row["all, ms"]
        assert sum(who == "target" for _, _, who in lane["calls"]) == row["target runs"] <= row["tokens"]
    assert len({row["tokens"] for row in rows(out, "figure5")}) == 1  # the same greedy text


@pytest.mark.slow
def test_what_was_measured_is_used_again(arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("measured again")

    before = (out / "table4.json").read_text()
    monkeypatch.setattr(lab, "QUICK", TINY)
    monkeypatch.setattr(lab.speeds, "race", refuse)
    assert reproduce("table4", *arguments).exit_code == 0
    assert (out / "table4.json").read_text() == before
    again = reproduce("table4", "--again", *arguments[:-2])
    assert again.exit_code == 2 and "measured again" in again.stderr


@pytest.mark.slow
def test_bleu_is_unchanged_by_speculation(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu")
    monkeypatch.setattr(lab, "QUICK", TINY)
    (table,) = json.loads(reproduce("bleu", "--json", *arguments[:-2]).stdout)
    greedy = [row for row in table["rows"] if row[1] == 0]
    assert [row[0] for row in greedy] == ["plain", "small"]
    assert all(row[5] == row[6] == 4 and row[2] == greedy[0][2] for row in greedy)
    assert "nrefs:1" in table["notes"][0]


@pytest.mark.slow
def test_models_of_ones_own(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    family = Path(arguments[1]) / "quick" / "translation"
    monkeypatch.setattr(lab, "QUICK", TINY)
    monkeypatch.setattr(lab.trails, "REPLICATES", 100)
    own = ("--target", str(family / "target"), "--draft", str(family / "small"), "--pairs", arguments[3], "--quick")
    (table,) = json.loads(reproduce("table3", "--json", *own, "--draft-dtype", "bfloat16").stdout)
    assert [row[2] for row in table["rows"]] == ["unigram", "bigram", "small"]
    assert "--draft-dtype bfloat16" in table["command"]
    assert table["environment"]["dtypes"] == {"translation target": "float32", "translation small": "bfloat16"}


def test_costs_of_a_text() -> None:
    costs = SpeedCosts(target=2.0, draft=0.1, rest=0.5, target_once=3.0, draft_once=1.0)
    assert costs.per_text(5, 4) == pytest.approx(3 + 1 + 4 * (2 + 0.5 + 0.5))
    assert replace(costs, draft=0.0).per_text(0, 1) == 6.5


def test_the_gamma_with_the_least_time_is_chosen() -> None:
    few, many = ({"3": 1.2, "5": 1.25, "7": 1.26}, {"3": 3.6, "5": 5.1, "7": 6.5})
    for per_round, draft, gamma in ((few, 0.3, 3), (many, 0.01, 7), (many, 3.0, 3)):
        alphas = {"mean_length": 20.0, "tokens_per_round": per_round}
        costs = SpeedCosts(1.0, draft, 0.1, 2.0, 0.5)
        assert speeds.chosen(alphas, dict.fromkeys((3, 5, 7), costs)) == gamma
        assert speeds.chosen(alphas, {3: costs, 5: costs, 7: replace(costs, target=2.0)}) == min(gamma, 5)
