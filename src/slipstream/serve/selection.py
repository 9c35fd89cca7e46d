"""Selects the best of several texts: of `best_of` samples by their probability, and by beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.core.options import OPTIONS, REQUEST_FIELDS
from slipstream.engine.generation import Completion
from slipstream.serve.faults import BadRequest
from slipstream.serve.options import engine_options, speculation
from slipstream.serve.schema import CompletionRequest
from slipstream.serve.settings import ServeSettings

OF_BEAMS = tuple(name for name in REQUEST_FIELDS if OPTIONS[name].group == "beams")


def count_written(body: CompletionRequest, settings: ServeSettings) -> int:
    """Return how many texts are generated for every prompt. Raises BadRequest for an impossible best_of."""
    asked, most = body.n or 1, settings.limits.samples
    if body.best_of is None:
        return asked
    if body.best_of > most:
        raise BadRequest(f"best_of asks for {body.best_of}, but this server gives at most {most}.", "best_of")
    if body.best_of < asked:
        raise BadRequest(f"best_of={body.best_of} is below n={asked}: of so many, no more can be answered.", "best_of")
    if body.stream and body.best_of > asked:
        raise BadRequest(
            "best_of is known when all texts are written: leave out stream, or give no best_of.", "best_of"
        )
    return body.best_of


def most_probable(completions: Sequence[Completion], written: int, asked: int) -> list[int]:
    """Return the indices of the texts to answer with, the best first.

    Of every `written` texts, these are the `asked` ones with the highest mean log-probability of their tokens. Texts
    that failed come last.
    """
    chosen = list[int]()
    for start in range(0, len(completions), written):
        places = range(start, start + written)
        chosen += sorted(places, key=lambda place: mean_logprob(completions[place]), reverse=True)[:asked]
    return chosen


def mean_logprob(completion: Completion) -> float:
    """Return the mean log-probability of a text's tokens; minus infinity for one that failed or is empty."""
    known = [] if completion.error else [one.logprob for one in completion.logprobs or ()]
    return sum(known) / len(known) if known else float("-inf")


# ---- beam search -----------------------------------------------------------------------------------------------------


def refuse_beam_fields(body: CompletionRequest) -> None:
    """Raises BadRequest for fields of beam search without use_beam_search, and for fields that it does not support."""
    if not body.use_beam_search:
        for name in OF_BEAMS:
            if getattr(body, name) is not None:
                raise BadRequest(f"{name} is for beam search: give use_beam_search=true as well.", name)
        return
    for name, why in (
        ("suffix", "beams do not fill in"),
        ("stream", "no text is known before the search has ended"),
        ("response_format", "beams and grammars do not go together"),
        ("structured_outputs", "beams and grammars do not go together"),
    ):
        if getattr(body, name):
            raise BadRequest(f"use_beam_search excludes {name}: {why}.", name)


def beam_options(body: CompletionRequest, settings: ServeSettings, tenant: str, written: int) -> dict[str, Any]:
    """Return the engine's options for a request with beam search, with `written` as the number of beams.

    Raises BadRequest for fewer than two.
    """
    if written < 2:
        raise BadRequest("use_beam_search needs beams: give best_of, or n, of 2 or more.", "use_beam_search")
    options = engine_options(body, settings, tenant)
    options.pop("n", None)
    if speculation(body).verify is None:
        options.pop("verify", None)  # the rule that a seed selects is for drafts that are drawn, which beams are not
    if body.temperature is None:
        options["temperature"] = 0.0
    return options | {"num_beams": written, "num_return_sequences": body.n or 1}
