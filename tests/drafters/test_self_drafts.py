"""Drafts of the target's own layers, weights and states: exact by enumeration, and blind to the batch around them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters.test_checkpoint_heads import block_draft, eagle
from slipstream.core.protocols import Drafter
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds
from slipstream.decoding.rules import BLOCK, TOKEN, Rule
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.heads import DFlashDrafter, HeadDrafter
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.kernels.quantization import Precision
from slipstream.models.causal import CausalScorer
from slipstream.models.layers import part_of
from slipstream.models.loading.twins import quantized_part
from toys.drafts import Altered, company_changes_nothing, flat, law_error
from toys.enumeration import WRONG
from toys.families import FAMILIES, HF_VOCAB, tiny
from toys.kernels import needs_kernel
from toys.texts import Cycle, ragged, rare

FLOAT = 2e-5  # the laws are softmaxes in float32


def int4(target: Any, kept: Any = None) -> Drafter:
    return SameRowsDrafter(quantized_part(target, Precision(4, 32), kept))


MADE: dict[str, Callable[[Any], Drafter]] = {
    "first layer": lambda target: SameRowsDrafter(part_of(target, 1)),
    "int4": int4,
    "int4, two tokens": lambda target: int4(target, torch.tensor([0, 2])),
    "window": lambda target: SameRowsDrafter(target.seeing(2, 1)),
    "eagle3, two tokens": lambda target: HeadDrafter(target, eagle(target.model, 2), "eagle3"),
    "dflash": lambda target: DFlashDrafter(target, block_draft(target.model), "dflash"),
}
FAST = {(name, "block") for name in MADE if name != "window"}
FAST |= {("first layer", "token")}


def marks(name: str, *more: Any) -> list[Any]:
    return [*([needs_kernel] if name.startswith("int4") else []), *more]


def kinds(*names: str) -> Any:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


@cache
def model(vocab: int) -> PreTrainedModel:
    spread = 0.4 if vocab == 3 else 0.2
    made = tiny(FAMILIES["llama"], vocab_size=vocab, num_hidden_layers=3, initializer_range=spread)
    return made.requires_grad_(False)


def decoder(name: str, vocab: int, gammas: tuple[int, ...], rule: Rule = TOKEN, change: Any = None) -> Decoder:
    """A target, and a draft of this kind, changed if that is asked for."""
    target = CausalScorer(model(vocab))
    drafter = MADE[name](target)
    return Decoder(target, Altered(drafter, change) if change else drafter, rule.verify, Cycle(gammas))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(
            name,
            rule,
            marks=marks(name, *([] if (name, rule.name) in FAST else [pytest.mark.slow])),
            id=f"{name}-{rule.name}",
        )
        for name in MADE
        for rule in (TOKEN, BLOCK)
    ],
)
def test_the_law_is_the_target_s(name: str, rule: Rule) -> None:
    """Two tokens, or none, or one, in turn; from states, after a first plain step, two at once."""
    by_states = name.startswith(("eagle3", "dflash"))
    assert law_error(decoder(name, 3, (2,) if by_states else (2, 0, 1), rule), 3) < FLOAT


@pytest.mark.parametrize("name", ["first layer", "eagle3, two tokens", *rare("int4")])
def test_control_a_law_that_was_not_sampled_from_is_caught(name: str) -> None:
    assert law_error(decoder(name, 3, (2,), TOKEN, flat)) > WRONG


@kinds(*(name for name in MADE if "two tokens" not in name))
def test_stops_in_mid_round_and_company_change_nothing(name: str) -> None:
    company_changes_nothing(replace(decoder(name, HF_VOCAB, (4,)), batch_size=1))


@kinds("first layer", "int4", "eagle3, two tokens", "dflash")
def test_settings_hold_for_the_draft_too(name: str) -> None:
    """Nothing is drafted that a request's own settings forbid, and a penalty looks at the drafted tokens before."""
    sampler, seen = Sampling(temperature=1.0, bad_words=[[7]], top_k=5, repetition_penalty=1.3), 0
    for round in rounds(decoder(name, HF_VOCAB, (3,)), ragged(sampler)):
        if (law := round.draft.law) is not None:
            seen += 1
            assert law.dense[..., 7].max() == 0 and (law.dense > 0).sum(-1).max() <= 5
    assert seen > 3
