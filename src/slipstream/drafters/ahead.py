"""Drafting ahead in one process: while the target verifies a draft on its device, the model drafts the next on another.

The model continues on the assumption that the whole draft is accepted. It guesses the token after its draft and then
drafts the tokens of the next round. If draft and guess are right, the next draft is complete or begun; tokens that the
text contradicts are discarded by position.

Why exact. Tokens drafted ahead are drawn with the random numbers of the round in which they are used (`Since`). Nothing
in the present round depends on those numbers, so whether the tokens are used is independent of their values. A draft
without drafting ahead would use the same numbers for the same text: drafts, and therefore texts, do not depend on how
far the model got in time.

The model runs in a thread of its own, from `propose` to `observe`; between rounds that thread is idle, and the thread
that runs the rounds may use the model's cache. On CUDA devices its passes are queued on the stream of the draft's
device, which the target's device does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Self

import torch
from torch import Tensor

from slipstream.core.draft import Draft, padded
from slipstream.core.draws import Key, Rekeyed, Rng, RowByRow, SameForAllRows
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Scorer, Traits
from slipstream.core.request import Row
from slipstream.core.round import Context, Round, Stopwatch
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter


@dataclass(frozen=True)
class Since(Rekeyed):
    """An `Rng` that draws with the keys of a round that begins when the rows' texts have the lengths `origins`.

    A draft that is drawn in several pieces, before or during its round, gets the same random numbers as one that is
    drawn at once.
    """

    origins: tuple[int, ...]

    def rekey(self, key: Key) -> Key:
        return replace(key, origins=self.origins)

    def select(self, places: Sequence[int]) -> Self:
        return replace(super().select(places), origins=tuple(self.origins[place] for place in places))


class Likeliest(SameForAllRows):
    """An `Rng` that returns the most probable token of every law, to guess tokens that the target will draw."""

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        return law.probs.argmax(-1)


LIKELIEST = Likeliest()


@dataclass
class ExpectedText:
    """A row, and the text that the model expects it to have.

    `shadow.tokens` are the row's first `base` tokens, then `drafted` tokens of this round's draft, a guess at the token
    after it, and the tokens drafted for the next round, which were drawn from `law` (1, n). Once the row's text reaches
    the end of the guess, those `ready` tokens are the beginning of its draft. `goal` is the number of tokens to draft
    ahead for the next round, and `unread` holds tokens of the text that were cut from `shadow`.
    """

    row: Row
    shadow: Row
    base: int
    drafted: int = 0
    law: Law | None = None
    goal: int = 0
    unread: list[int] = field(default_factory=list)

    @staticmethod
    def of(row: Row) -> ExpectedText:
        return ExpectedText(row, Row(row.request, row.index, list(row.tokens)), len(row.tokens))

    @property
    def ready(self) -> int:
        return 0 if self.law is None else self.law.positions

    @property
    def lacks_guess(self) -> bool:
        return self.goal > 0 and len(self.shadow.tokens) == self.base + self.drafted

    @property
    def lacks_draft(self) -> bool:
        return self.goal > self.ready and not self.lacks_guess

    def settle(self) -> None:
        """Keep the tokens drafted ahead if draft and guess were right; else cut the expected text at the first wrong
        token. `complete` then appends the rest of the row's text."""
        text, expected = self.row.tokens, self.shadow.tokens
        self.shadow.finish_reason = self.row.finish_reason
        if len(text) == self.base and not self.drafted:
            return  # nothing has happened since
        end = min(len(expected), len(text))  # the texts are equal in the first `base` tokens
        kept = next((place for place in range(self.base, end) if expected[place] != text[place]), end)
        came_true = self.drafted > 0 and kept == len(text) == self.base + self.drafted + 1
        self.base, self.drafted, self.goal = len(text), 0, 0
        if not came_true:
            self.law = None
            expected[kept:] = text[kept : kept + 1]
            self.unread = text[kept + 1 :]

    def complete(self) -> None:
        """Append the rest of the row's text after `settle` has cut the expected one."""
        self.shadow.tokens += self.unread
        self.unread = []

    def cut(self, gamma: int) -> None:
        if self.law is not None and self.ready > gamma:
            self.law = self.law.first(gamma) if gamma else None
            del self.shadow.tokens[self.base + gamma :]

    def aim(self, gamma: int) -> None:
        """Set the goal: as many tokens as in this round, if it has a draft, within the room that is left.
        Nothing is drafted ahead with a grammar or a user's processors, which may be running for the target."""
        sampler = self.row.request.sampler
        able = isinstance(sampler, Sampling) and not (sampler.grammar or sampler.processors)
        self.goal = max(0, min(gamma, self.row.room - self.drafted - 2)) if self.drafted and able else 0

    def take(self, tokens: Sequence[int], law: Law) -> None:
        self.shadow.tokens += tokens
        law = law.first(len(tokens))
        self.law = law if self.law is None else Law.join([self.law, law], 1)


