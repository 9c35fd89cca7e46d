"""Drafting on another machine; by default the texts are exact no matter what the server sends.

Why exact. A verifier is exact for tokens that were really drawn from the reported law q, with randomness independent of
its own. How a server drew cannot be observed from here, so the guarantee depends on the mode:

- **Guesses** (the default). The server's tokens are treated as tokens that are fixed before the verifier's own draws.
  q is a point mass on each, a token x is kept with probability p(x), and every rule is exact for any tokens, even
  malicious ones, as long as the server cannot predict the verifier's draws. It could if it had the seed, and a seed of
  0 is easily guessed; so the draws of these rounds come from the seed and a secret that never leaves this process
  (`core.draws.Sealed`). Greedy texts need no draws.
- **Coupled**. The target's own choice at every position is a function of seed and position alone; a guess decides how
  many of them one call finds, never which. The text is the same for every server, even one that has the seed, which
  it needs for good guesses.
- **Law** (`trust=true`). The server sends q, cut to its most probable tokens, and tokens drawn from it with our random
  numbers; autoregressive drafting needs token i before q_{i+1}, so the server must have these numbers. The client
  checks that ids are in range, that q sums to one, and that every token is what our number draws from q. This does not
  prove honesty: a server that has the number u can choose q so that u draws the token it prefers, for example by moving
  half of the mass to where u falls. Then q was not fixed before u was known; the token was certain, but is treated as
  drawn, and the output contains too many of them. (A commitment to q before u is known would be a proof, at the price
  of a round trip per token.) So in this mode the law of the output depends on the server's honesty, and it is off by
  default.

How it runs. Each round sends the commit of the last round together with the request of this one, for all rows in one
frame. A row that is new to the present connection is opened with its whole text, so a new connection needs no other
state. While the target verifies, the server continues as if the whole draft were accepted, up to the next draft; it
discards what it drafted from a wrong guess.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from slipstream.core.draft import Draft, common_length, padded
from slipstream.core.draws import Key, Purpose
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Traits
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ended
from slipstream.drafters.remote.frames import Frame, FrameError, FrameType
from slipstream.drafters.remote.link import REFUSED, DraftConnection, Missed
from slipstream.drafters.remote.messages import (
    AskRow,
    DraftMode,
    DraftRow,
    OpenRow,
    ask_frame,
    read_drafts,
    settings_of,
)

CPU = torch.device("cpu")

Numbers = tuple[tuple[float, ...], tuple[float, ...]]
"""The random numbers that draw the tokens of this round, and those of the next."""


@dataclass
class Held:
    """A row's state at the server: its number, its mode, and the text sent on connection `connection` (0: none)."""

    number: int
    mode: DraftMode
    text: list[int]
    connection: int = 0


