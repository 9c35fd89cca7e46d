"""Makes requests that measure, and feeds finished texts to the target again, for the laws of plain decoding."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from slipstream.core.draws import draw, request_key
from slipstream.core.law import Law, RowFailure
from slipstream.core.protocols import Scorer
from slipstream.core.request import Prefixes, Request, Row, Sampler
from slipstream.core.round import Context
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
    The keys of its draws are made of the text and its `copy` number, so that they do not depend on the batch."""
    begin, source = framed(frame, text)
    return Request(begin, sampler, max_new_tokens, frozenset(eos), seed, request_key(text, copy), source=source)


def plain_law(rows: Sequence[Row], scores: Tensor, model: str) -> Law:
    """Turn scores (rows, 1, vocab) into the law that plain decoding draws from."""
    nothing = torch.empty(len(rows), 0, dtype=torch.long, device=scores.device)
    law, faults = Context(tuple(rows), draw).law_and_faults(scores, Prefixes.chain(nothing, 1), model)
    if faults:
        raise RowFailure(faults, law)
    return law


Replayed = tuple[int, list[Row], Tensor, Law]


def replay(
    target: Scorer,
    requests: Sequence[Request],
    outputs: Sequence[Sequence[int]],
    before_pass: Callable[[int, Sequence[Row]], object] | None = None,
) -> Iterator[Replayed]:
    """Feed given outputs to the target, one token at a time, in new rows, as plain decoding would have done.

    Yields, before each token: its place, the rows so far, the scores (rows, 1, vocab) and their law. Rows that have
    ended stay, with meaningless scores. `before_pass` is called with place and rows while the target holds all of each
    row but the last token, as when a round begins.
    """
    rows = [Row(request, index, list(request.prompt)) for index, request in enumerate(requests)]
    target.add(len(rows), [request.source for request in requests])
    try:
        target.prefill([row.tokens[:-1] for row in rows])
        for place in range(max(map(len, outputs))):
            if before_pass:
                before_pass(place, rows)
            pending = torch.tensor([row.tokens[-1:] for row in rows], device=target.device)
            scores = target.extend(pending, [int(place < len(output)) for output in outputs])
            yield place, rows, scores, plain_law(rows, scores, target.name)
            for row, output in zip(rows, outputs, strict=True):
                row.tokens += output[place : place + 1]
    finally:
        target.free(range(len(rows)))
