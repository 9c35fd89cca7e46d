"""`slipstream datastore`: index documents to draft from, look at what a folder holds, and forget responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from slipstream.cli.app import app, tell_skipped
from slipstream.cli.console import busy, console
from slipstream.cli.options import Force, Json, Target
from slipstream.files import check_folder
from slipstream.text.documents import read
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.text.documents import Document


Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the datastore.")]
Sources = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help="Text files, .jsonl, .npy (token ids), folders of them.")
]
Field = Annotated[str | None, typer.Option("--field", metavar="NAME", help="Of JSON lines: where the document is.")]
Name = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Whose responses.")]
group = typer.Typer(no_args_is_help=True)


app.add_typer(group, name="datastore")


@group.callback()
def root() -> None:
    """Drafts from documents and past responses.

    Example: slipstream datastore build store src/ answers.jsonl
    """


@group.command()
def build(
    folder: Folder,
    sources: Sources,
    target: Target = None,
    field: Field = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Index documents; generate with --draft datastore:DIR then copies from them.

    JSON lines hold "text", "tokens" (ids) or "messages" (every assistant's content is a document). The corpus appears
    in the folder when it is whole; an interrupted build leaves the one before.

    Example: slipstream datastore build store src/ answers.jsonl --target Qwen/Qwen2.5-7B
    """
    from slipstream.drafters.datastore.corpus import KIND, Corpus
    from slipstream.drafters.datastore.drafter import CORPUS, fingerprint
    from slipstream.models.loading.load import EMBEDDED, load_tokenizer

    if not folder:
        raise ValueError("the datastore has no name: give a folder.")
    check_folder(folder, {CORPUS: KIND}, force, sources)
    screen, skipped = console(stderr=True), list[Path]()
    with busy(screen, "reading") as status:
        tokenizer = load_tokenizer(EMBEDDED / "target" if target is None else target)
        vocab = max(tokenizer.get_vocab().values()) + 1

        def on_progress(depth: int, left: int) -> None:
            if status:
                status.update(f"sorting: {depth} tokens deep, {left} suffixes left")

        documents = list(_encoded(read(sources, field, skipped), tokenizer, status))
        corpus = Corpus.build(documents, vocab, fingerprint(tokenizer), on_progress=on_progress)
        if status:
            status.update("writing")
        Path(folder).mkdir(parents=True, exist_ok=True)
        corpus.save(Path(folder) / CORPUS)
    tell_skipped(skipped)
    _show(folder, as_json)


@group.command()
def info(folder: Folder, as_json: Json = False) -> None:
    """Show what a folder holds: the corpus, and the memory by namespace.

    Example: slipstream datastore info store --json
    """
    _show(folder, as_json)


@group.command()
def forget(folder: Folder, namespace: Name, as_json: Json = False) -> None:
    """Remove all responses of a namespace; their bytes on disk are overwritten.

    Example: slipstream datastore forget store --namespace alice
    """
    from slipstream.drafters.datastore.drafter import MEMORY
    from slipstream.drafters.datastore.memory import forget as remove

    remove(Path(folder) / MEMORY, namespace)
    _show(folder, as_json)


def _encoded(documents: Iterator[tuple[str, Document]], tokenizer: Any, status: Any) -> Iterator[Any]:
    """Yield the token ids of documents, and show their number in `status`."""
    from slipstream.drafters.datastore.corpus import as_ids

    total = 0
    for number, (where, document) in enumerate(documents, 1):
        if isinstance(document, str):
            document = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        ids = as_ids(document)
        total += len(ids)
        if status and not number % 64:
            status.update(escape(f"reading: {number} documents, {total} tokens ({where})"))
        yield ids


def _show(folder: str, as_json: bool) -> None:
    from slipstream.drafters.datastore.corpus import Corpus
    from slipstream.drafters.datastore.drafter import CORPUS, MEMORY
    from slipstream.drafters.datastore.memory import read_totals

    if not folder:
        raise ValueError("the datastore has no name: give a folder.")
    paths = {name: Path(folder) / name for name in (CORPUS, MEMORY)}
    if not any(path.exists() for path in paths.values()):
        raise ValueError(f"{folder} holds no datastore: build one with `slipstream datastore build {folder} FILES`.")
    record: dict[str, Any] = {"folder": folder, "corpus": None, "memory": None}
    if paths[CORPUS].exists():
        corpus = Corpus.load(paths[CORPUS])
        record["corpus"] = {
            "documents": corpus.documents,
            "tokens": len(corpus) - corpus.documents,
            "vocab": corpus.vocab,
            "tokenizer": corpus.tokenizer,
            "bytes": paths[CORPUS].stat().st_size,
        }
    if paths[MEMORY].exists():
        totals = read_totals(paths[MEMORY])
        record["memory"] = {total.namespace: {"entries": total.entries, "bytes": total.bytes} for total in totals}
    print(json_text(record) if as_json else _as_text(record))


def _as_text(record: dict[str, Any]) -> str:
    lines = []
    if corpus := record["corpus"]:
        lines.append("corpus: {documents} documents, {tokens} tokens, {bytes} bytes".format_map(corpus))
    for name, total in (record["memory"] or {}).items():
        lines.append(f"memory of {name}: {total['entries']} responses, {total['bytes']} bytes")
    return "\n".join(lines or ["memory: empty"])
