"""Beam search for many prompts: draft tries of prefixes, score them in one target call, and advance the searches.

The result is exact for any proposal, of a model's own beams or of a drafter that continues texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.core.beams import Candidates, Prefix
from slipstream.core.draws import draw, gumbel_noise
from slipstream.core.law import Fault, pad_vocabulary, wide
from slipstream.core.protocols import Drafter, HasModel, Scorer, Traits
from slipstream.core.request import Prefixes, Request, Row
from slipstream.core.round import Context, Stopwatch
from slipstream.decoding.beam_search import Beam, BeamSearch, best_beams, best_continuations
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.scheduler import MemoryLimit, check_requests
from slipstream.decoding.tries import TrieCache
from slipstream.kernels.threads import release_threads

Proposal = list[Prefix]  # prefixes whose scores a search may need, parents first, without the live ones


def beam_drafts(drafter: Drafter, target: TrieCache) -> ModelBeams | TextBeams:
    """Return the proposer for a drafter, if tokens are all it needs."""
    traits = Traits.of(drafter)
    if traits.model is not None:
        refuse_states(traits.model)
        traits.release()
        return ModelBeams(traits.model, target.scorer.vocab, target if traits.on_target_rows else None)
    if traits.by_text:
        return TextBeams(drafter)
    raise ValueError(
        f"{type(drafter).__name__} cannot draft for beam search: use a model with the target's tokenizer, int4, int8, "
        "exit:LAYERS, window:N, lookup or ngram:FILE, or leave the draft out (plain=True)."
    )


def refuse_states(scorer: Scorer, needing: str = "beam search needs") -> None:
    if isinstance(scorer, HasModel) and not scorer.shares_rows:
        follows = "keeps a state, which follows one line of tokens"
        raise ValueError(f"{scorer.name} {follows}: {needing} a model that attends.")


class ModelBeams:
    """Runs beam search with the draft's laws from the live beams on, and proposes the prefixes of its beams.

    Where the target's law of a prefix is known, it is used instead of the draft's. This is the method of appendix A.4
    of arXiv 2211.17192. `EXTRA` beams are drafted beyond the target's. The prefixes lie in a `cache` of its own, with a
    row for each search; with `shared`, the draft works on the target's rows.
    """

    def __init__(self, scorer: Scorer, vocab: int, shared: TrieCache | None = None) -> None:
        self._scorer, self._vocab, self._shared = scorer, vocab, shared
        self.cache = TrieCache(scorer) if shared is None else None

    def propose(self, searches: Sequence[BeamSearch], depths: Sequence[int]) -> list[Proposal]:
        """Return prefixes that are up to `depths[r]` tokens longer than the live ones of search r, for every search."""
        before = list(self._scorer.lengths)
        cache = self._shared.shared_with(self._scorer) if self._shared else self.cache
        assert cache is not None
        beams, proposals = [list(search.live) for search in searches], [Proposal() for _ in searches]
        limit = self._scorer.context  # no prefix may be longer
        if limit is not None:
            rooms = [max(0, limit - len(search.request.prompt) - search.depth) for search in searches]
            depths = list(map(min, depths, rooms))
        for level in range(max(depths, default=0)):
            going = [level < depth for depth in depths]
            # The draft scores the prefixes of its beams that have no law yet: these are guesses.
            unknown = [
                [beam.prefix for beam in some if _law(beam.prefix) is None] if goes else []
                for some, goes in zip(beams, going, strict=True)
            ]
            new = [cache.lacking(place, wanted) for place, wanted in enumerate(unknown)]
            if any(new):
                keep = [self._candidates(search, beams=1) for search in searches]
                for prefix, outcome in score(cache, searches, new, keep, self._vocab):
                    prefix.guess = Candidates([], [], []) if isinstance(outcome, Fault) else outcome
            for place, search in enumerate(searches):
                if going[place]:
                    candidates = self._candidates(search, len(beams[place]))
                    continuations = best_continuations(beams[place], candidates, _law)
                    ends = search.request.eos
                    grown = [
                        Beam(prefix.child(token), chance)
                        for chance, prefix, token in continuations
                        if token not in ends
                    ]
                    beams[place] = best_beams(grown, search.settings.num_beams + EXTRA)
                    proposals[place] += [beam.prefix for beam in beams[place]]
        if self._shared is not None:
            self._scorer.rollback(before)  # guesses stay stored in the prefixes; needed keys are computed again
        return proposals

    def _candidates(self, search: BeamSearch, beams: int) -> int:
        """Return how many continuations a step of the draft examines: as many as the target's where these are drawn."""
        ends, settings = len(search.request.eos), search.settings
        return settings.candidates(ends) if settings.do_sample else settings.num_beams + EXTRA + ends * beams


