"""The planner: measures acceptance and costs, predicts what speculation will bring, chooses, and proves itself.

`slipstream.plan.planner.make` does it all; `slipstream.plan.from_figures` needs no model; docs/planning.md explains it.
"""
