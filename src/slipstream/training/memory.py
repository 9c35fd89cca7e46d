"""The memory of a training on a CPU: a step frees gigabytes that the next step takes again."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt, as <malloc.h> numbers them.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the rest of the process -> whether it can.

    By default every large tensor is given back to the system when it is freed, and the next one is mapped and cleared
    page by page: a fifth of the time of training a small model. The process stays as large as its largest step. Only
    glibc can do this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**26))
    return all(mallopt(name, value) for name, value in settings)
