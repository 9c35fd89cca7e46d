"""What the tests of kernels share: a mark for those that need them, and random numbers."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cpu import kernel_missing

needs_kernel = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
