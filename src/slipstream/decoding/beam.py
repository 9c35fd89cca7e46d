"""Beam search for many prompts: draft tries of prefixes, score them in one target call, and advance the searches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from slipstream.core.law import Fault
from slipstream.core.protocols import Scorer
from slipstream.core.request import Request, Row
from slipstream.core.round import Stopwatch
from slipstream.decoding.beam_drafts import beam_drafts, refuse_states, score
from slipstream.decoding.beam_search import BeamSearch
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.scheduler import MemoryLimit, check_requests
from slipstream.decoding.tries import TrieCache
from slipstream.kernels.threads import release_threads

EXTRA = 2  # the number of beams that a draft model keeps beyond the target's: u - w in appendix A.4 of arXiv 2211.17192


class BeamDecoder:
    """Runs beam searches in rounds, at most `decoder.batch_size` at a time.

    The decoder's rule and draws are not used; its controller, without updates, gives the number of steps to draft. As
    many searches run together as `memory` admits, at least one. Raises RuntimeError if the target is in use
    by another call, and ValueError for a target or a draft that cannot run beam search.
    """

    def __init__(
        self, decoder: Decoder, searches: Sequence[BeamSearch], extra: int = EXTRA, memory: MemoryLimit | None = None
    ) -> None:
        if decoder.target.lengths:
            raise RuntimeError(f"{decoder.target.name} serves one call at a time: drain or close the stream before.")
        refuse_states(decoder.target)
        self.decoder, self.running = decoder, list[BeamSearch]()
        self._memory = memory or MemoryLimit(None, decoder)
        self._waiting = list(searches)
        self._cache = TrieCache(decoder.target)
        self._drafts = beam_drafts(decoder.drafter, self._cache, extra)
        self._caches = [cache for cache in (self._cache, self._drafts.cache) if cache]

    def rounds(self) -> Iterator[Sequence[BeamSearch]]:
        """Run all searches to their ends, yielding those of each round; finished ones have a `finish_reason`."""
        try:
            while self.running or self._waiting:
                self._admit()
                self._play()
                yield tuple(self.running)
                ended = [place for place, search in enumerate(self.running) if search.finish_reason]
                if ended:
                    for cache in self._caches:
                        cache.free(ended)
                    self.running = [search for search in self.running if not search.finish_reason]
        finally:
            for cache in self._caches:
                cache.scorer.free(range(len(cache.scorer.lengths)))
            self.running = []
            release_threads()

    @torch.inference_mode()
    def _admit(self) -> None:
        new = self._waiting[: self.decoder.batch_size - len(self.running)]
        least = 0 if self.running else 1
        while len(new) > least and not self._memory.holds([*map(self._tokens, self.running), *map(self._tokens, new)]):
            new.pop()
        if not new:
            return
        watch = Stopwatch()
        self._waiting = self._waiting[len(new) :]
        for cache in self._caches:
            cache.add([search.request for search in new])
        self.running += new
        watch.lap("prefill")
        _share(watch, new)

    @torch.inference_mode()
    def _play(self) -> None:
        watch, searches = Stopwatch(), self.running
        depths = self._depths()
        proposals = self._drafts.propose(searches, depths) if any(depths) else [[] for _ in searches]
        watch.lap("draft")
        new = [
            self._cache.lacking(place, [*search.missing, *(each for each in more if not each.scored)])
            for place, (search, more) in enumerate(zip(searches, proposals, strict=True))
        ]
        keep = [search.settings.candidates(len(search.request.eos)) for search in searches]
        for prefix, outcome in score(self._cache, searches, new, keep, self.decoder.target.vocab):
            if isinstance(outcome, Fault):
                prefix.fault = outcome
            else:
                prefix.best = outcome
        watch.lap("target")
        for search, more in zip(searches, proposals, strict=True):
            _count(search, max((each.depth for each in more), default=search.depth) - search.depth)
        live = [[beam.prefix for beam in search.live] for search in searches]
        for cache in self._caches:
            cache.prune(live)
        watch.lap("rest")
        _share(watch, searches)

    def _tokens(self, search: BeamSearch) -> int:
        return most_tokens(search, self.decoder.controller.most)

    def _depths(self) -> list[int]:
        """Return the number of steps to draft per search; prefixes as long as the limit need no scores."""
        controller = self.decoder.controller
        rows = [Row(search.request, search.index, list(search.request.prompt)) for search in self.running]
        gammas = controller.gammas(controller.init(), rows)
        return [
            max(0, min(gamma, search.limit - 1 - search.depth))
            for gamma, search in zip(gammas, self.running, strict=True)
        ]


def searches_of(target: Scorer, requests: Sequence[Request]) -> list[BeamSearch]:
    check_requests(target, requests)
    searches = []
    for number, request in enumerate(requests):
        assert request.beams is not None
        if request.media is not None:
            raise ValueError("num_beams reads text alone: leave out images and sounds, or num_beams.")
        if (least := request.beams.candidates(len(request.eos))) > target.vocab:
            raise ValueError(
                f"num_beams={request.beams.num_beams} looks at {least} continuations, but {target.name} has "
                f"{target.vocab} tokens: use fewer beams."
            )
        room = request.max_new_tokens
        limit = room if target.context is None else min(room, target.context - len(request.prompt))
        searches.append(BeamSearch(request, request.beams, limit, number))
    return searches


def most_tokens(search: BeamSearch, gamma: int) -> int:
    """Return how many tokens a search may hold in a cache: the prompt, and all beams as if they had nothing in common,
    with the prefixes that are drafted, `gamma` steps at most."""
    beams = search.settings.num_beams
    return len(search.request.prompt) + beams * search.limit + (beams + EXTRA) * gamma


def beam_search(decoder: Decoder, requests: Sequence[Request]) -> list[BeamSearch]:
    searches = searches_of(decoder.target, requests)
    for _ in BeamDecoder(decoder, searches).rounds():
        pass
    return searches


def _count(search: BeamSearch, drafted: int) -> None:
    """Advance a search and update its statistics; its first step needs no draft."""
    steps, stats = search.advance(), search.stats
    accepted = max(0, min(steps - 1, drafted))
    tested = min(drafted, accepted + (not search.finish_reason))
    stats.target_calls += 1
    stats.emitted += steps
    stats.drafted += drafted
    stats.accepted += accepted
    stats.tested += tested
    stats.beta += accepted
    stats.count_positions(drafted, accepted)


def _share(watch: Stopwatch, searches: Sequence[BeamSearch]) -> None:
    for search in searches:
        for phase, seconds in watch.laps.items():
            search.stats.spend(phase, seconds / len(searches))
