"""Decoding: the round of Algorithm 1, the scheduler around it, sampling, acceptance rules and controllers."""
