"""`request_for` makes the requests of check, bench, plan and paper."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.core.draws import request_key
from slipstream.core.request import Request, Sampler
from slipstream.core.source import SourceFrame, framed


def request_for(
    text: tuple[int, ...],
    sampler: Sampler,
    max_new_tokens: int,
    *,
    copy: int = 0,
    eos: Collection[int] = (),
    seed: int = 0,
    frame: SourceFrame | None = None,
) -> Request:
    """Make a request to continue token ids or, with a `frame`, one whose source they are.

    The keys of its draws are made of the text and its `copy` number, so that they do not depend on the batch.
    """
    begin, source = framed(frame, text)
    return Request(begin, sampler, max_new_tokens, frozenset(eos), seed, request_key(text, copy), source=source)
