"""`ServerState`: the worker, the settings and the metrics that every route uses, and how a request becomes tickets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import time
from typing import Any

from starlette.requests import Request

from slipstream.core.options import REQUEST_FIELDS
from slipstream.core.stats import Stats
from slipstream.core.values import OptionError, PromptTooLong
from slipstream.decoding.grammar import GrammarLimits, Grammars
from slipstream.engine.beams import BeamTexts
from slipstream.engine.engine import Engine
from slipstream.engine.generation import Completion
from slipstream.engine.media import TextLimit
from slipstream.engine.requests import Prompt
from slipstream.engine.worker import Capacity, Ticket, Worker
from slipstream.serve import answers
from slipstream.serve.call import Call, SearchCall
from slipstream.serve.faults import (
    BadRequest,
    ContextExceeded,
    NotServed,
    ServeError,
    ServiceUnavailable,
    TooManyRequests,
)
from slipstream.serve.json_route import off_loop
from slipstream.serve.metrics import Metrics
from slipstream.serve.response_output import Conversations
from slipstream.serve.settings import ServeSettings
from slipstream.text.spelling import Spelling
from slipstream.theory import best_gamma_by_position
from slipstream.version import __version__

FIELDS = REQUEST_FIELDS | {  # names of the engine's options -> the fields of a request that set them
    "num_beams": "use_beam_search",
    "num_return_sequences": "n",
    "template_kwargs": "chat_template_kwargs",
    "timestamps": "response_format",
    **{name: f"speculative.{name}" for name in ("gamma", "verify", "lossless")},
}

LONGEST = 4096  # most tokens of an answer without a limit of its own, where the target has no limit either
LONGEST_PROMPT = 1 << 17  # most tokens of a text that is tokenized, where the target has no limit


@dataclass
class ServerState:
    """The parts of a running server: its worker, settings and metrics, the draft's name and the time it started."""

    worker: Worker
    settings: ServeSettings
    metrics: Metrics
    draft: str | None
    started: int
    readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))  # of heavy bodies
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # see `off_loop`
    conversations: Conversations = field(default_factory=Conversations)

    @staticmethod
    def new(engine: Engine, settings: ServeSettings, room: Capacity, draft: str | None) -> ServerState:
        if engine.text_limit is None:
            engine.text_limit = TextLimit.of(engine.tokenizer, LONGEST_PROMPT)
        metrics = Metrics(settings.names[0])
        worker = Worker(engine, room, settings.max_queue, [metrics], (TooManyRequests, ServiceUnavailable))
        metrics.follow(worker)
        return ServerState(worker, replace(settings, draft=draft), metrics, draft, int(time()))

    @property
    def engine(self) -> Engine:
        return self.worker.engine

    @property
    def model(self) -> str:
        return self.settings.names[0]

    @property
    def longest(self) -> int:
        own = self.engine.defaults.settings.get("max_new_tokens")
        return own or self.engine.decoder.target.context or LONGEST

    @property
    def temperature(self) -> float:
        return self.engine.defaults.settings.get("temperature", 1.0)

    @property
    def spelling(self) -> Spelling:
        assert self.engine.spelling is not None, "a model that is served has a tokenizer"
        return self.engine.spelling

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            raise NotServed(name, self.model)

    def encode(self, prompt: Prompt, field: str) -> list[int]:
        with self.refusing(field):
            return list(self.engine.encode(prompt))

    def check_length(self, field: str, *texts: str | None) -> None:
        with self.refusing(field):
            if self.engine.text_limit is not None:
                self.engine.text_limit.check([text for text in texts if text], field)

    @cached_property
    def grammars(self) -> Grammars:
        limits = GrammarLimits(self.settings.limits.grammar_bytes, self.settings.limits.schema_depth)
        return self.engine.new_grammars(limits)

    def properties(self) -> answers.Properties:
        engine, decoder, stats = self.engine, self.engine.decoder, self.metrics.stats
        return answers.Properties(
            target=self.model,
            draft=self.draft,
            rule=engine.rule.name,
            lossless=engine.rule.lossless,
            gamma=decoder.controller.most if self.draft else 0,
            max_rows=decoder.batch_size,
            max_model_len=decoder.target.context,
            vocabulary=decoder.target.vocab,
            encoder_decoder=decoder.target.source_form is not None,
            chat=engine.encoder.template is not None,
            notes=list(engine.notes),
            acceptance_by_position=stats.acceptance_by_position,
            recommended_gamma=recommended_gamma(stats),
            running=self.worker.running,
            waiting=self.worker.waiting,
            version=__version__,
        )

    async def call(self, request: Request, prompts: Sequence[Prompt], options: dict[str, Any], field: str) -> Call:
        """Queue a request's prompts -> the call, which the access log reports.

        `field` is the request's field to name in errors about prompts. Raises a ServeError for a request that is
        refused.
        """
        self.worker.check()
        texts, most = len(prompts) * (options.get("n") or 1), self.settings.max_queue
        if texts > most:
            raise BadRequest(f"the request asks for {texts} texts, but only {most} may wait: ask for fewer.", "n")
        options = {"temperature": self.temperature, **options}

        def submit() -> list[Ticket]:
            return self.worker.submit(self.engine.prepare(prompts, options, shared=True).generations)

        with self.refusing(field):
            tickets = await off_loop(request, submit)
        request.state.call = call = Call(tickets, options.get("n") or 1)
        return call

    async def search(
        self, request: Request, prompts: Sequence[Prompt], options: dict[str, Any], field: str
    ) -> list[Completion]:
        """Search with beams for a request's prompts -> `num_return_sequences` texts of each, side by side.

        `field` is the one that errors about prompts name. Raises a ServeError for a search
        that is refused.
        """
        self.worker.check()
        with self.refusing(field):
            job = await off_loop(request, self.engine.prepare, prompts, options)
            search = self.worker.submit_search(BeamTexts(job, memory=self.worker.room.memory))
            request.state.call = SearchCall(search, self.engine)
            return await search.found

    @contextmanager
    def refusing(self, field: str) -> Iterator[None]:
        """Raise BadRequest for what is refused in the block: an option, which the error names, or what is in `field`.
        It names the model as clients do: the engine's name may be a path of this machine."""
        try:
            yield
        except ServeError:
            raise
        except (ValueError, TypeError) as error:
            message = str(error).replace(self.engine.decoder.target.name, self.model)
            if isinstance(error, OptionError):
                said = re.sub(r"\b\w+(?==)", lambda name: FIELDS.get(name[0], name[0]), message)
                raise BadRequest(said, FIELDS.get(error.option, error.option)) from None
            raise (ContextExceeded if isinstance(error, PromptTooLong) else BadRequest)(message, field) from None


def recommended_gamma(stats: Stats) -> int | None:
    """Return the draft length that would have been fastest, from the acceptance and times so far.
    None before anything was drafted. Theorem 3.8 of arXiv 2211.17192, with acceptance by position."""
    if not stats.drafted or not stats.target_calls:
        return None
    verify = sum(seconds for phase, seconds in stats.seconds.items() if phase not in ("draft", "prefill"))
    if not verify:
        return None
    c = (stats.seconds.get("draft", 0.0) / stats.drafted) / (verify / stats.target_calls)
    return best_gamma_by_position(stats.acceptance_by_position, c)


def state_of(request: Request) -> ServerState:
    return request.app.state.server


def tenant_of(request: Request) -> str:
    return getattr(request.state, "tenant", "")
