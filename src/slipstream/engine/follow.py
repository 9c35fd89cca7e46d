"""`slipstream.follow`: what the processes do that torchrun started beside the first."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.execution.ranks import join, place
from slipstream.models.leading import Follower


def follow() -> bool:
    """Work for rank 0 until it ends -> True; on rank 0, and where torchrun did not start several, False at once.

    Every rank but the first keeps a part of each target that rank 0 loads with `tp_plan`, and does what that needs.
    Raises ConnectionError, which says why, if a rank is lost.

    >>> if slipstream.follow(): sys.exit()  # doctest: +SKIP
    """
    if place()[1] < 2:
        return False
    ranks = join()
    if ranks.leads:
        return False
    logging.getLogger("transformers").setLevel(logging.ERROR)  # rank 0 says the same
    try:
        with _led_by_rank_0():
            Follower(ranks).run()
    finally:
        ranks.close()
    return True


@contextmanager
def _led_by_rank_0() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM are left to rank 0, which gets them too: it finishes, and says so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
