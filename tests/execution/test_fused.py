"""Fused functions of tensors, as passes and drafts use them for CUDA graphs: any sizes, one compilation, no harm."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from scripted import LATE, ONE, THREE, Gammas, agree, drafts, drive, repeat
from slipstream.decoding.sampling import Sampling
from slipstream.execution import backends, graphs
from slipstream.execution.cuda_graphs import Captured
from slipstream.execution.graphs import GRAPHS, Fused
from slipstream.kernels.cpu import kernel_missing
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, rare, tiny

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
"""The first traces with symbolic sizes as the second does, and then runs what it traced."""

SHAPES: dict[str, Any] = {
    "greatest": lambda logits: (
        logits.new_empty(logits.shape[:2], dtype=torch.float32),
        logits.new_empty(logits.shape[:2], dtype=torch.long),
    ),
    "inverse": lambda weights, chances: weights.new_empty(weights.shape[:1], dtype=torch.long),
}


def double(numbers: Tensor, others: list[Tensor]) -> Tensor:
    return 2 * numbers + sum(other.sum() for other in others)


def run(function: Fused, *lengths: int) -> Iterator[bool]:
    """Whether each result is that of `double`, for vectors of these lengths."""
    for length in lengths:
        numbers, other = torch.arange(length, dtype=torch.float32), torch.ones(3)
        found = function((numbers, [other]), [(numbers, {0: "length"}), (other, {0: "three"})])
        yield torch.equal(found, double(numbers, [other]))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which work is captured: a GPU, or a CPU by a recorder that repeats the work."""
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "record", repeat)
        if kernel_missing() is None:  # torch compiles the kernels of a CPU only here, so nobody else needs their shapes
            for name, shape in SHAPES.items():
                torch.library.register_fake(f"slipstream::{name}", shape, allow_override=True)
        monkeypatch.setattr(backends, "CAPTURED", {"cpu"})
    elif not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


def test_one_compilation_serves_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setattr(graphs, "BACKEND", backend)
    compiled, told = GRAPHS.compiled, list[str]()
    function = Fused(double, {"three"}, "toy", lambda: told.append("compiling"))
    assert not told  # nothing is compiled before the first call
    assert all(run(function, 4, 9, 2, 300))
    assert (len(made), told, GRAPHS.compiled) == (1, ["compiling"], compiled + 1)


def test_control_sizes_that_are_constant_are_compiled_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(graphs, "BACKEND", lambda graph, inputs: made.append(graph) or graph)
    assert all(run(Fused(double, {"three", "length"}, "toy", lambda: None), 4, 9))
    assert len(made) == 2


def test_a_function_that_cannot_be_compiled_runs_as_it_is_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(graphs, "BACKEND", broken)
    function = Fused(double, (), "toy", lambda: None)
    with pytest.warns(RuntimeWarning, match="toy runs with more and smaller kernels, it cannot be compiled") as caught:
        assert all(run(function, 4, 9, 2))
    assert len(caught) == 1 and "no Triton here" in str(caught[0].message)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["opt", *rare("llama", "gemma3")])
def test_fused_passes_give_the_eager_logits(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str, backend: str
) -> None:
    monkeypatch.setattr(graphs, "BACKEND", backend)
    model, said = tiny(FAMILIES[name], num_hidden_layers=1 + (name == "gemma3")).to(device), list[str]()  # two masks
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Captured(model, "toy", said.append))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, rows in enumerate((1, 3, 2)):
            for left, right in zip(drive(eager, rows, seed), drive(fast, rows, seed), strict=True):
                torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
    assert [what for what in said if what.startswith("compiling")] == [
        f"compiling toy for {rows}, {new}" for rows in ("one text", "batches") for new in ("tokens", "one token")
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounds", [THREE, *rare(ONE, LATE)])
def test_chains_of_fused_steps_are_what_token_by_token_would_have_been(
    monkeypatch: pytest.MonkeyPatch, device: str, rounds: Gammas, backend: str
) -> None:
    monkeypatch.setattr(graphs, "BACKEND", backend)
    model = tiny(FAMILIES["llama"], num_hidden_layers=1).to(device)
    samplers = [Sampling(temperature=0.7)] * len(rounds[0])
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([4])
    compiled = GRAPHS.compiled
    for left, right in zip(drafts(one, samplers, rounds), drafts(other, samplers, rounds), strict=True):
        agree(left, right)
    assert GRAPHS.compiled - compiled == 2  # steps that are fed two tokens and one, for chains of any length
