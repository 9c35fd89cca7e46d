"""A scorer beside the texts it should hold, compared with fresh forwards of each text alone, without cache."""

import copy
import itertools

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
    """A scorer beside the texts it should hold; every step is compared with fresh forwards."""

    def __init__(self, model: PreTrainedModel | StateScorer, execution: Execution | None = None) -> None:
        self.scorer = model if isinstance(model, StateScorer) else CausalScorer(model, execution=execution)
        self.texts: list[list[int]] = []
        self.sources: list[Source | None] = []
        self.fresh_names = itertools.count(1000)

    def add(self, *lengths: int) -> None:
        """Prefill new rows behind the others."""
        new = [text(next(self.fresh_names), length) for length in lengths]
        sources = [source(self.scorer, next(self.fresh_names), 1 + 5 * length % 23) for length in lengths]
        self.scorer.add(len(new), sources)
        self.scorer.prefill(new, first=len(self.texts))
        self.texts += new
        self.sources += sources

    def fork(self, *rows: int) -> None:
        """Copies of some rows, behind all others."""
        self.scorer.fork(rows)
        self.texts += [list(self.texts[row]) for row in rows]
        self.sources += [self.sources[row] for row in rows]

    def read(self, count: int, first: int = 0) -> None:
        """Feed `count` more tokens of a prompt to the last rows, from `first` on."""
        pieces = [text(next(self.fresh_names), count + place) for place in range(len(self.texts) - first)]
        self.scorer.prefill(pieces, first)
        self.texts[first:] = [[*old, *new] for old, new in zip(self.texts[first:], pieces, strict=True)]

    def free(self, *rows: int) -> None:
        self.scorer.free(rows)
        self.texts = [text for place, text in enumerate(self.texts) if place not in rows]
        self.sources = [source for place, source in enumerate(self.sources) if place not in rows]

    @torch.inference_mode()
    def step(self, *counts: int) -> float:
        """Feed the first rows wrong tokens, roll back, feed `counts[r]` true ones -> largest difference in standard
        deviations. Rows behind them take no part."""
        wrong = torch.tensor([text(next(self.fresh_names), 3) for _ in counts])
        self.scorer.extend(wrong, [1 + place % 3 for place in range(len(counts))])
        self.scorer.rollback([len(text) for text in self.texts[: len(counts)]])
        new = [text(next(self.fresh_names), max(counts)) for _ in counts]
        logits = self.scorer.extend(torch.tensor(new), counts)
        assert logits.shape == (len(counts), max(counts), self.scorer.vocab)
        return self._gap(logits, new, counts)

    def verify(self, *counts: int) -> float:
        """Feed the first rows `counts[r]` true tokens and one to three wrong ones behind them, in one pass, and roll
        the wrong ones back -> largest difference for the true ones, in standard deviations."""
        new = [text(next(self.fresh_names), max(counts) + 3) for _ in counts]
        logits = self.scorer.extend(torch.tensor(new), [count + 1 + place % 3 for place, count in enumerate(counts)])
        texts = zip(self.texts, counts, strict=False)
        self.scorer.rollback([len(text) + count for text, count in texts])
        return self._gap(logits, new, counts)

    def _gap(self, logits: torch.Tensor, new: list[list[int]], counts: tuple[int, ...]) -> float:
        """Append `counts[r]` new tokens to the texts, and compare their logits."""
        gaps = []
        for place, count in enumerate(counts):
            self.texts[place] = [*self.texts[place], *new[place][:count]]
            want = self.scorer.alone(self.texts[place], self.sources[place])[0, -count:].float()
            gaps.append(float((logits[place, :count].float() - want).abs().max() / want.std()))
        assert self.scorer.lengths == [len(text) for text in self.texts]
        return max(gaps)


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
    rows = Reference(model, execution)
    rows.add(2 * WINDOW + 3, 4)
    gaps = [rows.step(2, 1)]
    rows.fork(0, 1, 0)
    gaps.append(rows.step(1, 4, 2, 3, 1))  # each goes on by itself
    rows.fork(4)
    rows.free(0)
    gaps.append(rows.step(3, 1, 2, 1, 2))
    rows.add(3)
    rows.fork(5, 0)
    rows.free(1, 3)
    gaps.append(rows.step(1, 2, 3, 4, 2, 1))
    return max(gaps)


def contract(model: PreTrainedModel | StateScorer, execution: Execution | None = None) -> float:
    """The whole contract -> largest difference. The first rows are longer than the window, the second is not."""
    rows = Reference(model, execution)
    rows.add(2 * WINDOW + 3, 3, WINDOW)
    gaps = [rows.step(1, 4, 2), rows.step(4, 1, 4)]
    rows.free(1)
    gaps.append(rows.step(2, 3))
    rows.add(3 * WINDOW, 1)  # late, and longer than the others
    gaps += [rows.step(1, 2, 3, 4), rows.step(4, 3, 2, 1)]
    gaps += [rows.verify(1, 2, 3, 4), rows.step(2, 1, 3, 1), rows.verify(4, 3, 2, 1)]
    rows.free(0, 2)
    gaps += [rows.step(2, 2), rows.verify(2, 5), rows.step(1, 2)]
    return max(gaps)
