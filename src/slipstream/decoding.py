"""THE LOOP. `rounds` yields one record per round; `generate` drains it; `plain` is the baseline, same code.

A round drafts gamma tokens, scores them and the pending token with one target call, verifies, and emits what
stands plus one token. Invariant after a round: the target's cache covers every token of a row but the last, which
is pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from time import perf_counter

import torch
from torch import Tensor

from slipstream.controllers import Fixed
from slipstream.laws import Faults
from slipstream.records import (
    Context,
    Controller,
    Draft,
    Drafter,
    Request,
    Round,
    Row,
    Scorer,
    Seam,
    Verdict,
    Verifier,
    accepted_paths,
)
from slipstream.rules import TOKEN
from slipstream.sampling import draw
from slipstream.sources import Frame, check_source
from slipstream.stats import Stats
from slipstream.values import whole_number


class NoDraft:
    """Drafts nothing: every round is a plain decoding step."""

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """An empty draft."""
        return Draft.empty(len(context.rows), torch.device("cpu"))

    def observe(self, round: Round) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class Decoder:
    """What takes part in decoding. The target, the drafter and their caches serve one `rounds` at a time."""

    target: Scorer
    drafter: Drafter = field(default_factory=NoDraft)
    verifier: Verifier = TOKEN.verify
    controller: Controller = field(default_factory=lambda: Fixed(5))
    batch_size: int = 8
    seam: Seam = draw
    frame: Frame | None = None  # around the sources of an encoder-decoder
    inside: bool = False  # a draft: its texts are not to end where no law can be made, any will do

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)


def rounds(decoder: Decoder, requests: Sequence[Request], numbers: Sequence[int] | None = None) -> Iterator[Round]:
    """Decode the requests, at most `batch_size` at a time, a new one joining as soon as one ends.

    `numbers` are the indices of their rows, where they are not 0, 1, 2 ...

    Raises ValueError before any work if a prompt is empty or longer than the target's context, and RuntimeError if
    another call has not ended: its stream has to be drained or closed first.
    """
    check_requests(decoder.target, requests)
    if decoder.target.lengths:
        raise RuntimeError(f"{decoder.target.name} serves one call at a time: drain or close the stream before.")
    counted = zip(range(len(requests)) if numbers is None else numbers, requests, strict=True)
    everyone = [Row(request, index, list(request.prompt)) for index, request in counted]
    for _, group in groupby(everyone, key=lambda row: row.request.sampler.greedy):
        waiting, running = deque(group), list[Row]()
        state = decoder.controller.init()
        try:
            while _admit(decoder, waiting, running):
                round = play_round(decoder, running, decoder.controller.gammas(state, running))
                state = decoder.controller.update(state, round)
                _dismiss(decoder, running)
                yield round
        finally:
            decoder.target.free(range(len(decoder.target.lengths)))


@torch.inference_mode()
def play_round(decoder: Decoder, running: Sequence[Row], gammas: Sequence[int]) -> Round:
    """One round of Algorithm 1 for all running rows: draft, score, verify, draw, commit, roll back."""
    watch = Stopwatch()
    target, context = decoder.target, Context(tuple(running), decoder.seam)
    possible = [_room(target, row, gamma) for row, gamma in zip(running, gammas, strict=True)]
    draft = decoder.drafter.propose(context, possible).to(target.device)
    watch.lap("draft")
    pending = torch.tensor([row.tokens[-1:] for row in running], device=target.device)
    counts = [1 + length for length in draft.lengths]
    logits = target.extend(torch.cat([pending, draft.fed], 1), counts, tree=draft.tree)
    watch.lap("target")
    p, faults = context.target_law(logits, draft, target.name)
    verdict = decoder.verifier(p, draft, context.draw)
    following = _next(context, verdict)
    watch.lap("accept")
    if verdict.path is not None:
        target.keep([len(row.tokens) for row in running], accepted_paths(verdict))
    tokens, accepted = _commit(running, draft, verdict, following, {} if decoder.inside else faults)
    _roll_back(target, running, faults)
    round = Round(context.rows, draft, verdict, tokens, accepted, tuple(gammas), watch.laps)
    decoder.drafter.observe(round)
    _count(round)
    watch.lap("rest")
    _share_time(round)
    return round


def generate(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """Decode all requests to their end -> their rows, in order; those that failed have an `error`."""
    rows = {row.index: row for round in rounds(decoder, requests) for row in round.rows}
    return [rows[index] for index in range(len(requests))]


def plain(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """Ordinary decoding with the same target, counted by the same code."""
    return generate(replace(decoder, drafter=NoDraft(), controller=Fixed(0)), requests)


def sound(rows: Iterable[Row]) -> list[Row]:
    """The same rows. For the first that failed, raises what a processor raised, or else FloatingPointError."""
    rows = list(rows)
    for row in rows:
        if row.error:
            raise row.error.cause or FloatingPointError(row.error)
    return rows


class Stopwatch:
    """Seconds by phase of one round."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to `phase`."""
        now = perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now


def check_requests(target: Scorer, requests: Sequence[Request]) -> None:
    """Raises ValueError if a prompt is empty, does not fit the target, or asks for less than one token."""
    for index, request in enumerate(requests):
        length = len(request.prompt)
        if not length:
            raise ValueError(f"prompt {index} is empty: it needs at least one token.")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={request.max_new_tokens} is not possible: it must be at least 1.")
        if target.context and length >= target.context:
            raise ValueError(
                f"prompt {index} has {length} tokens, but {target.name} holds {target.context}; "
                f"shorten it to at most {target.context - 1}."
            )
        check_source(target.source_form, request.source, f"prompt {index}", target.name)
        if not all(0 <= token < target.vocab for token in request.prompt):
            raise ValueError(f"prompt {index} has token ids outside 0..{target.vocab - 1}, which {target.name} knows.")


