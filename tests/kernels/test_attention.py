"""Our attention: that of float64, the same bits for a token whatever stands beside it, texts of any length."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels import attention
from slipstream.kernels.cpu import panel_attention
from slipstream.kernels.packing import packed
from toys import FAMILIES, tiny
from toys.kernels import needs_kernel, noise

TYPES = [torch.float32, torch.bfloat16]


# rows, heads, heads of keys, tokens, slots, width
CASES = [(1, 1, 1, 1, 1, 1), (2, 4, 4, 3, 7, 16), (3, 6, 2, 6, 50, 64), (2, 2, 1, 13, 70, 80), (1, 4, 2, 7, 9, 5)]


def random_inputs(case: tuple[int, ...], dtype: torch.dtype, hide: float, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries as models make them, keys and values in longer stores, and a ragged causal mask."""
    rows, heads, groups, tokens, slots, width = case
    queries = noise(rows, tokens, heads, width, dtype=dtype, seed=seed).transpose(1, 2)
    stores = [noise(rows, groups, slots + 3, width, dtype=dtype, seed=seed + i)[:, :, :slots] for i in (1, 2)]
    own = torch.arange(slots - tokens, slots)[None, :, None] - torch.arange(rows)[:, None, None]
    mask = torch.where(torch.arange(slots) <= own.clamp(min=0), 0.0, hide).to(dtype)[:, None]
    return queries, *stores, mask


