"""Linear layers and attention by kernels in C++, with the instructions that this processor has."""

import functools
import subprocess
import sys
import warnings

import torch
from torch import Tensor

from slipstream.core.values import first_sentence
from slipstream.kernels import laws, library, recurrences
from slipstream.kernels.quantization import GROUP, PANEL, STEP, Precision, QuantizedPanels, into_panels, quantize

SYSTEMS = ("linux", "darwin")


@functools.cache
def kernel_missing() -> str | None:
    """Return why the kernel cannot be used here, in one sentence; None if it can, and is loaded.

    A compiler that fails gives a warning; a missing compiler does not. Raises ValueError if SLIPSTREAM_MARCH names a
    level of instructions that this processor does not have.
    """
    if sys.platform not in SYSTEMS:
        return f"it is built on Linux and macOS only, and this is {sys.platform}"
    level = library.level()
    try:
        library.load(level)
        _check()
    except library.CompilerMissingError as error:
        return str(error)
    except (OSError, RuntimeError, subprocess.SubprocessError, ValueError) as error:
        reason = first_sentence(error).removesuffix(".")
        if isinstance(error, OSError) and error.strerror and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        warnings.warn(f"linear layers run slower than they can, their kernel: {reason}.", RuntimeWarning, stacklevel=2)
        return reason
    return None


def panel_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, features: int) -> Tensor:
    """Multiply (..., inputs) by a packed weight -> (..., features): sums in float32, in one order for every row."""
    return torch.ops.slipstream.linear(inputs.contiguous(), weight, bias, features)


def quantized_linear(
    inputs: Tensor, panels: QuantizedPanels, bias: Tensor | None, features: int, bits: int, whole: bool = True
) -> Tensor:
    """Multiply (..., inputs) by a quantized weight -> (..., features).

    If `whole`, inputs become whole numbers of 8 bits, group by group; the sums of groups are added in float32, in the
    same order for every row. Otherwise they stay as they are, and all products are added in float32.
    """
    return torch.ops.slipstream.quantized_linear(inputs.contiguous(), *panels, bias, features, bits, whole)


def quantized_rows(features: Tensor, panels: QuantizedPanels, bits: int, width: int) -> Tensor:
    """Return the weights (n, width) of features (n,) in float32, without rounding codes and scales again."""
    return torch.ops.slipstream.quantized_rows(features, *panels, bits, width)


def panel_attention(queries: Tensor, keys: Tensor, values: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """Attend with queries (rows, heads, n, width) to keys and values (rows, as many or fewer heads, slots, width).

    `added`, (rows or 1, heads or 1, n or 1, slots), is added to their scaled products -> (rows, n, heads, width). A
    token's output depends neither on the other new tokens nor on the contents of slots that no token sees.
    """
    inputs = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (queries, keys, values))
    added = added if added is None or added.stride(-1) == 1 else added.contiguous()
    return torch.ops.slipstream.attend(*inputs, added, scale)


def _check() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in STEP:
        inputs, weight = (torch.randn(rows, 192, generator=generator).to(dtype) for rows in (5, PANEL + 1))
        product = panel_linear(inputs, into_panels(weight), None, len(weight))
        queries, keys, values = torch.randn(3, 1, 2, 5, 64, generator=generator).to(dtype)
        seen = panel_attention(queries, keys, values, None, 0.1).transpose(1, 2)
        exact = (queries.double() @ keys.double().mT * 0.1).softmax(-1) @ values.double()
        pairs = [(product, inputs.double() @ weight.double().T), (seen, exact), *laws.samples(), *recurrences.samples()]
        for bits, group in GROUP.items():
            codes = quantize(weight, Precision(bits, group))
            outputs = quantized_linear(inputs, codes.into_panels(), None, len(weight), bits)
            pairs.append((outputs, inputs.double() @ codes.weight().double().T))
        if not all((outputs - right).double().norm() <= 0.02 * right.double().norm() for outputs, right in pairs):
            raise ValueError(f"the kernel for {dtype} computes something else on this processor")