class RemoteDrafter(Drafter):
    """Gets up to gamma tokens per row from a draft server; rows without an answer are decoded plainly in that round.

    Rounds without a draft are counted by reason in the rows' statistics (`Stats.undrafted`). Rows whose source is audio
    features get no draft.
    """

    def __init__(
        self, link: DraftConnection, vocab: int, trust: bool = False, top: int = 64, ahead: bool = True
    ) -> None:
        """Make the drafter of a server, whose ids are within `vocab`; the others are as in `link.Settings`."""
        self.link, self.vocab, self.trust, self.top, self.ahead = link, vocab, trust, top, ahead
        self.traits = Traits(secret=None if trust else secrets.randbits(128))
        self._held: dict[Row, Held] = {}
        self._numbers, self._sequences = count(1), count(1)
        self._missed: list[tuple[Row, str]] = []

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Return the server's draft (rows, longest) if it arrives in time; an empty draft otherwise."""
        self._missed, rows = [], context.rows
        sources = [row.request.source for row in rows]
        shown = [source is None or isinstance(source, tuple) for source in sources]  # features are not sent
        wanted = [
            gamma if known and row.request.gamma != 0 else 0
            for known, row, gamma in zip(shown, rows, gammas, strict=True)
        ]
        places = [place for place, gamma in enumerate(wanted) if gamma]
        if not places:
            return Draft.empty(len(rows), CPU)
        generation = self.link.generation
        answer: list[DraftRow] | Missed = Missed("disconnected")
        if generation:
            gone, self._held = self._held, {}
            for row in rows:
                self._held[row] = gone.pop(row) if row in gone else Held(next(self._numbers), DraftMode.GUESS, [])
            closing = [_close(each) for each in gone.values() if each.connection]
            answer = self._answer(context, places, wanted, (generation, closing))
        if isinstance(answer, Missed):
            self._missed = [(rows[place], answer.reason) for place in places]
            return Draft.empty(len(rows), CPU)
        return self._draft(rows, dict(zip(places, answer, strict=True)))

    def observe(self, round: Round) -> None:
        for row, reason in self._missed:
            row.stats.undrafted[reason] = row.stats.undrafted.get(reason, 0) + 1
        self._missed = []
        ended_rows = [row for row in round.rows if row.finish_reason and row in self._held]
        closing = [_close(self._held.pop(row)) for row in ended_rows]
        self.link.tell(self.link.generation, closing)

    def _answer(
        self, context: Context, places: Sequence[int], gammas: Sequence[int], known: tuple[int, Sequence[Frame]]
    ) -> list[DraftRow] | Missed:
        generation, frames, asks = known[0], list(known[1]), list[AskRow]()
        sequence, drawn = next(self._sequences), self._drawn(context, gammas)
        for place in places:
            row, gamma, numbers = context.rows[place], gammas[place], drawn[place]
            held = self._held[row]
            mode = self._mode(context, place, numbers is not None)
            if held.connection != generation or held.mode != mode:
                held.connection, held.mode, held.text = generation, mode, list(row.readable)
                frames.append(self._open(row, held))
            # The commit and the request of the row; the server then has the row's text.
            keep, text = common_length(held.text, row.readable), row.readable
            held.text = list(text)
            ask = AskRow(held.number, keep, tuple(text[keep:]), gamma)
            if numbers and mode == DraftMode.LAW:
                ask = replace(ask, numbers=numbers[0], later=numbers[1])
            asks.append(ask)
        answer = self.link.ask(generation, [*frames, ask_frame(sequence, asks, self.ahead)], sequence)
        if isinstance(answer, Missed):
            return answer
        try:
            return self._checked(answer, asks)
        except FrameError:
            for place in places:
                self._held[context.rows[place]].connection = 0  # opened again
            self.link.strike()
            return Missed(REFUSED)

    def _mode(self, context: Context, place: int, drawn: bool) -> DraftMode:
        if context.rows[place].request.sampler.greedy:
            return DraftMode.GUESS
        if context.rng.select([place]).coupled:
            return DraftMode.COUPLED
        return DraftMode.LAW if drawn else DraftMode.GUESS

    def _drawn(self, context: Context, gammas: Sequence[int]) -> list[Numbers | None]:
        """Return, per row, the numbers for the tokens of this round and the next; None where the server draws none."""
        if not self.trust:
            return [None] * len(gammas)
        key, most = context.key(Purpose.DRAFT), max(gammas)
        present = _chances(context, key, most)
        ahead, later = self.ahead, present
        if ahead:
            origins = tuple(origin + gamma + 1 for origin, gamma in zip(key.origins, gammas, strict=True))
            positions = tuple(position + gamma + 1 for position, gamma in zip(key.positions, gammas, strict=True))
            later = _chances(context, replace(key, origins=origins, positions=positions), most)
        return [
            None if now is None or then is None else (tuple(now[:gamma]), tuple(then[:gamma]) if ahead else ())
            for gamma, now, then in zip(gammas, present, later, strict=True)
        ]

    def _open(self, row: Row, held: Held) -> Frame:
        """Return the frame that opens a row at the server, with seed and key only if its draws are coupled."""
        request = row.request
        shared = held.mode == DraftMode.COUPLED
        source = request.source if isinstance(request.source, tuple) else ()
        prompt = len(row.readable) - len(row.output)
        opened = OpenRow(held.number, held.mode, settings_of(request.sampler), tuple(held.text), prompt, source)
        names = (request.seed, request.key) if shared else (0, 0)
        return replace(opened, top=self.top, seed=names[0], key=names[1]).frame()

    def _checked(self, answer: Frame, asks: Sequence[AskRow]) -> list[DraftRow]:
        """Return the drafts in an answer; it is a fault if a token is not what our number draws from its law."""
        if answer.kind != FrameType.DRAFT:
            raise FrameError("the server refuses to draft")
        drafts = read_drafts(answer, self.vocab)
        if [draft.row for draft in drafts] != [ask.row for ask in asks]:
            raise FrameError("the answer is for other rows")
        for draft, ask in zip(drafts, asks, strict=True):
            if len(draft.tokens) > ask.gamma or bool(draft.laws) != bool(ask.numbers and draft.tokens):
                raise FrameError("the answer is not what was asked for")
            for token, law, number in zip(draft.tokens, draft.laws, ask.numbers, strict=False):
                if law.draw(number) != token:
                    raise FrameError("a token is not the one that its distribution gives")
        return drafts

    def _draft(self, rows: Sequence[Row], drafts: dict[int, DraftRow]) -> Draft:
        """Join the rows' drafts to one; guesses are cut where the row's grammar or the end of its text forbids them."""
        texts = list[list[int]]()
        for place, row in enumerate(rows):
            draft = drafts.get(place)
            row_tokens = list(draft.tokens) if draft else []
            texts.append(row_tokens if draft and draft.laws else ended(row_tokens, row))
        tokens, lengths = padded(texts, CPU), tuple(map(len, texts))
        if not any(lengths):
            return Draft.empty(len(rows), CPU)
        if not any(draft.laws for draft in drafts.values()):
            return Draft(tokens, Law(tokens=tokens), lengths)
        probs = torch.zeros(*tokens.shape, self.vocab)
        probs.scatter_(-1, tokens.unsqueeze(-1), 1)
        for place, draft in drafts.items():
            for position, sent in enumerate(draft.laws):
                probs[place, position] = 0
                probs[place, position, torch.tensor(sent.ids)] = torch.tensor(sent.weights)
        points = tuple(row.request.sampler.greedy for row in rows)
        law = Law(probs, tokens, None, points) if any(points) else Law(probs=probs)
        return Draft(tokens, law, lengths)


def _close(held: Held) -> Frame:
    return Frame(FrameType.CLOSE, 0, {"row": held.number})


def _chances(context: Context, key: Key, positions: int) -> list[list[float] | None]:
    """Return the random numbers of every row, or None for rows without any; in one call if all rows have some."""
    if (chances := context.rng.chances(key, positions)) is not None:
        return list(chances)
    alone = [context.rng.select([place]).chances(key.select([place]), positions) for place in range(len(context.rows))]
    return [None if each is None else each[0] for each in alone]
