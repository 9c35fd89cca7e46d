"""The paper's tables and figures: their formulae, what is counted along texts, sheets, the page and the command."""

import json
import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from reproduction import catalogue, figures, ideal, published, tables
from reproduction.lab import Inputs, Lab
from reproduction.pages.page import INTRODUCTION, machine, page
from reproduction.pages.sheet import Column, Curve, Sheet, markdown, ratio, read_sheets, sheet
from reproduction.runs import acceptance as trails
from reproduction.runs import expected_rounds as walks
from reproduction.runs.subjects import Subject
from reproduction.standins import python_prompts as writing
from slipstream import theory
from slipstream.core.request import Request
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from toys import dirichlet_table
from toys.tables import TableScorer

HERE = Path(__file__).parents[1]


# ---- formulae ---------------------------------------------------------------------------------------------------


def test_table_1_row_by_row() -> None:
    rows = ideal.table1().rows
    assert len(rows) == 6
    for alpha, gamma, operations, ours, _, speed, ours_too, _ in rows:
        assert (round(ours, 2), round(ours_too, 2)) == (operations, speed), (alpha, gamma)


def test_table_3_has_the_alphas_of_table_2() -> None:
    alphas = {(row.task, row.draft): (row.greedy, row.sampled) for row in published.TABLE_3}
    for row in published.TABLES_2_AND_4:
        assert alphas[row.task, row.draft][row.temperature] == row.alpha


def test_curves_are_the_formulae() -> None:
    for made in (ideal.figure2(), ideal.figure3(), ideal.figure4()):
        assert all(curve.x == ideal.ALPHAS and len(curve.y) == len(curve.x) for curve in made.curves)
    (limit,) = [curve for curve in ideal.figure2().curves if "limit" in curve.label]
    assert limit.y[ideal.ALPHAS.index(0.9)] == pytest.approx(10)
    solid, dashed = ideal.figure4().curves[:2]
    assert (solid.dashed, dashed.dashed) == (False, True)
    assert solid.y[0] == 1 and dashed.y[0] == 2  # alpha = 0, gamma = 1: nothing gained for twice the operations


# ---- walks ------------------------------------------------------------------------------------------------------


def played(coins: tuple[bool, ...], gamma: int) -> int:
    """Rounds of a text whose test at every position is known to succeed or fail."""
    place = rounds = 0
    while place < len(coins):
        rounds, kept = rounds + 1, 0
        while kept < gamma and place < len(coins) and coins[place]:
            kept, place = kept + 1, place + 1
        place += 1  # correction or bonus; beyond the end it is not written
    return rounds


@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
def test_cost_is_the_mean_over_all_outcomes(gamma: int) -> None:
    rng = random.Random(gamma)
    chances = [rng.choice([0.0, 1.0, rng.random(), rng.random()]) for _ in range(8)]
    mean = 0.0
    for coins in product((False, True), repeat=len(chances)):
        weight = math.prod(chance if coin else 1 - chance for chance, coin in zip(chances, coins, strict=True))
        mean += weight * played(coins, gamma)
    assert walks.cost(chances, gamma, lambda kept: 1.0) == pytest.approx(mean)
    assert walks.cost(chances, gamma + 1, lambda kept: 1.0) <= mean + 1e-12


def test_long_iid_texts_obey_the_theory() -> None:
    texts = [[0.7] * 4000]
    assert walks.tokens_per_round(texts, 5) == pytest.approx(theory.tokens_per_round(0.7, 5), rel=2e-3)
    runs, drafted = walks.oracle(texts)
    assert 1 / (runs + 0.1 * drafted) == pytest.approx(theory.oracle_factor(0.7, 0.1), rel=2e-3)
    per_round = {gamma: walks.tokens_per_round(texts, gamma) for gamma in range(1, 17)}
    best = theory.walltime_factor(0.7, theory.best_gamma(0.7, 0.05), 0.05)
    assert walks.best(per_round, 0.05)[1] == pytest.approx(best, rel=2e-3)
    assert walks.best(per_round, 0.8) == (0, 1.0)  # a draft that costs more than it brings
    assert walks.after(texts, 3) == pytest.approx(0.7)
    assert walks.autocorrelation(texts, 1) == pytest.approx(0, abs=1e-9)


def test_runs_of_acceptance_are_seen() -> None:
    runs, alternating = [[1.0] * 50 + [0.0] * 50], [[1.0, 0.0] * 50]
    assert walks.autocorrelation(runs, 1) == pytest.approx(0.98, abs=0.01)
    assert walks.autocorrelation(alternating, 1) == pytest.approx(-1)
    assert walks.autocorrelation([[1.0] * 9], 1) is None
    assert walks.after(alternating, 0) == 1 and walks.after(alternating, 1) == 0
    assert walks.tokens_per_round(runs, 4) < theory.tokens_per_round(0.5, 4) * 2
    assert walks.by_place([[0.5, 1.0], [0.0]], 3) == [0.25, 1.0]
    assert walks.endless([[0.5], [1.0]]) == [[0.5, 1.0]]


