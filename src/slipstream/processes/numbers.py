"""`Numbers`: random numbers of chains as functions of seed, chain, round and step, for whole batches at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draws import Purpose

_STEP = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio, splitmix64's increment, as in core/draws
_AGAIN = np.uint64(0xD1B54A32D192ED03)  # makes the numbers of another attempt differ from further numbers of this one


@dataclass(frozen=True, slots=True)
class Numbers:
    """The random numbers of one draw per row; `streams` (rows,) of 64 bits identify the draws.

    Two draws with equal (seed, chain, origin, time, purpose) are the same draw, no matter what else is in the batch.
    `origins` are the chains' steps when the round began: without them a round would reuse the numbers of states that
    the previous round refused.
    """

    streams: np.ndarray

    @staticmethod
    def of(seed: int, purpose: Purpose, chains: Tensor, origins: Tensor, times: Tensor) -> Numbers:
        digest = hashlib.blake2b(f"{seed}/process/{purpose}".encode(), digest_size=8).digest()
        streams = np.full(len(chains), int.from_bytes(digest), np.uint64)
        for names in (chains, origins, times):
            streams = _mix(streams + (names.cpu().numpy().astype(np.uint64) + np.uint64(1)) * _STEP)
        return Numbers(streams)

    def select(self, rows: Tensor) -> Numbers:
        return Numbers(self.streams[rows.cpu().numpy()])

    def again(self, attempts: Tensor) -> Numbers:
        """Return the numbers of further attempts (rows,) at the same draw, counted from 0: each attempt has its own."""
        counts = attempts.cpu().numpy().astype(np.uint64)
        return Numbers(_mix((self.streams ^ _AGAIN) + (counts + np.uint64(1)) * _STEP))

    def uniforms(self, count: int) -> Tensor:
        """Return numbers in [0, 1) on the grid of 2^-53, (rows, count), float64."""
        places = np.arange(1, count + 1, dtype=np.uint64) * _STEP
        bits = _mix(self.streams[:, None] + places) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)

    def normals(self, count: int) -> Tensor:
        """Return standard normal numbers (rows, count), float64, by inversion; none exceeds 8.3 in size."""
        return torch.special.ndtri(self.uniforms(count) + 2.0**-54)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, as in core/draws; products wrap around at 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
