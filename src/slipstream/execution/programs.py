"""Recorded functions as programs: instructions in memory of their own, run by one call into the kernels.

A program leaves out what no output and no cache depends on, multiplies layers that read the same inputs together, and
uses a piece of memory again when what lies in it is not needed any more.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from slipstream.cache.stores import Stores
from slipstream.core.garbage import uncollected
from slipstream.execution.instructions import CODE, HANDLERS, number_words
from slipstream.execution.recording import (
    ABSENT,
    TYPES,
    Array,
    Instruction,
    MemoryKind,
    OperatorCall,
    Recording,
    Sizes,
    Step,
    Unrecordable,
    is_array,
    record,
)
from slipstream.execution.sizes import Size
from slipstream.kernels.cpu import kernel_missing


@uncollected()
def recorded(function: Callable[..., Any], inputs: tuple[Any, ...], sizes: Sizes, **how: Any) -> Recording:
    """Record a function for inputs like these, as `record` does. Raises Unrecordable if it cannot be."""
    if why := kernel_missing():
        raise Unrecordable(f"the kernels are missing: {why}")
    return record(function, inputs, sizes, HANDLERS, CODE["copy"], **how)


MOST_KEPT = 32 << 20  # bytes of memory that a program keeps between runs: a prefill of many texts needs more
LINE = 64  # bytes of the cache; pieces of memory begin with one
LINEAR, QUANTIZED = CODE["linear"], CODE["quantized_linear"]


def _take(things: Iterable[Any], given: tuple[list[Any], ...]) -> None:
    """Append the tensors of nested tuples, lists and dictionaries to a list, with their shapes and addresses."""
    for each in things:
        if isinstance(each, Tensor):
            if not each.is_contiguous():
                raise ValueError("an input is not contiguous")
            for known, fact in zip(given, (each, each.shape, each.data_ptr()), strict=True):
                known.append(fact)
        elif isinstance(each, Stores):
            for known, facts in zip(given, each.laid, strict=True):
                known += facts  # type: ignore[arg-type]
        elif isinstance(each, tuple | list | dict):
            _take(each.values() if isinstance(each, dict) else each, given)


class Program:
    """A recorded function that the kernels run: takes tensors, and returns the outputs."""

    def __init__(self, recording: Recording, kept: Collection[int] | None = None) -> None:
        """Make the program of a recording, for some of its outputs (None: all), by their numbers.
        The others are returned without numbers."""
        self._kept = range(len(recording.outputs)) if kept is None else kept
        steps = _needed(_merged(recording.steps), recording, self._kept)
        self._recording = recording
        self._slots, self._places = _slots(steps, recording)
        self._arena = torch.empty(0, dtype=torch.uint8)
        instructions = [step for step in steps if isinstance(step, Instruction)]
        words = torch.tensor(_words(recording, instructions, self._slots, self._places))
        self._program: int = torch.ops.slipstream.program(words)
        finalize(self, torch.ops.slipstream.forget_program, words, self._program).atexit = False
        self._parts = list(_parts(steps))
        alike: dict[tuple[Size, ...], list[int]] = {}
        for place, array in enumerate(recording.inputs):
            alike.setdefault(array.sizes, []).append(place)
        self._alike = list(alike.items())

    def __call__(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        """Run the function -> its outputs. Raises ValueError for inputs of other sizes than those recorded."""
        tensors, shapes, addresses = given = list[Tensor](), list[torch.Size](), list[int]()
        _take(inputs, given)
        symbols = self._symbols(shapes)
        products = [1]  # of every set of sizes, by the bits of the set
        for symbol in symbols:
            products += [symbol * product for product in products]
        outputs = [
            torch.empty(_values(array.sizes, products) if number in self._kept else 0, dtype=TYPES[array.type])
            for number, array in enumerate(self._recording.outputs)
        ]
        starts, end = [], 0
        for number, mask in self._slots:
            starts.append(end)
            end += -(-number * products[mask] // LINE) * LINE
        if self._arena.numel() < end + LINE:
            self._arena = torch.empty(end + end // 4 + LINE, dtype=torch.uint8)
        base = -self._arena.data_ptr() % LINE
        addresses += [tensor.data_ptr() for tensor in outputs]
        numbers = torch.from_numpy(np.array([*symbols, self._arena.data_ptr() + base, *addresses]))
        for part in self._parts:
            if isinstance(part, OperatorCall):
                self._call(part, products, tensors, outputs, [base + start for start in starts])
            else:
                torch.ops.slipstream.run_program(numbers, self._program, part.start, part.stop)
        if self._arena.numel() > MOST_KEPT:
            self._arena = self._arena[:0].clone()
        return outputs

    def _symbols(self, shapes: Sequence[torch.Size]) -> list[int]:
        if len(shapes) != len(self._recording.inputs):
            raise ValueError(f"{len(shapes)} inputs do not fit the program, which has {len(self._recording.inputs)}")
        found: list[int] = [-1] * len(self._recording.names)
        for sizes, alike in self._alike:  # the stores of all layers have the same sizes
            shape, everyone = shapes[alike[0]], [shapes[place] for place in alike]
            for size, (number, mask) in zip(shape, sizes, strict=True):
                if mask and found[mask.bit_length() - 1] < 0:
                    found[mask.bit_length() - 1] = size
                elif size != (found[mask.bit_length() - 1] if mask else number):
                    raise ValueError(f"an input of shape {tuple(shape)} does not fit the program")
            if everyone.count(shape) < len(alike):
                raise ValueError(f"inputs of the shapes {[*map(tuple, everyone)]} do not fit the program together")
        return [*found, *(found[place] + more for place, more in self._recording.sums)]

    def _call(
        self, call: OperatorCall, products: list[int], tensors: list[Tensor], outputs: list[Tensor], starts: list[int]
    ) -> None:
        outside = {MemoryKind.CONSTANT: self._recording.weights, MemoryKind.INPUT: tensors, MemoryKind.OUTPUT: outputs}

        def tensor(array: Any) -> Any:
            if not isinstance(array, Array):
                return array
            storage, dtype = self._recording.storages[array.storage], TYPES[array.type]
            if storage.memory is MemoryKind.OWN:
                begin, (size,) = starts[self._places[array.storage]], _values([storage.size], products)
                whole = self._arena[begin : begin + size].view(dtype)
            else:
                whole = outside[storage.memory][storage.place]
            (offset,) = _values([array.offset], products)
            start = 0 if storage.memory is MemoryKind.CONSTANT else whole.storage_offset()
            sizes, strides = _values(array.sizes, products), _values(array.strides, products)
            return whole.as_strided(sizes, strides, start + offset)

        args, kwargs = tree_map(tensor, call.arguments, is_leaf=is_array)
        results = tree_leaves(call.operator(*args, **kwargs))
        for array, result in zip(call.outputs, results, strict=True):
            if array is not None:
                tensor(array).copy_(result)


def _values(sizes: Iterable[Size], products: Sequence[int]) -> list[int]:
    return [number * products[mask] for number, mask in sizes]


def _parts(steps: Iterable[Step]) -> Iterator[OperatorCall | range]:
    """Yield the steps in their order: calls, and stretches of instructions by their numbers."""
    start = 0
    for is_call, group in groupby(steps, lambda step: isinstance(step, OperatorCall)):
        some = list(group)
        if is_call:
            yield from (step for step in some if isinstance(step, OperatorCall))
        else:
            yield range(start, start + len(some))
            start += len(some)


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with one product for layers that read the same inputs, where the first of them stands."""
    merged: list[Step] = []
    first: dict[Any, Instruction] = {}
    written = Counter(array.storage for step in steps for array in step.outputs if array)
    for step in steps:
        if not isinstance(step, Instruction) or step.code not in (LINEAR, QUANTIZED):
            merged.append(step)
            continue
        inputs = step.inputs[0]
        assert isinstance(inputs, Array)
        forms = [(each.type, each.sizes[1:]) if isinstance(each, Array) else each for each in step.inputs[1:-1]]
        form = (step.code, inputs, tuple(forms), tuple(step.numbers[:-1]))
        if written[inputs.storage] <= 1 and (before := first.get(form)):
            before.outputs += step.outputs
            before.inputs += step.inputs[1:]
            before.numbers += step.numbers[-1:]
        else:
            first[form] = replace(step, outputs=[*step.outputs], inputs=[*step.inputs], numbers=[*step.numbers])
            merged.append(first[form])
    return merged


