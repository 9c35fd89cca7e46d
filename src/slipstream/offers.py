"""Which drafts a target can use: each is tried, and what cannot be used says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.drafting import KINDS, Site, drafter

NEEDS_TRAINING = "make one first, then name it"


@dataclass(frozen=True)
class Offer:
    """One draft: how it is written, whether the target can use it, and what it is, or why not."""

    draft: str
    usable: bool
    says: str


def offers(site: Site, drafts: Sequence[str] = (), folder: Path = Path()) -> Iterator[Offer]:
    """The drafts named; without any, all that need nothing, n-gram files of a folder, and the forms of the others."""
    for draft in drafts or _around(folder):
        yield tried(draft, site)
    if not drafts:
        for kind in KINDS.values():
            if ":" in kind.form:
                yield Offer(kind.form, False, f"{kind.about}: {NEEDS_TRAINING}")


def tried(draft: str, site: Site) -> Offer:
    """Build a draft for the target and let it go again."""
    try:
        made = drafter(draft, site)
    except (ValueError, OSError) as error:
        return Offer(draft, False, " ".join(str(error).split()))
    kind = KINDS.get(draft.partition("?")[0].partition(":")[0])
    plain = kind is None or any(mark in draft for mark in ">|")
    return Offer(draft, True, type(made).__name__ if kind is None or plain else kind.about)


def _around(folder: Path) -> list[str]:
    """What can be tried without being named."""
    ready = [name for name, kind in KINDS.items() if ":" not in kind.form and name != "plain"]
    return [*ready, *(f"ngram:{file}" for file in sorted(folder.glob("*.ngram")))]
