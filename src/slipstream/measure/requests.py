"""`request_for`: a text to be decoded, as check, bench, plan and paper ask for it."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.core.draws import request_key
from slipstream.core.request import Request, Sampler
from slipstream.core.source import Frame, framed


def request_for(
    text: tuple[int, ...],
    sampler: Sampler,
    max_new_tokens: int,
    *,
    copy: int = 0,
    eos: Collection[int] = (),
    seed: int = 0,
    frame: Frame | None = None,
) -> Request:
    """A request to continue token ids or, with a `frame`, to write from them as a source.

    Its draws are named by the text and the number of its `copy`, so they do not depend on what it is batched with.
    """
    begin, source = framed(frame, text)
    return Request(begin, sampler, max_new_tokens, frozenset(eos), seed, request_key(text, copy), source=source)
