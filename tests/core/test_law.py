"""The one total variation, between dense laws and point masses."""

import pytest
import torch

from slipstream.core.law import Law, distance, total_variation

P = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]], dtype=torch.float64)
Q = torch.tensor([[[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]], dtype=torch.float64)
TOKENS = torch.tensor([[0, 2]])


def test_total_variation_is_what_neither_law_shares() -> None:
    assert torch.allclose(total_variation(P, Q), 1 - torch.minimum(P, Q).sum(-1))
    assert total_variation(P[0, 0], torch.zeros(3)) == pytest.approx(0.5)  # mass that is missing counts


def test_a_point_mass_is_as_far_from_a_law_as_its_one_hot_vector() -> None:
    one_hot = Law(probs=torch.nn.functional.one_hot(TOKENS, 3).double())
    point, dense = Law(tokens=TOKENS), Law(probs=P)
    assert torch.allclose(distance(point, dense).double(), distance(one_hot, dense))
    assert torch.equal(distance(point, dense), distance(dense, point))
    assert distance(point, Law(tokens=torch.tensor([[0, 1]]))).tolist() == [[0.0, 1.0]]
