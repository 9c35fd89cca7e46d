"""All randomness: numbers that are functions of seed, request and position, and the draws made with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from slipstream.core.law import Law
from slipstream.core.round import Key

# ---- randomness -------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


_STEP = 0x9E3779B97F4A7C15  # the golden ratio, splitmix64's increment


def request_key(prompt: Sequence[int], copy: int = 0) -> int:
    """A request's name in the keys of its draws: its text and which copy of that text it is.

    So equal prompts in one call differ, and a prompt's output does not depend on what it is batched with.
    """
    digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8, salt=copy.to_bytes(8))
    return int.from_bytes(digest.digest())


@lru_cache(maxsize=65536)
def _stream(seed: int, request: int, purpose: str) -> int:
    text = f"{seed}/{request}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _mix(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits whose output bits all depend on all input bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniforms(key: Key, positions: int) -> list[list[float]]:
    """Numbers in [0, 1) on the grid of 2^-53, [rows][positions]: splitmix64 counted by the token's position."""
    numbers = []
    for seed, request, origin, start in zip(key.seeds, key.requests, key.origins, key.positions, strict=True):
        stream = _mix((_stream(seed, request, key.purpose) + origin * _STEP) & _MASK)
        counts = range(start + 1, start + positions + 1)
        numbers.append([(_mix((stream + count * _STEP) & _MASK) >> 11) * 2.0**-53 for count in counts])
    return numbers


def draw(law: Law, key: Key) -> Tensor:
    """Tokens (rows, positions) from a law, by inversion of its cumulative weights. ALL randomness is here.

    The total of the weights may differ from one (rounding, coins). A token of weight zero is never drawn.
    """
    if law.probs is None:
        assert law.tokens is not None
        return law.tokens
    return inverse(law.probs, torch.tensor(uniforms(key, law.positions), dtype=torch.float64, device=law.device))


def inverse(probs: Tensor, chances: Tensor) -> Tensor:
    """The tokens (rows, positions) where the cumulative weights (rows, positions, vocab) pass `chances` in [0, 1)."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # u * total may round up to total itself, which would fall off the end.
    aim = torch.minimum(chances.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative <= aim).sum(-1).clamp(max=probs.shape[-1] - 1)


def draw_coupled(law: Law, key: Key) -> Tensor:
    """Tokens (rows, positions) by the Gumbel choice argmin_v e_v / p_v on exponentials shared by position.

    The noise depends on (seed, request, position) alone, not on who draws, why, or in which round: target and draft
    looking at one position choose on the same noise (arXiv 2408.07978). The law of each choice is exactly `law`.
    """
    if law.tokens is not None:
        return law.tokens
    rows = [
        [_exponentials(seed, request, start + j, law.dense.shape[-1]) for j in range(law.positions)]
        for seed, request, start in zip(key.seeds, key.requests, key.positions, strict=True)
    ]
    noise = torch.from_numpy(np.array(rows)).to(law.device)
    return (noise / law.dense.double()).argmin(-1)  # x / 0 = inf: a token of weight zero is never chosen


@lru_cache(maxsize=64)  # draft and target look at the same position, often in two rounds
def _exponentials(seed: int, request: int, position: int, vocab: int) -> np.ndarray:
    bits = np.random.Philox(key=[_stream(seed, request, "coupled"), position])
    return np.random.Generator(bits).standard_exponential(vocab).clip(min=1e-300)  # 0/0 would be NaN
