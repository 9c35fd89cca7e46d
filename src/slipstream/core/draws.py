"""All randomness: numbers that are functions of seed, request and position, and the draws made with them.

All draws go through the protocol `Rng`. `draw` inverts cumulative weights, `draw_coupled` chooses by Gumbel noise that
target and draft share; `ScopedDraws` gives the draws of one part of a round their own names, and `Sealed` makes draws
that cannot be predicted from the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from slipstream.core.law import Law


class Purpose(StrEnum):
    """The purpose of a draw: a drafted token, the coin that accepts or refuses it, or the token after the accepted."""

    DRAFT = "draft"
    ACCEPT = "accept"
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a draw, which names its random numbers: row r draws for the token positions from `positions[r]` on.

    Two draws with equal (seed, request, origin, position, name) are the same draw, no matter what else is in
    the batch. `origins` are the text lengths when the round began: without them the next round would reuse the numbers
    of tokens that this one rejects, and a rule that looks at the whole draft (block verification) would be biased.
    `node` distinguishes the candidates of a tree, and `scope` the parts of a round that draw for the same positions.
    """

    seeds: tuple[int, ...]
    requests: tuple[int, ...]
    origins: tuple[int, ...]
    positions: tuple[int, ...]
    purpose: str  # a `Purpose`, or a name that a drafter gives to further draws of its own
    node: int | None = None
    scope: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ".".join([*self.scope, self.purpose, *([] if self.node is None else [str(self.node)])])

    def select(self, places: Sequence[int]) -> Key:
        def some(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(numbers[place] for place in places)

        rows = (some(self.seeds), some(self.requests), some(self.origins), some(self.positions))
        return Key(*rows, self.purpose, self.node, self.scope)


class Rng(Protocol):
    """Draws tokens from laws, as a function of the law and the key."""

    @property
    def coupled(self) -> bool:
        """Whether draws depend on seed, request and position alone: not on target or draft, purpose or round."""

    def __call__(self, law: Law, key: Key) -> Tensor:
        """Draw token ids (rows, positions) from a law over as many rows and positions."""

    def chances(self, key: Key, positions: int) -> list[list[float]] | None:
        """Return the numbers in [0, 1) [rows][positions] with which `inverse` makes the same draws, for drafts that are
        drawn inside a graph; None if draws are not made by inversion."""

    def select(self, places: Sequence[int]) -> Rng:
        """Return the `Rng` of the rows at these places in the batch."""


_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # the golden ratio, splitmix64's increment


def request_key(prompt: Sequence[int], copy: int = 0) -> int:
    """Return a hash of a prompt and of which copy of it this is: the same, whatever else is in the batch."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8, salt=copy.to_bytes(8))
    return int.from_bytes(digest.digest())


@lru_cache(maxsize=65536)
def _stream(seed: int, request: int, name: str) -> int:
    text = f"{seed}/{request}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _mix(x: int) -> int:
    """Apply the finalizer of splitmix64: a bijection of 64 bits whose output bits all depend on all input bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniforms(key: Key, positions: int) -> list[list[float]]:
    """Return numbers in [0, 1) on the grid of 2^-53, [rows][positions]: splitmix64 counted by the token's position."""
    numbers = []
    for seed, request, origin, start in zip(key.seeds, key.requests, key.origins, key.positions, strict=True):
        stream = _mix((_stream(seed, request, key.name) + origin * _STEP) & _MASK)
        counts = range(start + 1, start + positions + 1)
        numbers.append([(_mix((stream + count * _STEP) & _MASK) >> 11) * 2.0**-53 for count in counts])
    return numbers


class SameForAllRows:
    """What the draws share that treat all rows alike, and that graphs cannot repeat unless they have `chances`."""

    coupled = False

    def chances(self, key: Key, positions: int) -> list[list[float]] | None:
        return None

    def select(self, places: Sequence[int]) -> Self:
        return self


@dataclass(frozen=True)
class Inversion(SameForAllRows):
    """Draws by inverting the cumulative weights of a law, whatever their total, at numbers that only this key has."""

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.point:
            return law.ids
        chances = torch.tensor(self.chances(key, law.positions), dtype=torch.float64, device=law.device)
        return inverse(law.dense, chances)

    def chances(self, key: Key, positions: int) -> list[list[float]]:
        return uniforms(key, positions)


def inverse(probs: Tensor, chances: Tensor) -> Tensor:
    """Return the tokens (rows, positions) at which the cumulative weights of a law exceed `chances` times their total.

    `probs` are weights (rows, positions, vocab), `chances` (rows, positions) numbers in [0, 1). On a CPU our kernel
    does it, once it is loaded, in one reading of the weights; its sums may differ by rounding in float64.
    """
    if probs.device.type == "cpu" and hasattr(torch.ops.slipstream, "inverse"):
        tokens: Tensor = torch.ops.slipstream.inverse(probs.flatten(0, -2), chances.flatten())
        return tokens.view(chances.shape)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # u * total may round up to total itself, which would fall off the end.
    aim = torch.minimum(chances.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative <= aim).sum(-1).clamp(max=probs.shape[-1] - 1)


@dataclass(frozen=True)
class GumbelChoice(SameForAllRows):
    """Draws by the Gumbel choice argmin_v e_v / p_v on exponentials shared by position.

    The noise depends on (seed, request, position) alone, not on model, purpose or round, so that target and draft
    choose on the same noise at a position (arXiv 2408.07978). The law of each choice is exactly the one given.
    """

    coupled = True

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.point:
            return law.ids
        rows = [
            [_exponentials(seed, request, start + j, law.dense.shape[-1]) for j in range(law.positions)]
            for seed, request, start in zip(key.seeds, key.requests, key.positions, strict=True)
        ]
        noise = torch.from_numpy(np.array(rows)).to(law.device)
        return (noise / law.dense.double()).argmin(-1)  # x / 0 = inf: a token of weight zero is never chosen


@lru_cache(maxsize=64)  # draft and target draw at the same position, often in two rounds
def _exponentials(seed: int, request: int, position: int, vocab: int) -> np.ndarray:
    """Return the exponential noise (vocab,) that all coupled draws at a position share."""
    bits = np.random.Philox(key=[_stream(seed, request, "coupled"), position])
    return np.random.Generator(bits).standard_exponential(vocab).clip(min=1e-300)  # 0/0 would be NaN


@lru_cache(maxsize=256)  # draft and target rank the continuations of the same prefixes
def gumbel_noise(seed: int, request: int, text: tuple[int, ...], vocab: int) -> Tensor:
    """Return the Gumbel noise (vocab,) of a text's continuations: a function of seed, request and text alone."""
    bits = np.random.Philox(key=[_stream(seed, request, "beams"), request_key(text)])
    return -torch.from_numpy(np.random.Generator(bits).standard_exponential(vocab).clip(min=1e-300)).log()


draw = Inversion()  # the `Rng` of all rules but the coupled one
draw_coupled = GumbelChoice()  # the `Rng` of the coupled rule: the text of a seed is the same with any draft


@dataclass(frozen=True)
class DrawnBy(SameForAllRows):
    """Draws with a function of law and key, for rules that users write; graphs cannot repeat such draws."""

    function: Callable[[Law, Key], Tensor]
    coupled: bool = False

    def __call__(self, law: Law, key: Key) -> Tensor:
        return self.function(law, key)


@dataclass(frozen=True)
class Rekeyed:
    """Makes the draws of another `Rng` under other keys; `select` is for those whose keys do not depend on rows."""

    outer: Rng

    @property
    def coupled(self) -> bool:
        return self.outer.coupled

    def rekey(self, key: Key) -> Key:
        raise NotImplementedError

    def __call__(self, law: Law, key: Key) -> Tensor:
        return self.outer(law, self.rekey(key))

    def chances(self, key: Key, positions: int) -> list[list[float]] | None:
        return self.outer.chances(self.rekey(key), positions)

    def select(self, places: Sequence[int]) -> Self:
        return replace(self, outer=self.outer.select(places))


@dataclass(frozen=True)
class ScopedDraws(Rekeyed):
    """Makes the draws of one part of a round under names that no draw outside that part has.

    `name` is the name of the part. A part whose texts are not those of the round, such as a draft that is drafted
    itself, gives `origins`: for each row the length of the round's text, and where the part's text begins in it. A text
    inside is longer than the outer one, so its length could be the origin of a later round too; the outer origin and
    the part's name make every draw unique.
    """

    name: str
    origins: tuple[tuple[int, int], ...] | None = None

    def select(self, places: Sequence[int]) -> Self:
        origins = None if self.origins is None else tuple(self.origins[place] for place in places)
        return replace(super().select(places), origins=origins)

    def rekey(self, key: Key) -> Key:
        key = replace(key, scope=(self.name, *key.scope))
        if self.origins is None:
            return key
        positions = tuple(place + start for place, (_, start) in zip(key.positions, self.origins, strict=True))
        return replace(key, origins=tuple(origin for origin, _ in self.origins), positions=positions)


@dataclass(frozen=True)
class Sealed(Rekeyed):
    """Draws from the seed and a secret, so that the seed alone is not enough to predict the draws."""

    secret: int

    def rekey(self, key: Key) -> Key:
        return replace(key, seeds=tuple(_sealed_seed(self.secret, seed) for seed in key.seeds))


@lru_cache(maxsize=4096)
def _sealed_seed(secret: int, seed: int) -> int:
    """Return the seed that replaces `seed` in sealed draws; it cannot be computed without the secret."""
    return int.from_bytes(hashlib.blake2b(f"{secret}/{seed}".encode(), digest_size=16).digest())


@dataclass(frozen=True)
class RowByRow:
    """Draws for a batch whose rows do not all draw in the same way: for each row with an `Rng` of its own."""

    rows: tuple[Rng, ...]

    @staticmethod
    def of(rows: Sequence[Rng]) -> Rng:
        """Return the `Rng` that all rows share, which costs nothing, or else one that draws row by row."""
        return rows[0] if len(set(map(id, rows))) == 1 else RowByRow(tuple(rows))

    @property
    def coupled(self) -> bool:
        return any(each.coupled for each in self.rows)

    def __call__(self, law: Law, key: Key) -> Tensor:
        return torch.cat([rng(law.of_row(place), key.select([place])) for place, rng in enumerate(self.rows)])

    def chances(self, key: Key, positions: int) -> list[list[float]] | None:
        per_row = [each.chances(key.select([place]), positions) for place, each in enumerate(self.rows)]
        return None if None in per_row else [numbers[0] for numbers in per_row if numbers]

    def select(self, places: Sequence[int]) -> Rng:
        return RowByRow.of([self.rows[place] for place in places])