def exact(queries: Tensor, keys: Tensor, values: Tensor, added: Tensor | None, scale: float) -> Tensor:
    keys, values = (store.repeat_interleave(queries.shape[1] // keys.shape[1], 1).double() for store in (keys, values))
    scores = queries.double() @ keys.mT * scale + (0 if added is None else added.double())
    return (scores.softmax(-1) @ values).transpose(1, 2)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hide", ["least", "infinite"])
def test_attention_is_that_of_float64(case: tuple[int, ...], dtype: torch.dtype, hide: str) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    *parts, mask = random_inputs(case, dtype, torch.finfo(dtype).min if hide == "least" else -torch.inf)
    bias = noise(1, case[1], *mask.shape[2:], dtype=dtype, seed=5)
    turned = bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # as T5 makes it: no step of one at the end
    for added in (mask, mask + bias, turned, mask[:1], mask[:, :, -1:], None):
        found = panel_attention(*parts, added, 0.3)
        torch.testing.assert_close(found.double(), exact(*parts, added, 0.3), atol=tolerance, rtol=tolerance)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_attends_with_the_same_bits_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    """One token, six, or more; alone or in a batch; before slots that hold nothing or anything."""
    case = (3, 6, 2, 15, 60, 48)
    queries, keys, values, mask = random_inputs(case, dtype, torch.finfo(dtype).min)
    whole = panel_attention(queries, keys, values, mask, 0.2)
    for row in range(3):
        part = slice(row, row + 1)
        for first, count in ((0, 1), (4, 2), (3, 6), (7, 8)):
            tokens = slice(first, first + count)
            slots = int((mask[row, 0, first + count - 1] == 0).sum())
            for end in (slots, slots + 1, 60):  # all later slots are hidden from these tokens
                if end < 60:
                    for store in (keys, values):
                        store[row, :, end:] = torch.nan  # and nobody looks
                seen = [store[part, :, :end] for store in (keys, values)]
                found = panel_attention(queries[part, :, tokens], *seen, mask[part, :, tokens, :end], 0.2)
                assert torch.equal(found, whole[part, tokens])
                keys, values = random_inputs(case, dtype, 0)[1:3]


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 128])
def test_few_queries_get_the_bits_of_many(dtype: torch.dtype, width: int) -> None:
    """Few queries keep more sums in registers each; these keys and values are read where they lie."""
    queries, keys, values, mask = random_inputs((1, 4, 2, 40, 330, width), dtype, torch.finfo(dtype).min)
    many = panel_attention(queries, keys, values, mask, 0.2)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    expected = exact(queries, keys, values, mask, 0.2)
    torch.testing.assert_close(many.double(), expected, atol=tolerance, rtol=tolerance)
    for first, count in ((0, 1), (5, 2), (17, 4), (20, 8), (39, 1)):  # 2 to 16 queries for a head of keys
        tokens = slice(first, first + count)
        few = panel_attention(queries[:, :, tokens], keys, values, mask[:, :, tokens], 0.2)
        assert torch.equal(few, many[:, tokens])


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
def test_slots_that_only_others_see_change_no_bit(dtype: torch.dtype) -> None:
    """Sliding windows, whose first slots differ, and branches of a tree, which do not see each other."""
    queries, keys, values, _ = random_inputs((1, 2, 1, 6, 60, 48), dtype, 0)
    slots, own = torch.arange(60), torch.arange(54, 60)[:, None]
    window = (slots <= own) & (slots > own - 21)
    branches = (slots < 54) | ((slots <= own) & ((own - slots) % 2 == 0))
    for sees in (window, branches):
        mask = torch.zeros(1, 1, 6, 60, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
        together = panel_attention(queries, keys, values, mask, 0.2)
        for token in range(6):
            part = slice(token, token + 1)
            alone = panel_attention(queries[:, :, part], keys, values, mask[:, :, part], 0.2)
            assert torch.equal(alone, together[:, part])


@needs_kernel
def test_hidden_slots_may_hold_anything_and_seen_ones_tell() -> None:
    queries, keys, values, mask = random_inputs((1, 2, 1, 3, 20, 32), torch.float32, -torch.inf)
    before = panel_attention(queries, keys, values, mask, 0.2)
    assert mask[0, 0, 2, 19] == 0 and mask[0, 0, 1, 19] == -torch.inf
    hidden = mask.clone()
    hidden[..., 19] = -torch.inf
    expected = panel_attention(queries, keys, values, hidden, 0.2)
    keys[:, :, 19] = values[:, :, 19] = torch.nan
    assert torch.equal(panel_attention(queries, keys, values, hidden, 0.2), expected)
    assert torch.equal(expected[:, :2], before[:, :2])
    assert panel_attention(queries, keys, values, mask, 0.2)[:, 2].isnan().all()


@needs_kernel
def test_a_model_keeps_our_attention_with_packed_layers() -> None:
    """Code that tests for torch's attention would keep that, so our own code must not look like it."""
    model = packed(tiny(FAMILIES["llama"]))
    assert model.config._attn_implementation == attention.NAME
    model.set_attn_implementation("sdpa")
    assert packed(model).config._attn_implementation == attention.NAME


@needs_kernel
def test_a_token_that_sees_nothing_gets_nothing() -> None:
    queries, keys, values, _ = random_inputs((1, 2, 1, 2, 20, 32), torch.float32, 0)
    mask = torch.full((1, 1, 2, 20), -torch.inf)
    assert not panel_attention(queries, keys, values, mask, 0.2).any()
    mask[0, 0, 1] = 0
    found = panel_attention(queries, keys, values, mask, 0.2)
    assert not found[:, 0].any() and found[:, 1].all()


@needs_kernel
def test_attention_that_does_not_fit_is_refused() -> None:
    queries, keys, values, mask = random_inputs((1, 4, 2, 2, 20, 32), torch.float32, 0)
    for parts, said in (
        ((queries, keys, values.bfloat16(), mask), "one type"),
        ((queries[:, :3], keys, values, mask), "do not fit"),
        ((queries, keys[..., :16], values, mask), "do not fit"),
        ((queries, keys, values, mask[..., :10]), "the mask does not fit"),
    ):
        with pytest.raises(RuntimeError, match=said):
            panel_attention(*parts, 0.2)


@needs_kernel
def test_what_the_kernel_does_not_know_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks are tensors, of which one must not ask whether they are true."""
    queries, keys, values, mask = random_inputs((1, 2, 2, 3, 20, 32), torch.float32, 0)
    asked: list[str] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **__: asked.append("torch"))
    monkeypatch.setattr(attention, "panel_attention", lambda *_: asked.append("ours"))
    for more in ({}, {"dropout": 0.0}, {"s_aux": torch.ones(2)}, {"softcap": 30.0}, {"dropout": 0.1}):
        attention.attend(torch.nn.Module(), queries, keys, values, mask, 0.2, **more)
    attention.attend(torch.nn.Module(), queries, keys, values, None, 0.2)  # causal, over a cache
    assert asked == ["ours", "ours", "torch", "torch", "torch", "torch"]
    for count in (attention.MANY - 1, attention.MANY):  # all of which see everything, as in an encoder
        attention.attend(torch.nn.Module(), torch.zeros(1, 2, count, 32), keys, values, None, 0.2, is_causal=False)
    assert asked[6:] == ["ours", "torch"]


LONG = 2500  # slots: four whole pieces of 512 and a part of a fifth


def sights(tokens: int) -> dict[str, Tensor]:
    """(tokens, LONG) by kind of mask: what the last tokens of a long text see."""
    slots, own = torch.arange(LONG), torch.arange(LONG - tokens, LONG)[:, None]
    causal = slots <= own
    return {
        "causal": causal,
        "windows": causal & (slots > own - 1100),  # which begin within a piece, and at other slots for every token
        "branches": causal & ((slots < LONG - tokens) | ((own - slots) % 3 == 0)),
        "gaps": causal & (slots % 97 != own % 5),  # in every span, for every token others
        "sinks": causal & ((slots < 4) | (slots > own - 40)),
        "one piece": causal & (slots >= 1024) & (slots < 2048),
    }


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", list(sights(1)))
@pytest.mark.parametrize("biased", [False, True])
def test_long_texts_are_right_and_a_token_keeps_its_bits(dtype: torch.dtype, kind: str, biased: bool) -> None:
    """Twenty queries for a head of keys against float64; one token of them alone, by bits."""
    queries, keys, values, _ = random_inputs((2, 4, 2, 10, LONG, 40), dtype, 0)
    mask = torch.zeros(1, 1, 10, LONG, dtype=dtype).masked_fill(~sights(10)[kind], torch.finfo(dtype).min)
    if biased:
        mask = mask + noise(1, 4, 10, LONG, dtype=dtype, seed=9)
    together = panel_attention(queries, keys, values, mask, 0.2)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    expected = exact(queries, keys, values, mask, 0.2)
    torch.testing.assert_close(together.double(), expected, atol=tolerance, rtol=tolerance)
    for part in (slice(0, 1), slice(9, 10)):
        alone = panel_attention(queries[1:, :, part], keys[1:], values[1:], mask[:, :, part], 0.2)
        assert torch.equal(alone, together[1:, part])


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [3, 600])  # few queries, and several sets of them
def test_how_many_threads_share_a_long_text_changes_no_bit(dtype: torch.dtype, tokens: int) -> None:
    queries, keys, values, mask = random_inputs((1, 4, 2, tokens, LONG, 64), dtype, torch.finfo(dtype).min)
    usual = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(panel_attention(queries, keys, values, mask, 0.2))
    finally:
        torch.set_num_threads(usual)
    some = panel_attention(queries[:, :, ::299], keys, values, mask[:, :, ::299], 0.2)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and torch.equal(found[0][:, ::299], some)
