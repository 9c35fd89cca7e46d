"""A scorer beside the texts it should hold, compared with fresh forwards of each text alone, without cache."""

import copy
import itertools
from typing import Self

import torch
from transformers import PreTrainedModel

from slipstream.check.families import EveryOther
from slipstream.core.protocols import Scorer
from slipstream.core.request import Request
from slipstream.core.source import Source
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.drafters.model import ModelDrafter
from slipstream.execution.passes import Execution
from slipstream.models.causal import CausalScorer
from slipstream.models.recurrent.scorer import StateScorer
from toys import HF_VOCAB, WINDOW

TOLERANCE = 1e-4  # of float32, in standard deviations of the logits


def text(name: int, count: int) -> list[int]:
    """A reproducible random text, without the padding token of any family."""
    return torch.randint(2, HF_VOCAB, (count,), generator=torch.Generator().manual_seed(name)).tolist()


def source(scorer: CausalScorer | StateScorer, name: int, length: int) -> Source | None:
    """What the model's encoder reads, if it has one: a random source of `length` tokens, or features."""
    form = scorer.source_form
    if form is None:
        return None
    if form.features is None:
        return tuple(text(name, length))
    return torch.randn(form.features, generator=torch.Generator().manual_seed(name))


def drafts_change_nothing(
    target: Scorer, draft: Scorer, requests: list[Request], want: list[list[int]], gamma: int = 3
) -> None:
    """Assert that greedy texts are `want`, plainly and with drafts that are wrong in every other round."""
    decoder = Decoder(target, EveryOther(ModelDrafter(draft)), controller=Fixed(gamma))
    assert [row.output for row in plain(decoder, requests)] == want
    rows = generate(decoder, requests)
    assert [row.output for row in rows] == want
    assert 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)


class Reference:
    """A scorer beside the texts it should hold. `gap` compares all that it scored with a fresh forward of each text,
    in which a token's logits depend on nothing behind it."""

    def __init__(self, model: PreTrainedModel | StateScorer, execution: Execution | None = None) -> None:
        self.scorer = model if isinstance(model, StateScorer) else CausalScorer(model, execution=execution)
        self.texts: list[list[int]] = []
        self.sources: list[Source | None] = []
        self.scored: list[list[tuple[int, torch.Tensor]]] = []  # from which place on, and the logits
        self.largest = 0.0
        self.fresh_names = itertools.count(1000)

    def add(self, *lengths: int) -> Self:
        """Prefill new rows behind the others."""
        new = [text(next(self.fresh_names), length) for length in lengths]
        sources = [source(self.scorer, next(self.fresh_names), 1 + 5 * length % 23) for length in lengths]
        self.scorer.add(len(new), sources)
        self.scorer.prefill(new, first=len(self.texts))
        self.texts += new
        self.sources += sources
        self.scored += [[] for _ in new]
        return self

    def fork(self, *rows: int) -> Self:
        """Copies of some rows, behind all others."""
        self.scorer.fork(rows)
        self.texts += [list(self.texts[row]) for row in rows]
        self.sources += [self.sources[row] for row in rows]
        self.scored += [[] for _ in rows]
        return self

    def read(self, count: int, first: int = 0) -> Self:
        """Feed `count` more tokens of a prompt to the last rows, from `first` on."""
        pieces = [text(next(self.fresh_names), count + place) for place in range(len(self.texts) - first)]
        self.scorer.prefill(pieces, first)
        self.texts[first:] = [[*old, *new] for old, new in zip(self.texts[first:], pieces, strict=True)]
        return self

    def free(self, *rows: int) -> Self:
        self.gap(*rows)
        self.scorer.free(rows)
        kept = [place for place in range(len(self.texts)) if place not in rows]
        self.texts, self.sources = [self.texts[place] for place in kept], [self.sources[place] for place in kept]
        self.scored = [self.scored[place] for place in kept]
        return self

    @torch.inference_mode()
    def step(self, *counts: int) -> Self:
        """Feed the first rows wrong tokens, roll back, feed `counts[r]` true ones. Rows behind them take no part."""
        wrong = torch.tensor([text(next(self.fresh_names), 3) for _ in counts])
        self.scorer.extend(wrong, [1 + place % 3 for place in range(len(counts))])
        self.scorer.rollback([len(text) for text in self.texts[: len(counts)]])
        new = [text(next(self.fresh_names), max(counts)) for _ in counts]
        logits = self.scorer.extend(torch.tensor(new), counts)
        assert logits.shape == (len(counts), max(counts), self.scorer.vocab)
        return self._note(logits, new, counts)

    def verify(self, *counts: int) -> Self:
        """Feed the first rows `counts[r]` true tokens and one to three wrong ones behind them, in one pass, and roll
        the wrong ones back."""
        new = [text(next(self.fresh_names), max(counts) + 3) for _ in counts]
        logits = self.scorer.extend(torch.tensor(new), [count + 1 + place % 3 for place, count in enumerate(counts)])
        texts = zip(self.texts, counts, strict=False)
        self.scorer.rollback([len(text) + count for text, count in texts])
        return self._note(logits, new, counts)

    def _note(self, logits: torch.Tensor, new: list[list[int]], counts: tuple[int, ...]) -> Self:
        """Append `counts[r]` new tokens to the texts."""
        for place, count in enumerate(counts):
            self.scored[place].append((len(self.texts[place]), logits[place, :count].float()))
            self.texts[place] = [*self.texts[place], *new[place][:count]]
        assert self.scorer.lengths == [len(text) for text in self.texts]
        return self

    @torch.inference_mode()
    def gap(self, *rows: int) -> float:
        """The largest difference so far, those of these rows or of all among them, in standard deviations."""
        for row in rows or range(len(self.texts)):
            if not self.scored[row]:
                continue
            fresh = self.scorer.alone(self.texts[row], self.sources[row])[0].float()
            for start, logits in self.scored[row]:
                want = fresh[start : start + len(logits)]
                self.largest = max(self.largest, float((logits - want).abs().max() / want.std()))
            self.scored[row].clear()
        return self.largest


