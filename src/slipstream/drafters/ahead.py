"""Drafting ahead in one process: while the target verifies a draft on its device, the model drafts the next on another.

The model goes on as if everything stood. It guesses the token after its draft and drafts what the next round will ask
for behind that. If draft and guess come true, the next draft is ready, or begun; what the text contradicts is thrown
away by position.

Why exact. What is drafted ahead is drawn with the numbers of the round that it is for (`Since`), which nothing in this
round depends on, so whether it is used says nothing about its tokens. These are the numbers that a draft without
going ahead would use for the same text: drafts, and so texts, are the same ones however far the model got in time.

The model runs in a thread of its own, from `propose` to `observe`; between rounds that thread does nothing, and whoever
runs the rounds may touch the model's cache. On CUDA devices its passes are queued on the stream of the draft's device,
which the target's device does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event

import torch
from torch import Tensor

from slipstream.core.draft import Draft, padded
from slipstream.core.draws import Key, Rng, RowByRow
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Scorer
from slipstream.core.request import Row
from slipstream.core.round import Context, Round, Stopwatch
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter


@dataclass(frozen=True)
class Since:
    """The draws outside, as of a round that begins when the rows' texts have the lengths `origins`.

    A draft that is drawn in several pieces, before or in its round, has the numbers of one that is drawn at once.
    """

    outer: Rng
    origins: tuple[int, ...]

    @property
    def coupled(self) -> bool:
        """As the draws outside."""
        return self.outer.coupled

    def __call__(self, law: Law, key: Key) -> Tensor:
        """Tokens (rows, positions), drawn outside under another key."""
        return self.outer(law, replace(key, origins=self.origins))

    def chances(self, key: Key, positions: int) -> list[list[float]] | None:
        """See `Rng`."""
        return self.outer.chances(replace(key, origins=self.origins), positions)

    def select(self, places: Sequence[int]) -> Rng:
        """See `Rng`."""
        return Since(self.outer.select(places), tuple(self.origins[place] for place in places))


@dataclass(frozen=True)
class Likeliest:
    """No draws: the likeliest token of every law, as the guess at a token that somebody else will draw."""

    coupled = False

    def __call__(self, law: Law, key: Key) -> Tensor:
        """Tokens (rows, positions)."""
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        return law.probs.argmax(-1)

    def chances(self, key: Key, positions: int) -> None:
        """See `Rng`: these are no inversions."""

    def select(self, places: Sequence[int]) -> Rng:
        """See `Rng`: all rows do alike."""
        return self


LIKELIEST = Likeliest()


@dataclass
class ExpectedText:
    """A row, and its text as the model has it: `shadow.tokens` are the row's first `base` tokens, then `drafted` tokens
    of this round's draft, a guess at the token after it, and what was drafted for the next round, by `law` (1, n).

    When the row has come to the end of the guess, the tokens behind it are the beginning of its draft: `ready` of them.
    `goal` is how many tokens the next round should find.
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
        """The text of a row, behind which nothing is expected."""
        return ExpectedText(row, Row(row.request, row.index, list(row.tokens)), len(row.tokens))

    @property
    def ready(self) -> int:
        """How many tokens were drafted for the round after the guess."""
        return 0 if self.law is None else self.law.positions

    @property
    def lacks_guess(self) -> bool:
        """Whether the token after the draft is still to be guessed."""
        return self.goal > 0 and len(self.shadow.tokens) == self.base + self.drafted

    @property
    def lacks_draft(self) -> bool:
        """Whether there is a guess, and more to be drafted behind it."""
        return self.goal > self.ready and not self.lacks_guess

    def settle(self) -> None:
        """Keep what was drafted ahead if all that was expected has come; else cut the text where it is wrong, down to
        the first token that the model has not read."""
        text, expected = self.row.tokens, self.shadow.tokens
        self.shadow.finish_reason = self.row.finish_reason
        if len(text) == self.base and not self.drafted:
            return  # nothing has happened since
        kept = _alike(expected, text, self.base)
        came_true = self.drafted > 0 and kept == len(text) == self.base + self.drafted + 1
        self.base, self.drafted, self.goal = len(text), 0, 0
        if not came_true:
            self.law = None
            expected[kept:] = text[kept : kept + 1]
            self.unread = text[kept + 1 :]

    def complete(self) -> None:
        """Append the rest of a text that was cut."""
        self.shadow.tokens += self.unread
        self.unread = []

    def cut(self, gamma: int) -> None:
        """Forget what was drafted beyond `gamma` tokens."""
        if self.law is not None and self.ready > gamma:
            self.law = self.law.first(gamma) if gamma else None
            del self.shadow.tokens[self.base + gamma :]

    def take(self, tokens: Sequence[int], law: Law) -> None:
        """Append tokens, with the law (1, positions) that they were drawn from."""
        self.shadow.tokens += tokens
        law = law.first(len(tokens))
        self.law = law if self.law is None else Law.join([self.law, law], 1)


