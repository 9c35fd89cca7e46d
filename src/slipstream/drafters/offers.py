"""Finds which drafts a target can use, by trying to build each; unusable ones come with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.kinds import KINDS
from slipstream.drafters.specification import DrafterTerm, OneOf, drafter, parse


@dataclass(frozen=True)
class Offer:
    """One draft: its specification, whether the target can use it (None: not tried), and what it is or why not."""

    draft: str
    usable: bool | None
    says: str


def offers(context: BuildContext, drafts: Sequence[str] = (), folder: Path = Path()) -> Iterator[Offer]:
    """Yield an offer for each draft named; without names, for all that need no value, and the other kinds' forms."""
    ready = [name for name, kind in KINDS.items() if ":" not in kind.form and name != "plain"]
    for draft in drafts or [*ready, *(f"ngram:{file}" for file in sorted(folder.glob("*.ngram")))]:
        yield tried(draft, context)
    if not drafts:
        for kind in KINDS.values():
            if ":" in kind.form:
                yield Offer(kind.form, None, kind.about)


def tried(draft: str, context: BuildContext) -> Offer:
    known = len(context.notes)
    try:
        built = drafter(draft, context)
    except (ValueError, OSError) as error:
        return Offer(draft, False, " ".join(str(error).split()))
    return Offer(
        draft, True, "; ".join(filter(None, [_about(draft), getattr(built, "facts", ""), *context.notes[known:]]))
    )


def _about(draft: str) -> str:
    syntax = parse(draft)
    if isinstance(syntax, DrafterTerm):
        return KINDS[syntax.kind].about
    if isinstance(syntax, OneOf):
        return "a choice: the fastest so far" if syntax.measured else "a choice: for each text the first that can"
    return "a chain: each drafts for the next, the last for the target"
