"""A call of an endpoint: its tickets, which are awaited together, and the fields of an answer besides its text."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, TypeVar

from starlette.requests import Request

from slipstream.core.stats import Stats
from slipstream.engine.engine import Engine
from slipstream.engine.generation import Piece
from slipstream.engine.queued import Search
from slipstream.engine.worker import Ticket, rounds_of
from slipstream.serve import answers
from slipstream.serve.answers import new_id
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


def new_heading(prefix: str, model: str) -> dict[str, Any]:
    """Return the first fields of all objects of one answer."""
    fingerprint = f"slipstream-{__version__}"
    return {"id": f"{prefix}-{new_id()}", "created": int(time()), "model": model, "system_fingerprint": fingerprint}


class Call:
    """The tickets of one request: `samples` answers for each of its prompts, in order."""

    def __init__(self, tickets: Sequence[Ticket], samples: int = 1) -> None:
        self.tickets, self.samples = list(tickets), samples
        self._only = tickets[0] if len(tickets) == 1 else None

    async def collect(self) -> list[list[Piece]]:
        per_ticket: list[list[Piece]] = [[] for _ in self.tickets]
        async for place, pieces in self.rounds():
            per_ticket[place] += pieces
        return per_ticket

    def rounds(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        return rounds_of(self.tickets)

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    @property
    def finish_reasons(self) -> list[str | None]:
        rows = (ticket.generation.row for ticket in self.tickets)
        return [None if row is None else row.finish_reason for row in rows]

    def texts(self) -> dict[str, list[str]]:
        prompts = [ticket.generation.request.prompt for ticket in self.tickets[:: self.samples]]
        written = [ticket.generation.completion.text for ticket in self.tickets]
        return {"prompts": list(map(self.tickets[0].worker.engine.decode, prompts)), "answers": written}

    def about(self, asked: SpeculationOptions) -> dict[str, Any]:
        return {"usage": self.usage, "metrics": self.metrics(asked.detailed), "timings": self.timings()}

    @property
    def usage(self) -> answers.Usage:
        """The tokens read and written so far; a prompt counts once, however many answers it has."""
        prompt = sum(ticket.prompt_tokens for ticket in self.tickets[:: self.samples])
        written = sum(ticket.completion_tokens for ticket in self.tickets)
        stats = sum((ticket.stats for ticket in self.tickets), Stats())
        return answers.Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=answers.PromptDetails(cached_tokens=stats.cached),
            completion_tokens_details=answers.CompletionDetails(
                accepted_prediction_tokens=stats.predicted_accepted,
                rejected_prediction_tokens=stats.predicted - stats.predicted_accepted,
            ),
        )

    def metrics(self, detailed: bool = False) -> answers.AnswerMetrics | None:
        """Return times and acceptance of the only answer; None if there are several, or before its first token."""
        if (ticket := self._only) is None:
            return None
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
        if (ticket := self._only) is None or ticket.times.first is None:
            return None
        prefill = ticket.stats.seconds.get("prefill", 0.0)
        rounds = ticket.stats.total_seconds - prefill
        read, written = ticket.prompt_tokens - ticket.stats.cached, ticket.completion_tokens
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
    """A beam search of one request, which reads its prompts without the prefix cache."""

    search: Search
    engine: Engine

    @property
    def finish_reasons(self) -> list[str]:
        return self.search.finish_reasons

    @property
    def usage(self) -> answers.Usage:
        prompt, written = self.search.texts.prompt_tokens, sum(len(each.tokens) for each in self.search.completions)
        return answers.Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)

    def texts(self) -> dict[str, list[str]]:
        written = [each.text for each in self.search.completions]
        return {"prompts": list(map(self.engine.decode, self.search.texts.prompts)), "answers": written}


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
