"""Draft from what was written before: documents, the responses to similar requests, and the text itself.

A folder holds a corpus of documents (`corpus`), a memory of responses (`memory`), or both. Where the memory draws on
is chosen by similarity of requests; where in it the text is, by the longest suffix of the text that occurs there, from
the beginning of the response on. Of all sources the longest match drafts (arXiv 2311.08252 for documents, 2411.04975
for responses).
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.core.draft import Draft
from slipstream.core.request import Request, Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ByRow, ended, source_tokens, sure
from slipstream.drafters.datastore.corpus import Corpus, Match
from slipstream.drafters.datastore.index import Embedder
from slipstream.drafters.datastore.memory import Limits, Memory
from slipstream.drafters.suffix_automaton import SuffixAutomaton

CORPUS, MEMORY = "corpus.safetensors", "memory.sqlite"
"""The files of a datastore's folder."""

Namespace = str | Callable[[Request], str]


@dataclass(frozen=True)
class DatastoreSettings:
    """How much is drafted on how much evidence.

    A match of m tokens drafts at most factor * m + offset tokens, as far as `chance` of its occurrences go on alike.
    `nearest` responses are taken from the memory. `begin` is how many matched tokens the place at the beginning of a
    response counts as, and `own` whether the text itself is a source.
    """

    factor: float = 1.0
    offset: float = 1.0
    chance: float = 0.1
    nearest: int = 64
    begin: int = 4
    own: bool = True

    def __post_init__(self) -> None:
        for name, least in (("factor", 0), ("offset", 0), ("chance", 0), ("nearest", 1), ("begin", 1)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"{name}={value} is not possible: it must be {least} or more.")


@dataclass
class Trace:
    """The record of a running row: its own text, and the responses that were recalled for it."""

    own: SuffixAutomaton
    recalled: Corpus | None


