"""Search for the layers of a target that should draft for it: every choice is measured, and so is plain decoding.

1. `first_layers` and `thinned` list the choices: exits after the first layers, and sets from which layers are left out,
   one after the other, always the one whose loss lowers alpha least.
2. Every choice decodes the prompts at one gamma; its alpha and its times predict its best gamma and speed (Theorem 3.8
   of arXiv 2211.17192 with a measured verify cost).
3. The best of them race at their own gamma against plain decoding. The winner is decided by measured speed; if plain
   decoding wins, the result is not to draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from statistics import median
from typing import Any

import torch
from torch import Tensor

from slipstream.core.protocols import HasModel
from slipstream.core.request import Request
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain, succeeded
from slipstream.drafters.same_rows import exit_drafter
from slipstream.measure.timing import race, ratios
from slipstream.models.layers import find_layers, part_of, spell
from slipstream.theory import best_gamma, walltime_factor

FINALISTS, LAPS, MOST = 3, 3, 8
"""The number of choices that race against plain decoding, the laps of the race, and the largest gamma."""

Layers = tuple[int, ...]
Watch = Callable[[str], None]  # called with a line about each piece of work done


@dataclass(frozen=True)
class Trial:
    """A choice of layers at a gamma: the measurements, and the best gamma and speed that they predict.

    `factor` is the predicted speed over plain decoding at `best_gamma`; both are 0 if drafting is predicted not to pay.
    """

    layers: Layers
    gamma: int
    alpha: float
    mean_acceptance_length: float
    acceptance_by_position: tuple[float, ...]
    tokens_per_second: float
    best_gamma: int
    factor: float


@dataclass(frozen=True)
class Finish:
    """The result of a choice in the race: medians over laps of its speed and of its ratio to plain decoding."""

    layers: Layers
    gamma: int
    tokens_per_second: float
    over_plain: float


@dataclass(frozen=True)
class LayerSearch:
    """The result of a search for layers. `best` is None if plain decoding is the fastest."""

    plain: float  # tokens per second
    trials: tuple[Trial, ...]
    race: tuple[Finish, ...]

    @property
    def best(self) -> Finish | None:
        first = max(self.race, key=lambda finish: finish.over_plain, default=None)
        return first if first and first.over_plain > 1 else None

    @property
    def layers(self) -> Layers:
        """The layers of the best choice; () means not to draft."""
        return self.best.layers if self.best else ()

    def as_dict(self) -> dict[str, Any]:
        def shown(record: Trial | Finish) -> dict[str, Any]:
            return {**asdict(record), "layers": spell(record.layers)}

        return {
            "plain_tokens_per_second": self.plain,
            "trials": [shown(trial) for trial in self.trials],
            "race": [shown(finish) for finish in self.race],
            "best": shown(self.best) if self.best else None,
        }


def search_exit(
    decoder: Decoder,
    requests: Sequence[Request],
    choices: Sequence[Layers] | None = None,
    gamma: int = 3,
    watch: Watch = lambda line: None,
) -> LayerSearch:
    """Measure which layers of the decoder's target should draft, on requests like those to come.

    Without `choices`: all exits and thinned sets. Raises ValueError if the target cannot run with some of its layers,
    or if nothing was decoded to measure on.
    """
    target = decoder.target
    assert isinstance(target, HasModel), "a model from `models`"
    if choices is None:
        choices = [*first_layers(target), *thinned(target, texts_of(decoder, requests), watch)]
    base = pooled_stats(decoder, requests, None)
    trials = []
    for layers in choices:
        trials.append(try_layers(decoder, requests, layers, gamma, base))
        watch(f"layers {spell(layers)}: alpha {trials[-1].alpha:.3f}, {trials[-1].tokens_per_second:.1f} tokens/s")
    promising = sorted((trial for trial in trials if trial.best_gamma), key=lambda trial: -trial.factor)[:FINALISTS]
    speed, finishes = _race(decoder, requests, promising, watch)
    return LayerSearch(speed, tuple(trials), finishes)


def first_layers(target: HasModel) -> list[Layers]:
    return [tuple(range(count)) for count in range(1, _count(target))]


def thinned(target: HasModel, texts: Sequence[tuple[int, Sequence[int]]], watch: Watch) -> list[Layers]:
    """Return sets of fewer and fewer layers, down to a quarter. `texts` are compared after their prompts.
    Each step leaves out the layer whose loss lowers alpha least: greedy, so not always the best set of a size."""
    laws = [(start, torch.tensor([text], device=target.device)) for start, text in texts]
    wanted = [_laws_behind(target, start, tokens) for start, tokens in laws]
    kept, sets = tuple(range(_count(target))), []
    while len(kept) > max(2, _count(target) // 4):
        smaller = [tuple(layer for layer in kept if layer != dropped) for dropped in kept]
        alphas = list[float]()
        for part in (part_of(target, layers) for layers in smaller):
            # The mean of sum_x min(p(x), q(x)), each text read once by the part alone: a real draft is in part fed by
            # the target's keys.
            same = [torch.minimum(p, _laws_behind(part, *text)).sum(-1) for text, p in zip(laws, wanted, strict=True)]
            alphas.append(float(torch.cat(same).mean()))
        best = max(range(len(smaller)), key=alphas.__getitem__)
        kept = smaller[best]
        watch(f"layers {spell(kept)}: alpha about {alphas[best]:.3f}")
        if spell(kept) != str(len(kept)):  # otherwise it is the exit of `first_layers`
            sets.append(kept)
    return sets


def texts_of(decoder: Decoder, requests: Sequence[Request]) -> list[tuple[int, list[int]]]:
    return [(len(row.request.prompt), row.tokens) for row in succeeded(plain(decoder, requests))]


def _count(target: HasModel) -> int:
    return len(find_layers(target.model, target.name)[1])


@torch.inference_mode()
def _laws_behind(scorer: HasModel, start: int, tokens: Tensor) -> Tensor:
    logits = scorer.model(input_ids=tokens, use_cache=False).logits[0, start - 1 : -1]
    return logits.float().softmax(-1)


def pooled_stats(decoder: Decoder, requests: Sequence[Request], layers: Layers | None) -> Stats:
    """Decode the texts once -> the statistics of all rows together. Raises ValueError if nothing was decoded."""
    if layers is None:
        rows = succeeded(plain(decoder, requests))
    else:
        assert isinstance(decoder.target, HasModel)
        rows = succeeded(generate(replace(decoder, drafter=exit_drafter(decoder.target, layers)), requests))
    stats = reduce(add, [row.stats for row in rows], Stats())
    if not stats.tokens_per_second:
        raise ValueError("there is nothing to measure on: give at least one prompt that can be continued.")
    return stats


def try_layers(decoder: Decoder, requests: Sequence[Request], layers: Layers, gamma: int, base: Stats) -> Trial:
    """Decode once at `gamma`: draft and verify times over a plain step give the best gamma and its speed."""
    stats = pooled_stats(replace(decoder, controller=Fixed(gamma)), requests, layers)
    step = _seconds(base) / base.target_calls
    c = stats.seconds["draft"] / max(1, stats.drafted) / step
    slope = ((_seconds(stats) - stats.seconds["draft"]) / stats.target_calls / step - 1) / gamma

    def verify(rows: int) -> float:
        return max(1.0, 1 + slope * (rows - 1))

    alpha = min(1.0, stats.alpha or 0.0)
    best = best_gamma(alpha, c, MOST, verify)
    return Trial(
        layers,
        gamma,
        alpha,
        stats.mean_acceptance_length or 1.0,
        tuple(stats.acceptance_by_position),
        stats.tokens_per_second or 0.0,
        best,
        walltime_factor(alpha, best, c, verify) if best else 0.0,
    )


def _seconds(stats: Stats) -> float:
    return stats.total_seconds - stats.seconds.get("prefill", 0.0)


def _race(
    decoder: Decoder, requests: Sequence[Request], trials: Sequence[Trial], watch: Watch
) -> tuple[float, tuple[Finish, ...]]:
    def run(trial: Trial | None, lap: int) -> float:
        if trial is None:
            return pooled_stats(decoder, requests, None).tokens_per_second or 0.0
        own = replace(decoder, controller=Fixed(trial.best_gamma))
        return pooled_stats(own, requests, trial.layers).tokens_per_second or 0.0

    plain_speeds, *others = zip(*race([None, *trials], range(LAPS), run), strict=True)
    finishes = []
    for trial, speeds in zip(trials, others, strict=True):
        speed, ratio = median(speeds), median(ratios(speeds, plain_speeds))
        finishes.append(Finish(trial.layers, trial.best_gamma, speed, ratio))
        watch(f"layers {spell(trial.layers)}, gamma {trial.best_gamma}: {speed:.1f} tokens/s, {ratio:.2f} x plain")
    return median(plain_speeds), tuple(finishes)
