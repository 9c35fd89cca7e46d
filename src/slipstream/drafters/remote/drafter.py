"""Drafts from another machine, exact whatever it sends.

Why exact. A verifier is exact for tokens that were really drawn from the law q that it is told, by chance that has
nothing to do with its own. Nobody can see from here how a server drew, so what may be concluded depends on the mode:

- **Guesses** (the default). The server's tokens are taken as what they are to us: tokens that are fixed before we toss
  any coin. q is a point mass on each, a token x is kept with chance p(x), and every rule is exact for whatever tokens
  come, chosen by whatever intention, as long as the server cannot foresee our coins. It could, if it knew the seed, and
  a seed of 0 is easily guessed; so the coins of these rounds come from the seed and a secret that never leaves this
  process (`core.draws.Sealed`). Greedy texts have no coins.
- **Coupled**. The target's own choice at every position is a function of seed and position alone; a guess decides how
  many of them one call finds, never which. The text is the same for every server, even one that knows the seed, as it
  must to guess well.
- **Law** (`trust=true`). The server sends q, cut to its likeliest tokens, and tokens drawn from it with our numbers;
  autoregressive drafting needs token i before q_{i+1}, so the server has to know these numbers. That ids are in range,
  that q sums to one, and that every token is what our number draws from q is checked. It proves nothing about intent: a
  server that knows the number u can choose q so that u draws the token it likes, as by moving half of the mass to where
  u falls. That q was not fixed before u was known; the tokens are then certain but claimed to be drawn, and the output
  gets too many of them. (q committed before u is known would be a proof, for a round trip per token.) So in this mode
  the law of the output rests on the server's honesty, and it is off unless asked for.

How it runs. Each round sends the commit of the last one together with the question of this one, for all rows in one
frame. A row that the present connection has not seen is opened with its whole text, which is all that a new connection
takes. While the target verifies, the server goes on as if everything stood, up to the next draft; what it made from a
wrong guess it throws away.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from weakref import ref

import torch

from slipstream.core.draft import Draft, padded
from slipstream.core.draws import Key, Purpose
from slipstream.core.law import Law
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ended
from slipstream.drafters.remote.frames import Frame, FrameError, Kind
from slipstream.drafters.remote.link import REFUSED, Link, Missed
from slipstream.drafters.remote.messages import (
    AskRow,
    DraftRow,
    Mode,
    OpenRow,
    ask_frame,
    read_drafts,
    settings_of,
)

CPU = torch.device("cpu")

Numbers = tuple[tuple[float, ...], tuple[float, ...]]
"""What draws the tokens of this round, and those of the next."""


@dataclass
class Held:
    """What the server of one connection knows of a row."""

    row: ref[Row]
    number: int
    mode: Mode
    text: list[int]
    connection: int = 0


@dataclass(frozen=True)
class Use:
    """What a user chose about a server: see `address.Settings`."""

    trust: bool = False
    top: int = 64
    ahead: bool = True


class RemoteDrafter:
    """Asks a draft server for up to gamma tokens per row; rows without an answer are decoded plainly in that round.

    Rounds without a draft are counted by reason in the rows' statistics (`Stats.undrafted`). Rows that listen to sound
    are not drafted for.
    """

    def __init__(self, link: Link, vocab: int, use: Use | None = None) -> None:
        """`vocab` is the target's; ids outside it are refused. `use`: how the server is used."""
        self.link, self.vocab, self.use = link, vocab, use or Use()
        self.secret = None if self.use.trust else secrets.randbits(128)
        self._held: dict[int, Held] = {}
        self._numbers, self._sequences = count(1), count(1)
        self._missed: list[tuple[ref[Row], str]] = []

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """What the server drafts in time, (rows, longest); an empty draft otherwise."""
        self._missed, rows = [], context.rows
        wanted = [gamma if _shown(row) else 0 for row, gamma in zip(rows, gammas, strict=True)]
        places = [place for place, gamma in enumerate(wanted) if gamma]
        if not places:
            return Draft.empty(len(rows), CPU)
        generation = self.link.generation
        gone = self._follow(rows) if generation else []
        found = self._answer(context, places, wanted, (generation, gone)) if generation else Missed("disconnected")
        if isinstance(found, Missed):
            self._missed = [(ref(rows[place]), found.reason) for place in places]
            return Draft.empty(len(rows), CPU)
        return self._draft(rows, dict(zip(places, found, strict=True)))

    def observe(self, round: Round) -> None:
        """Count why rows were not drafted for; the next question tells the server what stood."""
        for row, reason in self._missed:
            if (missed := row()) is not None:
                missed.stats.undrafted[reason] = missed.stats.undrafted.get(reason, 0) + 1
        self._missed = []
        ended_rows = [row for row in round.rows if row.finish_reason and id(row) in self._held]
        closing = [_close(self._held.pop(id(row))) for row in ended_rows]
        self.link.tell(self.link.generation, closing)

    def _answer(
        self, context: Context, places: Sequence[int], gammas: Sequence[int], known: tuple[int, Sequence[Frame]]
    ) -> list[DraftRow] | Missed:
        """Ask for some of the rows -> a draft for each, or why there is none."""
        generation, frames, asks = known[0], list(known[1]), list[AskRow]()
        sequence, drawn = next(self._sequences), self._drawn(context, gammas)
        for place in places:
            row, gamma, numbers = context.rows[place], gammas[place], drawn[place]
            held = self._held[id(row)]
            mode = self._mode(context, place, numbers is not None)
            if held.connection != generation or held.mode != mode:
                held.connection, held.mode, held.text = generation, mode, list(row.readable)
                frames.append(self._open(row, held))
            asks.append(_ask(row, held, gamma, numbers))
        answer = self.link.ask(generation, [*frames, ask_frame(sequence, asks, self.use.ahead)], sequence)
        if isinstance(answer, Missed):
            return answer
        try:
            return self._checked(answer, asks)
        except FrameError:
            for ask in asks:
                self._forget(ask.row)
            self.link.strike()
            return Missed(REFUSED)

    def _follow(self, rows: Sequence[Row]) -> list[Frame]:
        """Know these rows and no others -> frames that close those that have left."""
        held, self._held = self._held, {}
        for row in rows:
            known = held.get(id(row))
            if known is not None and known.row() is row:  # the address may be one that is used again
                self._held[id(row)] = held.pop(id(row))
            else:
                self._held[id(row)] = Held(ref(row), next(self._numbers), Mode.GUESS, [])
        return [_close(each) for each in held.values() if each.connection]

    def _forget(self, number: int) -> None:
        """The server has to be told anew of a row."""
        for each in self._held.values():
            if each.number == number:
                each.connection = 0

    def _mode(self, context: Context, place: int, drawn: bool) -> Mode:
        """How a row is drafted; `drawn`: there are numbers to draw its tokens with."""
        if context.rows[place].request.sampler.greedy:
            return Mode.GUESS
        if context.rng.select([place]).coupled:
            return Mode.COUPLED
        return Mode.LAW if drawn else Mode.GUESS

    def _drawn(self, context: Context, gammas: Sequence[int]) -> list[Numbers | None]:
        """What draws the tokens of this round, and of the next if all stand, for each row; None where there is nothing
        to draw: where the server is not trusted, and in draws that are no inversions."""
        if not self.use.trust:
            return [None] * len(gammas)
        key, most = context.key(Purpose.DRAFT), max(gammas)
        present = _chances(context, key, most)
        further = [gamma + 1 for gamma in gammas]
        later = _chances(context, _moved(key, further), most) if self.use.ahead else present
        ahead = self.use.ahead
        return [
            None if now is None or then is None else (tuple(now[:gamma]), tuple(then[:gamma]) if ahead else ())
            for gamma, now, then in zip(gammas, present, later, strict=True)
        ]

    def _open(self, row: Row, held: Held) -> Frame:
        request = row.request
        shared = held.mode == Mode.COUPLED
        source = request.source if isinstance(request.source, tuple) else ()
        prompt = len(row.readable) - len(row.output)
        opened = OpenRow(held.number, held.mode, settings_of(request.sampler), tuple(held.text), prompt, source)
        names = (request.seed, request.key) if shared else (0, 0)
        return replace(opened, top=self.use.top, seed=names[0], key=names[1]).frame()

    def _checked(self, answer: Frame, asks: Sequence[AskRow]) -> list[DraftRow]:
        """The drafts of an answer. Raises FrameError for those of other rows, of more than was asked for, and, where
        laws travel, for a token that is not what our number draws."""
        if answer.kind != Kind.DRAFT:
            raise FrameError("the server refuses to draft")
        drafts = read_drafts(answer, self.vocab)
        if [draft.row for draft in drafts] != [ask.row for ask in asks]:
            raise FrameError("the answer is for other rows")
        for draft, ask in zip(drafts, asks, strict=True):
            if len(draft.tokens) > ask.gamma or bool(draft.laws) != bool(ask.numbers and draft.tokens):
                raise FrameError("the answer is not what was asked for")
            for token, law, number in zip(draft.tokens, draft.laws, ask.numbers, strict=False):
                if law.draw(number) != token:
                    raise FrameError("a token is not the one that its law gives")
        return drafts

    def _draft(self, rows: Sequence[Row], found: dict[int, DraftRow]) -> Draft:
        """One draft of what came for each row; guesses end where the row's grammar or its end would refuse them."""
        texts = list[list[int]]()
        for place, row in enumerate(rows):
            draft = found.get(place)
            given = list(draft.tokens) if draft else []
            texts.append(given if draft and draft.laws else ended(given, row))
        tokens, lengths = padded(texts, CPU), tuple(map(len, texts))
        if not any(lengths):
            return Draft.empty(len(rows), CPU)
        if not any(draft.laws for draft in found.values()):
            return Draft(tokens, Law(tokens=tokens), lengths)
        probs = torch.zeros(*tokens.shape, self.vocab)
        probs.scatter_(-1, tokens.unsqueeze(-1), 1)
        for place, draft in found.items():
            for position, sent in enumerate(draft.laws):
                probs[place, position] = 0
                probs[place, position, torch.from_numpy(sent.ids.astype("int64"))] = torch.tensor(sent.weights)
        points = tuple(row.request.sampler.greedy for row in rows)
        law = Law(probs, tokens, None, points) if any(points) else Law(probs=probs)
        return Draft(tokens, law, lengths)

    @property
    def missed(self) -> Counter[str]:
        """Why rows have no draft in the present round."""
        return Counter(reason for _, reason in self._missed)


