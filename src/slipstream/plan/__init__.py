"""The planner: measures acceptance and costs, predicts the speed of speculation, chooses a gamma, and verifies it.

`slipstream.plan.planner.make` runs all of it; `slipstream.plan.from_figures` needs no model; docs/planning.md explains.
"""
