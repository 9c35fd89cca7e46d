"""Recorded functions of tensors: what the kernels compute is what torch computes, for sizes that were not recorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from slipstream.cache.stores import Int8Store
from slipstream.execution import recording
from slipstream.execution.backends import Native
from slipstream.execution.instructions import CODE
from slipstream.execution.passes import Mode
from slipstream.execution.programs import Program, recorded
from slipstream.execution.recording import TYPES, Array, Instruction, Unrecordable
from slipstream.kernels.attention import attend
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_scorer
from toys import PROBED, SEQ2SEQ, tiny
from toys.kernels import needs_kernel

pytestmark = needs_kernel
WEIGHT = torch.randn(6, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))


def numbers(rows: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, count, 6, generator=torch.Generator().manual_seed(rows + 10 * count)).to(dtype)


def program_of(function: Callable[..., Any], *inputs: Tensor, kept: tuple[int, ...] | None = None) -> Program:
    sizes = [(each, {0: "rows", 1: "count"}) for each in inputs]
    return Program(recorded(function, inputs, sizes), kept)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: silu(x) * torch.tanh(x) + gelu(x) - gelu(x, approximate="tanh") / x.abs().clamp(min=0.1),
    "activations": lambda x: (
        torch.sigmoid(x).exp().sqrt().rsqrt() - x.relu().floor() + x.pow(2).log1p() * x.sin().cos()
    ),
    "a norm": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype),
    "torch's norm": lambda x: layer_norm(x.float(), (6,), WEIGHT, WEIGHT, 1e-5),
    "softmax": lambda x: x.float().softmax(1),
    "masks": lambda x: torch.where((x > 0) & ~(x > 1), x, 0).masked_fill(x != x, 1.0).clamp(-0.5, 0.5),
    "powers": lambda x: [
        2 ** (x[0, 0] * 0 + torch.arange(2.0, 8)),
        x.float().abs() ** (TABLE[0] * 0 + torch.arange(2.0, 8)),
    ],
    "views": lambda x: x.transpose(0, 1)[:, :, 2:5].unflatten(-1, (3, 1)).expand(-1, -1, 3, 2).reshape(-1, 6).t(),
    "repetition": lambda x: x[:, 0].repeat(x.shape[1], 2) - x[0, 0].repeat(x.shape[0] * x.shape[1], 2),
    "a repeated weight": lambda x: x[:, 0] * WEIGHT.repeat(x.shape[0], 1),
    "parts": lambda x: torch.cat([x[..., 3:], -x[..., :3]], -1) + torch.stack([x[..., 0]] * 6, -1),
    "one more": lambda x: torch.cat([x, x[:, :1]], 1).float().softmax(1)[:, :-1].reshape(-1, 6),
    "counting": lambda x: torch.arange(x.shape[1])[None, :, None] % 3 + x.new_ones(x.shape) * torch.arange(6),
    "sums": lambda x: [x.float().sum((0, 2)), x.float().amax(-1), x.argmax(-1), x.max(1).values],
    "rows of a table": lambda x: [TABLE[(x[..., 0] > 0).long() + 3], x.gather(1, (x > 9).long()), x[:, :, [4, 0]]],
    "places of a table": lambda x: [
        x.new_zeros(len(x), 9).index_copy_(1, torch.tensor([0, 2, 3, 5, 7, 8]), x[:, 0]),
        x.index_copy(2, torch.tensor([4, 1]), x[..., :2] + 1),
    ],
    "products": lambda x: [x.float().transpose(1, 2) @ x.float(), x.float().flatten(0, 1) @ TABLE[:6]],
    "in place": lambda x: (x + 1).mul_(2).add_(x).masked_fill_(x > 1, 0.0).clamp_(max=3),
    "options": lambda x: [
        torch.add(x, x, alpha=3),
        torch.div(x, 0.3, rounding_mode="floor"),
        x.float().round(decimals=1),
    ],
    "an operator without an instruction": lambda x: [*x.float().topk(2, -1), x.float().cumsum(1)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_compute_what_torch_does(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    program = program_of(function, numbers(3, 4, dtype))
    for rows, count in ((3, 4), (1, 1), (5, 2), (2, 300)):
        given = numbers(rows, count, dtype)
        expected = function(given)
        for left, right in zip(expected if isinstance(expected, list) else [expected], program((given,)), strict=True):
            assert left.shape == right.shape and left.dtype == right.dtype
            torch.testing.assert_close(left, right, atol=1e-5 if left.dtype != torch.bfloat16 else 0.02, rtol=2e-2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: layer_norm(x, (6,), WEIGHT.to(x.dtype), WEIGHT.to(x.dtype)),
        lambda x: x.flatten(0, 1) @ TABLE[:6].to(x.dtype),
        lambda x: torch.addmm(WEIGHT.to(x.dtype), x.flatten(0, 1), TABLE[:6].to(x.dtype)),
        lambda x: x.sum(-1) / x.exp().mean(-1),
    ],
)
def test_doubles_are_computed_with_all_their_digits(function: Callable[[Tensor], Tensor]) -> None:
    """The control has fewer of them."""
    given = numbers(2, 5, torch.float64)
    (found,) = program_of(function, numbers(3, 4, torch.float64))((given,))
    assert (found - function(given)).abs().max() < 1e-13 < (function(given.float()) - function(given)).abs().max()


def test_products_of_whole_numbers_are_exact() -> None:
    given = numbers(2, 5, torch.float64).mul(2**30).long()
    (found,) = program_of(lambda x: x @ x.new_ones(6, 2), given)((given,))
    assert torch.equal(found, given.sum(-1, keepdim=True).expand(-1, -1, 2))


OF_ONE_TOKEN = {name: FUNCTIONS[name] for name in ("elementwise", "activations", "a norm", "torch's norm", "masks")}
OF_ONE_TOKEN |= {
    "softmax": lambda x: x.repeat_interleave(31, -1).float().softmax(-1),
    "sums": lambda x: x.repeat_interleave(31, -1).float().sum(-1),
    "a product": lambda x: x.float().flatten(0, 1) @ TABLE[:6],
}


@pytest.mark.parametrize("name", [*OF_ONE_TOKEN, "of all tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_beside_others(name: str, dtype: torch.dtype) -> None:
    """The control is a function of all tokens."""
    program = program_of(OF_ONE_TOKEN.get(name, lambda x: x - x.float().mean((0, 1))), numbers(3, 4, dtype))
    given = numbers(3, 701, dtype)
    (many,) = program((given,))
    for row, place in ((0, 0), (1, 333), (2, 700)):
        (alone,) = program((given[row : row + 1, place : place + 1].contiguous(),))
        same = torch.equal(alone.flatten(), many.reshape(3, 701, -1)[row, place])
        assert same == (name in OF_ONE_TOKEN)


def test_weights_are_read_where_they_lie() -> None:
    weight = torch.ones(6)
    program = program_of(lambda x: x * weight, numbers(3, 4))
    weight.fill_(2)
    assert torch.equal(program((numbers(2, 2),))[0], numbers(2, 2) * 2)


def test_other_inputs_are_refused() -> None:
    program = program_of(lambda x: x + 1, numbers(3, 4))
    for wrong in (torch.zeros(3, 4, 5), numbers(4, 3).transpose(0, 1)):
        with pytest.raises(ValueError, match=r"does not fit|not contiguous"):
            program((wrong,))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x * x.sum().item(), "contents of tensors"),
        (lambda x: x if bool(x.any()) else -x, "contents of tensors"),
        (lambda x: x[0, 0].tolist() and x, "contents of tensors"),
        (lambda x: x if torch.equal(x, -x) else 2 * x, "contents of tensors"),
        (lambda x: x[x[..., 0] > 0], "contents of tensors"),
        (lambda x: torch.cat([x[:, 0], x[0]]), "no product of sizes"),
        (lambda x: x @ x.transpose(1, 2), "no product of sizes"),
        (lambda x: x * x.shape[1], "a size that varies is computed with"),
        (lambda x: x + 1 if len(x) > 2 else x, "depend on sizes"),
        (lambda x: x + torch.empty(6), "not known"),
    ],
)
def test_what_no_program_can_do_is_refused(function: Callable[[Tensor], Any], why: str) -> None:
    with pytest.raises(Unrecordable, match=why):
        program_of(function, numbers(3, 4))


def test_what_nobody_asks_for_is_not_computed() -> None:
    def function(x: Tensor, store: Tensor, slots: Tensor) -> Tensor:
        store[torch.arange(len(x))[:, None], :, slots] = x[:, :, None]
        return TABLE[slots + 5]  # there are nine places

    x, store, slots = numbers(2, 3), torch.zeros(2, 1, 8, 6), torch.tensor([[0, 1, 2], [5, 6, 7]])
    sizes = [(x, {0: "rows", 1: "count"}), (store, {0: "rows", 2: "slots"}), (slots, {0: "rows", 1: "count"})]
    recording = recorded(function, (x, store, slots), sizes)
    with pytest.raises(RuntimeError, match="index 10 of 9"):
        Program(recording)((x, store, slots))
    Program(recording, ())((x, store.zero_(), slots))
    assert torch.equal(store[1, 0, 5:], x[1]) and torch.equal(store[0, 0, :3], x[0]) and not store[0, 0, 3:].any()


FAMILIES = {
    "gpt_oss": "a sink stands behind the slots",
    "gptj": "a table of positions is repeated for every row",
    "whisper": "positions are",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_unusual_sizes_run_by_programs(family: str) -> None:
    model = tiny({**PROBED, **SEQ2SEQ}[family])
    fast, eager = load_scorer(model, mode=Mode(packed=True)), CausalScorer(model)
    for rows in (1, 2):
        logits = list[Tensor]()
        for scorer in (fast, eager):
            scorer.add(1, [scorer.source_form and scorer.source_form.example(3)])
            scorer.prefill([[5] * (3 * rows)], rows - 1)
            logits.append(scorer.extend(torch.tensor([[7, 8, 9]] * rows), [2] * rows))
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
    assert isinstance(fast.execution, Native) and fast.execution.fault is None


def test_control_sums_of_sizes_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "sums_of", lambda *steps: ())
    scorer = load_scorer(tiny(PROBED["gpt_oss"]), mode=Mode(packed=True))
    assert isinstance(scorer.execution, Native) and "no product of sizes" in str(scorer.execution.fault)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [False, True])
def test_attention_to_codes_has_the_bits_of_attention_to_their_numbers(dtype: torch.dtype, changes: bool) -> None:
    """Codes and scales are read by the kernel, unless they changed after their numbers were made."""

    def function(queries: Tensor, mask: Tensor, store: Int8Store, new: Tensor) -> Tensor:
        keys, values = store.read(mask.shape[3])
        if changes:
            store.write([0], new, new)
        return attend(torch.nn.Module(), queries, keys, values, mask)[0]

    def inputs(tokens: int, slots: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(slots)
        states = torch.randn(2, 1, 2, slots + 3, 40, generator=generator).to(dtype)
        queries, new = (torch.randn(1, heads, tokens, 40, generator=generator).to(dtype) for heads in (6, 2))
        mask = torch.full((tokens, slots), torch.finfo(dtype).min).triu(1 + slots - tokens).to(dtype)[None, None]
        return queries, mask, Int8Store.of(*states), new

    given = inputs(4, 50)
    dims = {"tokens": (given[0], given[3]), "slots": given[2]}
    sizes = [(each, {2: name}) for name, tensors in dims.items() for each in tensors]
    found = recorded(function, given, [(given[1], {2: "tokens", 3: "end"}), *sizes])
    [step] = [step for step in found.steps if isinstance(step, Instruction) and step.code == CODE["attend"]]
    keys = step.inputs[1]
    assert isinstance(keys, Array) and (TYPES[keys.type] is torch.int8) is not changes
    program = Program(found)
    for tokens, slots in ((1, 9), (6, 700)):
        given = inputs(tokens, slots)
        copied = Int8Store(*(each.clone() for each in given[2]))
        [output] = program((given[0], given[1], copied, given[3]))
        assert torch.equal(output, function(*given))
    scales = torch.cat([torch.zeros(1), torch.logspace(-37, 35, 63)]).to(dtype).view(1, 1, 64, 1).expand(1, 2, 64, 1)
    codes = torch.arange(2 * 64 * 40).mul(89).remainder(255).sub(127).to(torch.int8).view(1, 2, 64, 40)
    alone = torch.full((64, 64), torch.finfo(dtype).min).fill_diagonal_(0).to(dtype)[None, None]
    wide = Int8Store(codes * 0, scales.contiguous(), codes, scales.contiguous())
    if not changes:  # every token sees its own slot alone, and so gets its values
        queries, keys = (torch.zeros(1, heads, 64, 40, dtype=dtype) for heads in (6, 2))
        [output] = program((queries, alone, wide, keys))
        values = wide.read(64)[1]
        assert torch.equal(output, values.repeat_interleave(3, 1).transpose(1, 2))
        unrounded = codes.float() * scales.float()
        assert torch.equal(values.float(), unrounded) is (dtype is torch.float32)  # else there is something to round
