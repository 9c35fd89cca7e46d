"""Beam search through transformers' hook: what `generate(num_beams=...)` returns, with fewer calls of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.transformers_hook.custom_generate import custom_generate
from toys.hooked import padded, pair

SETTINGS: dict[str, Any] = {**padded(), "num_beams": 3, "max_new_tokens": 14, "do_sample": False}


def allowed(row: int, ids: Tensor) -> list[int]:
    """Tokens that may follow, which depend on the prompt's place in the batch."""
    return [token for token in range(2, 60) if token % 4 != row]


CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "several": {"num_return_sequences": 3},
    "ends": {"eos_token_id": [5, 17, 30], "num_return_sequences": 2, "early_stopping": True},
    "never": {"eos_token_id": [5, 17], "num_return_sequences": 3, "early_stopping": "never", "length_penalty": 2.0},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]], "length_penalty": -1.0},
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "by row": {"prefix_allowed_tokens_fn": allowed},
    "a record": {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2},
    "no scores": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_generate(name: str) -> None:
    target, draft = pair(noise=0.02)
    speculate = custom_generate(draft, gamma=3)
    asked = {**SETTINGS, **CASES[name]}
    expected, ours = target.generate(**asked), target.generate(**asked, custom_generate=speculate)
    if not isinstance(expected, Tensor):
        assert type(ours) is type(expected)
        assert (ours.sequences_scores is None) == (expected.sequences_scores is None)
        if expected.sequences_scores is not None:
            torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)
        expected, ours = expected.sequences, ours.sequences
    assert torch.equal(expected, ours)
    assert speculate.stats.target_calls < speculate.stats.emitted


def test_control_another_model_finds_other_texts() -> None:
    target, draft = pair(noise=0.02)
    assert not torch.equal(
        target.generate(**SETTINGS), draft.generate(**SETTINGS, custom_generate=custom_generate(target))
    )


def test_what_a_processor_raises_is_raised() -> None:
    def upset(ids: Tensor, scores: Tensor) -> Tensor:
        raise ArithmeticError("no")

    target, draft = pair(noise=0.02)
    with pytest.raises(ArithmeticError, match="no"):
        target.generate(**SETTINGS, logits_processor=[upset], custom_generate=custom_generate(draft))
    assert torch.equal(target.generate(**SETTINGS), target.generate(**SETTINGS, custom_generate=custom_generate(draft)))
