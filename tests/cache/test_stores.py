"""The formats of keys and values: what they keep of a token, whatever is written with it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.cache.rows import RowCache
from slipstream.cache.stores import FloatStore, Int8Store, Store, each_tensor, store_format

FORMATS = [FloatStore, Int8Store]
ROWS, HEADS, COUNT, WIDTH = 3, 2, 7, 16


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values of sizes that differ between heads, tokens and the two."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 2, HEADS * COUNT).view(1, HEADS, COUNT, 1)
    keys, values = ((torch.randn(ROWS, HEADS, COUNT, WIDTH, generator=generator) * sizes).to(dtype) for _ in range(2))
    return keys, 3 * values


def empty(format: type[Store], dtype: torch.dtype) -> Store:
    return each_tensor(format.of(*states(dtype)), torch.zeros_like)


def together(store: Store, keys: Tensor, values: Tensor) -> None:
    store.write([0] * ROWS, keys, values)


def by_slots(store: Store, keys: Tensor, values: Tensor) -> None:
    """As graphs write: the last tokens first."""
    back = torch.arange(COUNT - 1, -1, -1).expand(ROWS, -1)
    store.write(back, keys.flip(2), values.flip(2))


def one_by_one(store: Store, keys: Tensor, values: Tensor) -> None:
    for place in range(COUNT):
        store.write([place] * ROWS, keys[:, :, place : place + 1], values[:, :, place : place + 1])


def from_other_slots(store: Store, keys: Tensor, values: Tensor) -> None:
    """Two tokens of each row, which begin at another slot in every row, and then the rest."""
    together(store, *(part * 0 + 9 for part in (keys, values)))
    starts = [place % (COUNT - 1) for place in range(ROWS)]
    part = [torch.stack([of[row, :, start : start + 2] for row, start in enumerate(starts)]) for of in (keys, values)]
    store.write(starts, part[0], part[1])
    for row, start in enumerate(starts):
        for place in {*range(COUNT)} - {start, start + 1}:
            alone = each_tensor(store, lambda each, row=row: each[row : row + 1])
            alone.write([place], keys[row : row + 1, :, [place]], values[row : row + 1, :, [place]])


WAYS = [together, by_slots, one_by_one, from_other_slots]


def different(format: type[Store], way: Callable[..., None], dtype: torch.dtype = torch.float32) -> bool:
    """Whether some number that is read depends on the way in which the tokens were written."""
    read = []
    for write in (together, way):
        write(store := empty(format, dtype), *states(dtype))
        read.append(store.read(COUNT))
    return not all(torch.equal(one, other) for one, other in zip(*read, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_read_does_not_depend_on_how_it_was_written(
    format: type[Store], way: Callable[..., None], dtype: torch.dtype
) -> None:
    assert not different(format, way, dtype)


@pytest.mark.parametrize("way", WAYS[2:])
def test_a_scale_for_all_tokens_of_a_pass_is_noticed(way: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a format that looks at the tokens written together."""

    def careless(keys: Tensor, values: Tensor) -> Int8Store:
        scales = [of.abs().amax((2, 3), keepdim=True).expand(-1, -1, of.shape[2], 1) / 127 for of in (keys, values)]
        codes = [(each / scale).round().to(torch.int8) for each, scale in zip((keys, values), scales, strict=True)]
        return Int8Store(codes[0], scales[0], codes[1], scales[1])

    monkeypatch.setattr(Int8Store, "of", staticmethod(careless))
    assert different(Int8Store, way)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_in_8_bits_are_off_by_half_a_step(dtype: torch.dtype) -> None:
    """Of 127 steps up to the greatest number of the same head and token, and by what the model's type rounds."""
    form = torch.finfo(dtype)
    for kept, own in zip(Int8Store.of(*states(dtype)).read(COUNT), states(dtype), strict=True):
        exact = own.double()
        step = exact.abs().amax(-1, keepdim=True) / 127
        rounding = form.eps * (exact.abs() + step) + 127 * form.smallest_normal * form.eps
        off = (kept.double() - exact).abs()
        assert kept.dtype == dtype and (off <= step / 2 + rounding).all() and (off > step / 4).any()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_damage_stays_in_its_head_and_is_seen(damage: float) -> None:
    keys, values = states()
    keys[1, 0, 2, 5], values[1, :, 4] = damage, 0
    found, zeros = Int8Store.of(keys, values).read(COUNT)
    finite = torch.isfinite(found).all(-1)
    assert not finite[1, 0, 2] and finite.sum() == finite.numel() - 1
    assert not zeros[1, :, 4].any() and zeros.isfinite().all()


def test_8_bits_take_half_of_bfloat16_and_a_scale() -> None:
    sizes = []
    for kv_dtype in (None, "int8"):
        cache = RowCache(store_format(kv_dtype))
        cache.add(1)
        cache.place(4)
        cache.update(0, *torch.zeros(2, 1, 8, 4, 64, dtype=torch.bfloat16))
        sizes.append(cache.bytes_per_token)
    assert sizes == [2 * 8 * 64 * 2, 2 * 8 * (64 + 2)]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_dtype='int4' is not known: use 'int8', or None"):
        store_format("int4")
