"""The tools that check, bench, plan and paper measure with: timing, replay, statistics, the machine."""
