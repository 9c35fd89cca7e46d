"""The trainer: the same weights whatever interrupts it, with any optimizer, and its checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from slipstream.training.trainer import Checkpoint, Diverged, Progress, Steps, Trainer

TWELVE = Steps(12, save_every=5)


def trainer(file: Path, seed: int = 0) -> Trainer:
    """A layer under Muon and a scale under fused AdamW, as the recipes divide a model."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layer": nn.Linear(3, 3, bias=False), "scale": nn.LayerNorm(3)})
    matrices, scales = list(model["layer"].parameters()), list(model["scale"].parameters())
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(scales, lr=0.01, fused=True)]
    return Trainer(model, optimizers, lambda step, used: 1 - used, TWELVE, Checkpoint(file, {"seed": seed}))


def run(one: Trainer, stop: int | None = None) -> Tensor:
    """Train to copy random vectors -> all weights."""

    def loss_of(step: int, used: float) -> tuple[Tensor, int]:
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return (one.model["scale"](one.model["layer"](batch)) - batch).square().mean(), 8

    def watch(progress: Progress, loss: float) -> None:
        if progress.steps == stop:
            raise KeyboardInterrupt

    one.train(loss_of, watch)
    one.save()
    return torch.cat([weight.detach().flatten() for weight in one.model.parameters()])


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(11, marks=pytest.mark.slow)])
def test_an_interruption_changes_no_weight(tmp_path: Path, stop: int) -> None:
    whole = run(trainer(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(trainer(tmp_path / "parts"), stop)
    resumed = trainer(tmp_path / "parts")
    assert resumed.progress.steps == stop and resumed.progress.tokens == 8 * stop
    assert torch.equal(run(resumed), whole)
    assert resumed.progress.steps == 12 and resumed.progress.seconds > 0
    (tmp_path / "parts").unlink()  # the control: without the optimizers' memory the weights are others
    with pytest.raises(KeyboardInterrupt):
        run(trainer(tmp_path / "parts"), stop)
    forgetful = trainer(tmp_path / "parts")
    for optimizer in forgetful.optimizers:
        optimizer.state.clear()
    assert not torch.equal(run(forgetful), whole)


def test_a_checkpoint_of_other_settings_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    run(trainer(tmp_path / "state"))
    with pytest.raises(ValueError, match="another seed: give the same settings"):
        trainer(tmp_path / "state", seed=1)
    (tmp_path / "state").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="damaged"):
        trainer(tmp_path / "state")


def test_a_training_that_diverges_ends_and_saves_nothing(tmp_path: Path) -> None:
    one = trainer(tmp_path / "state")

    def loss_of(step: int, used: float) -> tuple[Tensor, int]:
        return one.model["scale"](torch.ones(1, 3)).sum() * (torch.nan if step == 2 else 1.0), 1

    with pytest.raises(Diverged, match=r"^the training diverged after 2 steps: its loss is nan"):
        one.train(loss_of)
    assert not (tmp_path / "state").exists()


def test_a_second_model_in_the_loss_stays_as_it_is(tmp_path: Path) -> None:
    one, teacher = trainer(tmp_path / "state"), nn.Linear(3, 3)
    batch = torch.ones(2, 3)
    one.train(lambda step, used: ((one.model["scale"](one.model["layer"](batch)) - teacher(batch)).square().mean(), 2))
    assert all(weight.grad is None for weight in teacher.parameters())
