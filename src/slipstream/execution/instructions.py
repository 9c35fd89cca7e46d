"""The instructions of recorded programs, and which of torch's operators they stand for.

Their numbers are those of program.cpp: places in `CODES`.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.execution.recording import TYPES, Array, Handler, Instruction, Operand, Recorder, Unrecordable

HANDLERS: dict[str, Handler] = {}  # what emits the instructions of an operator, by the operator's name

CODES = (
    *("copy", "neg", "abs", "exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid"),
    *("silu", "relu", "gelu", "gelu_tanh", "floor", "ceil", "round", "not", "isnan"),
    *("add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge", "and", "or"),
    *("floor_divide", "where", "arange", "sum", "mean", "amax", "argmax", "softmax", "layer_norm", "gather", "scatter"),
    *("matmul", "linear", "quantized_linear", "quantized_rows", "attend", "greatest", "inverse", "remainder"),
)
CODE = {name: number for number, name in enumerate(CODES)}

ELEMENTWISE = {  # the names of operators that compute every number by itself, with the instruction of each
    **{
        name: name
        for name in CODES[: CODES.index("arange")]
        if name not in ("copy", "not", "pow", "and", "or", "gelu_tanh")
    },
    "_to_copy": "copy",
    "clone": "copy",
    "logical_not": "not",
    "logical_and": "and",
    "logical_or": "or",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
}

CHANGING = {"alpha": 1, "rounding_mode": None, "decimals": 0}
"""The options with which operators compute something else, with their usual values."""


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return enter


def _in_float32(handler: Handler) -> Handler:
    """Return a handler that leaves all but float32 and bfloat16 to torch: its instruction computes in float32."""

    def handle(recorder: Recorder, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dtype = (out if isinstance(out, Tensor) else out[0]).dtype
        known = dtype in (torch.float32, torch.bfloat16)
        (handler if known else Recorder.call)(recorder, func, out, args, kwargs)

    return handle


def _elementwise(code: str, picked: Callable[..., Sequence[Any]] | None = None) -> Handler:
    """Handle an operator that computes every number by itself, of its first arguments, or of those `picked`."""

    def handle(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(kwargs.get(name, usual) != usual for name, usual in CHANGING.items()):
            recorder.call(func, out, args, kwargs)
            return
        given = picked(*args) if picked else args[: 3 if code == "where" else 2]
        operands = [recorder.operand(each, out) for each in given]
        name = "gelu_tanh" if code == "gelu" and kwargs.get("approximate") == "tanh" else code
        recorder.emit(CODE[name], [out], operands)

    return handle


def _bitwise(code: str) -> Handler:
    """Handle an operator that is a logical one for truth values; there is no instruction for whole numbers."""

    def handle(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if out.dtype != torch.bool:
            raise Unrecordable(f"there is no instruction for {func} of {out.dtype}")
        _elementwise(code)(recorder, func, out, args, kwargs)

    return handle


@_handles("aten.pow", "aten.pow_")
def _pow(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    square = isinstance(args[1], int | float) and args[1] == 2
    _elementwise("mul" if square else "pow")(recorder, func, out, (args[0], args[0 if square else 1]), {})


@_handles("aten.clamp", "aten.clamp_")
def _clamp(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bounds = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
    source = recorder.operand(args[0], out)
    for name, code in (("min", "maximum"), ("max", "minimum")):
        if bounds.get(name) is not None:
            recorder.emit(CODE[code], [out], [source, recorder.operand(bounds[name], out)])
            source = recorder.array(out)


@_handles("aten.empty", "aten.new_empty", "aten.empty_like")
def _empty(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recorder.array(out)


@_handles("aten.arange")
def _arange(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    numbers = [argument for argument in args if isinstance(argument, int | float)]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    recorder.emit(CODE["arange"], [out], [recorder.operand(start), recorder.operand(step)])


@_handles("aten.cat", "aten.stack")
def _joined(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle `cat` and `stack`: every tensor is copied to its part of the result."""
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    stacks, start = func.overloadpacket is torch.ops.aten.stack, 0
    for part in args[0]:
        part = part.unsqueeze(dim) if stacks else part
        if part.ndim != out.ndim:  # an empty one, that `cat` ignores
            continue
        place = out.narrow(dim, start, part.shape[dim])
        recorder.emit(CODE["copy"], [place], [recorder.operand(part)])
        start += part.shape[dim]