def _needed(steps: Sequence[Step], recording: Recording, outputs: Collection[int]) -> list[Step]:
    """Return the steps without those that neither these outputs nor a cache depend on."""
    live = {
        number
        for number, storage in enumerate(recording.storages)
        if storage.memory is MemoryKind.INPUT or (storage.memory is MemoryKind.OUTPUT and storage.place in outputs)
    }
    kept: list[Step] = []
    for step in reversed(steps):
        if any(array and array.storage in live for array in step.outputs):
            kept.append(step)
            live |= {each.storage for each in step.inputs if isinstance(each, Array)}
    return kept[::-1]


def _slots(steps: Sequence[Step], recording: Recording) -> tuple[list[Size], dict[int, int]]:
    """Return the sizes of the pieces of memory that the steps need, and the piece of each storage."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for array in (*step.outputs, *step.inputs):
            if isinstance(array, Array):
                last[array.storage] = number
    slots: list[Size] = []
    places: dict[int, int] = {}
    free: dict[Size, list[int]] = {}
    for number, step in enumerate(steps):
        for array in step.outputs:
            if (
                array is None
                or array.storage in places
                or recording.storages[array.storage].memory is not MemoryKind.OWN
            ):
                continue
            size = recording.storages[array.storage].size
            if not free.get(size):
                free.setdefault(size, []).append(len(slots))
                slots.append(size)
            places[array.storage] = free[size].pop()
        touched = {array.storage for array in (*step.outputs, *step.inputs) if isinstance(array, Array)}
        for storage in touched & places.keys():
            if last[storage] == number:
                free[recording.storages[storage].size].append(places[storage])
    return slots, places


def _words(
    recording: Recording, steps: Sequence[Instruction], slots: Sequence[Size], places: dict[int, int]
) -> list[int]:
    """Return the program as program.cpp reads it."""
    arrays: dict[Array, int] = {}
    body: list[int] = []
    for step in steps:
        scalars: list[float] = []
        inputs = []
        for each in step.inputs:
            if isinstance(each, Array):
                inputs.append(arrays.setdefault(each, len(arrays)))
            elif each is None:
                inputs.append(ABSENT)
            else:
                scalars.append(float(each))
                inputs.append(-len(scalars))
        outputs = [arrays.setdefault(array, len(arrays)) for array in step.outputs]
        numbers = [*number_words(scalars), *step.numbers, *(word for size in step.sizes for word in size)]
        body += [step.code, len(outputs), *outputs, len(inputs), *inputs, len(scalars), len(numbers), *numbers]
    words = [
        len(recording.names) + len(recording.sums),
        len(recording.inputs) + len(recording.outputs),
        len(recording.storages),
    ]
    for number, storage in enumerate(recording.storages):
        place = {
            MemoryKind.CONSTANT: lambda storage=storage: recording.weights[storage.place].untyped_storage().data_ptr(),
            MemoryKind.INPUT: lambda storage=storage: storage.place,
            MemoryKind.OUTPUT: lambda storage=storage: len(recording.inputs) + storage.place,
            MemoryKind.OWN: lambda number=number: places.get(number, 0),
        }[storage.memory]()
        words += [storage.memory, place]
    words += [len(slots), *(word for slot in slots for word in slot)]
    words += [len(arrays), *(word for array in arrays for word in array.words)]
    return [*words, len(steps), *body]
