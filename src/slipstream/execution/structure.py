"""A key of all that the graph of a function depends on: everything it reaches, except the values of large tensors."""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from slipstream.version import __version__

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
KNOWN = ("torch", "transformers", "slipstream", "builtins")  # packages whose version stands for their code
UNREAD = {"_name_or_path", "name_or_path", "_commit_hash", "generation_config", "transformers_version"}
SMALL = 16  # the most values of a small tensor; inductor writes up to 8 into its code as constants
MOST = 1_000_000  # the most objects; a function that reaches more has reached something other than a model


class Unknown(Exception):
    """Raised for an object that cannot be recognized as the same in another process."""


class Structure:
    """The key of a function and its inputs, and the tensors it reaches, in an order that follows from the key.

    Raises Unknown if it reaches what has no key, such as a lock or a file.
    """

    def __init__(self, function: Any, inputs: Any) -> None:
        self.weights: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # keeps the objects alive, so that no id is used twice
        self._places: dict[tuple[int, int], int] = {}
        digest = hashlib.sha256(repr(_surroundings()).encode())
        for word in (*_signature(inputs), *self._words(function)):
            digest.update(word.encode() + b"\0")
        self.key = digest.hexdigest()[:40]

    def _words(self, thing: Any) -> Iterator[str]:
        """Yield the words of the key for an object; one that was met before is named by its number."""
        if isinstance(thing, PLAIN):
            yield f"{type(thing).__qualname__} {thing!r}"
        elif id(thing) in self._seen:
            yield f"seen {self._seen[id(thing)]}"
        else:
            self._seen[id(thing)] = len(self._held)
            self._held.append(thing)
            if len(self._held) > MOST:
                raise Unknown(f"more than {MOST} objects")
            yield f"{type(thing).__module__}.{type(thing).__qualname__}"
            yield from self._parts(thing)

    def _parts(self, thing: Any) -> Iterator[str]:
        """Yield the words of the key for what an object holds. Raises Unknown for one of a kind without a key."""
        if isinstance(thing, Tensor):
            yield self._tensor(thing)
        elif isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType)) and not _bound(thing):
            yield _origin(thing)
        elif isinstance(thing, types.FunctionType):
            yield _origin(thing)
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
            yield from self._all([thing.__defaults__, thing.__kwdefaults__, cells])
        elif isinstance(thing, types.MethodType):
            yield from self._all([thing.__func__, thing.__self__])
        elif isinstance(thing, functools.partial):
            yield from self._all([thing.func, thing.args, thing.keywords])
        elif isinstance(thing, Mapping):
            yield from self._all([part for pair in thing.items() if pair[0] not in UNREAD for part in pair])
        elif isinstance(thing, (list, tuple)):
            yield from self._all(thing)
        elif isinstance(thing, (set, frozenset)) and all(isinstance(part, PLAIN) for part in thing):
            yield repr(sorted(map(repr, thing)))
        elif hasattr(thing, "__wrapped__"):
            yield from self._words(thing.__wrapped__)
        elif hasattr(thing, "__dict__"):
            yield _origin(type(thing))
            yield from self._words(vars(thing))
        else:
            raise Unknown(type(thing).__qualname__)

    def _all(self, parts: Any) -> Iterator[str]:
        yield str(len(parts))
        for part in parts:
            yield from self._words(part)

    def _tensor(self, tensor: Tensor) -> str:
        """Return a tensor's form, the first tensor at the same address, and the values of a small one.

        Inductor writes the values of small tensors into its code.
        """
        self.weights.append(tensor)
        same = ""
        if tensor.layout is torch.strided:
            place = (tensor.data_ptr(), tensor.nbytes)
            same = str(self._places.setdefault(place, len(self.weights))) if tensor.nbytes else ""
        form = (tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device, tensor.requires_grad)
        values = tensor.detach().flatten().tolist() if tensor.numel() <= SMALL else ""
        return f"{form} {values} {tensor.stride() if tensor.layout is torch.strided else ''} {same}"


def _bound(thing: Any) -> bool:
    """Whether a function written in C is bound to an object, whose state it might depend on."""
    owner = getattr(thing, "__self__", None)
    return isinstance(thing, types.BuiltinFunctionType) and not isinstance(owner, (types.ModuleType, type(None), type))


def _signature(inputs: Any) -> list[str]:
    """Return the form of inputs, without sizes that vary."""
    leaves, form = tree_flatten(inputs)
    return [str(form), *(str(_form(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    varying = getattr(tensor, "_dynamo_dynamic_indices", ())
    return tensor.dtype, *(None if dim in varying else size for dim, size in enumerate(tensor.shape))


def _origin(thing: Any) -> str:
    """Return the name of code, with a digest of its file if no version stands for it."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__ or "builtins"
    versioned = name.partition(".")[0] in KNOWN or name in sys.builtin_module_names
    digest = "" if versioned else _file(name)
    return f"{name}.{getattr(thing, '__qualname__', '')} {digest}"


@cache
def _file(module: str) -> str:
    """Return a digest of a module's file. Raises Unknown if it has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        raise Unknown(module)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@cache
def _sources() -> str:
    """Return a digest of our own code, which changes more often than its version."""
    package = importlib.util.find_spec("slipstream")
    assert package is not None and package.origin is not None
    digest = hashlib.sha256()
    for path in sorted(Path(package.origin).parent.rglob("*")):
        if path.suffix in {".py", ".cpp", ".h"}:
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _processor() -> str:
    """Return the model and the features of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return repr(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def _surroundings() -> tuple[Any, ...]:
    """Return what all graphs depend on: versions, our own code, processor, kernels and settings of torch."""
    versions = (__version__, _sources(), torch.__version__, torch.version.git_version, version("transformers"))
    kernels = [hasattr(torch.ops.slipstream, name) for name in ("linear", "attend", "quantized_linear")]
    numbers = (torch.get_num_threads(), torch.get_default_dtype(), torch.backends.mkldnn.is_available())
    return (*versions, sys.version, _processor(), *kernels, *numbers)
