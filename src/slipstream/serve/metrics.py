"""Counters and times for Prometheus, under our own names and under vLLM's, whose dashboards then work unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from slipstream.core.round import Round
from slipstream.core.stats import Stats
from slipstream.execution.graphs import GRAPHS
from slipstream.serve.worker import Search, Ticket, Worker

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
PREFIXES = ("slipstream", "vllm")


class Metrics:
    """Counts the events of a worker for Prometheus, which reads `text`. `model` labels every series."""

    def __init__(self, model: str) -> None:
        self.registry, self.model = CollectorRegistry(), model
        self.stats = Stats()
        self.running = self._gauges("num_requests_running", "Requests whose rows have a place in the batch.")
        self.waiting = self._gauges("num_requests_waiting", "Requests that wait for a place.")
        self.drafts = self._counters("spec_decode_num_drafts", "Rounds in which a row was drafted for.")
        self.drafted = self._counters("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = self._counters("spec_decode_num_accepted_tokens", "Accepted drafted tokens.")
        self.by_position = self._counters(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens, by place in the draft.", "position"
        )
        self.generated = self._counters("generation_tokens", "Tokens written.")
        self.read = self._counters("prompt_tokens", "Tokens of prompts.")
        self.finished = self._counters("request_success", "Requests that ended, by reason.", "finished_reason")
        self.first = self._histograms("time_to_first_token_seconds", "From arrival to the first token.", FIRST)
        self.between = self._histograms("inter_token_latency_seconds", "Between tokens of a request.", BETWEEN)
        self.whole = self._histograms("e2e_request_latency_seconds", "From arrival to the last token.", WHOLE)
        self.queued = self._histograms("request_queue_time_seconds", "From arrival to a place in the batch.", FIRST)
        names = ["model_name", "phase"]
        self.seconds = Counter("slipstream:round_seconds", "Time of rounds, by phase.", names, registry=self.registry)
        about, why = "Rounds without the draft that was asked of another machine.", ["model_name", "reason"]
        self.undrafted = Counter("slipstream:undrafted_rounds", about, why, registry=self.registry)
        self.registry.register(_Graphs(model))

    def text(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(self.registry)

    # ---- called by the worker ----

    def on_round(self, round: Round, worker: Worker) -> None:
        """Count a round: its tokens, its seconds by phase and its acceptance by position."""
        for gauge in self.running:
            gauge.set(worker.running)
        for gauge in self.waiting:
            gauge.set(worker.waiting)
        for phase, seconds in round.seconds.items():
            self.seconds.labels(self.model, phase).inc(seconds)
        drafted = [depth for depth in round.draft.depths if depth]
        _add(self.drafts, len(drafted))
        _add(self.drafted, sum(round.draft.lengths))
        _add(self.accepted, sum(round.accepted))
        _add(self.generated, sum(map(len, round.tokens)))
        for position in range(max(round.accepted, default=0)):
            count = sum(accepted > position for accepted in round.accepted)
            for counter in self.by_position:
                counter.labels(self.model, str(position)).inc(count)

    def on_tokens(self, ticket: Ticket, count: int, now: float) -> None:
        """Record the times of a request's tokens."""
        times, before = ticket.times, ticket.times.last
        if times.first is None:
            _observe(self.first, now - times.arrived)
            _observe(self.queued, (times.started or now) - times.arrived)
            _add(self.read, ticket.prompt_tokens)
        elif before is not None and count:
            for _ in range(count):  # tokens of one round come at once: the wait for them is shared
                _observe(self.between, (now - before) / count)

    def on_end(self, ticket: Ticket, now: float) -> None:
        """Count the end of a request by its reason, and add up its statistics."""
        row = ticket.generation.row
        assert row is not None and row.finish_reason
        self.stats += row.stats
        for reason, count in row.stats.undrafted.items():
            self.undrafted.labels(self.model, reason).inc(count)
        _observe(self.whole, now - ticket.times.arrived)
        for counter in self.finished:
            counter.labels(self.model, row.finish_reason).inc()

    def on_search(self, search: Search, now: float) -> None:
        """Count a beam search: its texts as requests that ended, and what was drafted and accepted on the way."""
        found = search.completions
        stats = sum((each.stats for each in found), Stats())
        _add(self.read, search.texts.prompt_tokens)
        _add(self.generated, sum(len(each.tokens) for each in found))
        _add(self.drafts, bool(stats.drafted) * stats.target_calls)
        _add(self.drafted, stats.drafted)
        _add(self.accepted, stats.accepted)
        for position, count in enumerate(stats.accepted_by_position):
            for counter in self.by_position:
                counter.labels(self.model, str(position)).inc(count)
        for phase, seconds in stats.seconds.items():
            self.seconds.labels(self.model, phase).inc(seconds)
        _observe(self.queued, (search.times.started or now) - search.times.arrived)
        _observe(self.whole, now - search.times.arrived)
        for counter in self.finished:
            for reason in search.finish_reasons:
                counter.labels(self.model, reason).inc()

    # ---- series under both names ----

    def _counters(self, name: str, help: str, *labels: str) -> list[Counter]:
        made = [Counter(f"{p}:{name}", help, ["model_name", *labels], registry=self.registry) for p in PREFIXES]
        return made if labels else [counter.labels(self.model) for counter in made]

    def _gauges(self, name: str, help: str) -> list[Gauge]:
        made = [Gauge(f"{prefix}:{name}", help, ["model_name"], registry=self.registry) for prefix in PREFIXES]
        return [gauge.labels(self.model) for gauge in made]

    def _histograms(self, name: str, help: str, buckets: Sequence[float]) -> list[Histogram]:
        made = [
            Histogram(f"{prefix}:{name}", help, ["model_name"], registry=self.registry, buckets=buckets)
            for prefix in PREFIXES
        ]
        return [histogram.labels(self.model) for histogram in made]


class _Graphs(Collector):
    """Exports how many graphs the process has made; in a warm server the number should not grow."""

    def __init__(self, model: str) -> None:
        self.model = model

    def collect(self) -> Iterator[CounterMetricFamily]:
        names = ["model_name", "origin"]
        family = CounterMetricFamily("slipstream:graphs", "Graphs of passes, by where they came from.", labels=names)
        for origin, made in asdict(GRAPHS).items():
            family.add_metric([self.model, origin], made)
        yield family


def _add(counters: Sequence[Counter], count: int) -> None:
    for counter in counters:
        counter.inc(count)


def _observe(histograms: Sequence[Histogram], value: float) -> None:
    for histogram in histograms:
        histogram.observe(value)
