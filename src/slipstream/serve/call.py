"""A call of an endpoint: its tickets, which are awaited together, and the fields of an answer besides its text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, TypeVar

from starlette.requests import Request

from slipstream.engine.engine import Engine
from slipstream.engine.generation import Piece
from slipstream.engine.queued import Search
from slipstream.engine.worker import Ticket, rounds_of
from slipstream.serve import answers
from slipstream.serve.ids import new_id
from slipstream.serve.schema import SpeculationOptions
from slipstream.version import __version__

Result = TypeVar("Result")


class ClientGone(Exception):
    """Raised when the client has closed the connection before its answer was ready."""


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Wait for work. Raises ClientGone, and cancels the work, if the client disconnects before it is done."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()


@dataclass(frozen=True)
class Heading:
    """The first fields of all objects of one answer: id, time and model."""

    id: str
    created: int
    model: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the heading as an answer has them, with the system fingerprint."""
        return {**vars(self), "system_fingerprint": f"slipstream-{__version__}"}

    @staticmethod
    def new(prefix: str, model: str) -> Heading:
        return Heading(f"{prefix}-{new_id()}", int(time()), model)


class Call:
    """The tickets of one request: `samples` answers for each of its prompts, in order."""

    def __init__(self, tickets: Sequence[Ticket], samples: int = 1) -> None:
        self.tickets, self.samples = list(tickets), samples

    async def collect(self) -> list[list[Piece]]:
        """Wait for the end -> the pieces of each ticket, the last of which has the completion."""
        per_ticket: list[list[Piece]] = [[] for _ in self.tickets]
        async for place, pieces in self.rounds():
            per_ticket[place] += pieces
        return per_ticket

    def rounds(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """Yield what every round gives to a ticket, with its place; see `rounds_of`."""
        return rounds_of(self.tickets)

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    def log_fields(self, texts: bool) -> dict[str, Any]:
        """Return the call's fields of the access log: counts, and with `texts` also prompts and answers."""
        usage, engine = self.usage, self.tickets[0].worker.engine
        fields: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "finish_reasons": [
                ticket.generation.row and ticket.generation.row.finish_reason for ticket in self.tickets
            ],
        }
        if texts:
            requests = [ticket.generation.request for ticket in self.tickets[:: self.samples]]
            fields["prompts"] = [engine.decode(request.prompt) for request in requests]
            fields["answers"] = [ticket.generation.completion.text for ticket in self.tickets]
        return fields

    # ---- what an answer has besides its text ----

    def about(self, asked: SpeculationOptions) -> dict[str, Any]:
        """Return the fields of the last object of an answer: usage, times and acceptance."""
        return {"usage": self.usage, "metrics": self.metrics(asked.detailed), "timings": self.timings()}

    @property
    def usage(self) -> answers.Usage:
        """The tokens read and written so far; a prompt counts once, however many answers it has."""
        prompt = sum(ticket.prompt_tokens for ticket in self.tickets[:: self.samples])
        written = sum(ticket.completion_tokens for ticket in self.tickets)
        return answers.Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=answers.PromptDetails(
                cached_tokens=sum(ticket.stats.cached for ticket in self.tickets)
            ),
            completion_tokens_details=answers.CompletionDetails(
                accepted_prediction_tokens=sum(ticket.predicted[0] for ticket in self.tickets),
                rejected_prediction_tokens=sum(ticket.predicted[1] for ticket in self.tickets),
            ),
        )

    def metrics(self, detailed: bool = False) -> answers.AnswerMetrics | None:
        """Return times and acceptance of the only answer; None if there are several, or before its first token."""
        if len(self.tickets) != 1:
            return None
        [ticket] = self.tickets
        times, written = ticket.times, ticket.completion_tokens
        if times.first is None or times.last is None or times.started is None:
            return None
        span = times.last - times.first
        return answers.AnswerMetrics(
            time_to_first_token_ms=1e3 * (times.first - times.arrived),
            generation_time_ms=1e3 * (times.last - times.arrived),
            queue_time_ms=1e3 * (times.started - times.arrived),
            mean_itl_ms=1e3 * span / (written - 1) if written > 1 else None,
            tokens_per_second=(written - 1) / span if written > 1 and span else None,
            speculative_decoding=speculative_decoding(ticket.generation.steps, detailed),
        )

    def timings(self) -> answers.Timings | None:
        """Return times of the only answer under llama.cpp's names; None if there are several, or without a token."""
        if len(self.tickets) != 1:
            return None
        [ticket] = self.tickets
        prefill = ticket.stats.seconds.get("prefill", 0.0)
        rounds = ticket.stats.total_seconds - prefill
        read, written = ticket.prompt_tokens - ticket.stats.cached, ticket.completion_tokens
        if ticket.times.first is None:
            return None
        return answers.Timings(
            cache_n=ticket.stats.cached,
            prompt_n=read,
            prompt_ms=1e3 * prefill,
            prompt_per_token_ms=1e3 * prefill / max(1, read),
            prompt_per_second=read / prefill if prefill else 0.0,
            predicted_n=written,
            predicted_ms=1e3 * rounds,
            predicted_per_token_ms=1e3 * rounds / max(1, written),
            predicted_per_second=written / rounds if rounds else 0.0,
            draft_n=ticket.stats.drafted,
            draft_n_accepted=ticket.stats.accepted,
        )


@dataclass(frozen=True)
class SearchCall:
    """A beam search of one request, for the access log."""

    search: Search
    engine: Engine

    def log_fields(self, texts: bool) -> dict[str, Any]:
        """Return the search's fields of the access log: counts, and with `texts` also prompts and answers."""
        completions = self.search.completions
        fields: dict[str, Any] = {
            "prompt_tokens": self.search.texts.prompt_tokens,
            "completion_tokens": sum(len(each.tokens) for each in completions),
            "cached_tokens": 0,  # a search reads its prompts itself
            "finish_reasons": self.search.finish_reasons,
        }
        if texts:
            fields["prompts"] = [self.engine.decode(prompt) for prompt in self.search.texts.prompts]
            fields["answers"] = [each.text for each in completions]
        return fields


def speculative_decoding(steps: Sequence[tuple[int, int]], detailed: bool) -> answers.SpeculativeDecoding | None:
    """Return the acceptance of one answer from drafted and accepted tokens of each round; None without drafts."""
    longest = max((drafted for drafted, _ in steps), default=0)
    if not longest:
        return None
    histogram, by_length = [0] * (longest + 1), dict[str, list[int]]()
    for drafted, accepted in steps:
        histogram[accepted] += 1
        by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
    drafted, accepted = (sum(column) for column in zip(*steps, strict=True))
    return answers.SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / len(steps),
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length=dict(sorted(by_length.items(), key=lambda item: int(item[0]))),
        num_spec_steps=sum(drafted > 0 for drafted, _ in steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=longest,
        per_step_accepted=[accepted for _, accepted in steps] if detailed else None,
        per_step_drafted=[drafted for drafted, _ in steps] if detailed else None,
    )
