"""Compares texts with plain decoding: its choices, the effect of rounding on them, and where texts end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.check.record import Emission, RecordedText
from slipstream.check.report import Difference
from slipstream.core.draws import Key, Purpose, Rng
from slipstream.core.law import Law, distance
from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.request import Request, Row
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, succeeded
from slipstream.kernels.packing import inputs_as_they_are
from slipstream.measure.replay import plain_law, replay

HALF = {torch.float16, torch.bfloat16}

MARGIN = 4
"""The greatest near-tie over the measured rounding: 2 since two scores move, times 2 for processors that scale them."""


@dataclass
class Rounding:
    """The differences between the scores of rounds and of plain steps, in logits.

    `noise` is the largest difference, `whole` that between plain steps and one pass over the whole
    text without a cache (None if the target cannot do that), `spread` the standard deviation of the logits. `inputs` is
    how far the rounding of layers' inputs to 8 bits moves the logits of that pass.
    """

    noise: float = 0.0
    whole: float | None = None
    inputs: float = 0.0
    spread: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def limit(self) -> float:
        """The greatest difference that rounding explains; above it, the scores themselves are wrong.

        The last bits of inputs that are rounded to 8 bits may become whole steps: two passes are each about as far from
        the one without that rounding as this one is.
        """
        half, single = 0.5 * self.spread, 0.01 * self.spread
        return half if self.dtype in HALF else max(single, min(half, 2 * self.inputs))

    @property
    def allowed(self) -> float:
        least = {torch.float64: 1e-9, torch.float32: 1e-4}.get(self.dtype, 1e-2)
        return max(least, MARGIN * self.noise)

    def see(self, plain: Tensor, used: Tensor) -> None:
        self.noise = max(self.noise, _farthest(plain, used))
        self.spread = max(self.spread, float(plain[plain.isfinite()].float().std(correction=0)))
        self.dtype = plain.dtype

    def see_whole(self, target: Scorer, text: RecordedText, plain: Sequence[Tensor]) -> None:
        alone = getattr(target, "alone", None)
        if alone is None:
            return
        request = text.row.request

        def scores() -> Tensor:
            return alone([*request.prompt, *text.tokens[:-1]], request.source)[0, -len(plain) :].to(plain[0].device)

        found = scores()
        self.whole = max(self.whole or 0.0, _farthest(torch.stack(list(plain)), found))
        if isinstance(target, HasModel):
            with inputs_as_they_are(target.model) as rounds:
                self.inputs = max(self.inputs, _farthest(found, scores()) if rounds else 0.0)


def _farthest(left: Tensor, right: Tensor) -> float:
    gap = (left.double() - right.double()).abs()
    gap[left == right] = 0  # both minus infinity
    return float(gap.nan_to_num(nan=math.inf).max())


@dataclass
class Comparison:
    """The comparison of all texts of a run; `moved` is the sum of total variations by which rounding moved the laws.

    `unforced` counts tokens that are not the choice even under the scores of their own round, which rounding cannot
    explain.
    """

    rounding: Rounding = field(default_factory=Rounding)
    differences: list[Difference] = field(default_factory=list)
    unforced: int = 0
    tokens: int = 0
    moved: float = 0.0

    def first(self) -> list[Difference]:
        """Return the first difference of every text, where it departs from plain decoding."""
        return [d for i, d in enumerate(self.differences) if not i or d.prompt != self.differences[i - 1].prompt]


def compare(
    target: Scorer,
    texts: Sequence[RecordedText],
    rng: Rng | None = None,
    on_text: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Replay every text through the target and compare its choices: greedy ones always, sampled ones with an rng."""
    comparison = Comparison()
    for prompt, text in enumerate(texts):
        on_text(prompt, len(texts))
        plain = []
        for place, rows, scores, law in replay(target, [text.row.request], [text.tokens]):
            emission = text.emissions[place]
            used = plain_law(rows, emission.scores[None, None], target.name)
            comparison.rounding.see(scores[0, 0], emission.scores)
            comparison.moved += float(distance(law, used))
            choice = _choice(law, rows[0], emission, rng)
            comparison.unforced += _choice(used, rows[0], emission, rng) not in (None, emission.token)
            if choice is not None and choice != emission.token:
                gap = _gap((law, used), rows[0], emission, rng)
                where = emission.token, *gap, emission.round, emission.source
                comparison.differences.append(Difference(prompt, place, choice, *where))
            plain.append(scores[0, 0])
        comparison.tokens += len(plain)
        comparison.rounding.see_whole(target, text, plain)
    return comparison


