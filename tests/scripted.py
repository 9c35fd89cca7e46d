"""Passes and drafts in a fixed order, to be run in two ways and compared."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Tree
from slipstream.core.draws import draw
from slipstream.core.request import Request, Row
from slipstream.core.round import Context
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.execution.graphs import GRAPHS
from slipstream.models.causal import CausalScorer
from toys import HF_VOCAB

# ---- passes ----


def drive(scorer: CausalScorer, rows: int, seed: int = 0) -> list[Tensor]:
    """Ragged rows, a rejected tail, more slots than were allocated, a row leaving: the logits of every pass."""
    generator = torch.Generator().manual_seed(seed + rows)
    texts = [torch.randint(0, HF_VOCAB, (4 + 3 * row,), generator=generator).tolist() for row in range(rows)]
    scorer.add(rows)
    scorer.prefill(texts)
    found, lengths = [], [len(text) for text in texts]
    for width, kept in ((4, 2), (1, 1), (6, 6), (3, 0), (2, 2)):
        tokens = torch.randint(0, HF_VOCAB, (rows, width), generator=generator).to(scorer.device)
        found.append(scorer.extend(tokens, [width] * rows))
        lengths = [length + kept for length in lengths]
        scorer.rollback(lengths)
    scorer.free(range(rows))
    return found


def grow_and_branch(*scorers: CausalScorer) -> None:
    """A text that grows out of the first storage slot by slot, and a tree after it."""
    found, tree = list[list[Tensor]](), Tree.of((-1, 0, 0, 1), 4)
    for scorer in scorers:
        scorer.add(1)
        scorer.prefill([[i % HF_VOCAB for i in range(120)]])
        passes = [scorer.extend(torch.tensor([[i, i + 1, i + 2]], device=scorer.device), [3]) for i in range(0, 12, 3)]
        found.append([*passes, scorer.extend(torch.tensor([[5, 6, 7, 8]], device=scorer.device), [4], tree=tree)])
        scorer.free([0])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)


def run_before_others(*scorers: CausalScorer) -> None:
    """One row, two and three run while others behind them are read piece by piece; in the end a fork joins them."""
    found, generator = list[list[Tensor]](), torch.Generator()
    for scorer in scorers:
        generator.manual_seed(5)
        found.append([])
        scorer.add(4)
        scorer.prefill([[1, 2, 3], [4, 5], [6], [7, 8, 9]])
        for rows, width in ((1, 3), (2, 3), (1, 2), (3, 1), (2, 1), (3, 5), (5, 2)):
            tokens = torch.randint(0, HF_VOCAB, (rows, width), generator=generator)
            found[-1].append(scorer.extend(tokens.to(scorer.device), [1] * rows))
            if rows == 3:
                scorer.prefill([[10, 11, 12]], first=3)
            if width == 5:
                scorer.fork([1])
        assert scorer.lengths == [10, 7, 4, 10, 7]
        scorer.free(range(5))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)


def repeat(function: Callable[[], list[Tensor]], pool: Any = None) -> tuple[list[Tensor], Callable[[], object]]:
    """Stand for the recorder of CUDA graphs on a CPU: a replay runs the function again, into the same tensors."""
    GRAPHS.captured += 1
    found = function()
    return found, lambda: [kept.copy_(new) for kept, new in zip(found, function(), strict=True)]


class Unfused:
    """Stand for `Fused`: run a function of tensors as it is, which takes no time to compile."""

    def __init__(self, function: Callable[..., Any], *others: Any) -> None:
        self._function = function

    def __call__(self, inputs: Sequence[Any], sizes: Any) -> Any:
        return self._function(*inputs)


# ---- drafts ----

Gammas = list[tuple[int, ...]]
ONE: Gammas = [(4,), (2,), (4,)]
SHORT: Gammas = [(2,), (1,), (2,)]
THREE: Gammas = [(4, 2, 3), (1, 4, 0), (3, 3, 3)]
LATE: Gammas = [(4, 0, 3), (1, 0, 2), (3, 3, 3)]
"""The second text is drafted nothing, and not read, for two rounds."""
KEPT = ((1, 1, 0), (1, 3, 0), (0, 0, 0))  # of what each of three rows drafts in each of three rounds


def drafts(scorer: CausalScorer, samplers: list[Sampling], rounds: Gammas) -> list[Draft]:
    """What a drafter proposes for some texts, one per sampler, in rounds of which some stand and others are refused."""
    drafter, texts = ModelDrafter(scorer, HF_VOCAB), [list(range(1, 9 - place)) for place in range(len(samplers))]
    rows = tuple(
        Row(Request(tuple(text), sampler, 100, seed=7), place, text)
        for place, (text, sampler) in enumerate(zip(texts, samplers, strict=True))
    )
    found = []
    for gammas, kept in zip(rounds, KEPT, strict=True):
        draft = drafter.propose(Context(rows, draw), gammas)
        for place, row in enumerate(rows):
            row.tokens += [*draft.tokens[place, : min(kept[place], gammas[place])].tolist(), 3]
        have = zip(scorer.lengths, rows, strict=True)
        scorer.rollback([min(length, len(row.tokens) - 1) for length, row in have])
        found.append(draft)
    return found


def agree(left: Draft, right: Draft) -> None:
    """Up to the drafts' lengths: what stands behind is nobody's."""
    assert left.lengths == right.lengths
    assert left.law is not None and right.law is not None
    assert left.law.point == right.law.point and left.law.points == right.law.points
    for row, length in enumerate(left.lengths):
        assert left.tokens[row, :length].tolist() == right.tokens[row, :length].tolist()
        if not left.law.point:
            some, same = left.law.dense[row, :length], right.law.dense[row, :length]
            torch.testing.assert_close(some, same, atol=1e-6, rtol=1e-4)
