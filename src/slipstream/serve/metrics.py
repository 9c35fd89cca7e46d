"""Counters and times for Prometheus, under our own names and under vLLM's, whose dashboards then work unchanged."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.core.round import Round
from slipstream.core.stats import Stats
from slipstream.engine.queued import Search
from slipstream.engine.worker import Ticket, Worker
from slipstream.execution.graphs import GRAPHS

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
OURS, VLLM = "slipstream:", "vllm:"  # prefixes of the names of series


class Metrics:
    """Counts the events of a worker for Prometheus, which reads `text`. `model` labels every series."""

    def __init__(self, model: str) -> None:
        self.model, self.stats = model, Stats()
        self.shared = CollectorRegistry()  # the series that vLLM has too
        self.registry = CollectorRegistry()
        for series in (self.shared, _UnderVllmNames(self.shared), _Graphs(model)):
            self.registry.register(series)

        def new(kind: type[Any], name: str, help: str, *labels: str, **more: Any) -> Any:
            made = kind(OURS + name, help, ["model_name", *labels], **{"registry": self.shared, **more})
            return made if labels else made.labels(model)

        self.running = new(Gauge, "num_requests_running", "Requests whose rows have a place in the batch.")
        self.waiting = new(Gauge, "num_requests_waiting", "Requests that wait for a place.")
        self.drafts = new(Counter, "spec_decode_num_drafts", "Rounds in which a row was drafted for.")
        self.drafted = new(Counter, "spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = new(Counter, "spec_decode_num_accepted_tokens", "Accepted drafted tokens.")
        by_place = "Accepted drafted tokens, by place in the draft."
        self.by_position = new(Counter, "spec_decode_num_accepted_tokens_per_pos", by_place, "position")
        self.generated = new(Counter, "generation_tokens", "Tokens written.")
        self.read = new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.finished = new(Counter, "request_success", "Requests that ended, by reason.", "finished_reason")
        times = {
            "time_to_first_token": ("From arrival to the first token.", FIRST),
            "inter_token_latency": ("Between tokens of a request.", BETWEEN),
            "e2e_request_latency": ("From arrival to the last token.", WHOLE),
            "request_queue_time": ("From arrival to a place in the batch.", FIRST),
        }
        self.first, self.between, self.whole, self.queued = (
            new(Histogram, f"{name}_seconds", help, buckets=buckets) for name, (help, buckets) in times.items()
        )
        ours, why = {"registry": self.registry}, "Rounds without the draft that was asked of another machine."
        self.seconds = new(Counter, "round_seconds", "Time of rounds, by phase.", "phase", **ours)
        self.undrafted = new(Counter, "undrafted_rounds", why, "reason", **ours)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def follow(self, worker: Worker) -> None:
        self.running.set_function(lambda: worker.running)
        self.waiting.set_function(lambda: worker.waiting)

    def on_round(self, round: Round, worker: Worker) -> None:
        for phase, seconds in round.seconds.items():
            self.seconds.labels(self.model, phase).inc(seconds)
        drafted = [depth for depth in round.draft.depths if depth]
        self.drafts.inc(len(drafted))
        self.drafted.inc(sum(round.draft.lengths))
        self.accepted.inc(sum(round.accepted))
        self.generated.inc(sum(map(len, round.tokens)))
        for position in range(max(round.accepted, default=0)):
            count = sum(accepted > position for accepted in round.accepted)
            self.by_position.labels(self.model, position).inc(count)

    def on_tokens(self, ticket: Ticket, count: int, now: float) -> None:
        times, before = ticket.times, ticket.times.last
        if times.first is None:
            self.first.observe(now - times.arrived)
            self.queued.observe((times.started or now) - times.arrived)
            self.read.inc(ticket.prompt_tokens)
        elif before is not None and count:
            for _ in range(count):  # tokens of one round come at once: the wait for them is shared
                self.between.observe((now - before) / count)

    def on_end(self, ticket: Ticket, now: float) -> None:
        row = ticket.generation.row
        assert row is not None and row.finish_reason
        self.stats += row.stats
        for reason, count in row.stats.undrafted.items():
            self.undrafted.labels(self.model, reason).inc(count)
        self.whole.observe(now - ticket.times.arrived)
        self.finished.labels(self.model, row.finish_reason).inc()

    def on_search(self, search: Search, now: float) -> None:
        completions = search.completions
        stats = sum((each.stats for each in completions), Stats())
        self.read.inc(search.texts.prompt_tokens)
        self.generated.inc(sum(len(each.tokens) for each in completions))
        self.drafts.inc(bool(stats.drafted) * stats.target_calls)
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        for position, count in enumerate(stats.accepted_by_position):
            self.by_position.labels(self.model, position).inc(count)
        for phase, seconds in stats.seconds.items():
            self.seconds.labels(self.model, phase).inc(seconds)
        self.queued.observe((search.times.started or now) - search.times.arrived)
        self.whole.observe(now - search.times.arrived)
        for reason in search.finish_reasons:
            self.finished.labels(self.model, reason).inc()


class _UnderVllmNames(Collector):
    """Exports our series once more, under vLLM's names."""

    def __init__(self, ours: CollectorRegistry) -> None:
        self.ours = ours

    def collect(self) -> Iterator[Metric]:
        for family in self.ours.collect():
            renamed = Metric(family.name.replace(OURS, VLLM), family.documentation, family.type)
            renamed.samples = [each._replace(name=each.name.replace(OURS, VLLM)) for each in family.samples]
            yield renamed


class _Graphs(Collector):
    """Exports how many graphs the process has made; in a warm server the number should not grow."""

    def __init__(self, model: str) -> None:
        self.model = model

    def collect(self) -> Iterator[CounterMetricFamily]:
        names = ["model_name", "origin"]
        family = CounterMetricFamily(f"{OURS}graphs", "Graphs of passes, by where they came from.", labels=names)
        for origin, made in asdict(GRAPHS).items():
            family.add_metric([self.model, origin], made)
        yield family
