"""Adds a round's tokens, acceptance by position and seconds to the statistics of its rows."""

from __future__ import annotations

from slipstream.core.round import Round


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
        stats.windowed += round.draft.windowed[r] if round.draft.windowed else 0
        stats.ahead += round.draft.ahead[r] if round.draft.ahead else 0
        if verdict.relaxed is not None and verdict.distance is not None:
            stats.relaxed += int(verdict.relaxed[r, :accepted].sum())
            stats.distance += float(verdict.distance[r, :tested].sum())
        stats.count_positions(depth, accepted)
        for phase, seconds in round.seconds.items():
            stats.spend(phase, seconds / len(round.rows))
