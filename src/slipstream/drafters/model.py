"""Draft by a smaller model: the paper's approximation model M_q, sampled token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.records import Context, Draft, Law, Round, Row, Scorer


class ModelDrafter:
    """Samples drafts from a Scorer with the request's own sampling settings.

    Its cache may lag behind the text: by two tokens after a full acceptance (the last draft was sampled but never
    fed), by any number after rounds without drafting, by the whole prompt at the start; `propose` feeds what is
    missing. A text longer than the draft's context is drafted from its last tokens ("window"), which is exact,
    since q is the law the token was really sampled from; the statistics count such tokens as `windowed`.
    """

    def __init__(self, scorer: Scorer, vocab: int | None = None) -> None:
        """`vocab`: size of the target's logits. The draft's padding ids beyond it are never proposed."""
        self.scorer = scorer
        self.vocab = vocab or scorer.vocab
        scorer.free(range(len(scorer.lengths)))  # leftovers of an earlier drafter
        self._rows: list[Row] = []
        self._starts: list[int] = []  # where each row's window begins in its text

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample up to `gammas[r]` tokens per row, each from the law given all before it."""
        self._follow(context.rows)
        gamma = max(gammas, default=0)
        if not gamma:
            return Draft.empty(len(self._rows), self.scorer.device)
        logits = self._catch_up(gamma)
        tokens = torch.empty(len(self._rows), 0, dtype=torch.long, device=self.scorer.device)
        laws: list[Law] = []
        for i in range(gamma):
            laws.append(context.law(fit(logits, self.vocab), tokens, self.scorer.name).bare())
            tokens = torch.cat([tokens, context.draw(laws[-1], "draft", start=i)], 1)
            if i + 1 < gamma:
                logits = self.scorer.extend(tokens[:, -1:], [int(i + 1 < wanted) for wanted in gammas])
        windowed = tuple(wanted if start else 0 for wanted, start in zip(gammas, self._starts, strict=True))
        return Draft(tokens, Law.join(laws, 1), tuple(gammas), windowed=windowed)

    def observe(self, round: Round) -> None:
        """Forget drafted tokens that were not kept."""
        if self._rows:
            kept = [len(row.tokens) - 1 - start for row, start in zip(self._rows, self._starts, strict=True)]
            self.scorer.rollback([min(have, keep) for have, keep in zip(self.scorer.lengths, kept, strict=True)])

    def _follow(self, rows: Sequence[Row]) -> None:
        """Make our rows those of the context: free the ended, add the new. Rows that run on keep their order."""
        running = {id(row) for row in rows}
        ended = [place for place, row in enumerate(self._rows) if id(row) not in running]
        self.scorer.free(ended)
        self._starts = [start for place, start in enumerate(self._starts) if place not in set(ended)]
        new = len(rows) - len(self._starts)
        self.scorer.add(new)
        self._starts += [0] * new
        self._rows = list(rows)

    def _catch_up(self, gamma: int) -> Tensor:
        """Feed what the cache lacks -> logits (rows, 1, vocab) of each row's last token."""
        self._slide(gamma)
        missing = self._missing()
        if max(map(len, missing)) > 2:
            self.scorer.prefill([tokens[:-1] for tokens in missing])
            missing = self._missing()
        counts = torch.tensor([len(tokens) for tokens in missing], device=self.scorer.device)
        width = max(map(len, missing))
        fed = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in missing], device=counts.device)
        logits = self.scorer.extend(fed, counts.tolist())
        return logits[torch.arange(len(missing), device=counts.device), counts - 1].unsqueeze(1)

    def _missing(self) -> list[list[int]]:
        places = zip(self._rows, self._starts, self.scorer.lengths, strict=True)
        return [row.tokens[start + have :] for row, start, have in places]

    def _slide(self, gamma: int) -> None:
        """Begin a new window of half the draft's context where text and draft no longer fit."""
        limit = self.scorer.context
        if limit is None:
            return
        lengths = list(self.scorer.lengths)
        for place, row in enumerate(self._rows):
            if len(row.tokens) - self._starts[place] + gamma > limit:
                self._starts[place] = len(row.tokens) - max(1, min(limit // 2, limit - gamma))
                lengths[place] = 0
        self.scorer.rollback(lengths)


def fit(logits: Tensor, vocab: int) -> Tensor:
    """Cut or pad logits (..., v) to the target's vocabulary: its other ids get probability zero."""
    if logits.shape[-1] >= vocab:
        return logits[..., :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=float("-inf"))
