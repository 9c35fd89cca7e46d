"""`slipstream.follow`: the work of all processes that torchrun started except the first one, rank 0."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.execution.ranks import join, place
from slipstream.models.leading import FollowingRank


def follow() -> bool:
    """Work for rank 0 until it ends -> True; on rank 0, and where torchrun did not start several, return False at once.

    Every rank but the first holds a part of each target that rank 0 loads with `tp_plan`, and repeats its calls.
    Raises ConnectionError, with the reason, if a rank is lost.

    >>> if slipstream.follow(): sys.exit()  # doctest: +SKIP
    """
    if place()[1] < 2:
        return False
    ranks = join()
    if ranks.leads:
        return False
    logging.getLogger("transformers").setLevel(logging.ERROR)  # rank 0 logs the same messages
    try:
        with _led_by_rank_0():
            FollowingRank(ranks).run()
    finally:
        ranks.close()
    return True


@contextmanager
def _led_by_rank_0() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside the block: rank 0 gets them too, finishes, and ends the other ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
