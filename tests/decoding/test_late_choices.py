"""How many tokens to verify must never depend on the drafted tokens: that gives another distribution, and is caught."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from slipstream.check.controls import Draw, broken
from slipstream.check.enumeration import CHAINS, TREE, TREES, Pair, Topology, distances, normed
from slipstream.core.draft import Draft, Verdict
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import TOKEN
from slipstream.drafters.model import ModelDrafter
from toys.enumeration import EXACT, WRONG, Distribution, enumerate_outcomes, total_variation
from toys.tables import TableScorer
from toys.texts import request


def counterexample(choose: Callable[[int], bool]) -> Distribution:
    """The law of the first token where p = q = (.7, .3) and `choose(drafted)` says whether a draft is verified."""

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        lengths = tuple(
            length * choose(tokens[0]) if length else 0
            for tokens, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)
        )
        return TOKEN.verify(p, replace(draft, lengths=lengths), draw)

    def run(rng: Rng) -> int:
        pair = [TableScorer(lambda prefix: (0.7, 0.3), 2, name) for name in ("target", "draft")]
        decoder = Decoder(pair[0], ModelDrafter(pair[1]), verify, Fixed(1), rng=rng)
        return generate(decoder, [request([0], 2)])[0].output[0]

    return enumerate_outcomes(run)


def test_control_a_budget_chosen_by_the_drafted_tokens_is_caught() -> None:
    """Token 1 looks less likely to stand, so it is not verified: that gives .91 and .09."""
    law = counterexample(lambda token: token == 0)
    assert total_variation(law, {0: 0.91, 1: 0.09}) < EXACT
    assert total_variation(law, {0: 0.7, 1: 0.3}) > WRONG


@pytest.mark.parametrize("verified", [True, False])
def test_a_budget_that_was_fixed_before_leaves_the_law(verified: bool) -> None:
    assert total_variation(counterexample(lambda token: verified), {0: 0.7, 1: 0.3}) < EXACT


@pytest.mark.parametrize("parents", [None, TREE])
def test_the_certificate_notices_a_budget_chosen_by_the_drafted_tokens(parents: Topology | None) -> None:
    generator = torch.Generator().manual_seed(0)
    laws = [[normed(torch.rand(4, generator=generator)) for _ in range(3)] for _ in range(24)]
    pairs = [Pair(*each) for each in laws]
    controls = {rule.name: rule for rule in broken(TOKEN, greedy=False, sampled=True)}
    wrong = controls["budget by the drafted tokens"]
    assert all(found.joint > WRONG for found in distances(wrong.verify, pairs, CHAINS if parents is None else TREES))
    assert all(found.joint < 1e-6 for found in distances(TOKEN.verify, pairs, CHAINS if parents is None else TREES))
    assert len(broken(TOKEN, greedy=False)) == len(controls) - 1, "a copied draft leaves nothing to choose by"
