"""`Generation`, one text that is being written, and what it gives: a `Piece` per token, a `Completion` in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.stats import Stats
from slipstream.text.detokenize import Decode, Transcript


@dataclass(frozen=True)
class Completion:
    """One finished output. `tokens` include the EOS token or the end of a stop string; `text` does not.

    `finish_reason` is "stop", "length", "error", "abort" or "interrupted". With "error", `error` says why no more
    tokens are possible. With "length", `context_full` tells that the target can hold no longer text, before
    `max_new_tokens`.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stats: Stats
    prompt_tokens: int
    error: str | None = None
    context_full: bool = False


@dataclass(frozen=True)
class Piece:
    """One emitted token of a stream: the text it completed, and where it came from.

    `source` is "draft", "correction", "bonus", or "target" for a plain step. The last piece carries `completion`. A
    text that ends without a token of its own (it fails or is aborted) ends with a piece whose source is its finish
    reason and that has no token.
    """

    text: str
    token: int | None
    source: str
    completion: Completion | None = None
    refused: tuple[int, ...] = ()  # what the draft had proposed from here on


@dataclass
class Generation:
    """One text that is being written: a request, and the row in which it grows once a scheduler has taken it.

    `follow` makes pieces of rounds; whoever does not need pieces asks for the `completion` alone. `decode` writes text
    of tokens, `stops` are the strings to end before.
    """

    request: Request
    decode: Decode
    stops: tuple[str, ...] = ()
    row: Row | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted and accepted tokens of each round
    _judge: Transcript | None = field(default=None, init=False)
    _transcript: Transcript = field(init=False)

    def __post_init__(self) -> None:
        self._transcript = Transcript(self.decode, self.stops)
        if self.stops:
            # The round asks for the end before anybody sees its tokens: so the judge has a transcript of its own.
            self._judge = judge = Transcript(self.decode, self.stops)
            self.request = replace(self.request, stop=lambda tokens: judge.push(tokens[-1]))

    def follow(self, round: Round, place: int) -> Iterator[Piece]:
        """The pieces of a round in which the row ran at `place`, one for every token; see `Piece`."""
        row, tokens = round.rows[place], round.tokens[place]
        self.steps.append((round.draft.depths[place], round.accepted[place]))
        for i, token in enumerate(tokens):
            last = bool(row.finish_reason) and i + 1 == len(tokens) and not row.error
            if token not in self.request.eos:
                self._transcript.push(token)
            source = round.source(place, i)
            refused = round.refused(place) if source == "correction" else ()
            yield self._piece(token, source, last, refused)
        if row.error:
            yield self.end()

    def end(self) -> Piece:
        """The last piece of a text that ends without a token: it failed, or was aborted."""
        assert self.row is not None and self.row.finish_reason
        return self._piece(None, self.row.finish_reason, last=True)

    def _piece(self, token: int | None, source: str, last: bool, refused: tuple[int, ...] = ()) -> Piece:
        if last:
            self._transcript.finish()
        return Piece(self._transcript.take(final=last), token, source, self.completion if last else None, refused)

    @property
    def completion(self) -> Completion:
        """What was written; "interrupted" if it has not ended."""
        row, length = self.row, len(self.request.prompt if self.request.source is None else self.request.source)
        if row is None:
            return Completion("", (), "interrupted", Stats(), length)
        error = row.error and str(row.error)
        reason = row.finish_reason or "interrupted"
        return Completion(self._text(row), tuple(row.output), reason, row.stats, length, error, row.context_full)

    def _text(self, row: Row) -> str:
        if self._judge is None:
            return self.decode([token for token in row.output if token not in self.request.eos])
        self._judge.finish()
        return self._judge.text
