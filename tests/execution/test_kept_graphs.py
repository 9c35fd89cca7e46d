"""Graphs that another process made: taken over on this one's weights, and never where anything differs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from slipstream.execution import kept_graphs, structure
from slipstream.execution.graphs import Frozen, vary
from slipstream.execution.structure import Structure, Unknown


class Scale(nn.Module):
    """A product and a sum; `fold` makes inductor compute a constant out of the weight."""

    def __init__(self, seed: int, power: float = 1.0, fold: bool = False, size: int = 100) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)
        self.power, self.fold = power, fold

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (self.weight.exp() if self.fold else self.weight) + self.power


def compiled(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], list[bool]]:
    """The model as a graph, and whether it was made (True) or taken over (False)."""

    def function(inputs: Tensor) -> Tensor:
        return model(inputs)

    was_made: list[bool] = []
    graph = Frozen(function, ["inputs"], was_made.append)

    def call(inputs: Tensor) -> Tensor:
        vary([(inputs, {0: "rows"})])
        with torch.inference_mode():
            return graph(inputs)

    return call, was_made


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kept_graphs.PLACE, str(tmp_path))
    return tmp_path


def check(model: Scale, *, made: bool) -> None:
    """The model's own values, by a graph that was made or not."""
    call, was_made = compiled(model)
    before = counters["stats"]["unique_graphs"]
    for rows in (3, 5):
        inputs = torch.randn(rows, len(model.weight))
        torch.testing.assert_close(call(inputs), model(inputs))
    assert was_made == [made]
    assert (counters["stats"]["unique_graphs"] > before) == made


def test_a_kept_graph_has_the_weights_of_who_takes_it_over(place: Path) -> None:
    check(Scale(0), made=True)
    assert len(list(place.iterdir())) == 1
    check(Scale(1), made=False)
    check(Scale(1, power=2.0), made=True)  # which is no weight: the graph says it


@pytest.mark.slow
def test_who_makes_a_graph_runs_it_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch checks more before every call of a graph that it has just made than a stored one needs."""
    run, ran = kept_graphs.BoundGraph.run, list[object]()
    monkeypatch.setattr(kept_graphs.BoundGraph, "run", lambda graph, inputs: ran.append(graph) or run(graph, inputs))
    model = Scale(0)
    call, was_made = compiled(model)
    call(torch.randn(3, 100))
    first, inputs = len(ran), torch.randn(5, 100)
    torch.testing.assert_close(call(inputs), model(inputs))
    assert (was_made, len(ran)) == ([True], first + 1)


def test_small_weights_which_inductor_writes_into_its_code_are_told_apart() -> None:
    check(Scale(0, size=8), made=True)
    check(Scale(1, size=8), made=True)
    check(Scale(0, size=8), made=False)


@pytest.mark.slow
def test_constants_that_were_computed_out_of_weights_are_never_kept(place: Path) -> None:
    check(Scale(0, fold=True), made=True)
    assert not list(place.iterdir())
    check(Scale(1, fold=True), made=True)


@pytest.mark.slow
def test_damaged_and_foreign_files_are_made_anew(place: Path) -> None:
    check(Scale(0), made=True)
    (path,) = place.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole.replace(b"arguments", b"argumentz", 1), b""):
        path.write_bytes(damaged)
        check(Scale(0), made=True)
        check(Scale(0), made=False)  # it was mended


@pytest.mark.slow
def test_another_version_makes_graphs_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Scale(0), made=True)
    monkeypatch.setattr(structure, "__version__", "another")
    check(Scale(0), made=True)


@pytest.mark.slow
def test_inputs_that_a_graph_was_not_made_for_get_their_own(place: Path) -> None:
    check(Scale(0), made=True)
    model = Scale(0)
    call, was_made = compiled(model)
    call(torch.randn(3, 100))
    turned = torch.randn(100, 3).T  # of the same size, but lying otherwise
    torch.testing.assert_close(call(turned), model(turned))
    assert was_made == [False, True]


@pytest.mark.slow
def test_nothing_is_kept_where_that_is_turned_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_graphs.PLACE, "off")
    check(Scale(0), made=True)
    check(Scale(0), made=True)
    assert not list(place.iterdir())


@pytest.mark.slow
def test_a_place_that_cannot_be_written_only_costs_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv(kept_graphs.PLACE, str(place / "file" / "below"))
    check(Scale(0), made=True)


@pytest.mark.slow
def test_pairs_in_lists_as_encoders_return_them_are_taken_over() -> None:
    def check_pairs(model: Scale, *, made: bool) -> None:
        def function(inputs: Tensor) -> list[tuple[Tensor, Tensor | None]]:
            return [(model(inputs), None), (inputs * 3, inputs * model.weight)]

        inputs, was_made = torch.randn(3, 100), list[bool]()
        with torch.inference_mode():
            found = Frozen(function, ["inputs"], was_made.append)(inputs)
        torch.testing.assert_close(found, function(inputs))
        assert was_made == [made]

    check_pairs(Scale(0), made=True)
    check_pairs(Scale(1), made=False)


@pytest.mark.slow
def test_old_graphs_are_deleted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_graphs, "MOST_FILES", 1)
    check(Scale(0), made=True)
    check(Scale(0, power=2.0), made=True)
    assert len(list(place.iterdir())) == 1


def test_what_has_no_form_has_no_key() -> None:
    with pytest.raises(Unknown):
        Structure(iter([]).__next__, ())


SCRIPT = """
import sys, torch, slipstream
from torch._dynamo.utils import counters
said = []
engine = slipstream.load(draft=sys.argv[1], compile=True, gamma=2, progress=said.append)
texts = [engine.generate("def fib", max_new_tokens=12, temperature=t, seed=1)[0].text for t in (0, 1)]
print(repr(texts), counters["stats"]["unique_graphs"], sum(line.startswith("loading the graph") for line in said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["embedded", "int4", "int8"])
def test_another_process_compiles_nothing_and_writes_the_same(draft: str) -> None:
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT, draft], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (texts, made, taken), (same, none, all_of_them) = (run.stdout.rsplit(maxsplit=2) for run in runs)
    assert (texts, none, taken) == (same, "0", "0")
    assert int(made) == int(all_of_them) >= 3
