"""Draft by copying from documents, from the responses to similar requests, and from the text itself.

A folder holds a corpus of documents (`corpus`), a memory of responses (`memory`), or both. Responses are chosen from
the memory by similarity of their requests, and the place in them by the longest suffix of the text that occurs there,
or by the beginning of the response. The longest match of all sources is the draft (arXiv 2311.08252 for documents,
2411.04975 for responses).
"""

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.values import check_least
from slipstream.drafters.copying import CopyingDrafter, SuffixAutomaton, source_tokens
from slipstream.drafters.datastore.corpus import Corpus, Match
from slipstream.drafters.datastore.memory import ResponseMemory, read_totals

CORPUS, MEMORY = "corpus.safetensors", "memory.sqlite"  # the names of the files in a datastore's folder
Namespace = str | Callable[[Request], str]


@dataclass(frozen=True)
class DatastoreSettings:
    """The settings of a datastore drafter: how many tokens are drafted for a match.

    A match of m tokens drafts at most factor * m + offset tokens, as long as a share `chance` of its occurrences agree.
    `nearest` responses are taken from the memory. The beginning of a response counts as `begin` matched tokens, and
    `own` is whether the text itself is a source.
    """

    factor: float = 1.0
    offset: float = 1.0
    chance: float = 0.1
    nearest: int = 64
    begin: int = 4
    own: bool = True

    def __post_init__(self) -> None:
        check_least(self, factor=0, offset=0, chance=0, nearest=1, begin=1)


@dataclass
class Trace:
    """The state of a running row: the automaton of its own text, and the responses recalled for it."""

    own: SuffixAutomaton
    recalled: Corpus | None


class Datastore(CopyingDrafter[Trace]):
    """Drafts a chain by copying what most often followed the longest match; q is a point mass.

    `namespace` names the memory that a request may draft from and, with `learn`, the one that its response is added to.
    Namespaces keep tenants apart: the time of a response shows how much of a draft is accepted, so that tenants who
    share a memory can find out each other's responses. The law of outputs does not depend on the memory, but the text
    of a seed does.
    """

    def __init__(
        self,
        vocab: int,
        corpus: Corpus | None = None,
        memory: ResponseMemory | None = None,
        namespace: Namespace = "default",
        learn: bool = False,
        settings: DatastoreSettings | None = None,
    ) -> None:
        """Make the drafter; `vocab` is the size of the target's logits.
        Raises ValueError if there is nothing to draft from or learn for."""
        super().__init__()
        self.settings = settings or DatastoreSettings()
        if learn and memory is None:
            raise ValueError("learn=True needs a memory to write responses to: give one.")
        if corpus is None and memory is None and not self.settings.own:
            raise ValueError("there is nothing to draft from: give a corpus, a memory, or own=True.")
        if corpus is not None and corpus.vocab > vocab:
            raise ValueError(f"the corpus has {corpus.vocab} token ids, the target {vocab}: build it for this target.")
        self.vocab, self.corpus, self.memory, self.learn = vocab, corpus, memory, learn
        self._namespace = namespace

    @property
    def facts(self) -> str:
        held = [f"corpus: {self.corpus.facts}"] if self.corpus else []
        totals = read_totals(self.memory.path) if self.memory else []
        held += [f"memory of {each.namespace}: {each.entries} responses, {each.bytes} bytes" for each in totals]
        return "; ".join(held)

    def observe(self, round: Round) -> None:
        """Drop the rows that have ended, and add their responses to the memory if `learn`."""
        super().observe(round)
        for row in round.rows:
            if row.finish_reason and self.learn and row.output:
                # If that fails, it warns and stops learning, so that the response is not lost.
                assert self.memory is not None
                try:
                    self.memory.add(self.namespace(row.request), self._request_tokens(row), row.output)
                except OSError as error:
                    self.learn = False
                    warnings.warn(f"{error} Responses are no longer learned.", RuntimeWarning, stacklevel=2)

    def namespace(self, request: Request) -> str:
        return self._namespace if isinstance(self._namespace, str) else self._namespace(request)

    def begin(self, row: Row) -> Trace:
        recalled = None
        if self.memory is not None:
            near = self.memory.nearest(self.namespace(row.request), self._request_tokens(row), self.settings.nearest)
            marked = [[self.vocab + 1, *response] for _, response in near if response.max() < self.vocab]
            recalled = Corpus.build(marked, self.vocab, marks=1) if marked else None
        return Trace(SuffixAutomaton(), recalled)

    def _request_tokens(self, row: Row) -> tuple[int, ...]:
        """Return the tokens by which requests are compared: the source of an encoder-decoder, else the prompt."""
        return source_tokens(row, self.vocab) or row.request.prompt

    def copy(self, row: Row, gamma: int) -> list[int]:
        trace, matches = self.known[row], list[Match]()  # own text first: of equally long ones the first is used
        if self.settings.own:
            trace.own.follow([*source_tokens(row, self.vocab), *row.tokens])
            copy = trace.own.following(gamma)
            matches.append(Match(trace.own.length, tuple(copy), (1.0,) * len(copy)))
        if trace.recalled is not None:
            match = trace.recalled.match([self.vocab + 1, *row.output], gamma)
            if match.length > len(row.output):  # a response begins with the whole text so far: it counts as longer
                match = replace(match, length=match.length + self.settings.begin - 1)
            matches.append(match)
        if self.corpus is not None:
            matches.append(self.corpus.match(row.tokens, gamma))
        best = max((match for match in matches if match.tokens), key=lambda match: match.length, default=Match())
        most = min(gamma, int(self.settings.factor * best.length + self.settings.offset))
        pairs = zip(best.tokens[:most], best.chances, strict=False)
        return [token for token, chance in pairs if chance >= self.settings.chance]


def open_corpus(folder: str | os.PathLike[str], tokenizer: str = "") -> Corpus | None:
    """Open the corpus of a datastore's folder; return None if it has none.
    Raises ValueError if it is damaged or was built with another tokenizer (names as `fingerprint` gives them)."""
    path = Path(folder) / CORPUS
    if not path.exists():
        return None
    corpus = Corpus.load(path)
    if tokenizer and corpus.tokenizer and corpus.tokenizer != tokenizer:
        raise ValueError(
            f"{path} was built with another tokenizer ({corpus.tokenizer}, the target has {tokenizer}): "
            "build it again with --target."
        )
    return corpus


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary; empty for None, which is not compared."""
    if tokenizer is None:
        return ""
    words = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]
