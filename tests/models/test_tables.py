"""Scorers of tables keep their rows apart as models do."""

from __future__ import annotations

import torch

from slipstream.models.tables import TableScorer


def test_rows_fork_and_the_first_ones_run_alone() -> None:
    scorer = TableScorer(lambda prefix: [0.25 + sum(prefix) / 100, 0.75 - sum(prefix) / 100], 2)
    scorer.add(3)
    scorer.prefill([[1, 1], [0], [1]])
    scorer.prefill([[1, 0]], first=2)  # behind what it holds
    scorer.fork([0, 2])
    assert scorer.lengths == [2, 1, 3, 2, 3]
    scorer.extend(torch.tensor([[1, 1], [0, 0]]), [2, 1])
    assert scorer.lengths == [4, 2, 3, 2, 3]
    scorer.rollback([1])
    scorer.free([1])
    laws = scorer.extend(torch.ones(4, 1, dtype=torch.long), [1] * 4).exp()[:, 0, 0]
    torch.testing.assert_close(laws, torch.tensor([0.27, 0.28, 0.28, 0.28]).double())
    assert scorer.lengths == [2, 4, 3, 4]
