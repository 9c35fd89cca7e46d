"""One round of Algorithm 1 (arXiv 2211.17192): draft, score, verify, draw, commit, roll back.

A round drafts gamma tokens, scores them and the pending token with one target call, verifies, and emits what
stands plus one token. Invariant after a round: the target's cache covers every token of a row but the last, which
is pending.
"""

from collections.abc import Sequence

import torch

from slipstream.core.draft import Draft, Verdict, accepted_paths
from slipstream.core.law import Faults
from slipstream.core.protocols import Scorer
from slipstream.core.request import Row
from slipstream.core.round import PREFILL_CHUNK, Context, Round, stopwatch
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.verification import Outcome


def count_round(round: Round) -> None:
    """Count a round for its rows, which share its seconds in equal parts."""
    verdict = round.verdict
    counts, betas = verdict.accepted.tolist(), verdict.beta.tolist()
    for r, row in enumerate(round.rows):
        stats, depth, accepted = row.stats, round.draft.depths[r], round.accepted[r]
        # A token is tested if all before it were kept and it was not cut away.
        tested = min(counts[r] + 1, depth, len(round.tokens[r]))
        stats.emitted += len(round.tokens[r])
        stats.accepted += accepted
        stats.drafted += round.draft.lengths[r]
        stats.tested += tested
        stats.beta += sum(betas[r][:tested])
        stats.target_calls += 1
        if verdict.relaxed is not None and verdict.distance is not None:
            stats.relaxed += int(verdict.relaxed[r, :accepted].sum())
            stats.distance += float(verdict.distance[r, :tested].sum())
        stats.count_positions(depth, accepted)
        for phase, seconds in round.seconds.items():
            stats.spend(phase, seconds / len(round.rows))


@torch.inference_mode()
def play_round(decoder: Decoder, running: Sequence[Row], gammas: Sequence[int], piece: int = PREFILL_CHUNK) -> Round:
    """Play a round of Algorithm 1 for all running rows: draft, score, verify, draw, commit, roll back."""
    target = decoder.target
    watch = stopwatch(target.device)
    context = Context(tuple(running), decoder.rng_of(running), piece, watch)
    possible = [_room(target, row, gamma) for row, gamma in zip(running, gammas, strict=True)]
    # Before the draft, since sending it to a GPU waits for the work there.
    pending = torch.tensor([row.tokens[-1:] for row in running], device=target.device)
    draft = decoder.drafter.propose(context, possible).to(target.device)
    watch.lap("draft")
    counts = [1 + length for length in draft.lengths]
    fed = torch.cat([pending, draft.fed], 1) if draft.tokens.shape[1] else pending
    logits = target.extend(fed, counts, tree=draft.tree)
    watch.lap("target")
    outcome = decoder.verification(decoder.verifier, context, logits, draft, target.name)
    watch.lap("accept")
    if outcome.verdict.path is not None:
        target.keep([len(row.tokens) for row in running], accepted_paths(outcome.verdict))
    tokens, accepted = _commit(running, draft, outcome, {} if decoder.inside else outcome.faults)
    target.rollback([len(row.tokens) - 1 for row in running])
    if outcome.faults:
        target.scrub()  # a NaN that stayed behind would pass the mask
    round = Round(context.rows, draft, outcome.verdict, tokens, accepted, tuple(possible), watch.laps, outcome.p)
    decoder.drafter.observe(round)
    watch.end("rest")
    count_round(round)
    return round


def _room(target: Scorer, row: Row, gamma: int) -> int:
    """Limit gamma to what can be emitted: a round emits at most gamma + 1 tokens, within limit and context."""
    room = row.room if target.context is None else min(row.room, target.context - len(row.tokens))
    return max(0, min(gamma, room - 1))


def _commit(
    running: Sequence[Row], draft: Draft, outcome: Outcome, faults: Faults
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Append what stands to every row, cut where plain decoding would have ended -> emitted tokens, accepted."""
    verdict = outcome.verdict
    drafted = draft.tokens if verdict.path is None else draft.fed.gather(1, verdict.path)
    counts, last = verdict.accepted.tolist(), outcome.following.tolist()
    new_tokens = [[*tokens[:count], new] for tokens, count, new in zip(drafted.tolist(), counts, last, strict=True)]
    if faults:
        _cut(running, new_tokens, verdict, faults)
    emitted = [emit(row, new) for row, new in zip(running, new_tokens, strict=True)]
    return tuple(emitted), tuple(min(count, len(new)) for count, new in zip(counts, emitted, strict=True))


def _cut(running: Sequence[Row], new_tokens: Sequence[list[int]], verdict: Verdict, faults: Faults) -> None:
    """Drop the tokens that have no law, and set the row's error: plain decoding would have failed at the same token.
    The tokens before it do not depend on the arbitrary law: the rules are exact for any law after a prefix."""
    paths = [range(len(new)) for new in new_tokens] if verdict.path is None else verdict.path.tolist()
    for place, (row, new, path) in enumerate(zip(running, new_tokens, paths, strict=True)):
        positions = [0, *(node + 1 for node in path)][: len(new)]
        end = next((i for i, position in enumerate(positions) if (place, position) in faults), None)
        if end is not None:
            row.error = faults[place, positions[end]]
            del new[end:]


def emit(row: Row, tokens: Sequence[int]) -> tuple[int, ...]:
    """Append tokens to the row until one of them ends it -> the appended tokens."""
    for count, new in enumerate(tokens, 1):
        row.tokens.append(new)
        row.finish_reason = row.request.finish_reason(row.tokens, row.room)
        if row.finish_reason:
            row.error = None  # the row ends before the fault
            return tuple(tokens[:count])
    row.finish_reason = "error" if row.error else None
    return tuple(tokens)
