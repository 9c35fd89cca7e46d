"""Acceptance along texts that the target wrote (Corollary 3.6): alpha of models and n-grams, strict and lenient."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction.published import LENIENCES
from reproduction.runs import expected_rounds as walks
from reproduction.runs.subjects import Subject
from reproduction.statistics import bootstrap_ratio
from slipstream.core.law import Law, pad_vocabulary
from slipstream.core.protocols import Scorer
from slipstream.core.request import Request, Row
from slipstream.decoding import acceptance
from slipstream.decoding.generate import generate, succeeded
from slipstream.drafters.ngram import NgramModel
from slipstream.measure.environment import environment
from slipstream.measure.replay import plain_law, replay

Outputs = Sequence[Sequence[int]]

Scout = Callable[[Sequence[Request], Outputs], Iterator[Law]]
"""A function that returns q (rows, 1, vocab) before every token of given outputs, in their order."""

BATCH = 32
TIMES = 8  # the greatest number of texts from one source
LAGS = 5  # autocorrelations are computed at 1 to LAGS positions apart
RUN = 6  # acceptance is computed after 0 to RUN - 1 accepted tokens
PLACES = 12  # acceptance is computed at each of the first PLACES tokens
REPLICATES = 200  # bootstrap samples for the interval of alpha
GAMMAS, ENDLESS = range(1, 17), range(1, 17)  # gammas on the texts as they are, and on all of them joined to one


class Trail:
    """The acceptance of a draft at every position of texts: beta, and the chance that the token there is kept."""

    def __init__(self) -> None:
        self.betas: list[list[float]] = []
        self.chances: list[list[float]] = []
        self.lenient = dict.fromkeys(LENIENCES, 0.0)  # sums over positions

    def begin(self, texts: int) -> None:
        """Add texts whose positions are then added together by `step`."""
        self.betas += [[] for _ in range(texts)]
        self.chances += [[] for _ in range(texts)]

    def step(self, texts: Sequence[int], p: Law, q: Law, written: Tensor) -> None:
        """Add one position of some of the texts; `written` (rows, 1) are the target's tokens there."""
        beta = acceptance.beta(p, q)
        chance = beta if p.point else (q.of(written) / p.of(written)).clamp(max=1)
        for text, kept, kept_here in zip(texts, beta[:, 0].tolist(), chance[:, 0].tolist(), strict=True):
            self.betas[text].append(min(1.0, kept))
            self.chances[text].append(kept_here)
        for lenience in self.lenient:
            self.lenient[lenience] += float(lenient_beta(p, q, lenience).clamp(max=1).sum())

    def figures(self) -> dict[str, Any]:
        """Return the figures for tables and plots."""
        positions = sum(map(len, self.betas))
        pairs = [(math.fsum(betas), len(betas)) for betas in self.betas if betas]
        one = walks.endless(self.chances)
        return {
            "alpha": asdict(bootstrap_ratio(pairs, replicates=REPLICATES)),
            "positions": positions,
            "mean_length": positions / len(pairs),
            "lenient": {f"{lenience:g}": total / positions for lenience, total in self.lenient.items()},
            "by_place": walks.by_place(self.chances, PLACES),
            "after": [walks.after(self.chances, kept) for kept in range(RUN)],
            "autocorrelation": [walks.autocorrelation(self.chances, lag) for lag in range(1, LAGS + 1)],
            "tokens_per_round": {str(gamma): walks.tokens_per_round(self.chances, gamma) for gamma in GAMMAS},
            "endless_tokens_per_round": {str(gamma): walks.tokens_per_round(one, gamma) for gamma in ENDLESS},
            "oracle": walks.oracle(one),
        }


def lenient_beta(p: Law, q: Law, lenience: float) -> Tensor:
    """Return alpha_l at each position (rows, positions): sum_x min(p/l, q), greedily whether p(x) >= l max p (A.5)."""
    if p.tokens is None:
        return torch.minimum(p.dense / lenience, q.dense).sum(-1)
    assert p.scores is not None and q.tokens is not None
    scores = p.scores.gather(-1, q.tokens.unsqueeze(-1)).squeeze(-1)
    return ((q.tokens == p.tokens) | (scores >= p.scores.amax(-1) + math.log(lenience))).float()


