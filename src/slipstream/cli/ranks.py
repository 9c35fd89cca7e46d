"""Commands under torchrun: rank 0 runs the command, the other ranks work for it and print only errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def on_ranks(command: Callable[[], None]) -> None:
    """Run a command on rank 0, with its target on all ranks; only rank 0 reads, prints and writes.

    Raises ValueError, which says how to start it, in a single process, and ConnectionError on all remaining ranks
    when one is lost.
    """
    from slipstream.engine.follow import follow
    from slipstream.execution.ranks import RankLost, join

    ranks = join()
    if not ranks.leads:
        warnings.simplefilter("ignore")  # rank 0 shows the same warnings
        try:
            follow()
        except RankLost as error:
            raise RankLost(f"rank {ranks.rank} ends: {error}") from error
        return
    try:
        command()
    except RankLost:
        raise
    except BaseException:
        if ranks.lost is None:
            raise
        raise RankLost(ranks.lost) from None  # torchrun ends all ranks when one has ended, which looks like Ctrl-C
    finally:
        ranks.close()
