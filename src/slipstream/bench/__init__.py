"""Benchmark speculative decoding against its baselines, for prompts and settings.

A *contender* continues the prompts it is given. All get the same token ids, limit and end of text, run one after the
other in one process, and are timed from outside by the same code: emitted tokens / wall time of the whole call, prefill
included. A repetition runs every contender once, in a rotating order; ratios are taken within a repetition, and
the median over the repetitions is reported.
"""