# ---- acceptance along texts -------------------------------------------------------------------------------------


def toy(temperature: float) -> tuple[Subject, list[Request]]:
    """A target and a draft of three tokens, and what they are asked."""
    target, draft = (TableScorer(dirichlet_table(seed), 3, name=f"table {seed}") for seed in (1, 2))
    subject = Subject("toy", Engine(Decoder(target)), {"draft": draft}, (), lambda: [[0, 1, 2, 1]], 6)
    requests = [Request((first,), Sampling(temperature=temperature), 6, key=first) for first in range(3)]
    return subject, requests


def test_alpha_along_texts_is_corollary_3_6() -> None:
    subject, requests = toy(1.0)
    outputs = [[0, 1, 2], [2], [1, 1, 0, 2]]
    trail = trails.follow(subject, {"draft": trails.model_scout(subject.lend("draft"), 3)}, requests, outputs)["draft"]
    p, q = dirichlet_table(1), dirichlet_table(2)
    for request, output, betas, chances in zip(requests, outputs, trail.betas, trail.chances, strict=True):
        assert len(betas) == len(output)
        for place, token in enumerate(output):
            prefix = (*request.prompt, *output[:place])
            assert betas[place] == pytest.approx(theory.beta(p(prefix), q(prefix)), abs=1e-6)
            assert chances[place] == pytest.approx(min(1.0, q(prefix)[token] / p(prefix)[token]), rel=1e-5)
    figures = trail.figures()
    assert figures["positions"] == 8 and figures["lenient"]["1"] == pytest.approx(figures["alpha"]["value"], abs=1e-6)
    lenient = [figures["lenient"][f"{lenience:g}"] for lenience in published.LENIENCES]
    assert lenient == sorted(lenient) and lenient[0] < lenient[-1]


def test_greedy_alpha_is_a_share_of_equal_choices() -> None:
    subject, requests = toy(0.0)
    outputs = [[0, 1, 2], [2, 0], [1]]
    trail = trails.follow(subject, {"draft": trails.model_scout(subject.lend("draft"), 3)}, requests, outputs)["draft"]
    p, q = dirichlet_table(1), dirichlet_table(2)
    for request, output, betas in zip(requests, outputs, trail.betas, strict=True):
        for place in range(len(output)):
            prefix = (*request.prompt, *output[:place])
            same = max(range(3), key=p(prefix).__getitem__) == max(range(3), key=q(prefix).__getitem__)
            assert betas[place] == same


def test_n_grams_walk_along_the_same_texts() -> None:
    _, requests = toy(1.0)
    model = trails.NgramModel.fit([[0, 1, 0, 1, 2]], 2, 3)
    laws = list(trails.ngram_scout(model, "bigram")(requests, [[0, 1], [2], [1]]))
    assert len(laws) == 2
    want = torch.from_numpy(model.law(model.state([0, 0])))
    assert torch.allclose(laws[1].dense[0, 0], want, atol=1e-6)


def test_a_source_that_is_taken_again_draws_other_numbers() -> None:
    subject, _ = toy(1.0)
    subject = replace(subject, sources=((0, 1, 2), (1, 2)), length=40)
    requests, outputs = trails.write(subject, 1.0, 10_000, lambda line: None)
    assert len(outputs) == 2 * trails.TIMES and len({tuple(text) for text in outputs}) == len(outputs)
    assert [request.prompt for request in requests[:3]] == [(0, 1, 2), (1, 2), (0, 1, 2)]
    _, greedy = trails.write(subject, 0.0, 10_000, lambda line: None)
    assert len(greedy) == 2
    _, few = trails.write(subject, 1.0, 41, lambda line: None)
    assert few == outputs[:2]


# ---- sheets -----------------------------------------------------------------------------------------------------


def test_sheets_survive_json() -> None:
    for made in (ideal.table1(), ideal.figure3()):
        assert sheet(json.loads(json.dumps(made.as_dict()))) == made


def test_a_table_is_markdown() -> None:
    made = Sheet("t", "T", (Column("name"), Column("x", 1)), (("a", 0.25), ("b", None)))
    assert markdown(made) == ["| name | x |", "| --- | --: |", "| a | 0.2 |", "| b |  |"]
    assert ratio(3.0, 2.0) == 1.5 and ratio(3.0, None) is None and ratio(None, 2.0) is None


