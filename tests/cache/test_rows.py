"""RowCache against a naive reference: a list of token names per row."""

import ctypes
import sys
from collections.abc import Sequence
from mmap import PAGESIZE
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from slipstream.cache import rows as rows_module
from slipstream.cache.rows import FIRST_SLOTS, RowCache
from slipstream.cache.stores import FloatStore, Int8Store, Store

LAYERS, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 3, 2  # keys and values may differ in size


def stored(names: Sequence[Sequence[int]], layer: int, dim: int, sign: int) -> Tensor:
    """What a layer stores for tokens of these names: (rows, heads, n, dim), different for every coordinate."""
    tokens = torch.tensor(names, dtype=torch.float64)[:, None, :, None] * 100
    heads = torch.arange(HEADS, dtype=torch.float64)[None, :, None, None] * 10
    return sign * (tokens + heads + torch.arange(dim) + 5 * layer)


def run_pass(cache: RowCache, names: Sequence[Sequence[int]], first: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Place tokens after the rows first .. first + len(names) and store them in every layer -> what the layers see."""
    cache.place(len(names[0]), first, first + len(names))
    return [
        cache.update(layer, stored(names, layer, KEY_DIM, 1), stored(names, layer, VALUE_DIM, -1))
        for layer in range(LAYERS)
    ]


def assert_seen(
    seen: Sequence[tuple[Tensor, Tensor]], texts: Sequence[Sequence[int]], format: type[Store] = FloatStore
) -> None:
    """Every layer sees the texts, row by row, from slot 0 on, each token as this format keeps it alone."""
    for layer, (keys, values) in enumerate(seen):
        assert keys.shape[0] == values.shape[0] == len(texts)
        assert keys.shape[2] == values.shape[2] >= max(map(len, texts))
        for row, text in enumerate(texts):
            want = format.of(stored([text], layer, KEY_DIM, 1), stored([text], layer, VALUE_DIM, -1)).read(len(text))
            for got, kept in zip((keys, values), want, strict=True):
                assert torch.equal(got[row, :, : len(text)], kept[0])


class Orders(RuleBasedStateMachine):
    """Any order of adding, forking, freeing, extending (also some rows alone), rolling back and keeping a tree's
    path."""

    format: type[Store] = FloatStore

    def __init__(self) -> None:
        super().__init__()
        with patch.object(rows_module, "FIRST_SLOTS", 2):  # so that it grows often
            self.cache = RowCache(self.format)
        self.texts: list[list[int]] = []
        self.next = 1

    def names(self, rows: int, count: int) -> list[list[int]]:
        start, self.next = self.next, self.next + rows * count
        return [[start + r * count + j for j in range(count)] for r in range(rows)]

    @rule(rows=st.integers(1, 3))
    def add(self, rows: int) -> None:
        self.cache.add(rows)
        self.texts += [[] for _ in range(rows)]

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(range(len(self.texts))), max_size=3)) if self.texts else []
        self.cache.fork(rows)
        self.texts += [list(self.texts[row]) for row in rows]

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(range(len(self.texts))), unique=True)) if self.texts else []
        self.cache.free(gone)
        self.texts = [text for place, text in enumerate(self.texts) if place not in gone]

    @rule(data=st.data(), count=st.integers(1, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        if not self.texts:
            return
        first = data.draw(st.integers(0, len(self.texts) - 1))
        rows = data.draw(st.integers(1, len(self.texts) - first))
        counts = data.draw(st.lists(st.integers(0, count), min_size=rows, max_size=rows))
        names = self.names(rows, count)
        seen = run_pass(self.cache, names, first)
        part = self.texts[first : first + rows]
        for found in (seen, [store.read(self.cache.end) for store in self.cache.taking_part]):
            assert_seen(found, [[*text, *new] for text, new in zip(part, names, strict=True)], self.format)
        self.cache.advance(counts)
        for text, new, kept in zip(part, names, counts, strict=True):
            text += new[:kept]

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        rows = data.draw(st.integers(0, len(self.texts)))
        lengths = [data.draw(st.integers(0, len(text))) for text in self.texts[:rows]]
        self.cache.rollback(lengths)
        for text, length in zip(self.texts[:rows], lengths, strict=True):
            del text[length:]

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        starts = [data.draw(st.integers(0, len(text))) for text in self.texts]
        paths = [
            sorted(data.draw(st.sets(st.integers(0, len(text) - start - 1)))) if start < len(text) else []
            for text, start in zip(self.texts, starts, strict=True)
        ]
        self.cache.keep(starts, paths)
        self.texts = [
            [*text[:start], *(text[start + place] for place in path)]
            for text, start, path in zip(self.texts, starts, paths, strict=True)
        ]
        self.cache.rollback([len(text) for text in self.texts])

    @invariant()
    def same_lengths(self) -> None:
        assert self.cache.lengths == [len(text) for text in self.texts]

    @invariant()
    def stores_follow(self) -> None:
        """Whatever has grown, moved or gone since they were looked at last."""
        if self.texts:
            most = max(map(len, self.texts))
            assert_seen([store.read(most) for store in self.cache.stores], self.texts, self.format)

    def teardown(self) -> None:
        """All that is left, read through one more pass."""
        if self.texts:
            names = self.names(len(self.texts), 1)
            seen = run_pass(self.cache, names)
            assert_seen(seen, [[*text, *new] for text, new in zip(self.texts, names, strict=True)], self.format)


class Int8Orders(Orders):
    """The same in a cache of whole numbers with scales."""

    format = Int8Store


TestOrders, TestInt8Orders = Orders.TestCase, Int8Orders.TestCase
TestOrders.settings = TestInt8Orders.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)


def test_a_row_can_begin_with_what_another_cache_holds() -> None:
    """In a cache with rows already and in a fresh one; and it grows for a long text, of which it gets the end."""
    for used in (True, False):
        cache, long = RowCache(), list(range(300))
        cache.add(2)
        if used:
            run_pass(cache, [[1, 2], [3, 4]])
            cache.rollback([0, 0])
        for row, text in enumerate(([5, 6, 7], long)):
            layers = {
                layer: (stored([text[-200:]], layer, KEY_DIM, 1)[0], stored([text[-200:]], layer, VALUE_DIM, -1)[0])
                for layer in range(LAYERS)
            }
            cache.fill(row, layers, len(text))
        with pytest.raises(ValueError, match="it keeps keys of its own in layers 7, 8"):
            cache.fill(0, {**layers, 8: layers[0], 7: layers[0]}, 3)
        assert cache.lengths == [3, 300]
        seen = run_pass(cache, [[8], [9]])
        assert_seen([(keys[:1], values[:1]) for keys, values in seen], [[5, 6, 7, 8]])
        for layer, (keys, _) in enumerate(seen):
            assert torch.equal(keys[1:, :, 100:301], stored([[*long[100:], 9]], layer, KEY_DIM, 1))


def test_no_pass_looks_at_every_slot_there_is() -> None:
    """At 128, 256, ... tokens all slots would be in use, and a graph made for a part of them would be made anew."""
    rows = RowCache()
    rows.add(1)
    for _ in range(3 * FIRST_SLOTS):
        rows.place(1)
        rows.update(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        assert rows.stores[0][0].shape[2] > rows.end
        rows.advance([1])


def resident(cache: RowCache) -> int:
    """The bytes of a cache's stores that are in memory, as the system counts them."""
    total = 0
    for store in cache.stores:
        for tensor in store:
            start = tensor.data_ptr() // PAGESIZE * PAGESIZE
            size = ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start)
            pages = (ctypes.c_ubyte * -(-size.value // PAGESIZE))()
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, pages) == 0
            total += sum(page & 1 for page in pages) * PAGESIZE
    return total


def fill_unequally(cache: RowCache, lengths: Sequence[int]) -> None:
    states = torch.ones(2, HEADS, max(lengths), 64)
    cache.add(len(lengths))
    for row, length in enumerate(lengths):
        cache.fill(row, dict.fromkeys(range(LAYERS), (states[0, :, :length], states[1, :, :length])), length)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere whole stores are allocated")
def test_unequal_rows_take_the_memory_of_their_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text beside short ones, when it has left too; zeros that were written take many times as much."""
    lengths = [30, 2000, *[30] * 6]
    cache, needed = RowCache(), LAYERS * 2 * HEADS * 64 * 4 * sum(lengths)
    fill_unequally(cache, lengths)
    before = [each.clone() for each in cache.stores[1].read(30)]
    cache.fork([0])
    assert needed <= resident(cache) <= cache.bytes_allocated <= cache.bytes_for([*lengths, 30]) < 1.5 * needed
    cache.free([1])
    assert resident(cache) <= cache.bytes_for([30] * 8) < needed / 4
    for now, kept in zip(cache.stores[1].read(30), before, strict=True):
        assert torch.equal(now[:, :, :30], kept[[0, *range(2, 8), 0]]) and not now[:, :, 30:].any()
    monkeypatch.setattr(rows_module, "zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype).fill_(0))
    dense = RowCache()
    fill_unequally(dense, lengths)
    assert resident(dense) > 4 * needed


def test_places_are_each_rows_own_slots() -> None:
    cache = RowCache()
    cache.add(3)
    run_pass(cache, [[1, 1, 1], [2, 2, 2], [3, 3, 3]])
    cache.advance([3, 0, 1])
    assert cache.place(2).tolist() == [[3, 4], [0, 1], [1, 2]] and (cache.past, cache.end) == (3, 5)
    assert cache.place(2, first=1).tolist() == [[0, 1], [1, 2]] and (cache.past, cache.end) == (1, 3)


def test_a_fork_copies_no_more_than_is_in_use() -> None:
    """Leftovers of rejected tokens stay with the origin, and what lay in the copy's place is wiped."""
    cache = RowCache()
    cache.add(2)
    run_pass(cache, [[1, 2, 3, 4], [5, 6, 7, 8]])
    cache.advance([2, 4])
    cache.free([1])
    cache.fork([0])
    assert cache.lengths == [2, 2]
    for keys, values in (store.read(4) for store in cache.stores):
        assert (keys[0, :, 2:4] != 0).all()
        assert not keys[1, :, 2:].any() and not values[1, :, 2:].any()


def test_a_new_row_finds_no_nan_that_another_left_behind() -> None:
    """A mask gives leftovers the weight zero, but zero times NaN is NaN: one damaged text would damage the next."""
    cache = RowCache()
    cache.add(2)
    damaged = torch.full((2, HEADS, 6, KEY_DIM), torch.nan)
    cache.place(6)
    cache.update(0, damaged, damaged)
    cache.advance([6, 6])
    cache.free([0, 1])
    cache.add(1)
    cache.place(6)
    cache.update(0, torch.zeros_like(damaged[:1]), torch.zeros_like(damaged[:1]))
    cache.advance([6])
    cache.add(1)  # short beside a long row: it looks past its own end
    cache.place(1)
    seen = cache.update(0, torch.ones(2, HEADS, 1, KEY_DIM), torch.ones(2, HEADS, 1, KEY_DIM))
    assert [part.shape[2] for part in seen] == [7, 7]
    assert all(torch.isfinite(part).all() for part in seen)


@pytest.mark.parametrize("lengths", [[1, 4], [-1, 2], [1, 1, 0]])
def test_rollback_only_shortens_rows_that_exist(lengths: list[int]) -> None:
    cache = RowCache()
    cache.add(2)
    run_pass(cache, [[1, 2, 3], [4, 5, 6]])
    cache.advance([3, 3])
    with pytest.raises(AssertionError):
        cache.rollback(lengths)
