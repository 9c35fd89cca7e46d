"""`Round`, the record of one draft and its verification, and `Context`, the rows that run together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict, ancestors
from slipstream.core.draws import Key, Rng
from slipstream.core.law import Fault, Faults, Law, RowFailure
from slipstream.core.request import Prefixes, Row

PREFILL_CHUNK = 512  # the number of prompt tokens that a model reads between two rounds (chunked prefill)


class Stopwatch:
    """Measures the seconds of a round by phase on the host; a phase may come several times."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        now = perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now

    def end(self, phase: str) -> None:
        self.lap(phase)

    @contextmanager
    def apart(self, phase: str) -> Iterator[None]:
        """Count the time of the block as `phase`, and leave it out of the lap that contains the block."""
        began = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - began
            self.laps[phase] = self.laps.get(phase, 0.0) + took
            self._last += took


class GpuStopwatch(Stopwatch):
    """Measures the phases of a round by a GPU's own clock, since the host runs ahead of the GPU's work.
    The last phase ends on the host, so that all of them together take as long as the round. The laps are known then."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._began = device, self._last
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._apart: dict[int, float] = {}  # seconds that do not belong to the lap that ends with this mark
        self.lap("")

    def lap(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def end(self, phase: str) -> None:
        """Read the times of all laps, and count what is left of the round as `phase`."""
        self._marks[-1][1].synchronize()
        for place in range(1, len(self._marks)):
            name, event = self._marks[place]
            took = self._marks[place - 1][1].elapsed_time(event) / 1e3 - self._apart.get(place, 0.0)
            self.laps[name] = self.laps.get(name, 0.0) + max(0.0, took)
        self.laps[phase] = max(0.0, perf_counter() - self._began - sum(self.laps.values()))

    @contextmanager
    def apart(self, phase: str) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        began = perf_counter()
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            took, place = perf_counter() - began, len(self._marks)
            self.laps[phase] = self.laps.get(phase, 0.0) + took
            self._apart[place] = self._apart.get(place, 0.0) + took


def believable(seconds: float) -> bool:
    """Return whether a measured time can be true: it is not 0, negative, infinite or NaN."""
    return 1e-9 <= seconds <= 1e9


def stopwatch(device: torch.device) -> Stopwatch:
    return GpuStopwatch(device) if device.type == "cuda" else Stopwatch()


@dataclass(frozen=True, slots=True)
class Context:
    """The rows that run together in a round, and the `Rng` with which they draw.

    A drafter reads at most `prefill_chunk` tokens of their texts per round while any of them waits for it, and counts
    the time of that on the `watch`.
    """

    rows: tuple[Row, ...]
    rng: Rng
    prefill_chunk: int = PREFILL_CHUNK
    watch: Stopwatch = field(default_factory=Stopwatch)

    def law(self, logits: Tensor, texts: Prefixes, model: str) -> Law:
        """Return the law of a draft from logits (rows, positions, vocab), each row by its own sampler.

        Where no law can be made, an arbitrary one replaces it: decoding is exact with any law of a draft. Warns if
        that is because of logits that are not finite.
        """
        law, faults = self.law_and_faults(logits, texts, model)
        if faults and not bool(logits.amax(-1).isfinite().all()):
            warnings.warn(f"{model} gives non-finite logits, so that hardly any draft stands.", RuntimeWarning, 2)
        return law

    def law_and_faults(self, logits: Tensor, texts: Prefixes, model: str) -> tuple[Law, Faults]:
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(self.rows):
            groups.setdefault(id(row.request.sampler), []).append(place)
        if len(groups) == 1:
            return _attempt(self.rows, logits, texts, model)
        laws, faults = list[Law](), dict[tuple[int, int], Fault]()
        for places in groups.values():
            rows = [self.rows[place] for place in places]
            law, group_faults = _attempt(rows, logits[places], texts.select(places), model)
            laws.append(law)
            faults |= {(places[r], position): why for (r, position), why in group_faults.items()}
        order = torch.tensor([place for places in groups.values() for place in places]).argsort()
        return Law.join(laws, 0).select(order.to(logits.device)), faults

    def target_law(self, logits: Tensor, draft: Draft, model: str) -> tuple[Law, Faults]:
        """Return p after the pending token and after every drafted one, and the faults where it cannot be made."""
        paths = None if draft.parents is None else [(), *ancestors(draft.parents)]
        texts = Prefixes.chain(draft.tokens, logits.shape[1]) if paths is None else Prefixes(draft.fed, paths)
        return self.law_and_faults(logits, texts, model)

    def select(self, places: Sequence[int]) -> Context:
        return replace(self, rows=tuple(self.rows[place] for place in places), rng=self.rng.select(places))

    def draw(self, law: Law, purpose: str, start: int | Sequence[int] = 0, node: int | None = None) -> Tensor:
        return self.rng(law, self.key(purpose, start, node))

    def key(self, purpose: str, start: int | Sequence[int] = 0, node: int | None = None) -> Key:
        """Make the key of draws for positions from len(tokens) + start on; `start` is one number, or one per row."""
        starts = [start] * len(self.rows) if isinstance(start, int) else start
        origins = tuple(len(row.tokens) for row in self.rows)
        places = tuple(origin + begin for origin, begin in zip(origins, starts, strict=True))
        requests = [row.request for row in self.rows]
        seeds, names = tuple(request.seed for request in requests), tuple(request.key for request in requests)
        return Key(seeds, names, origins, places, purpose, node)


def _attempt(rows: Sequence[Row], logits: Tensor, texts: Prefixes, model: str) -> tuple[Law, Faults]:
    try:
        return rows[0].request.sampler.law(logits, rows, texts, model), {}
    except RowFailure as failure:
        return failure.law, failure.faults


@dataclass(frozen=True, slots=True)
class Round:
    """A draft and its verification: the record that streams, statistics, benchmarks and controllers read.

    `tokens[r]` were emitted for `rows[r]` after all cuts, none if the row fails at once; `accepted[r]` of them came
    from the draft, and one more, unless a cut came before it, from the target. `gammas` are the numbers of tokens that
    the drafter was called with: the controller's choice, within the room that is left. It may have drafted fewer:
    `draft.lengths`. `seconds` has the phases `draft`, `target`, `accept` (laws, verification and draws) and `rest`, and
    `prefill` if a model that drafts had to read missing parts of a text first. `p` are the target's laws that the draft
    was verified with, after the pending token and after every drafted one (None in the rounds of a simulation, which
    has no models).
    """

    rows: tuple[Row, ...]
    draft: Draft
    verdict: Verdict
    tokens: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    gammas: tuple[int, ...]
    seconds: dict[str, float]
    p: Law | None = None

    @property
    def reading(self) -> float:
        """The seconds in which models that draft read parts of texts that were missing in their caches."""
        return self.seconds.get("prefill", 0.0)

    def source(self, row: int, position: int) -> str:
        """Return the origin of an emitted token: "draft", "correction", "bonus", or "target" if nothing was drafted."""
        if position < self.accepted[row]:
            return "draft"
        drafted = self.draft.depths[row]
        return "target" if not drafted else "correction" if position < drafted else "bonus"

    def refused(self, row: int) -> tuple[int, ...]:
        """Return the drafted tokens of a row that were not accepted, in the order in which they were drafted."""
        drafted = self.draft.tokens if self.verdict.path is None else self.draft.fed
        tokens = drafted[row, : self.draft.lengths[row]].tolist()
        kept: Sequence[int] = range(self.accepted[row])
        if self.verdict.path is not None:
            kept = self.verdict.path[row, : self.accepted[row]].tolist()
        return tuple(token for place, token in enumerate(tokens) if place not in kept)
