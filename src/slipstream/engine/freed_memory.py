"""Memory that the C library holds after it was freed: a training keeps it, and a server at rest gives it back."""

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


def give_back_freed_memory() -> None:
    """Let the C library give all freed memory back to the system, as glibc can; else every thread that ever held a
    large request keeps its pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