def _alike(expected: Sequence[int], text: Sequence[int], known: int) -> int:
    """How many tokens two texts begin with alike, which have the first `known` in common."""
    end = min(len(expected), len(text))
    return next((place for place in range(known, end) if expected[place] != text[place]), end)


class AheadDrafter:
    """Drafts with a model as `ModelDrafter` does, the same tokens, and goes on while the target verifies them.

    Rows whose sampling calls code of the user's, or a grammar, are not drafted ahead: that code may be running for the
    target. Statistics count the tokens that were ready (`Stats.ahead`). What the model raises is raised by `propose`
    or `observe`.
    """

    on_target_rows = False

    def __init__(self, model: ModelDrafter, executor: Executor | None = None) -> None:
        """`executor` runs the model, one call at a time; none: a thread of our own."""
        self.model = model
        self._executor = executor or ThreadPoolExecutor(1, "slipstream draft")
        self._texts: list[ExpectedText] = []
        self._going: Future[None] | None = None
        self._enough = Event()

    @property
    def scorer(self) -> Scorer:
        """The model."""
        return self.model.scorer

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The model."""
        return self.model.scorers

    def release(self) -> None:
        """Forget all rows."""
        self._stop()
        self._texts = []
        self.model.release()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` tokens per row, of which some may be ready; then go ahead, until `observe`."""
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
        """Throw away what was guessed wrong."""
        self._stop()
        self._settle()

    # ---- in the thread that runs the rounds ----

    def _stop(self) -> None:
        """Wait until the model has done the step that it is at."""
        if self._going is not None:
            going, self._going = self._going, None
            self._enough.set()
            going.result()

    def _settle(self) -> None:
        """Compare what was expected with the rows' texts; the model forgets what it has read in vain."""
        for text in self._texts:
            text.settle()
        self.model.trim()
        for text in self._texts:
            text.complete()

    # ---- in the thread of the model ----

    @torch.inference_mode()
    def _draft(self, context: Context, gammas: Sequence[int]) -> Draft:
        """This round's draft: what is ready, and what is lacking of it."""
        known = {id(text.row): text for text in self._texts}
        self._texts = [known.get(id(row)) or ExpectedText.of(row) for row in context.rows]
        whole = self._fit([text.base + max(gammas) for text in self._texts])
        for text, gamma in zip(self._texts, gammas, strict=True):
            text.cut(gamma if whole else 0)
        self.model.trim()
        ready = [text.ready for text in self._texts]
        lacking = [gamma - count for gamma, count in zip(gammas, ready, strict=True)]
        rng = Since(context.rng, tuple(text.base for text in self._texts))
        fresh = self.model.propose(self._context(context, rng), lacking)
        draft = self._joined(fresh, ready) if any(ready) else fresh
        for place, text in enumerate(self._texts):
            text.shadow.tokens += fresh.tokens[place, : fresh.lengths[place]].tolist()
            text.law, text.drafted = None, draft.lengths[place]
            text.goal = _goal(text, gammas[place])
        if not self._fit([text.base + text.drafted + 1 + text.goal for text in self._texts]):
            for text in self._texts:
                text.goal = 0
        return draft

    @torch.inference_mode()
    def _go_ahead(self, context: Context) -> None:
        """Guess and draft token by token, until `_stop` or until the next draft is whole."""
        context = replace(context, watch=Stopwatch())  # that of the round belongs to the other thread now
        while not self._enough.is_set() and (self._guess(context) or self._draft_next(context)):
            pass

    def _guess(self, context: Context) -> bool:
        """Guess the token after the draft for all rows that lack it -> whether any did.

        Coupled draws are known before the target has made them; of others, the likeliest token may come.
        """
        lacking = [int(text.lacks_guess) for text in self._texts]
        rows = [context.rng.select([place]) for place in range(len(lacking))] if context.rng.coupled else []
        rng = RowByRow.of([each if each.coupled else LIKELIEST for each in rows]) if rows else LIKELIEST
        guess = self._one_more(context, rng, lacking)
        for text, tokens, length in zip(self._texts, guess.tokens.tolist(), guess.lengths, strict=True):
            text.shadow.tokens += tokens[:length]
        return any(guess.lengths)

    def _draft_next(self, context: Context) -> bool:
        """Draft one token more for the next round, for all rows that lack one -> whether any did."""
        lacking = [int(text.lacks_draft) for text in self._texts]
        rng = Since(context.rng, tuple(text.base + text.drafted + 1 for text in self._texts))
        draft = self._one_more(context, rng, lacking)
        for place, (text, length) in enumerate(zip(self._texts, draft.lengths, strict=True)):
            if length:
                text.take(draft.tokens[place, :length].tolist(), _of_row(draft, place))
        return any(draft.lengths)

    def _one_more(self, context: Context, rng: Rng, lacking: Sequence[int]) -> Draft:
        return self.model.propose(self._context(context, rng), lacking)

    def _context(self, context: Context, rng: Rng) -> Context:
        return replace(context, rows=tuple(text.shadow for text in self._texts), rng=rng)

    def _fit(self, lengths: Sequence[int]) -> bool:
        """Whether the model can hold texts of these lengths. Of longer ones it reads the end, from a place that depends
        on the room it is asked for: that must be the room that a draft which waits would ask for."""
        return self.scorer.context is None or max(lengths) <= self.scorer.context

    def _joined(self, fresh: Draft, ready: Sequence[int]) -> Draft:
        """One draft of the tokens that are ready and those that are fresh, row by row."""
        lengths = tuple(count + more for count, more in zip(ready, fresh.lengths, strict=True))
        laws = [self._law(text, fresh, place) for place, text in enumerate(self._texts)]
        drafted = [text.shadow.tokens[text.base :] for text in self._texts]
        new = [tokens[:length] for tokens, length in zip(fresh.tokens.tolist(), fresh.lengths, strict=True)]
        tokens = padded([[*old, *more] for old, more in zip(drafted, new, strict=True)], self.scorer.device)
        law = Law.join([each.stretched(tokens.shape[1]) for each in laws], 0)
        return Draft(tokens, law, lengths, fresh.windowed, ahead=tuple(ready))

    def _law(self, text: ExpectedText, fresh: Draft, place: int) -> Law:
        """The law of a row's tokens; of a row without any, some law of its kind."""
        pieces = [] if text.law is None else [text.law]
        if fresh.lengths[place]:
            pieces.append(_of_row(fresh, place).first(fresh.lengths[place]))
        if pieces:
            return Law.join(pieces, 1)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.scorer.device)
        if text.row.request.sampler.greedy:
            return Law(tokens=token)
        return Law(probs=torch.full((1, 1, self.model.vocab), 1 / self.model.vocab, device=token.device))


def ahead_or_waiting(drafter: Drafter, target: Scorer | None, ahead: bool | None) -> Drafter:
    """The drafter of a target, which goes on while the target verifies if that was asked for, or if nothing was said
    and the two have devices of their own.

    No `target`: it cannot go on, because it drafts for another draft or its passes are graphs, whose making knows one
    thread only. Raises ValueError if it was asked for and cannot be.
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


def _goal(text: ExpectedText, gamma: int) -> int:
    """How many tokens to draft ahead: as many as now, where the text has room for them."""
    sampler = text.row.request.sampler
    if not text.drafted or not isinstance(sampler, Sampling) or sampler.grammar or sampler.processors:
        return 0
    return max(0, min(gamma, text.row.room - text.drafted - 2))


def _of_row(draft: Draft, place: int) -> Law:
    """The law (1, positions) of one row of a draft that has tokens."""
    assert draft.law is not None
    return draft.law.select(torch.tensor([place], device=draft.law.device))
