"""`Request`, one text to be continued, and `Row`, a request in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.core.beams import Beams
from slipstream.core.draft import Verifier
from slipstream.core.draws import Rng, draw
from slipstream.core.law import Fault, Law, TokenLogprobs
from slipstream.core.media import Media
from slipstream.core.source import Source
from slipstream.core.stats import Stats


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The tokens before each position: the row's own, and the `drafted` (rows, n) ones that `paths[j]` names."""

    drafted: Tensor
    paths: Sequence[Sequence[int]]

    @staticmethod
    def chain(drafted: Tensor, positions: int) -> Prefixes:
        """Make the prefixes of a chain: the last position is after all drafted tokens, each other one token earlier."""
        last = drafted.shape[1]
        return Prefixes(drafted, [range(last - positions + 1 + j) for j in range(positions)])

    def of_row(self, row: Row, place: int) -> list[Tensor]:
        """Return the tokens (length,) before every position of the row at `place`."""
        text = torch.from_numpy(np.fromiter(row.tokens, np.int64)).to(self.drafted.device)  # ten times as fast
        return [torch.cat([text, self.drafted[place, list(path)]]) for path in self.paths]

    def select(self, places: Sequence[int]) -> Prefixes:
        return Prefixes(self.drafted[list(places)], self.paths)


class Sampler(Protocol):
    """Turns logits into the law really sampled from (section 2.2 of the paper)."""

    @property
    def greedy(self) -> bool:
        """Whether every law is a point mass, so that no token is drawn at random."""

    def law(self, logits: Tensor, rows: Sequence[Row], texts: Prefixes, model: str) -> Law:
        """Return the law of logits (rows, positions, vocab); errors name the `model` that computed them.
        Raises RowFailure if some position has no law."""


@dataclass(frozen=True)
class Rule:
    """A verifier and the `Rng` of its draws. `lossless` rules keep the target's law exactly. A rule with `paths` needs
    drafts of that many independent paths."""

    name: str
    verify: Verifier
    rng: Rng = draw
    lossless: bool = True
    paths: int | None = None


@dataclass(frozen=True)
class Request:
    """A text to be continued, and the settings with which it is continued.

    `prompt` are token ids, `key` names the request in the keys of its draws, `stop` is called after every emitted
    token and returns a finish reason or None. `source` is what an encoder reads; `prompt` begins the decoder's text.
    `rule` and `gamma` replace those of the decoder; with gamma 0 nothing is drafted for the request.
    Of requests that wait, those of lower `priority` run first. `cache_salt` names the tenant: prompts share what is
    cached of them with the same salt only. `prediction` are tokens that the output is expected to resemble, for
    drafters that copy. The row ends after the round in which `max_time` seconds have passed since it got a place in
    the batch. `media` are the images and sounds that placeholders in the prompt stand for. With `beams`, beam search
    continues it. With `prompt_logprobs`, the prompt is scored, with this many of the most probable tokens; only then
    `max_new_tokens` may be 0.
    """

    prompt: tuple[int, ...]
    sampler: Sampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    seed: int = 0
    key: int = 0
    stop: Callable[[list[int]], str | None] | None = None
    source: Source | None = None
    rule: Rule | None = None
    gamma: int | None = None
    priority: int = 0
    cache_salt: str = ""
    prediction: tuple[int, ...] = ()
    max_time: float | None = None
    media: Media | None = None
    beams: Beams | None = None
    prompt_logprobs: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt; for an encoder-decoder, of the source."""
        return len(self.prompt if self.source is None else self.source)

    def finish_reason(self, tokens: list[int], room: int) -> str | None:
        """Return why plain decoding would end a text with these tokens and `room` for more; None if it goes on."""
        if tokens[-1] in self.eos:
            return "stop"
        if self.stop and (reason := self.stop(tokens)):
            return reason
        return "length" if room <= 0 else None


@dataclass(eq=False)
class Row:
    """A request in progress, told apart by identity. The last token is pending, not yet in any cache."""

    request: Request
    index: int  # the place of the request in its list
    tokens: list[int]
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    turn: tuple[int, int] = (0, 0)  # its place in the order of waiting rows: priority, then arrival
    error: Fault | None = None  # why no token is possible any more, if `finish_reason` is "error"
    started: float | None = None  # when it got a place in the batch, on the clock of `time.monotonic`
    timed_out: bool = False  # whether it ended because its `max_time` has passed
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all prompt tokens but the first, if wanted

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def readable(self) -> list[int]:
        """The tokens for a model that reads text only: all but those that stand for images or sounds."""
        media = self.request.media
        return self.tokens if media is None else [*media.text(self.request.prompt), *self.output]

    @property
    def room(self) -> int:
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def context_full(self) -> bool:
        """Whether the row ended before its token limit because it filled the target's context, or the memory."""
        return self.finish_reason == "length" and self.room > 0 and not self.timed_out

    @property
    def late(self) -> bool:
        limit = self.request.max_time
        return limit is not None and self.started is not None and monotonic() - self.started >= limit
