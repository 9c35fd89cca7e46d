"""`slipstream plan --replicas`: simulate fleets of replicas under a load curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.cli.app import INTERRUPTED, say
from slipstream.cli.console import console, figures_table, steps
from slipstream.cli.options import own, panel
from slipstream.engine.plan_file import Plan
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.plan.fleet import Service

EVERY = 1000  # number of requests between two updates of the progress bar

FleetOptions = panel(
    "A simulated fleet",
    replicas=own(list[int] | None, None, "Replicas of what --plan measured. Repeatable.", "N", min=1, max=100_000),
    trace=own(str | None, None, "When requests come, with their tokens: a CSV file.", "FILE"),
    load=own(float, 1.0, "Requests over those of the trace.", "X", min=0.0),
    price=own(float | None, None, "What a replica costs an hour, in any money.", "X", min=0.0),
)


def show_fleets(plan: Plan, params: dict[str, Any]) -> None:
    """Simulate fleets of every size, plain and with the plan's draft, and print their figures.
    Raises ValueError if there is no trace, or if the plan lacks figures."""
    from slipstream.plan.fleet import multiplied, paces, read_trace, simulate

    if params["trace"] is None:
        raise ValueError("--replicas needs a load curve: name a CSV file with --trace.")
    known = paces(plan)
    arrivals = multiplied(read_trace(params["trace"]), params["load"], params["seed"])
    fleets: dict[int, dict[str, Service]] = {}
    try:
        with steps() as show:
            for replicas in sorted(set(params["replicas"])):
                fleets[replicas] = {}
                for name, pace in known.items():

                    def on_step(number: int, name: str = f"{replicas} replicas, {name}") -> None:
                        if number % EVERY == 0:
                            show(number, len(arrivals), name)

                    fleets[replicas][name] = simulate(pace, replicas, arrivals, params["seed"], on_step)
    except KeyboardInterrupt:
        say("interrupted: the simulation did not come to its end.")
        raise SystemExit(INTERRUPTED) from None
    price, rows = params["price"], known["plain"].rows[-1]
    if params["as_json"]:

        def shown(each: Service) -> dict[str, Any]:
            return each.as_dict() | ({} if price is None else {"cost_per_million_tokens": each.cost(price)})

        simulated = [{name: shown(each) for name, each in kinds.items()} for kinds in fleets.values()]
        print(json_text({"measured": dict(plan.machine), "rows_per_replica": rows, "simulated": simulated}))
    else:
        _show(fleets, price, rows, plan)


def _show(by_replicas: dict[int, dict[str, Service]], price: float | None, rows: int, plan: Plan) -> None:
    heads = ("replicas", "decoding", "busy", "tokens/s", "first p50", "p99", "gap p99", "behind")
    screen, table = console(), figures_table(*heads, *(() if price is None else ("cost/M",)))
    for replicas, kinds in by_replicas.items():
        for name, each in kinds.items():
            first, between = each.first_token, each.between["p99"]
            cells = (
                f"{each.busy:.0%}",
                f"{each.tokens_per_second:.0f}",
                *(f"{first[q]:.2f} s" for q in ("p50", "p99")),
            )
            more = () if price is None else (f"{each.cost(price):.2f}",)
            table.add_row(str(replicas), name, *cells, f"{1000 * between:.0f} ms", f"{each.behind:.0f} s", *more)
    screen.print(table)
    count = next(iter(next(iter(by_replicas.values())).values())).requests
    facts = (str(plan.machine[name])[:40] for name in ("cpu", "date") if name in plan.machine)
    place = ", ".join(facts) or "it is not said where"
    measured = f"Measured: the pace of a replica with up to {rows} rows, and of reading prompts ({place})."
    legend = (
        "first: seconds to the first token; gap: between tokens; behind: after the last request, until all are answered"
    )
    cost = "" if price is None else f"; cost/M: of a million written tokens, if a replica costs {price:g} an hour"
    screen.print(f"\n{measured} Simulated: everything else, from {count} requests. {legend}{cost}.", style="dim")