@_handles("aten.repeat")
def _repeat(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle `repeat`: every dimension of the result is one of repetitions, and one of the tensor."""
    tensor, counts = args
    sizes = [*[1] * (out.ndim - tensor.ndim), *tensor.shape]
    single = tensor.reshape([each for size in sizes for each in (1, size)])
    tiles = [each for pair in zip(counts, sizes, strict=True) for each in pair]
    recorder.emit(CODE["copy"], [out.view(tiles)], [recorder.operand(single.expand(tiles))])


def _reduced(code: str) -> Handler:
    def handle(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor, given = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        some = [given] if isinstance(given, int) else list(given or range(tensor.ndim))
        dims = sorted(dim % tensor.ndim for dim in some)
        kept = [dim for dim in range(tensor.ndim) if dim not in dims]
        out = out if out.ndim == len(kept) else out.squeeze(dims)
        recorder.emit(CODE[code], [out], [recorder.operand(tensor.permute(*kept, *dims))], [len(dims)])

    return handle


@_handles("aten.max")
def _max(recorder: Recorder, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func is not torch.ops.aten.max.dim:
        recorder.call(func, out, args, kwargs)
        return
    for code, part in zip(("amax", "argmax"), out, strict=True):
        _reduced(code)(recorder, func, part, args, kwargs)


@_handles("aten._softmax", "aten._safe_softmax")
@_in_float32
def _softmax(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, dim = args[:2]
    recorder.emit(CODE["softmax"], [out.movedim(dim, -1)], [recorder.operand(tensor.movedim(dim, -1))])


@_handles("aten.native_layer_norm")
@_in_float32
def _layer_norm(recorder: Recorder, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, shape, weight, bias, eps = args
    if len(shape) != 1:
        raise Unrecordable("a norm is over several dimensions")
    operands = [recorder.operand(each) for each in (tensor, weight, bias)]
    recorder.emit(CODE["layer_norm"], [out[0]], operands, number_words([eps]))


def _gather_rows(recorder: Recorder, out: Tensor, tensor: Tensor, dim: int, index: Tensor) -> None:
    """Emit the copy of some places of a dimension: (a, dim, b) by indices (i) -> (a, i, b)."""
    behind = tensor.ndim - dim - 1
    spread = tensor.select(dim, 0)
    for _ in range(index.ndim):
        spread = spread.unsqueeze(dim)
    places = index[(..., *[None] * behind)]
    operands = [recorder.operand(spread, out), recorder.operand(places, out)]
    recorder.emit(CODE["gather"], [out], operands, sizes=_along(tensor, dim))


def _along(tensor: Tensor, dim: int) -> list[int]:
    return [tensor.stride(dim), tensor.shape[dim]]


@_handles("aten.embedding")
def _embedding(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _gather_rows(recorder, out, args[0], 0, args[1])


@_handles("aten.index")
def _index(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, indices = args
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if len(dims) != 1 or indices[dims[0]].dtype not in (torch.int64, torch.int32):
        recorder.call(func, out, args, kwargs)
        return
    _gather_rows(recorder, out, tensor, dims[0], indices[dims[0]])


@_handles("aten.gather")
def _gather(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, dim, index = args[:3]
    dim %= tensor.ndim
    some = tensor.select(dim, 0).unsqueeze(dim)
    for other, size in enumerate(index.shape):
        some = some if other == dim else some.narrow(other, 0, size)
    operands = [recorder.operand(some, out), recorder.operand(index)]
    recorder.emit(CODE["gather"], [out], operands, sizes=_along(tensor, dim))


@_handles("aten.index_put_")
def _index_put(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle tensor[rows, :, slots] = values (rows, n, heads, width), as caches write."""
    tensor, indices, values = args[:3]
    pattern = [index is not None for index in indices]
    if pattern != [True, False, True] or kwargs.get("accumulate") or not _counts_rows(recorder, indices[0]):
        recorder.call(func, out, args, kwargs)
        return
    walk = torch.broadcast_shapes(values.shape, (*indices[2].shape, 1, 1))
    target = tensor.select(2, 0)[:, None].expand(walk)  # (rows, heads, width), where n is to be added
    operands = [recorder.operand(values.expand(walk)), recorder.operand(indices[2][:, :, None, None].expand(walk))]
    recorder.emit(CODE["scatter"], [target], operands, sizes=_along(tensor, 2))


@_handles("aten.index_copy", "aten.index_copy_")
def _index_copy(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, dim, index, values = args
    if out is not tensor:
        recorder.emit(CODE["copy"], [out], [recorder.operand(tensor)])
    places = index.view([-1 if each == dim % out.ndim else 1 for each in range(out.ndim)]).expand(values.shape)
    target = out.select(dim, 0).unsqueeze(dim).expand(values.shape)
    recorder.emit(
        CODE["scatter"], [target], [recorder.operand(values), recorder.operand(places)], sizes=_along(out, dim)
    )


def _counts_rows(recorder: Recorder, index: Tensor) -> bool:
    """Whether a tensor (rows, 1) has the number of each row."""
    made = [recorder.steps[number] for number in recorder.writers.get(recorder.array(index).storage, ())]
    return (
        index.shape[1] == 1
        and len(made) == 1
        and isinstance(made[0], Instruction)
        and (made[0].code, made[0].inputs[:2]) == (CODE["arange"], [0, 1])
    )


@_handles("aten.bmm", "aten.mm")
@_in_float32
def _product(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    first, second, result = (each if each.ndim == 3 else each[None] for each in (*args[:2], out))
    recorder.emit(CODE["matmul"], [result], [recorder.operand(first), recorder.operand(second)])


@_handles("aten.addmm")
@_in_float32
def _addmm(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        raise Unrecordable("a product is scaled")
    _product(recorder, func, out, args[1:3], {})
    recorder.emit(CODE["add"], [out], [recorder.array(out), recorder.operand(args[0], out)])


def _of_weights(code: str, count: int, numbers: Callable[..., Sequence[int]]) -> Handler:
    """Handle an operator of tensors and `count` numbers, of which the instruction takes `numbers`."""

    def handle(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operands = [recorder.operand(each) for each in args[:-count]]
        recorder.emit(CODE[code], [out], operands, numbers(*args[-count:]))

    return handle


@_handles("slipstream.attend")
def _attend(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    queries, keys, values, mask, scale = args
    (keys, key_scales), (values, value_scales) = (_stored(recorder, recorder.array(each)) for each in (keys, values))
    operands = [recorder.operand(queries), keys, values, recorder.operand(mask), key_scales, value_scales]
    recorder.emit(CODE["attend"], [out], operands, number_words([scale]))


def _stored(recorder: Recorder, made: Array) -> tuple[Operand, Operand]:
    """Return the codes and scales of which the steps so far made an array, or the array itself and None.
    The kernel makes the same numbers where it reads them, so that those steps are left out."""
    numbers = recorder.writers.get(made.storage, [])
    steps = [recorder.steps[number] for number in numbers]
    if [getattr(step, "code", None) for step in steps] != [CODE["copy"], CODE["mul"]]:
        return made, None
    codes, (product, scales) = steps[0].inputs[0], steps[1].inputs
    if not (isinstance(codes, Array) and isinstance(scales, Array) and steps[0].outputs == steps[1].outputs == [made]):
        return made, None
    known = product == made and TYPES[codes.type] is torch.int8 and scales.strides[-1] == 0
    changed = any(number > numbers[0] for each in (codes, scales) for number in recorder.writers[each.storage])
    return (codes, scales) if known and not changed else (made, None)


@_handles("aten.remainder")
def _remainder(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    whole = all(not each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, int) for each in args)
    (_elementwise("remainder") if whole else Recorder.call)(recorder, func, out, args, kwargs)


@_handles("slipstream.greatest")
def _greatest(recorder: Recorder, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recorder.emit(CODE["greatest"], list(out), [recorder.operand(args[0])])


@_handles("slipstream.inverse")
def _inverse(recorder: Recorder, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    weights = args[0]
    if weights.dtype != torch.float32:
        recorder.call(func, out, args, kwargs)
        return
    recorder.emit(CODE["inverse"], [out], [recorder.operand(each) for each in args])


def number_words(numbers: Iterable[float]) -> list[int]:
    """Return floating-point numbers as the integers with the same bits."""
    return [struct.unpack("q", struct.pack("d", number))[0] for number in numbers]


HANDLERS |= {f"aten.{name}{mark}": _elementwise(code) for name, code in ELEMENTWISE.items() for mark in ("", "_")}
HANDLERS |= {f"aten.bitwise_{name}": _bitwise(name) for name in ("not", "and", "or")}
HANDLERS |= {f"aten.{name}": _reduced(name) for name in ("sum", "mean", "amax", "argmax")}
HANDLERS |= {f"aten.{name}": _elementwise("copy", lambda *_: [0]) for name in ("zeros", "new_zeros", "zeros_like")}
HANDLERS |= {f"aten.{name}": _elementwise("copy", lambda *_: [1]) for name in ("ones", "new_ones", "ones_like")}
HANDLERS |= {
    f"aten.{name}": _elementwise("copy", lambda *args: args[1:2]) for name in ("full", "full_like", "fill_", "copy_")
}
HANDLERS |= {
    "aten.new_full": _elementwise("copy", lambda _, size, value: [value]),
    "aten.rsub": _elementwise("sub", lambda given, other, *_: [other, given]),
    **dict.fromkeys(
        ("aten.masked_fill", "aten.masked_fill_"),
        _elementwise("where", lambda given, mask, value: [mask, value, given]),
    ),
    "aten.scalar_tensor": _elementwise("copy", lambda value: [value]),
    "slipstream.linear": _of_weights("linear", 1, lambda features: [features]),
    "slipstream.quantized_linear": _of_weights(
        "quantized_linear", 3, lambda features, bits, whole: [bits, whole, features]
    ),
    "slipstream.quantized_rows": _of_weights("quantized_rows", 2, lambda bits, width: [bits]),
}