def _admit(decoder: Decoder, waiting: deque[Row], running: list[Row]) -> bool:
    """Fill free places of the batch; False when nothing runs any more."""
    new = [waiting.popleft() for _ in range(min(len(waiting), decoder.batch_size - len(running)))]
    if new:
        watch = Stopwatch()
        decoder.target.add(len(new), [row.request.source for row in new])
        running += new
        decoder.target.prefill([row.tokens[:-1] for row in new], first=len(running) - len(new))
        watch.lap("prefill")
        for row in new:
            row.stats.seconds["prefill"] = watch.laps["prefill"] / len(new)
    return bool(running)


def _room(target: Scorer, row: Row, gamma: int) -> int:
    """No more drafts than can be emitted: a round emits at most gamma + 1 tokens, within limit and context."""
    room = row.room if target.context is None else min(row.room, target.context - len(row.tokens))
    return max(0, min(gamma, room - 1))


def _next(context: Context, verdict: Verdict) -> Tensor:
    """Draw the token after the accepted ones (rows,)."""
    return context.draw(verdict.law, "next", verdict.accepted.tolist())[:, 0]


def _commit(
    running: Sequence[Row], draft: Draft, verdict: Verdict, following: Tensor, faults: Faults
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Append what stands to every row, cut where plain decoding would have ended -> emitted tokens, accepted."""
    drafted = draft.tokens if verdict.path is None else draft.fed.gather(1, verdict.path)
    counts, last = verdict.accepted.tolist(), following.tolist()
    stands = [[*tokens[:count], new] for tokens, count, new in zip(drafted.tolist(), counts, last, strict=True)]
    if faults:
        _cut(running, stands, verdict, faults)
    emitted = [_emit(row, new) for row, new in zip(running, stands, strict=True)]
    return tuple(emitted), tuple(min(count, len(new)) for count, new in zip(counts, emitted, strict=True))


def _cut(running: Sequence[Row], stands: Sequence[list[int]], verdict: Verdict, faults: Faults) -> None:
    """Drop the tokens for which there was no law, and say so in the row: plain decoding would have come as far.

    Up to there the arbitrary law has no influence: the rules are exact for whatever law stands behind a prefix.
    """
    paths = [range(len(new)) for new in stands] if verdict.path is None else verdict.path.tolist()
    for place, (row, new, path) in enumerate(zip(running, stands, paths, strict=True)):
        positions = [0, *(node + 1 for node in path)][: len(new)]
        end = next((i for i, position in enumerate(positions) if (place, position) in faults), None)
        if end is not None:
            row.error = faults[place, positions[end]]
            del new[end:]


def _emit(row: Row, tokens: Sequence[int]) -> tuple[int, ...]:
    """Append tokens until one of them ends the row -> the appended ones."""
    for count, new in enumerate(tokens, 1):
        row.tokens.append(new)
        row.finish_reason = _finish(row, new)
        if row.finish_reason:
            row.error = None  # it ends before
            return tuple(tokens[:count])
    row.finish_reason = "error" if row.error else None
    return tuple(tokens)


def _finish(row: Row, new: int) -> str | None:
    request = row.request
    if new in request.eos:
        return "stop"
    if request.stop and (reason := request.stop(row.tokens)):
        return reason
    return "length" if row.room <= 0 else None


def _roll_back(target: Scorer, running: Sequence[Row], faults: Faults) -> None:
    """Forget what does not stand."""
    target.rollback([len(row.tokens) - 1 for row in running])
    if faults:
        target.scrub()


def _dismiss(decoder: Decoder, running: list[Row]) -> None:
    """Free the rows that have ended, or that fill the target's context."""
    full = decoder.target.context
    for row in running:
        if not row.finish_reason and full and len(row.tokens) >= full:
            row.finish_reason = "length"
    ended = [place for place, row in enumerate(running) if row.finish_reason]
    if ended:
        decoder.target.free(ended)
        running[:] = [row for row in running if not row.finish_reason]


def _count(round: Round) -> None:
    """Add the round to the statistics of its rows."""
    verdict = round.verdict
    counts = verdict.accepted.tolist()
    for r, row in enumerate(round.rows):
        stats, depth, accepted = row.stats, round.draft.depths[r], round.accepted[r]
        # A token is tested if all before it were kept and it was not cut away.
        tested = min(counts[r] + 1, depth, len(round.tokens[r]))
        stats.emitted += len(round.tokens[r])
        stats.accepted += accepted
        stats.drafted += round.draft.lengths[r]
        stats.tested += tested
        stats.beta += float(verdict.beta[r, :tested].sum())
        stats.target_calls += 1
        stats.windowed += round.draft.windowed[r] if round.draft.windowed else 0
        if verdict.relaxed is not None and verdict.distance is not None:
            stats.relaxed += int(verdict.relaxed[r, :accepted].sum())
            stats.distance += float(verdict.distance[r, :tested].sum())
        _count_positions(stats, depth, accepted)


def _share_time(round: Round) -> None:
    """Every row of a round has an equal part of its time."""
    for row in round.rows:
        for phase, seconds in round.seconds.items():
            row.stats.seconds[phase] = row.stats.seconds.get(phase, 0.0) + seconds / len(round.rows)


def _count_positions(stats: Stats, depth: int, accepted: int) -> None:
    grow = max(0, depth - len(stats.drafted_by_position))
    stats.drafted_by_position += [0] * grow
    stats.accepted_by_position += [0] * grow
    for position in range(depth):
        stats.drafted_by_position[position] += 1
        stats.accepted_by_position[position] += position < accepted
