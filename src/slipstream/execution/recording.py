"""Recording a function of tensors as instructions, which the kernels run without Python or torch between them.

The function runs twice, on small inputs of zeros whose varying sizes are others each time. A number of both recordings
(a size, a stride, an offset) that grew from one to the other is a product of a constant, some of these sizes, and sums
of one of them and a constant (as where a sink stands behind the slots of an attention).

Views need no instruction, since they are other strides over the same memory; what depends on weights alone is computed
once; what has no instruction is called as torch's operator (`OperatorCall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from slipstream.cache.stores import Stores
from slipstream.execution.sizes import Size, growth_of, product_of

Sizes = Iterable[tuple[Tensor, Mapping[int, str]]]
"""Inputs, each with the names of the dimensions whose sizes vary; what is part of something else comes before it."""

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
ARITHMETIC = (*FLOATS, torch.int64, torch.int32, torch.bool, torch.int8, torch.uint8)
TYPES = (*ARITHMETIC, torch.float16, torch.int16, torch.complex64)
"""The types of tensors in the order in which program.cpp numbers them; instructions compute with the first ones."""
NUMBERS = {dtype: number for number, dtype in enumerate(TYPES)}

TRIED = ((2, 3, 5, 7, 11, 13, 17), (3, 7, 11, 17, 19, 37, 43))
"""The sizes of both recordings, by the order of their names.

Every one grew by another number, every product of some of them by another factor, and so did each of them and 1 or 2.
"""

READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
"""The methods by which Python sees what a tensor contains."""

TELLING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""The marks of operators whose result as a Python value, or whose shape, depends on what tensors contain."""

ABSENT = -1 << 40
MOST_FOLDED = 1 << 20  # bytes of a tensor that is computed once, of weights alone


class Unrecordable(Exception):
    """Raised for a function whose operations depend on the contents of tensors, or have no form as instructions."""


class MemoryKind(IntEnum):
    """The kinds of memory in which tensors lie: weights, inputs, outputs, and the memory of the program itself."""

    CONSTANT = 0
    INPUT = 1
    OUTPUT = 2
    OWN = 3


@dataclass(frozen=True)
class Array:
    """A tensor of a recording: which storage it lies in, and where. Numbers are plain ones until both are compared."""

    storage: int
    type: int
    offset: Any
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]

    @property
    def words(self) -> list[int]:
        """The array as program.cpp reads it."""
        sizes = [word for pair in zip(self.sizes, self.strides, strict=True) for size in pair for word in size]
        return [self.storage, self.type, *self.offset, len(self.sizes), *sizes]


@dataclass(frozen=True)
class Storage:
    """A piece of memory of `size` bytes: `place` is the number of the constant, input or output that it is."""

    memory: MemoryKind
    size: Any
    place: int = 0


Operand = Array | float | int | None


@dataclass
class Instruction:
    """An operation by its number in program.cpp: arrays it writes and reads, numbers, and numbers that are sizes."""

    code: int
    outputs: list[Array]
    inputs: list[Operand]
    numbers: list[int] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)


@dataclass
class OperatorCall:
    """An operator of torch that has no instruction; arrays stand for its tensors."""

    operator: Any
    outputs: list[Array | None]
    arguments: tuple[Any, dict[str, Any]]

    @property
    def inputs(self) -> list[Operand]:
        return [leaf for leaf in tree_leaves(self.arguments, is_leaf=is_array) if isinstance(leaf, Array)]


Step = Instruction | OperatorCall


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, Array)


def tensors_in(things: Iterable[Any], found: list[Tensor]) -> list[Tensor]:
    """Append the tensors of nested tuples, lists and dictionaries to a list; torch's function for it takes longer."""
    for each in things.values() if isinstance(things, dict) else things:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list | dict):
            tensors_in(each, found)
    return found


@dataclass
class Recording:
    """The steps of a function, with its storages, its outputs, and the weights that have to stay alive.

    Sizes that vary are those with `names`, then `sums`: a size, by its place among the names, and what is added to it.
    """

    names: tuple[str, ...]
    sums: tuple[tuple[int, int], ...]
    steps: list[Step]
    storages: list[Storage]
    inputs: list[Array]
    outputs: list[Array]
    weights: list[Tensor]

    @property
    def constants(self) -> list[Any]:
        """The sizes of the weights' memory."""
        return [storage.size for storage in self.storages if storage.memory is MemoryKind.CONSTANT]