def _law(prefix: Prefix) -> Candidates | None:
    return prefix.guess if prefix.best is None else prefix.best


class TextBeams:
    """Proposes, for every live beam, a chain that a drafter gives for its text; see `ModelBeams`."""

    cache = None

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, searches: Sequence[BeamSearch], depths: Sequence[int]) -> list[Proposal]:
        lines = [(place, beam.prefix) for place, search in enumerate(searches) for beam in search.live]
        rows = [row_of(searches[place], prefix) for place, prefix in lines]
        draft = self._drafter.propose(Context(tuple(rows), draw), [depths[place] for place, _ in lines])
        proposals = [Proposal() for _ in searches]
        for (place, node), tokens, length in zip(lines, draft.tokens.tolist(), draft.lengths, strict=True):
            for token in tokens[:length]:
                if token in searches[place].request.eos:
                    break
                node = node.child(token)
                proposals[place].append(node)
        return proposals


def row_of(search: BeamSearch, prefix: Prefix) -> Row:
    return Row(search.request, search.index, [*search.request.prompt, *prefix.tokens])


def score(
    cache: TrieCache, searches: Sequence[BeamSearch], new: Sequence[Sequence[Prefix]], keep: Sequence[int], vocab: int
) -> list[tuple[Prefix, Candidates | Fault]]:
    """Feed prefixes in one call -> each with its first `keep[r]` continuations, or with the fault that prevented them.

    Continuations are scored by log-softmax after the requests' logits processors; a beam's score is the sum of these,
    as in transformers. Sampled searches rank them by scores with noise.
    """
    logits = pad_vocabulary(wide(cache.feed(new)), vocab).log_softmax(-1)
    pairs = [(place, prefix) for place, some in enumerate(new) for prefix in some]
    rows = [row_of(searches[place], prefix) for place, prefix in pairs]
    nothing = torch.empty(len(rows), 0, dtype=torch.long, device=logits.device)
    context = Context(tuple(rows), draw)
    law, faults = context.law_and_faults(logits[:, None], Prefixes(nothing, [()]), cache.scorer.name)
    assert law.scores is not None, "beams are greedy"
    scores, counts = law.scores[:, 0], [keep[place] for place, _ in pairs]
    ranks, tokens = _ranked(scores, rows).topk(min(max(counts), scores.shape[-1]))
    best = zip(scores.gather(-1, tokens).tolist(), tokens.tolist(), ranks.tolist(), counts, strict=True)
    candidates = [Candidates(some[:count], ids[:count], order[:count]) for some, ids, order, count in best]
    return [(prefix, faults.get((i, 0)) or candidates[i]) for i, (_, prefix) in enumerate(pairs)]


def _ranked(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    sampled = [place for place, row in enumerate(rows) if row.request.beams and row.request.beams.do_sample]
    if not sampled:
        return scores
    ranks = scores.to(torch.float64, copy=True)
    for place in sampled:
        request, text = rows[place].request, tuple(rows[place].tokens)
        ranks[place] += gumbel_noise(request.seed, request.key, text, scores.shape[-1]).to(scores.device)
    return ranks


EXTRA = 2  # the number of beams that a draft model keeps beyond the target's: u - w in appendix A.4 of arXiv 2211.17192


class BeamDecoder:
    """Runs beam searches in rounds, at most `decoder.batch_size` at a time.

    The decoder's rule and draws are not used; its controller, without updates, gives the number of steps to draft. As
    many searches run together as `memory` admits, at least one. Raises RuntimeError if the target is in use
    by another call, and ValueError for a target or a draft that cannot run beam search.
    """

    def __init__(self, decoder: Decoder, searches: Sequence[BeamSearch], memory: MemoryLimit | None = None) -> None:
        if decoder.target.lengths:
            raise RuntimeError(f"{decoder.target.name} serves one call at a time: drain or close the stream before.")
        refuse_states(decoder.target)
        self.decoder, self.running = decoder, list[BeamSearch]()
        self._memory = memory or MemoryLimit(None, decoder)
        self._waiting = list(searches)
        self._cache = TrieCache(decoder.target)
        self._drafts = beam_drafts(decoder.drafter, self._cache)
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
        # The number of steps to draft per search; prefixes as long as the limit need no scores.
        rows = [Row(search.request, search.index, list(search.request.prompt)) for search in searches]
        gammas = self.decoder.controller.gammas(self.decoder.controller.init(), rows)
        rooms = [search.limit - 1 - search.depth for search in searches]
        depths = [max(0, min(gamma, room)) for gamma, room in zip(gammas, rooms, strict=True)]
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
