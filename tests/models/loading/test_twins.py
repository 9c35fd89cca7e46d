"""Models with packed weights: they say what the model says, or run without."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, PreTrainedModel

from slipstream.kernels import attention
from slipstream.kernels.packing import PackedLinear
from slipstream.models.loading.load import load_scorer
from slipstream.models.tiny import tiny_config, tiny_model
from toys.kernels import needs_kernel

pytestmark = needs_kernel

TEXT = [4 + 7 * place % 90 for place in range(40)]
"""Longer than what an indexer chooses of a tiny model, 12 tokens."""


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A model that attends to what its indexer chooses, and the folder where it lies."""
    model = tiny_model(DeepseekV32ForCausalLM, tiny_config(DeepseekV32Config))
    folder = tmp_path_factory.mktemp("sparse")
    model.save_pretrained(folder)
    return model, folder


@torch.inference_mode()
def gap(model: PreTrainedModel, scorer: Any) -> float:
    """How far the logits of the text's end are from those of transformers' own model."""
    scorer.add(1)
    got = scorer.extend(torch.tensor([TEXT]), [len(TEXT)])
    scorer.free([0])
    return float((got - model(torch.tensor([TEXT])).logits).abs().max())


def is_packed(scorer: Any) -> bool:
    """Whether some of its layers have packed weights."""
    return any(isinstance(part, PackedLinear) for part in scorer.model.modules())


def test_an_indexers_choice_is_kept_with_packed_weights(sparse: tuple[PreTrainedModel, Path]) -> None:
    model, folder = sparse
    scorer = load_scorer(folder, "float32")
    assert scorer.way == "length"
    assert is_packed(scorer) and gap(model, scorer) < 1e-4


def test_a_twin_that_gives_other_logits_is_not_used(
    sparse: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ASKS", re.compile("nothing asks like this"))
    model, folder = sparse
    with pytest.warns(RuntimeWarning, match="packed for this processor they give other logits"):
        scorer = load_scorer(folder, "float32")
    assert not is_packed(scorer) and gap(model, scorer) < 1e-4
