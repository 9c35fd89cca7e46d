"""`Job`, a call that is ready to run, its `Generation`s, and what these give: `Piece`s, then a `Completion`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.core.law import Law, TokenLogprobs, token_logprobs
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.stats import Stats
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.options import Options
from slipstream.text.detokenize import Decode, EmittedText


@dataclass(frozen=True)
class Completion:
    """One finished output. `tokens` include the EOS token or the end of a stop string; `text` does not.

    `finish_reason` is "stop", "length", "error", "abort" or "interrupted". With "error", `error` says why no more
    tokens are possible. With "length", `context_full` is True if the target can hold no longer text, though
    `max_new_tokens` is not reached. `logprobs` are those of each token, and `prompt_logprobs` those of each token of
    the prompt but the first, if they were requested. `score` is that of beam search: the sum of the tokens'
    log-probabilities, divided by length ** length_penalty. `stop` is the stop string that ended the text.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stats: Stats
    prompt_tokens: int
    error: str | None = None
    context_full: bool = False
    logprobs: tuple[TokenLogprobs, ...] | None = None
    score: float | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Piece:
    """One emitted token of a stream: the text it completed, and its source.

    `source` is "draft", "correction", "bonus", or "target" for a plain step. The last piece carries `completion`. A
    text that ends without a token of its own (it fails or is aborted) ends with a piece whose source is its finish
    reason and that has no token.
    """

    text: str
    token: int | None
    source: str
    completion: Completion | None = None
    refused: tuple[int, ...] = ()  # the drafted tokens from this position on, which were rejected
    logprobs: TokenLogprobs | None = None  # if they were requested


@dataclass
class Generation:
    """One text that is being written: a request, and the row in which it grows once a scheduler has taken it.

    Every round of the row is passed once: to `follow`, which makes pieces of it, or to `record`, if only the
    `completion` is needed. `decode` turns tokens into text, without those in `hidden`; the text ends before any of
    `stops` that is complete after `least` tokens. `top` is how many tokens besides the emitted one get their logprobs
    (None: not even that one), `echo` the text before all others.
    """

    request: Request
    decode: Decode
    stops: tuple[str, ...] = ()
    row: Row | None = None
    top: int | None = None
    echo: str = ""
    hidden: Mapping[int, str] = field(default_factory=dict)
    least: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted and accepted tokens of each round
    _logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    _followed: int = field(default=0, init=False)  # tokens of the text that were made pieces of
    _transcript: EmittedText = field(init=False)

    def __post_init__(self) -> None:
        self._transcript, self._unsent = self._new_transcript(), self.echo
        if self.stops:  # the round calls `stop` for every token, before any of its tokens gets here
            self.request = replace(self.request, stop=lambda tokens: self._transcript.push(tokens[-1]))

    def _new_transcript(self) -> EmittedText:
        prompt, media = self.request.prompt, self.request.media
        before = prompt if media is None else media.text(prompt)
        return EmittedText(self.decode, self.stops, before, self.hidden, self.least)

    def follow(self, round: Round, place: int) -> Iterator[Piece]:
        """Yield the pieces of a round in which the row ran at `place`, one for every token; see `Piece`."""
        row, tokens = round.rows[place], round.tokens[place]
        logprobs = self.record(round, place)
        for i, token in enumerate(tokens):
            last = bool(row.finish_reason) and i + 1 == len(tokens) and not row.error
            if token not in self.request.eos:
                self._followed += 1
                if not self.stops:
                    self._transcript.push(token)
            source = round.source(place, i)
            refused = round.refused(place) if source == "correction" else ()
            piece = self._piece(token, source, last, refused)
            yield replace(piece, logprobs=logprobs[i]) if logprobs else piece
        if row.error:
            yield self.end()

    def record(self, round: Round, place: int) -> list[TokenLogprobs]:
        """Add a round in which the row ran at `place` -> the logprobs of its tokens; [] unless requested."""
        self.steps.append((round.draft.depths[place], round.accepted[place]))
        if self.top is None:
            return []
        assert round.p is not None, "a round of models has the target's laws"
        tokens = round.tokens[place]
        nodes = range(len(tokens)) if round.verdict.path is None else round.verdict.path[place].tolist()
        # The law at position 0 stands after the pending token, that at j + 1 after the drafted token (or node) j.
        positions = [0, *(node + 1 for node in nodes)][: len(tokens)]
        logprobs = token_logprobs(_log_law(round.p, place, positions), tokens, self.top)
        self._logprobs += logprobs
        return logprobs

    def end(self) -> Piece:
        """Return the last piece of a text that ends without a token: it failed, or was aborted."""
        assert self.row is not None and self.row.finish_reason
        return self._piece(None, self.row.finish_reason, last=True)

    def _piece(self, token: int | None, source: str, last: bool, refused: tuple[int, ...] = ()) -> Piece:
        if last:
            self._transcript.finish()
        text, self._unsent = self._unsent + self._transcript.take(None if last else self._followed), ""
        return Piece(text, token, source, self.completion if last else None, refused)

    @property
    def completion(self) -> Completion:
        """The text and tokens written so far, as a `Completion`; "interrupted" if it has not ended."""
        row, length = self.row, self.request.prompt_tokens
        if row is None:
            return Completion(self.echo, (), "interrupted", Stats(), length)
        reason, logprobs = row.finish_reason or "interrupted", None if self.top is None else tuple(self._logprobs)
        scored = None if self.request.prompt_logprobs is None else tuple(row.prompt_logprobs)
        about = (row.stats, length, row.error, row.context_full, logprobs)
        if not self.stops:
            assert self.row is not None
            left = [token for token in self.row.output if token not in self.request.eos][self._followed :]
            self._followed += len(left)
            self._transcript.extend(left)
        self._transcript.finish()
        text, stop = self.echo + self._transcript.text, self._transcript.stop
        return Completion(text, tuple(row.output), reason, *about, prompt_logprobs=scored, stop=stop)

    def text_of(self, tokens: Sequence[int]) -> str:
        transcript = self._new_transcript()
        transcript.extend([token for token in tokens if token not in self.request.eos])
        transcript.finish()
        return transcript.text