def test_the_page_is_what_the_json_gives() -> None:
    found = read_sheets(HERE / "paper", tuple(catalogue.MAKERS))
    assert {made.name for made in found} >= {"table1", "figure2", "figure3", "figure4"}
    assert (HERE / "paper.md").read_text(encoding="utf-8") == page(found, "paper")
    for made in found:
        assert not made.drawn or (HERE / "paper" / f"{made.name}.svg").is_file()
    changed = Sheet(**{**vars(found[0]), "title": "another"})
    assert page([changed], "paper") != page(found[:1], "paper")


def test_the_page_shows_commands_notes_and_what_is_quick() -> None:
    curve = Curve("a", (0.0,), (1.0,))
    made = Sheet(
        "t", "A title", (), (), ("A note.",), "text", curves=(curve,), command="python -m reproduction t", quick=True
    )
    text = page([made], "paper")
    assert text.startswith(INTRODUCTION)
    for part in (
        "## A title",
        "$ python -m reproduction t",
        "**Quick",
        "![A title](paper/t.svg)",
        "A note.",
        "\ntext\n",
    ):
        assert part in text


def test_formulae_on_the_page_are_todays() -> None:
    """The committed sheets that need no run are what the code makes now."""
    lab = Lab(Inputs())
    for made in read_sheets(HERE / "paper", ("table1", "figure2", "figure3", "figure4")):
        assert made == catalogue.make(made.name, lab)


def test_drawings_are_repeatable(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from reproduction.pages.draw import draw
    from reproduction.pages.sheet import Lane

    lanes = (Lane("plain", ((0.0, 1.0, "once"), (1.0, 3.0, "target"), (3.0, 3.5, "draft"), (3.5, 4.0, "rest"))),)
    for made in (ideal.figure4(), Sheet("lanes", "Lanes", lanes=lanes)):
        for name in ("a", "b"):
            draw(made, tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert b"<svg" in (tmp_path / "a").read_bytes()


# ---- reasons ----------------------------------------------------------------------------------------------------


def measured_row(**changes: float) -> dict[str, object]:
    row = {**dict.fromkeys(tables.STEPS, 2.0), "tokens_per_call": 3.0, "tokens_per_call_raced": 3.0, **changes}
    return {**row, "over_plain": {"median": changes.pop("measured", 2.0)}}


def test_every_gap_has_its_reason() -> None:
    assert list(tables.reason("here", measured_row())) == []
    (line,) = tables.reason("here", measured_row(all_costs=1.5, real_texts=1.5, raced_texts=1.5, measured=1.5))
    assert "-25% against Theorem 3.8" in line and "other costs" in line
    costly = {"theorem_verify": 1.6, "all_costs": 1.5, "real_texts": 1.5, "raced_texts": 1.5}
    (line,) = tables.reason("here", measured_row(**costly, measured=1.5))
    assert "scoring gamma + 1 tokens" in line
    (line,) = tables.reason("here", measured_row(raced_texts=1.5, measured=1.5))
    assert "which texts the race takes (-25%)" in line
    first, second = tables.reason("here", measured_row(measured=1.0, tokens_per_call=1.5))
    assert "-50%" in first and "-50% tokens per call" in second


# ---- the embedded pair ------------------------------------------------------------------------------------------


def test_prompts_and_texts_do_not_meet() -> None:
    prompts, texts = writing.prompts(), list(writing.texts(200_000))
    assert len(prompts) > 50 and all(prompt.startswith("def ") for prompt in prompts)
    assert max(map(len, prompts)) <= writing.LONGEST
    assert 0 < sum(map(len, texts)) <= 200_000
    held_out = [(writing.library() / name).read_text(encoding="utf-8") for name in writing.HELD_OUT]
    assert not set(held_out) & set(writing.texts())


def test_figures_take_only_models() -> None:
    assert set(figures.TABLES) == {"unigram", "bigram"}


def test_every_machine_is_told_with_its_tasks() -> None:
    """One for all, or each with what ran there; and models with their types, where these are known."""
    here = {"date": "2026-01-02T03:04:05", "device": "cpu", "cpu": "A", "threads": 2, "cores": 4}
    here |= {"slipstream": "1", "torch": "2", "transformers": "3"}
    facts = {"runs": {"x": here, "y": here}, "parameters": {"x target": 2_000_000}, "dtypes": {"x target": "float32"}}
    versions = "(slipstream 1, torch 2, transformers 3)"
    one = f"Measured 2026-01-02 on A, 2 of 4 threads {versions}; parameters: x target 2.00 M float32."
    assert machine(facts) == one
    facts |= {"runs": {"x": here, "y": {**here, "device": "cuda:0 (B)"}}, "dtypes": {}}
    two = f"x 2026-01-02 on A, 2 of 4 threads {versions}; y 2026-01-02 on cuda:0 (B) {versions}"
    assert machine(facts) == f"Measured {two}; parameters: x target 2.00 M."