class AheadDrafter:
    """Drafts the same tokens as `ModelDrafter`, and drafts the next round while the target verifies them.

    Rows whose sampling calls a user's code or a grammar are not drafted ahead, because that code may be running for the
    target at the same time. Statistics count the tokens that were ready (`Stats.ahead`). Errors of the model are raised
    by `propose` or `observe`.
    """

    def __init__(self, model: ModelDrafter, executor: Executor | None = None) -> None:
        """Make the drafter; `executor` runs the model, one call at a time (None: a thread of the drafter's own)."""
        self.model = model
        self._executor = executor or ThreadPoolExecutor(1, "slipstream draft")
        self._texts: list[ExpectedText] = []
        self._going: Future[None] | None = None
        self._enough = Event()

    @property
    def traits(self) -> Traits:
        """The model's; a property, since an attribute that calls the drafter would keep it, and its thread, alive."""
        return replace(self.model.traits, release=self._release)

    @property
    def scorer(self) -> Scorer:
        return self.model.scorer

    def _release(self) -> None:
        self._stop()
        self._texts = []
        self.model.traits.release()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Draft up to `gammas[r]` tokens per row, some of which may be ready; then start to draft ahead, until
        `observe`."""
        self._stop()
        self._settle()
        if not any(gammas):
            return Draft.empty(len(context.rows), self.scorer.device)
        draft = self._executor.submit(self._draft, context, gammas).result()
        if any(text.goal for text in self._texts):
            self._enough.clear()
            self._going = self._executor.submit(self._go_ahead, context)
        return draft

    def observe(self, round: Round) -> None:
        self._stop()
        self._settle()

    # ---- in the thread that runs the rounds ----

    def _stop(self) -> None:
        if self._going is not None:
            going, self._going = self._going, None
            self._enough.set()
            going.result()

    def _settle(self) -> None:
        for text in self._texts:
            text.settle()
        self.model.trim()
        for text in self._texts:
            text.complete()

    # ---- in the thread of the model ----

    @torch.inference_mode()
    def _draft(self, context: Context, gammas: Sequence[int]) -> Draft:
        known = {text.row: text for text in self._texts}
        self._texts = [known.get(row) or ExpectedText.of(row) for row in context.rows]
        whole = self._fit([text.base + max(gammas) for text in self._texts])
        for text, gamma in zip(self._texts, gammas, strict=True):
            text.cut(gamma if whole else 0)
        self.model.trim()
        ready = [text.ready for text in self._texts]
        lacking = [gamma - count for gamma, count in zip(gammas, ready, strict=True)]
        rng = Since(context.rng, tuple(text.base for text in self._texts))
        fresh = self._propose(context, rng, lacking)
        draft = fresh
        if any(ready):
            laws = [self._law(text, fresh, place) for place, text in enumerate(self._texts)]
            drafted = [text.shadow.tokens[text.base :] for text in self._texts]
            new = [tokens[:length] for tokens, length in zip(fresh.tokens.tolist(), fresh.lengths, strict=True)]
            tokens = padded([[*old, *more] for old, more in zip(drafted, new, strict=True)], self.scorer.device)
            law = Law.join([each.stretched(tokens.shape[1]) for each in laws], 0)
            lengths = tuple(count + more for count, more in zip(ready, fresh.lengths, strict=True))
            draft = Draft(tokens, law, lengths, fresh.windowed, ahead=tuple(ready))
        for place, text in enumerate(self._texts):
            text.shadow.tokens += fresh.tokens[place, : fresh.lengths[place]].tolist()
            text.law, text.drafted = None, draft.lengths[place]
            text.aim(gammas[place])
        if not self._fit([text.base + text.drafted + 1 + text.goal for text in self._texts]):
            for text in self._texts:
                text.goal = 0
        return draft

    @torch.inference_mode()
    def _go_ahead(self, context: Context) -> None:
        context = replace(context, watch=Stopwatch())  # the round's own stopwatch is used by the other thread now
        while not self._enough.is_set() and (self._guess(context) or self._draft_next(context)):
            pass

    def _guess(self, context: Context) -> bool:
        """Guess the token after the draft for all rows that lack it -> whether there were any.

        Coupled draws are made with the target's own random numbers; for others, the most probable token is the guess.
        """
        lacking = [int(text.lacks_guess) for text in self._texts]
        rows = [context.rng.select([place]) for place in range(len(lacking))] if context.rng.coupled else []
        rng = RowByRow.of([each if each.coupled else LIKELIEST for each in rows]) if rows else LIKELIEST
        guess = self._propose(context, rng, lacking)
        for text, tokens, length in zip(self._texts, guess.tokens.tolist(), guess.lengths, strict=True):
            text.shadow.tokens += tokens[:length]
        return any(guess.lengths)

    def _draft_next(self, context: Context) -> bool:
        lacking = [int(text.lacks_draft) for text in self._texts]
        rng = Since(context.rng, tuple(text.base + text.drafted + 1 for text in self._texts))
        draft = self._propose(context, rng, lacking)
        for place, (text, length) in enumerate(zip(self._texts, draft.lengths, strict=True)):
            if length and draft.law is not None:
                text.take(draft.tokens[place, :length].tolist(), draft.law.of_row(place))
        return any(draft.lengths)

    def _propose(self, context: Context, rng: Rng, lacking: Sequence[int]) -> Draft:
        return self.model.propose(replace(context, rows=tuple(text.shadow for text in self._texts), rng=rng), lacking)

    def _fit(self, lengths: Sequence[int]) -> bool:
        """Return whether texts of these lengths fit the model's context.

        Longer texts are read in a window whose start depends on the number of tokens to draft; so nothing is drafted
        ahead there, to keep the window that a draft without drafting ahead would have.
        """
        return self.scorer.context is None or max(lengths) <= self.scorer.context

    def _law(self, text: ExpectedText, fresh: Draft, place: int) -> Law:
        """Return the law of a row's tokens; for a row without tokens, a placeholder law of the same kind."""
        pieces = [] if text.law is None else [text.law]
        if fresh.law is not None and fresh.lengths[place]:
            pieces.append(fresh.law.of_row(place).first(fresh.lengths[place]))
        if pieces:
            return Law.join(pieces, 1)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.scorer.device)
        if text.row.request.sampler.greedy:
            return Law(tokens=token)
        return Law(probs=torch.full((1, 1, self.model.vocab), 1 / self.model.vocab, device=token.device))


def ahead_or_waiting(drafter: Drafter, target: Scorer | None, ahead: bool | None) -> Drafter:
    """Return the drafter, wrapped to draft ahead if `ahead` is true, or if it is None and the devices differ.

    `target` is None where drafting ahead is not possible: the model drafts for another draft, or its passes are
    compiled graphs, which are made for one thread only. Raises ValueError if `ahead` is true and not possible.
    """
    able = isinstance(drafter, ModelDrafter) and target is not None
    if ahead and not able:
        raise ValueError(
            "ahead=true is not possible here: it takes a model with the target's tokenizer, which drafts for the "
            "target itself and runs eagerly. Leave it out, or leave out the tree, the chain a>b or --compile."
        )
    if not isinstance(drafter, ModelDrafter) or target is None or ahead is False:
        return drafter
    return AheadDrafter(drafter) if ahead or drafter.scorer.device != target.device else drafter
