"""The planner: measures acceptance and costs, predicts what speculation will bring, chooses, and proves itself.

`slipstream.plan.run.make` does it all; `slipstream.plan.figures` needs no model; docs/planning.md explains it.
"""