@torch.inference_mode()
def rounding(model: PreTrainedModel) -> float:
    """How far a model's own logits lie from those of its weights in float64, in standard deviations: what its dtype
    costs on this processor, and so the most by which its passes may differ from each other in half precision."""
    rough, exact = CausalScorer(model), CausalScorer(copy.deepcopy(model).double())
    gaps = []
    for name in range(8):
        given = text(name, 2 * WINDOW + 3), source(rough, 100 + name, 9)
        found, want = (scorer.alone(*given)[0].double() for scorer in (rough, exact))
        gaps.append(float((found - want).abs().max() / want.std()))
    return max(gaps)


def families(model: PreTrainedModel | StateScorer, execution: Execution | None = None) -> float:
    """Rows that fork, fork again and lose their origins -> largest difference."""
    rows = Reference(model, execution).add(2 * WINDOW + 3, 4).step(2, 1)
    rows.fork(0, 1, 0).step(1, 4, 2, 3, 1)  # each goes on by itself
    rows.fork(4).free(0).step(3, 1, 2, 1, 2)
    return rows.add(3).fork(5, 0).free(1, 3).step(1, 2, 3, 4, 2, 1).gap()


def contract(model: PreTrainedModel | StateScorer, execution: Execution | None = None) -> float:
    """The whole contract -> largest difference. The first rows are longer than the window, the second is not."""
    rows = Reference(model, execution).add(2 * WINDOW + 3, 3, WINDOW)
    rows.step(1, 4, 2).step(4, 1, 4).free(1).step(2, 3)
    rows.add(3 * WINDOW, 1)  # late, and longer than the others
    rows.step(1, 2, 3, 4).step(4, 3, 2, 1).verify(1, 2, 3, 4).step(2, 1, 3, 1).verify(4, 3, 2, 1)
    return rows.free(0, 2).step(2, 2).verify(2, 5).step(1, 2).gap()