def write(
    subject: Subject, temperature: float, tokens: int, say: Callable[[str], object]
) -> tuple[list[Request], Outputs]:
    """Decode about `tokens` tokens with the target -> requests and outputs; above temperature 0 sources may repeat."""
    decoder, requests, outputs = replace(subject.plain, batch_size=BATCH), list[Request](), list[list[int]]()
    places, written = range(len(subject.sources)), 0
    for seed in range(TIMES if temperature else 1):
        for start in places[::BATCH]:
            if written >= tokens:
                return requests, outputs
            some = subject.requests(temperature, places[start : start + BATCH], seed)
            requests += some
            outputs += [row.output for row in succeeded(generate(decoder, some))]
            written = sum(map(len, outputs))
            say(f"{subject.name} at temperature {temperature:g}: {min(written, tokens)} of {tokens} tokens")
    return requests, outputs


def tables(subject: Subject) -> dict[str, NgramModel]:
    """Return unigram and bigram models of the text that a subject's models were trained on."""
    vocab, known = subject.engine.decoder.target.vocab, subject.known()
    with_begin = [[*subject.begin, *text] for text in known]
    return {"unigram": NgramModel.fit(known, 1, vocab), "bigram": NgramModel.fit(with_begin, 2, vocab)}


def scouts(subject: Subject, counted: Mapping[str, NgramModel]) -> dict[str, Scout]:
    vocab = subject.engine.decoder.target.vocab
    ngrams: dict[str, Scout] = {name: ngram_scout(model, name) for name, model in counted.items()}
    return ngrams | {name: model_scout(subject.lend(name), vocab) for name in subject.drafts}


def model_scout(draft: Scorer, vocab: int) -> Scout:
    def walk(requests: Sequence[Request], outputs: Outputs) -> Iterator[Law]:
        for _, rows, scores, _ in replay(draft, requests, outputs):
            yield plain_law(rows, pad_vocabulary(scores, vocab), draft.name)

    return walk


def ngram_scout(model: NgramModel, name: str) -> Scout:
    """Return a scout for an n-gram model; `name` is for messages."""

    def walk(requests: Sequence[Request], outputs: Outputs) -> Iterator[Law]:
        rows = [Row(request, index, list(request.prompt)) for index, request in enumerate(requests)]
        for place in range(max(map(len, outputs))):
            laws = np.stack([model.law(model.state(row.tokens[-model.order :])) for row in rows])
            yield plain_law(rows, torch.from_numpy(np.log(laws))[:, None], f"the {name} model")
            for row, output in zip(rows, outputs, strict=True):
                row.tokens += output[place : place + 1]

    return walk


@torch.inference_mode()
def follow(
    subject: Subject, found: Mapping[str, Scout], requests: Sequence[Request], outputs: Outputs
) -> dict[str, Trail]:
    trails = {name: Trail() for name in found}
    for start in range(0, len(outputs), BATCH):
        some, texts = requests[start : start + BATCH], outputs[start : start + BATCH]
        for trail in trails.values():
            trail.begin(len(texts))
        draft_laws = {name: scout(some, texts) for name, scout in found.items()}
        for place, _, _, p in replay(subject.engine.decoder.target, some, texts):
            alive = torch.tensor([row for row, text in enumerate(texts) if place < len(text)])
            written = torch.tensor([[texts[row][place]] for row in alive])
            for name, laws in draft_laws.items():
                alive_p, alive_q = p.select(alive.to(p.device)), next(laws).to(p.device).select(alive.to(p.device))
                trails[name].step([start + row for row in alive.tolist()], alive_p, alive_q, written.to(p.device))
    return trails


def measure(
    subject: Subject, temperature: float, tokens: int, counted: Mapping[str, NgramModel], say: Callable[[str], object]
) -> dict[str, Any]:
    """Measure the acceptance of n-grams and drafts along about `tokens` tokens of the target -> a JSON object."""
    requests, outputs = write(subject, temperature, tokens, say)
    say(f"{subject.name} at temperature {temperature:g}: acceptance along {sum(map(len, outputs))} tokens")
    trails = follow(subject, scouts(subject, counted), requests, outputs)
    return {
        "subject": subject.name,
        "environment": environment(subject.engine),
        **subject.models,
        "drafts": {name: trail.figures() for name, trail in trails.items()},
    }
