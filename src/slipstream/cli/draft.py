"""The command `slipstream draft list`, which shows the drafts that a target can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.app import app
from slipstream.cli.console import busy, console
from slipstream.cli.options import Device, Dtype, Target, ThreadOptions, with_options
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.drafters.offers import Offer


NONE_WORKS = 1
"""The exit code if no draft can be used."""

draft = typer.Typer(no_args_is_help=True)


app.add_typer(draft, name="draft")


Drafts = Annotated[
    list[str] | None, typer.Argument(metavar="DRAFT...", help="Drafts to try. Without: all that can be tried here.")
]
Json = Annotated[bool, typer.Option("--json", help="A list of objects, nothing else.")]


@draft.callback()
def root() -> None:
    """Drafts for a target.

    Example: slipstream draft list
    """


@draft.command("list")
@with_options(ThreadOptions)
def offered(
    drafts: Drafts = None, target: Target = None, dtype: Dtype = "auto", device: Device = None, as_json: Json = False
) -> None:
    """Try drafts with the target, and say for each what it is or why it cannot be used. Exit code 1 if none can be.

    Example: slipstream draft list lookup "lookup|Qwen/Qwen2.5-0.5B" --target Qwen/Qwen2.5-7B
    """
    from slipstream.drafters.build_context import BuildContext
    from slipstream.drafters.offers import offers
    from slipstream.engine.load import embedded, load

    with busy(console(stderr=True), "loading"):
        source, chosen = embedded(target, dtype)
        engine = load(source, dtype=chosen, device=device)
        context = BuildContext(engine.decoder.target, engine.tokenizer, chosen, device)
        tried = list(offers(context, drafts or ()))
    print(json_text([asdict(offer) for offer in tried], ensure_ascii=False) if as_json else _lines(tried))
    if not any(offer.usable for offer in tried):
        raise typer.Exit(NONE_WORKS)


def _lines(offers: Sequence[Offer]) -> str:
    width = max(len(offer.draft) for offer in offers)
    tried = [
        f"{'yes' if offer.usable else 'no ':3}  {offer.draft:{width}}  {offer.says}"
        for offer in offers
        if offer.usable is not None
    ]
    others = [f"     {offer.draft:{width}}  {offer.says}" for offer in offers if offer.usable is None]
    return "\n".join([*tried, *(["with a name of yours:"] if others else []), *others])
