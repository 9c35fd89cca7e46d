"""What a `Worker` keeps of its queue: times of a request, a beam search, and errors for what cannot be queued."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from slipstream.engine.beams import BeamTexts
from slipstream.engine.generation import Completion


class QueueFull(RuntimeError):
    """Raised when as many requests wait as may."""


class Unavailable(RuntimeError):
    """Raised while the models are not ready, after the end, and if the thread that runs the models has failed."""


@dataclass
class Times:
    """Times of a request's events, in seconds of `time.monotonic`; None for what has not happened yet."""

    arrived: float
    started: float | None = None  # its row got a place in the batch
    first: float | None = None  # its first token was emitted
    last: float | None = None  # its latest token was emitted


@dataclass(eq=False)
class Search:
    """A beam search that waits for the models, or runs; `found` is its result, in the event loop."""

    texts: BeamTexts
    found: asyncio.Future[list[Completion]]
    times: Times
    error: Exception | None = None

    @property
    def completions(self) -> list[Completion]:
        return self.texts.completions

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each text: "abort" if a cancelled search has not found it, "error" after an error."""
        if self.error is not None:
            return ["error"] * len(self.completions)
        return ["abort" if one.finish_reason == "interrupted" else one.finish_reason for one in self.completions]

    def run(self, wanted: Callable[[], bool]) -> None:
        """Search in the worker's thread while it is wanted, until it ends, fails or is cancelled."""
        self.times.started = monotonic()
        try:
            self.texts.play(wanted=lambda: wanted() and not self.found.done())
        except Exception as error:  # of this search alone: the models are as they were
            self.error = error
        self.times.last = monotonic()

    def fail(self, error: Exception) -> None:
        """End it by an error, in the event loop."""
        if not self.found.done():
            self.found.set_exception(error)

    def deliver(self) -> None:
        """Set the result after it has run, in the event loop."""
        if self.error is not None:
            self.fail(self.error)
        elif not self.found.done():
            self.found.set_result(self.completions)
