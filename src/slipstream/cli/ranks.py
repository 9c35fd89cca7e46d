"""Commands under torchrun: rank 0 runs them, the other ranks work for it and say nothing unless something is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def on_ranks(command: Callable[[], None]) -> None:
    """Run a command with its target on all ranks: what is read, printed and written is rank 0's business alone.

    Raises ValueError, which says how to start it, in a single process, and ConnectionError on every rank that is left
    when one is lost.
    """
    from slipstream.engine.follow import follow
    from slipstream.execution.ranks import RankLost, join

    ranks = join()
    if not ranks.leads:
        warnings.simplefilter("ignore")  # rank 0 says the same
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