def _shown(row: Row) -> bool:
    """Whether a server can be told what the row's model reads."""
    return row.request.gamma != 0 and (row.request.source is None or isinstance(row.request.source, tuple))


def _close(held: Held) -> Frame:
    return Frame(Kind.CLOSE, 0, {"row": held.number})


def _common(known: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    if text[: len(known)] == known:
        return len(known)
    pairs = enumerate(zip(known, text, strict=False))
    return next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(known), len(text)))


def _ask(row: Row, held: Held, gamma: int, numbers: Numbers | None) -> AskRow:
    """The commit and the question for a row."""
    text = row.readable
    keep = _common(held.text, text)
    held.text = list(text)
    ask = AskRow(held.number, keep, tuple(text[keep:]), gamma)
    return replace(ask, numbers=numbers[0], later=numbers[1]) if numbers and held.mode == Mode.LAW else ask


def _chances(context: Context, key: Key, positions: int) -> list[list[float] | None]:
    """The numbers of every row, in one call where all rows have some."""
    if (found := context.rng.chances(key, positions)) is not None:
        return list(found)
    alone = [context.rng.select([place]).chances(key.select([place]), positions) for place in range(len(context.rows))]
    return [None if each is None else each[0] for each in alone]


def _moved(key: Key, tokens: Sequence[int]) -> Key:
    """The key of the round after so many more tokens of each row."""
    origins = tuple(origin + more for origin, more in zip(key.origins, tokens, strict=True))
    positions = tuple(position + more for position, more in zip(key.positions, tokens, strict=True))
    return replace(key, origins=origins, positions=positions)
