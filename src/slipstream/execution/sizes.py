"""Sizes of tensors that vary: what they are products of, told by how they grew from one recording to another."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod

Size = tuple[int, int]  # A number, and a set of bits: the sizes that vary by which it is multiplied
Growth = Mapping[tuple[int, int], int]  # the products of some sizes in both recordings, with the bits of the sizes


def growth_of(tried: Sequence[tuple[int, int]]) -> Growth:
    """Return the products of sizes, given as they were in both recordings."""
    return {
        (prod(tried[bit][0] for bit in bits), prod(tried[bit][1] for bit in bits)): sum(1 << bit for bit in bits)
        for count in range(len(tried) + 1)
        for bits in combinations(range(len(tried)), count)
    }


def product_of(one: int, other: int, growth: Growth) -> Size | None:
    """Return what a number of both recordings is a product of; None if it is none."""
    for (before, after), mask in growth.items() if one != other else ():
        if one % before == 0 and one // before * after == other:
            return one // before, mask
    return (one, 0) if one == other else None