class Datastore:
    """Drafts a chain by copying what most often followed the longest match; q is a point mass.

    `namespace` names whose memory a request may draft from and, with `learn`, whose it becomes when it has ended.
    That keeps texts apart: how much of a draft is accepted shows in the time a response takes, so whoever shares
    a memory can find out what others were answered. What a seed gives does not depend on the memory in law, but
    which text it is does. Tokens are on the CPU.
    """

    def __init__(
        self,
        vocab: int,
        corpus: Corpus | None = None,
        memory: Memory | None = None,
        namespace: Namespace = "default",
        learn: bool = False,
        settings: DatastoreSettings | None = None,
    ) -> None:
        """`vocab`: size of the target's logits. Raises ValueError if there is nothing to draft from or learn for."""
        self.settings = settings or DatastoreSettings()
        if learn and memory is None:
            raise ValueError("learn=True needs a memory to write responses to: give one.")
        if corpus is None and memory is None and not self.settings.own:
            raise ValueError("there is nothing to draft from: give a corpus, a memory, or own=True.")
        if corpus is not None and corpus.vocab > vocab:
            raise ValueError(f"the corpus has {corpus.vocab} token ids, the target {vocab}: build it for this target.")
        self.vocab, self.corpus, self.memory, self.learn = vocab, corpus, memory, learn
        self._namespace = namespace
        # What is known of every row that runs; rows that have ended, or that nobody holds, leave it.
        self.traces: ByRow[Trace] = ByRow()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` copied tokens per row, (rows, longest), none where nothing matches."""
        self.traces.follow(context.rows, self._begin)
        return sure([self._copy(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def observe(self, round: Round) -> None:
        """Forget the rows that have ended; learn their responses, if asked to."""
        for row in round.rows:
            if row.finish_reason:
                self.traces.forget(row)
                if self.learn and row.output:
                    self._learn(row)

    def namespace(self, request: Request) -> str:
        """Return the namespace whose memory a request uses."""
        return self._namespace if isinstance(self._namespace, str) else self._namespace(request)

    def _learn(self, row: Row) -> None:
        """A memory that cannot be written must not cost the response that was just made."""
        assert self.memory is not None
        try:
            self.memory.add(self.namespace(row.request), self._asked(row), row.output)
        except OSError as error:
            self.learn = False
            warnings.warn(f"{error} Responses are no longer learned.", RuntimeWarning, stacklevel=2)

    def _begin(self, row: Row) -> Trace:
        """A new row: recall the responses to the nearest requests."""
        recalled = None
        if self.memory is not None:
            near = self.memory.nearest(self.namespace(row.request), self._asked(row), self.settings.nearest)
            marked = [[self.vocab + 1, *response] for _, response in near if response.max() < self.vocab]
            recalled = Corpus.build(marked, self.vocab, marks=1) if marked else None
        return Trace(SuffixAutomaton(), recalled)

    def _asked(self, row: Row) -> tuple[int, ...]:
        """Return the tokens to compare requests by: with an encoder-decoder, prompts are alike and sources differ."""
        return source_tokens(row, self.vocab) or row.request.prompt

    def _copy(self, row: Row, gamma: int) -> list[int]:
        """The draft of the longest match, cut after the first end-of-text token."""
        if not gamma:
            return []
        best = max(self._matches(row, gamma), key=lambda match: match.length, default=Match())
        most = min(gamma, int(self.settings.factor * best.length + self.settings.offset))
        pairs = zip(best.tokens[:most], best.chances, strict=False)
        return ended([token for token, chance in pairs if chance >= self.settings.chance], row)

    def _matches(self, row: Row, gamma: int) -> list[Match]:
        """Find the match that each source has for the text; of equally long matches the first is taken."""
        trace, found = self.traces[row], list[Match]()
        if self.settings.own:
            trace.own.follow([*source_tokens(row, self.vocab), *row.tokens])
            copy = trace.own.following(gamma)
            found.append(Match(trace.own.length, tuple(copy), (1.0,) * len(copy)))
        if trace.recalled is not None:
            found.append(self._recall(trace.recalled, row, gamma))
        if self.corpus is not None:
            found.append(self.corpus.match(row.tokens, gamma))
        return [match for match in found if match.tokens]

    def _recall(self, recalled: Corpus, row: Row, gamma: int) -> Match:
        """Where the recalled responses go on, from their beginning on or from any place in them."""
        match = recalled.match([self.vocab + 1, *row.output], gamma)
        if match.length > len(row.output):  # all of the text so far is how one of them began
            return replace(match, length=match.length + self.settings.begin - 1)
        return match


def open_corpus(folder: str | os.PathLike[str], vocab: int, tokenizer: str = "") -> Corpus | None:
    """The corpus of a datastore's folder; None if it has none.

    Raises ValueError if it is damaged or was built with another tokenizer (names as `fingerprint` gives them).
    """
    path = Path(folder) / CORPUS
    if not path.exists():
        return None
    corpus = Corpus.load(path)
    if tokenizer and corpus.tokenizer and corpus.tokenizer != tokenizer:
        raise ValueError(
            f"{path} was built with another tokenizer ({corpus.tokenizer}, the target has {tokenizer}): "
            "build it again with --target."
        )
    if corpus.vocab > vocab:
        raise ValueError(f"{path} has {corpus.vocab} token ids, the target {vocab}: build it again with --target.")
    return corpus


def open_memory(
    folder: str | os.PathLike[str],
    embed: Embedder,
    tokenizer: str = "",
    limits: Limits | None = None,
    make: bool = False,
) -> Memory | None:
    """The memory of a datastore's folder; None if it has none and none is to be made. Errors as of `Memory`."""
    path = Path(folder) / MEMORY
    if not (path.exists() or make):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return Memory(path, embed, tokenizer, limits)


def fingerprint(tokenizer: Any) -> str:
    """Names a tokenizer by what its ids mean; empty for None, which is compared with nothing."""
    if tokenizer is None:
        return ""
    words = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]
