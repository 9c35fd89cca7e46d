"""What check, bench, plan and paper share to measure: timing, replay, statistics, the machine."""
