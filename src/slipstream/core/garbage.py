"""What Python and the C library do about memory that was freed: when garbage is looked for, and what is given back."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage in the block: through modules and models that stay, it would take a fifth of the time.
    Memory that was freed in it, such as that of files that were read, is given back at its end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        give_back_freed_memory()


# Parameters of glibc's mallopt, as <malloc.h> numbers them.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the rest of the process -> whether it can.

    By default every large tensor is given back to the system when it is freed, and the next one is mapped and cleared
    page by page: a fifth of the time of training a small model. The process stays as large as its largest step. Only
    glibc can do this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**26))
    return mallopt is not None and all(mallopt(name, value) for name, value in settings)


def give_back_freed_memory() -> None:
    """Let the C library give all freed memory back to the system, as glibc can; else every thread that ever held a
    large request keeps its pages."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