def _choice(law: Law, row: Row, emission: Emission, rng: Rng | None) -> int | None:
    """Return the token that plain decoding chooses; None if it is sampled and no rng is given."""
    if law.point:
        return int(law.ids)
    return None if rng is None else int(rng(law, _key(row, emission)))


def _key(row: Row, emission: Emission) -> Key:
    request = row.request
    return Key((request.seed,), (request.key,), (emission.origin,), (len(row.tokens),), Purpose.NEXT)


Scores = tuple[float, float, float]  # the logit of the chosen token, that of the emitted one, and the gap between them


def _gap(laws: tuple[Law, Law], row: Row, emission: Emission, rng: Rng | None) -> Scores:
    """Return the gap; of coupled draws by bisection: how much likelier the emitted token must be for them to draw it.
    The first of the `laws` is that of plain decoding."""
    if laws[0].point:
        assert laws[0].scores is not None
        best, own = float(laws[0].scores.max()), float(laws[0].scores[0, 0, emission.token])
        return best, own, best - own
    assert rng is not None
    law = next((law for law in laws if float(law.dense[0, 0, emission.token]) > 0), None)
    if law is None:
        return 0.0, -math.inf, math.inf
    # A token that is missing from the plain law alone was at the edge of top-k or top-p.
    ours = law.dense.double().log()
    best, low, high = float(ours[0, 0, int(rng(law, _key(row, emission)))]), 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        ahead = ours.clone()
        ahead[0, 0, emission.token] += middle
        chosen = int(rng(Law(probs=ahead.softmax(-1)), _key(row, emission))) == emission.token
        low, high = (low, middle) if chosen else (middle, high)
    temperature = float(getattr(row.request.sampler, "temperature", 1.0))
    return best, float(ours[0, 0, emission.token]), high * temperature


@dataclass(frozen=True)
class Endings:
    """Sentences about texts that end wrongly, and how many texts were ended inside a draft for the test."""

    faults: tuple[str, ...]
    inside: int


def endings(decoder: Decoder, texts: Sequence[RecordedText]) -> Endings:
    """Check how texts end, and how they end if a token from inside an accepted draft is made an end token."""
    requests = list[Request]()
    for text in texts:  # with the first new token that is not the last of its round as another end token
        seen = set[int]()
        for emission in text.emissions:
            if emission.inside and emission.token not in seen:
                requests.append(replace(text.row.request, eos=text.row.request.eos | {emission.token}))
                break
            seen.add(emission.token)
    again = succeeded(generate(decoder, requests))
    rows = [*(text.row for text in texts), *again]
    faults = [fault for row in rows for fault in _faults(row, decoder.target)]
    return Endings(tuple(faults), sum(row.finish_reason == "stop" for row in again))


def _faults(row: Row, target: Scorer) -> list[str]:
    """Return what is wrong with the end of a text, in a sentence; [] if nothing is."""
    request, output = row.request, row.output
    text = f"text {row.index + 1}"
    full = target.context is not None and len(row.tokens) >= target.context
    if any(token in request.eos for token in output[:-1]):
        return [f"{text} goes on after its end token"]
    if len(output) > request.max_new_tokens:
        return [f"{text} has {len(output)} tokens, {request.max_new_tokens} were asked for"]
    if (output[-1] in request.eos) != (row.finish_reason == "stop"):
        return [f"{text} says {row.finish_reason!r} after token {output[-1]}"]
    if output[-1] not in request.eos and len(output) < request.max_new_tokens and not full:
        return [f"{text} ends after {len(output)} tokens without an end token"]
    return []