class Blind(TorchFunctionMode):
    """Refuses that Python looks at what tensors contain."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise Unrecordable("what it does depends on the contents of tensors")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records what a function does to tensors; what is made of weights alone, up to `folded` bytes, is a weight too."""

    def __init__(self, handlers: Mapping[str, Handler], folded: int) -> None:
        super().__init__()
        self.handlers, self.folded = handlers, folded
        self.steps: list[Step] = []
        self.storages: list[Storage] = []
        self.weights: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # of storages, by their identity
        self._held: list[Tensor] = []  # so that no identity is used twice
        self.writers: dict[int, list[int]] = {}  # the steps that write to a storage, for those with known contents

    # ---- memory ----

    def add(self, tensor: Tensor, memory: MemoryKind, place: int = 0) -> int:
        """Add the memory of a tensor -> its number."""
        self._held.append(tensor)
        number = self._numbers[tensor.untyped_storage()._cdata] = len(self.storages)
        if memory is not MemoryKind.OWN:
            self.writers[number] = []
        self.storages.append(Storage(memory, tensor.untyped_storage().nbytes(), place))
        return number

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's memory; None for memory that was not met yet."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def constant(self, thing: Any) -> None:
        """Take what was not met yet, and is not the result of an operator, for a weight."""
        if not isinstance(thing, Tensor) or self.known(thing) is not None:
            return
        if thing.device.type != "cpu" or thing.layout is not torch.strided:
            raise Unrecordable(f"a tensor is on {thing.device}, {thing.layout}")
        self.add(thing, MemoryKind.CONSTANT, len(self.weights))
        self.weights.append(thing)

    def array(self, tensor: Tensor) -> Array:
        """Return where a tensor lies; memory that was not met yet is the program's own."""
        if (kind := NUMBERS.get(tensor.dtype)) is None:
            raise Unrecordable(f"there are no instructions for {tensor.dtype}")
        number = self.known(tensor)
        number = self.add(tensor, MemoryKind.OWN) if number is None else number
        return Array(number, kind, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def operand(self, thing: Any, like: Tensor | None = None) -> Operand:
        """Return an operand: a tensor, spread over the sizes of `like` if it is given, a number, or None."""
        if isinstance(thing, Tensor):
            return self.array(thing if like is None or thing.shape == like.shape else thing.expand(like.shape))
        return thing

    def emit(
        self,
        code: int,
        outputs: Sequence[Tensor],
        inputs: Sequence[Operand],
        numbers: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        arrays = [self.array(each) for each in outputs]
        self._append(Instruction(code, arrays, list(inputs), list(numbers), list(sizes)))

    def call(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        """Append the call of an operator that has no instruction."""
        given = tree_map(lambda leaf: self.array(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        outputs = [self.array(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(out)]
        if not outputs:  # it would be left out, though it changes what it is given
            raise Unrecordable(f"{func} returns nothing")
        self._append(OperatorCall(func, outputs, given))

    def _append(self, step: Step) -> None:
        made = {array.storage for array in step.outputs if array}
        own = made if isinstance(step, OperatorCall) else set()  # what it is given it may write to
        if not {each.storage for each in step.inputs if isinstance(each, Array)} - own <= self.writers.keys():
            raise Unrecordable("the contents of a tensor are not known")
        for storage in made:
            self.writers.setdefault(storage, []).append(len(self.steps))
        self.steps.append(step)

    # ---- recording ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs), [])
        name, tells, mutates = _facts(func)
        if tells and not (name == "aten.index" and all(leaf.dtype != torch.bool for leaf in given[1:])):
            raise Unrecordable("what it does depends on the contents of tensors")
        for leaf in given:
            self.constant(leaf)
        out = func(*args, **kwargs)
        made = tensors_in((out,), [])
        if not mutates and all(self.known(leaf) is not None for leaf in made):
            return out  # views
        folds = bool(given) and not mutates and all(map(self._is_constant, given))
        if folds and sum(leaf.nbytes for leaf in made) <= self.folded:
            for leaf in made:
                self.constant(leaf)
            return out
        known = all(leaf.dtype in ARITHMETIC for leaf in (*given, *made)) or func.namespace == "slipstream"
        (self.handlers.get(name, Recorder.call) if known else Recorder.call)(self, func, out, args, kwargs)
        return out

    def _is_constant(self, tensor: Tensor) -> bool:
        number = self.known(tensor)
        return number is not None and self.storages[number].memory is MemoryKind.CONSTANT


@cache
def _facts(operator: Any) -> tuple[str, bool, bool]:
    """Return an operator's name, whether its result tells what tensors contain, and whether it changes a tensor."""
    return str(operator.overloadpacket), bool(TELLING & {*operator.tags}), operator._schema.is_mutable


Handler = Callable[[Recorder, Any, Any, Any, Any], None]
"""A function that emits the instructions of an operator: recorder, operator, result, arguments, named arguments."""


def record(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    sizes: Sizes,
    handlers: Mapping[str, Handler],
    copy: int,
    tried: tuple[Sequence[int], Sequence[int]] = TRIED,
) -> Recording:
    """Record a function of inputs, nested tuples, lists and dictionaries of tensors; the tensors in `sizes` vary.
    `copy` is the number of the instruction that copies. Raises Unrecordable if that is not possible."""
    varying = {id(tensor): dims for tensor, dims in sizes}
    names = tuple(dict.fromkeys(name for dims in varying.values() for name in dims.values()))
    if len(names) > len(tried[0]):
        raise Unrecordable(f"more than {len(tried[0])} sizes vary")

    def recording(taken: Sequence[int], folded: int = MOST_FOLDED) -> Recording:
        recorder, tensors = Recorder(handlers, folded), list[Tensor]()

        def small(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return tree_map(small, [*leaf]) if isinstance(leaf, Stores) else leaf
            dims = varying.get(id(leaf), {})
            shape = [taken[names.index(dims[dim])] if dim in dims else size for dim, size in enumerate(leaf.shape)]
            tensors.append(torch.zeros(shape, dtype=leaf.dtype))
            recorder.add(tensors[-1], MemoryKind.INPUT, len(tensors) - 1)
            return tensors[-1]

        with torch.inference_mode(False), torch.no_grad():  # inference mode would show operators that consist of others
            given = tree_map(small, inputs)
            with Blind(), recorder:
                out = function(*given)
            results = tensors_in((out,), [])
            finals = [torch.empty(result.shape, dtype=result.dtype) for result in results]
            for place, (result, final) in enumerate(zip(results, finals, strict=True)):
                recorder.constant(result)
                recorder.add(final, MemoryKind.OUTPUT, place)
                recorder.emit(copy, [final], [recorder.array(result)])
        arrays, outputs = (list(map(recorder.array, group)) for group in (tensors, finals))
        return Recording(names, (), recorder.steps, recorder.storages, arrays, outputs, recorder.weights)

    first, second = map(recording, tried)
    if first.constants != second.constants:  # a weight that is repeated for every row, say
        first, second = (recording(taken, folded=0) for taken in tried)
    return _compared(names, list(zip(*tried, strict=True))[: len(names)], first, second)


# ---- what both recordings say of sizes ----------------------------------------------------------------------------


def _compared(
    names: tuple[str, ...], tried: Sequence[tuple[int, int]], first: Recording, second: Recording
) -> Recording:
    """Return the first of two recordings with numbers that grew as products. Raises Unrecordable for other steps.
    `tried` are the sizes of both, by name."""
    sums = sums_of(first.steps, second.steps, tried)
    growth = growth_of([*tried, *((tried[place][0] + more, tried[place][1] + more) for place, more in sums)])

    @cache
    def size(one: int, other: int) -> Size:
        if (found := product_of(one, other, growth)) is None:
            raise Unrecordable("a size is no product of sizes of the inputs")
        return found

    def array(one: Any, other: Any) -> Any:
        if not isinstance(one, Array) or not isinstance(other, Array):
            if one is not other and one != other and not (one != one and other != other):
                raise Unrecordable("a size that varies is computed with")
            return one
        if (one.storage, one.type, len(one.sizes)) != (other.storage, other.type, len(other.sizes)):
            raise Unrecordable("its operations depend on sizes")
        sizes, strides = tuple(map(size, one.sizes, other.sizes)), tuple(map(size, one.strides, other.strides))
        return Array(one.storage, one.type, size(one.offset, other.offset), sizes, strides)

    def arrays(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        if len(one) != len(other):
            raise Unrecordable("its operations depend on sizes")
        return list(map(array, one, other))

    def step(one: Step, other: Step) -> Step:
        outputs = arrays(one.outputs, other.outputs)
        if isinstance(one, Instruction) and isinstance(other, Instruction):
            if (one.code, one.numbers) == (other.code, other.numbers):
                sizes = list(map(size, one.sizes, other.sizes))
                return replace(one, outputs=outputs, inputs=arrays(one.inputs, other.inputs), sizes=sizes)
        elif isinstance(one, OperatorCall) and isinstance(other, OperatorCall) and one.operator is other.operator:
            return OperatorCall(
                one.operator, outputs, tree_map(array, one.arguments, other.arguments, is_leaf=is_array)
            )
        raise Unrecordable("its operations depend on sizes")

    if len(first.steps) != len(second.steps) or len(first.storages) != len(second.storages):
        raise Unrecordable("its operations depend on sizes")
    memory = zip(first.storages, second.storages, strict=True)
    storages = [replace(one, size=size(one.size, other.size)) for one, other in memory]
    steps = list(map(step, first.steps, second.steps))
    inputs, outputs = arrays(first.inputs, second.inputs), arrays(first.outputs, second.outputs)
    return Recording(names, sums, steps, storages, inputs, outputs, first.weights)


def sums_of(
    first: Sequence[Step], second: Sequence[Step], tried: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return which sizes of tensors are sums of one of those `tried` and a constant, as `Recording` has them."""
    growth, sums = growth_of(tried), dict[tuple[int, int], None]()
    for one, other in zip(first, second, strict=False):
        for before, after in zip(one.outputs, other.outputs, strict=False):
            for small, large in zip(before.sizes, after.sizes, strict=False) if before and after else ():
                if product_of(small, large, growth) is None:
                    places = (place for place, (start, end) in enumerate(tried) if large - small == end - start)
                    sums |= dict.fromkeys((place, small - tried[place][0]) for place in places)
    return tuple(sums)
