"""`slipstream draft`: builds drafts from texts, says what a target can draft with, forgets stored responses."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import app
from slipstream.cli.console import busy
from slipstream.text.jsontext import json_text

NONE_WORKS = 1  # exit code if no draft can be used
drafts = typer.Typer(no_args_is_help=True)
app.add_typer(drafts, name="draft")


@drafts.callback()
def root() -> None:
    """Drafts for a target.

    Example: slipstream draft list
    """


Name = Annotated[
    str,
    typer.Argument(metavar="DRAFT", help="ngram:FILE, datastore:DIR, vocabulary, or vocabulary:FILE elsewhere."),
]
Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE...",
        help="Text, JSON lines, also .gz, .npy (token ids), folders of them, dataset:NAME; for vocabulary, files of "
        "prompts.",
    ),
]
Read = opt.panel(None, field=opt.own(str | None, None, "Of JSON lines: where the document is.", "NAME"), chat=opt.CHAT)
Ngrams = opt.panel(
    "ngram:FILE",
    order=opt.own(int, 3, "The longest n-gram.", "N", min=1, max=5),
    vocab=opt.own(int | None, None, "Size of the target's logits; else by its config.", "N"),
)
Writing = opt.options_of(
    ("max_new_tokens", "temperature", "seed", "batch_size", "quantize"),
    max_new_tokens=64,
    temperature=1.0,
    batch_size=8,
)
Output = opt.panel("Output", force=opt.FORCE, as_json=opt.REPORT_JSON)


@drafts.command()
@opt.with_options(opt.options_of(["target"]), Read, opt.Where, Ngrams, Writing, Output)
def build(context: typer.Context, name: Name, sources: Sources = None) -> None:
    """Build a draft for a target, which --draft then takes by the same name.

    ngram and datastore are made of documents; JSON lines hold "text", "tokens" (ids) or "messages" (of which every
    assistant's content is a document). Files appear when they are whole.

    vocabulary counts the tokens that the target writes, for drafts that know the frequent ones only:
    --draft "int4?draft_vocab=2048".

    Example: slipstream draft build ngram:mine.ngram src notes.jsonl.gz --target Qwen/Qwen2.5-7B
    """
    from slipstream.cli.draft_builders import BUILDERS

    kind, _, place = name.partition(":")
    if kind not in BUILDERS or (not place and BUILDERS[kind].needs_place):
        forms = "ngram:FILE, datastore:DIR, vocabulary or vocabulary:FILE"
        raise ValueError(f"{name!r} cannot be built: give {forms}.")
    if not sources:
        raise ValueError(f"{name} is made of texts: give a SOURCE, such as a file or a folder.")
    builder, common = BUILDERS[kind], {"name", "sources", "target", "as_json", "threads"}
    opt.refuse_others(context, common | builder.options, f"{kind} is built without them")
    report, text = builder.build(place, sources, context.params)
    print(json_text(report) if context.params["as_json"] else text)


Drafts = Annotated[
    list[str] | None, typer.Argument(metavar="DRAFT...", help="Drafts to try. Without: all that can be tried here.")
]
Listed = opt.panel("Output", as_json=opt.own(bool, False, "A list of objects, nothing else.", flag="--json"))


@drafts.command("list")
@opt.with_options(opt.options_of(["target"]), opt.Where, Listed)
def offered(context: typer.Context, drafts: Drafts = None) -> None:
    """Try drafts with the target, and say for each what it is or why it cannot be used. Exit code 1 if none can be.

    Example: slipstream draft list lookup "lookup|Qwen/Qwen2.5-0.5B" --target Qwen/Qwen2.5-7B
    """
    from slipstream.drafters.build_context import BuildContext
    from slipstream.drafters.specification import offers
    from slipstream.engine.load import alone, load

    params = context.params
    with busy("loading"):
        source, dtype = alone(params["target"], params["dtype"])
        engine = load(source, dtype=dtype, device=params["device"])
        here = BuildContext(engine.decoder.target, engine.tokenizer, dtype, params["device"])
        found = list(offers(here, drafts or ()))
    if params["as_json"]:
        print(json_text([asdict(offer) for offer in found], ensure_ascii=False))
    else:
        width = max(len(offer.draft) for offer in found)
        marks = {True: "yes", False: "no ", None: "   "}
        lines = [f"{marks[offer.usable]}  {offer.draft:{width}}  {offer.says}" for offer in found]
        tried = sum(offer.usable is not None for offer in found)  # those that need a name or a file come last
        print("\n".join([*lines[:tried], *["with a name of yours:"][: len(lines) - tried], *lines[tried:]]))
    if not any(offer.usable for offer in found):
        raise typer.Exit(NONE_WORKS)


Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the datastore.")]
Namespace = Annotated[str, typer.Option(metavar="NAME", help="Whose responses.")]


@drafts.command()
def forget(folder: Folder, namespace: Namespace) -> None:
    """Remove the responses of a namespace from a datastore; their bytes on disk are overwritten.

    Example: slipstream draft forget store --namespace alice
    """
    from slipstream.drafters.datastore.drafter import MEMORY
    from slipstream.drafters.datastore.memory import forget as remove

    remove(Path(folder) / MEMORY, namespace)
