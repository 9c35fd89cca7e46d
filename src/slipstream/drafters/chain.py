"""A draft that is drafted itself: n-gram -> tiny -> draft -> target, any depth.

The gamma tokens of a draft model are themselves made by speculative rounds: a faster drafter proposes, the model scores
in one call, the exact rule keeps a prefix. It is the loop of Algorithm 1, one level down, so the tokens jointly have
the model's own law q with any inner drafter; q at every position is the law that the inner round verified against. The
outer rule therefore stays exact. How many tokens a row drafts is fixed before anything is sampled: tokens that rows of
a batch make beyond it, while others are not done, are cut by position alone, which does not change the others' law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slipstream.core.draft import Draft, ScopedDraft, Tree, padded
from slipstream.core.draws import ScopedDraws
from slipstream.core.law import Law, pad_vocabulary
from slipstream.core.protocols import Drafter, Scorer, Traits, scorers_among
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.rules import MATCH, TOKEN, Rule
from slipstream.decoding.speculate import play_round
from slipstream.drafters.following import Follower

ENDLESS = 1 << 62
"""The token limit of texts inside a draft, which is never reached: the drafter counts the tokens itself."""


class ChainDrafter:
    """Samples a chain from a Scorer by speculative rounds with a faster drafter, which drafts `gamma` tokens at a time.

    The drafts have the law of those that `drafters.model.ModelDrafter` makes. Counts and seconds of the inner rounds
    are in the rows' `stats.levels`, under the scorer's name, with that scorer in the place of the target.
    """

    def __init__(self, scorer: Scorer, inner: Drafter, vocab: int | None = None, gamma: int = 3) -> None:
        """Make the drafter of a model and its `inner` drafter; `vocab` is the size of the target's logits."""
        if gamma < 1:
            raise ValueError(f"gamma={gamma} is not possible within a chain of drafts: it must be 1 or more.")
        self.scorer, self.inner, self.gamma = scorer, inner, gamma
        self.vocab = vocab or scorer.vocab
        self._fitted: Any = scorer if scorer.vocab == self.vocab else _Fitted(scorer, self.vocab)
        self._follower = Follower(scorer)
        self._shadows: dict[Row, Shadow] = {}
        self.traits = Traits((scorer, *scorers_among([inner])))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        if not max(gammas, default=0):
            return Draft.empty(len(context.rows), self.scorer.device)
        self._follower.follow(context.rows, context.watch)
        self._follower.cover(2 * max(gammas) + 1)
        kept = {}
        for row, start in zip(context.rows, self._follower.starts, strict=True):
            shadow = self._shadows.get(row)
            if shadow is None or shadow.start != start:
                shadow = Shadow.of(row, start)
                shadow.row.stats = row.stats.levels.setdefault(self.scorer.name, shadow.row.stats)
            shadow.reset()
            kept[row] = shadow
        self._shadows, shadows = kept, list(kept.values())
        parts, laws = self._rounds(context, shadows, gammas)
        bases = [len(shadow.outer.readable) - shadow.start for shadow in shadows]
        new = [shadow.row.tokens[base:][:gamma] for shadow, base, gamma in zip(shadows, bases, gammas, strict=True)]
        tokens = padded(new, self.scorer.device)
        return Draft(tokens, laws, tuple(gammas), parts=tuple(parts))

    def observe(self, round: Round) -> None:
        self._follower.rollback(round)
        shadows = [self._shadows[row] for row in round.rows if row in self._shadows]
        for shadow in shadows:
            shadow.reset()
        if len(shadows) == len(round.rows):  # inside, the texts were cut, and no token is new
            rows = tuple(shadow.row for shadow in shadows)
            self.inner.observe(replace(round, rows=rows, tokens=((),) * len(rows)))

    def _rounds(
        self, context: Context, shadows: Sequence[Shadow], gammas: Sequence[int]
    ) -> tuple[list[ScopedDraft], Law]:
        """Play rounds until every row has its tokens -> the rounds, and the law of the tokens (rows, gamma)."""
        made, left, laws = list[ScopedDraft](), list(gammas), [list[Law]() for _ in shadows]
        rows, origins = [shadow.row for shadow in shadows], tuple(shadow.origin for shadow in shadows)
        while max(left) > 0:
            scope = f"inner.{len(made)}"
            rng = ScopedDraws(context.rng, scope, origins)
            # Coupled rows are verified by matching, the others token by token.
            ways = [rng.select([place]) for place in range(len(rows))]
            mixed = len({way.coupled for way in ways}) > 1
            for row, way in zip(rows, ways, strict=True):
                own = Rule("inside", (MATCH if way.coupled else TOKEN).verify, way) if mixed else None
                row.request = replace(row.request, rule=own)
            verify = MATCH.verify if ways[0].coupled else TOKEN.verify
            decoder = Decoder(self._fitted, self.inner, verify, rng=rng, inside=True)
            round = play_round(decoder, rows, [min(self.gamma, n - 1) for n in left])
            assert round.p is not None
            p = round.p.bare()
            made.append(ScopedDraft(scope, round.draft, tuple(range(len(rows))), p, round.verdict))
            left = [n - len(new) for n, new in zip(left, round.tokens, strict=True)]
            for place, new in enumerate(round.tokens):
                laws[place].append(p.of_row(place).first(len(new)))
        width = max(gammas)
        return made, Law.join([Law.join(each, 1).stretched(width) for each in laws], 0)


@dataclass(frozen=True)
class Shadow:
    """The copy of a row inside the draft: its text from `start` on, and the tokens drafted after it."""

    outer: Row
    start: int
    row: Row

    @staticmethod
    def of(outer: Row, start: int) -> Shadow:
        """Make the copy, which has no end of its own: the outer round decides where to cut."""
        prompt = tuple(outer.readable[: len(outer.readable) - len(outer.output)][start:])
        open_ended = replace(outer.request, max_new_tokens=ENDLESS, eos=frozenset(), stop=None)
        request = replace(open_ended, prompt=prompt, media=None, rule=None, gamma=None)
        return Shadow(outer, start, Row(request, outer.index, outer.readable[start:]))

    @property
    def origin(self) -> tuple[int, int]:
        return len(self.outer.readable), self.start

    def reset(self) -> None:
        self.row.tokens[:] = self.outer.readable[self.start :]


class _Fitted:
    """A Scorer cut or padded to the target's vocabulary; ids that it lacks are fed as its last id."""

    def __init__(self, scorer: Scorer, vocab: int) -> None:
        self._scorer, self.vocab = scorer, vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        return pad_vocabulary(
            self._scorer.extend(tokens.clamp(max=self._scorer.vocab - 1), counts, first, tree), self.vocab
        )
