"""The cache of states: what a row knows after a rollback, and what it has to read again."""

from collections.abc import Sequence

import pytest

from slipstream.cache.recurrent import StateCache

Text = tuple[int, ...]


def feed(cache: StateCache[Text], tokens: Sequence[Sequence[int]], first: int = 0) -> None:
    cache.reserve(max(map(len, tokens)), first, first + len(tokens))
    for row, new in enumerate(tokens, first):
        if new:
            cache.write(row, (*(cache.state(row) or ()), *new))
    cache.advance([len(new) for new in tokens])


def made() -> StateCache[Text]:
    """Two rows of three tokens and one, after two passes of the first."""
    cache = StateCache[Text]()
    cache.add(2)
    feed(cache, [[1, 2], [5]])
    feed(cache, [[3], []])
    return cache


def test_a_rollback_to_a_pass_needs_nothing_to_be_read_again() -> None:
    cache = made()
    cache.rollback([2])
    assert cache.lengths == [2, 1] and cache.state(0) == (1, 2) and cache.known(0) == 2
    feed(cache, [[4], [6]])
    assert [cache.state(row) for row in range(2)] == [(1, 2, 4), (5, 6)]


def test_a_rollback_between_passes_goes_to_the_state_before() -> None:
    cache = made()
    feed(cache, [[7, 8, 9], []])
    cache.rollback([5, 1])
    assert cache.lengths == [5, 1] and cache.known(0) == 3 and cache.state(0) == (1, 2, 3)
    with pytest.raises(AssertionError, match="read again first"):
        feed(cache, [[4], []])
    cache.bring_forward(0, (1, 2, 3, 7, 8))
    feed(cache, [[4], []])
    assert cache.state(0) == (1, 2, 3, 7, 8, 4)
    cache.rollback([0, 0])
    assert cache.lengths == [0, 0] and cache.state(0) is None and cache.known(0) == 0


def test_forked_rows_share_states_and_part_with_the_next_pass() -> None:
    cache = made()
    cache.fork([0, 0])
    assert cache.state(2) is cache.state(3) is cache.state(0) and cache.lengths == [3, 1, 3, 3]
    feed(cache, [[4], [5]], first=2)
    cache.free([1])
    assert [cache.state(row) for row in range(3)] == [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5)]
    cache.rollback([3, 3, 3])
    assert [cache.state(row) for row in range(3)] == [(1, 2, 3)] * 3


def test_paths_of_trees_are_refused_and_chains_are_not() -> None:
    cache = made()
    cache.keep([1, 0], [[0, 1], []])
    with pytest.raises(ValueError, match="draft chains instead of trees"):
        cache.keep([1, 0], [[1], []])