def _log_law(law: Law, place: int, positions: Sequence[int]) -> Tensor:
    """Return the log-probabilities (positions, vocab) of one row; of a point mass, the log-softmax of its scores."""
    point = law.point if law.points is None else law.points[place]
    if not point:
        return law.dense[place, positions].log()
    assert law.scores is not None, "greedy laws keep the scores that they were made of"
    scores = law.scores[place, positions]
    certain = scores == math.inf  # a processor may force a token by an infinite score, for which softmax would give NaN
    forced = torch.where(certain, 0.0, -math.inf)
    return torch.where(certain.any(-1, keepdim=True), forced, scores).log_softmax(-1)


@dataclass(frozen=True)
class Job:
    """A call, ready to run: its decoder, its options, and the generations, those of a prompt side by side."""

    decoder: Decoder
    options: Options
    generations: list[Generation]

    def begin(self, scheduler: Scheduler) -> None:
        for index, generation in enumerate(self.generations):
            generation.row = scheduler.add(generation.request, index)

    def stream(self) -> Iterator[tuple[int, Piece]]:
        """Play rounds to the end -> each piece, with the index of its generation."""
        with Scheduler(self.decoder) as scheduler:
            self.begin(scheduler)
            without_rounds = dict(enumerate(self.generations))  # whose prompts are only scored, or fail
            for round in scheduler.rounds():
                for place, row in enumerate(round.rows):
                    without_rounds.pop(row.index, None)
                    for piece in self.generations[row.index].follow(round, place):
                        yield row.index, piece
            for index, one in without_rounds.items():
                yield index, one.end()

    def pieces(self) -> Iterator[Piece]:
        with closing(self.stream()) as stream:  # type: ignore[type-var]
            for _, piece in stream:
                yield piece
