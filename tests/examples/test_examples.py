"""The examples, each exact: two samples of 10^4 or 10^5 trajectories, and pictures that no draft changes."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import script

ROOT = Path(__file__).parents[2]


def apart(left: Tensor, right: Tensor) -> float:
    """How far two samples are apart (Kolmogorov-Smirnov), over the distance that chance passes with odds 1e-6."""
    places = torch.cat([left, right])
    shares = [torch.searchsorted(each.sort().values, places, right=True) / len(each) for each in (left, right)]
    return float((shares[0] - shares[1]).abs().max()) / math.sqrt(-math.log(5e-7) / len(left))


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_clusters_move_as_by_the_expensive_force(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Radius, an atom's place and the longest step of clusters (odds 3e-6); the cheap force alone is told apart.

    A coarser cutoff and longer steps than in the example, so that the forces differ and drafts are refused.
    """
    langevin = script("examples/langevin.py")
    monkeypatch.setattr(langevin, "CUTOFF", 1.05)
    monkeypatch.setattr(langevin, "STEP", 2e-3)

    def figures(run: Any) -> list[Tensor]:
        moved = run.trajectories.diff(dim=1).square().sum(-1).amax((1, 2))
        return [langevin.radius(run.trajectories)[:, -1], run.trajectories[:, -1, 1, 0], moved]

    direct, drafted = langevin.run(count, 5, 0, seed=1), langevin.run(count, 5, 3, seed=2)
    assert max(map(apart, figures(drafted), figures(direct))) < 1
    assert 0.3 < drafted.stats.alpha < 0.999
    starts = langevin.START.expand(count, *langevin.START.shape)
    cheap = langevin.simulate(langevin.steps(langevin.CUTOFF), starts, 5, seed=3)
    assert max(map(apart, figures(cheap), figures(direct))) > 1.5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [4000, 100_000])
def test_episodes_are_those_of_the_real_simulator(count: int) -> None:
    """Returns and two speeds (odds 3e-6), drafted by a learned model that is wrong and, alone, told apart."""
    pytest.importorskip("gymnasium")
    cartpole = script("examples/cartpole.py")
    good = cartpole.learned()
    cartpole.learned = lambda: lambda x, action: good(x, action) + torch.tensor([0, 0, 0, 0.02])

    def figures(run: Any) -> list[Tensor]:
        return [run.steps.double(), run.trajectories[:, 10, 3], run.trajectories[:, 10, 1]]

    direct, drafted = cartpole.episodes(count, 25, 0, seed=1), cartpole.episodes(count, 25, 4, seed=2)
    assert max(map(apart, figures(drafted), figures(direct))) < 1
    assert 0.3 < drafted.stats.alpha < 0.999
    starts = torch.zeros(count, 4, dtype=torch.float64)
    cheap = cartpole.simulate(cartpole.rollout(cartpole.learned()), starts, 25, 3, cartpole.fallen)
    assert max(map(apart, figures(cheap), figures(direct))) > 1.5


@pytest.mark.slow
def test_no_draft_changes_a_picture() -> None:
    """By coupled draws pictures are those of the target alone, pixel by pixel; another seed's are not."""
    pytest.importorskip("sklearn")
    images, digits = script("examples/images.py"), script("recipes/digits.py")
    torch.manual_seed(0)
    target, small = (digits.new_model(32, layers).eval() for layers in (2, 1))
    plain, marks, _ = images.draw(target, None, range(4), verify="coupled")
    assert not any(map(any, marks))
    for draft in (small, images.RowAbove()):
        pictures, marks, stats = images.draw(target, draft, range(4), verify="coupled")
        assert pictures == plain
        assert any(map(any, marks)) and (draft is small or not any(any(each[:8]) for each in marks))
        assert sum(map(sum, marks)) == sum(each.accepted for each in stats) > 0
        assert images.draw(target, draft, range(4), seed=1, verify="coupled")[0] != plain


def test_rows_that_are_copied_leave_the_law_of_pixels() -> None:
    """The first pixel that the row above drafts, in 1,500 pictures: chi-squared with 25 degrees of freedom against the
    target's law, pooled over what comes before, beyond 76 with odds 1e-6; that of drafts that are all kept is not."""
    pytest.importorskip("sklearn")
    images, digits = script("examples/images.py"), script("recipes/digits.py")
    torch.manual_seed(1)
    target = digits.new_model(32, 1).eval()
    target.lm_head.weight.data.mul_(8)
    engine = images.slipstream.load(target, images.RowAbove(), gamma=2, batch_size=500)
    done = engine.generate([[16]], n=1500, seed=5, max_new_tokens=10, temperature=1.0, verify="token")
    assert 0.02 < sum(each.stats.accepted for each in done) / sum(each.stats.drafted for each in done) < 0.9
    with torch.no_grad():
        rows = torch.tensor([[16, *each.tokens[:8]] for each in done])
        laws = torch.softmax(target(input_ids=rows).logits.double(), -1).sum(0)
    found = torch.tensor([each.tokens[8] for each in done]).bincount(minlength=26)
    assert float(((found - laws[-1]).square() / laws[-1]).sum()) < 76
    always_kept = torch.tensor([each.tokens[0] for each in done]).bincount(minlength=26)  # what was drafted
    assert float(((always_kept - laws[-1]).square() / laws[-1]).sum()) > 152


@pytest.mark.slow
def test_digits_are_learned_in_pieces(tmp_path: Path) -> None:
    """A training that was stopped goes on, a finished one is not begun again, and wrong settings are told."""
    pytest.importorskip("sklearn")
    digits = script("recipes/digits.py")
    assert digits.texts().shape == (1797, 65) and int(digits.texts().max()) == 25
    before = digits.bits_per_pixel(digits.new_model(*digits.SIZES["draft"]))
    after = digits.bits_per_pixel(digits.train("draft", tmp_path, 12, batch=16))
    assert after < before - 0.3
    assert digits.bits_per_pixel(digits.train("draft", tmp_path, 12, batch=16)) == after
    with pytest.raises(ValueError, match="another steps"):
        digits.train("draft", tmp_path, 13, batch=16)


def test_pictures_can_be_plotted(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    images = script("examples/images.py")
    levels, marks = [[index % 16 for index in range(64)]] * 10, [[index % 2 == 0 for index in range(64)]] * 10
    images.plot(tmp_path / "two.png", {"one": (levels, marks, []), "two": (levels, marks, [])})
    assert (tmp_path / "two.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_missing_pair_is_told(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/images.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "recipes/digits.py" in run.stderr and "Traceback" not in run.stderr


LONGEST = 40
"""Lines of an example's functions, without imports, docstrings and what reads the command line."""


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.stem)
def test_examples_are_short(file: Path) -> None:
    import ast

    tree = ast.parse(file.read_text(encoding="utf-8"))
    statements = [node for node in tree.body if not isinstance(node, ast.If | ast.Import | ast.ImportFrom | ast.Expr)]
    statements = [node for node in statements if getattr(node, "name", "") != "plot"]
    lines = [each for node in statements for each in ast.unparse(node).splitlines()]
    lines = [each for each in lines if each.strip() and '"""' not in each]
    assert len(lines) <= LONGEST
