"""`slipstream ngram`: build n-gram models to draft with, and show what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from slipstream.cli.app import INTERRUPTED, app, say, tell_skipped
from slipstream.cli.console import console
from slipstream.cli.options import Force
from slipstream.files import check_writable
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.text.documents import Document

ngram = typer.Typer(no_args_is_help=True)


app.add_typer(ngram, name="ngram")


Texts = Annotated[
    list[str],
    typer.Argument(metavar="TEXT...", help="Files of text or JSON lines, also .gz, folders of them, dataset:NAME."),
]
Out = Annotated[str, typer.Option(metavar="FILE", help="The model; it appears when it is whole.")]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", "--target", metavar="MODEL", help="Whose tokens to count. Without: the embedded target's."
    ),
]
Order = Annotated[int, typer.Option(metavar="N", min=1, max=5, help="The longest n-gram.")]
Vocab = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Size of the target's logits, if it has no config.json.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")]

BATCH = 1 << 20
"""The bytes of text that are tokenized together."""


@ngram.callback()
def root() -> None:
    """N-gram models: drafts by table lookup, built from your own text.

    Example: slipstream ngram build src docs --out mine.ngram
    """


@ngram.command()
def build(
    text: Texts,
    out: Out,
    tokenizer: Tokens = None,
    order: Order = 3,
    vocab: Vocab = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Count the n-grams of a text and write a model for `--draft ngram:FILE`.

    Example: slipstream ngram build src docs notes.jsonl.gz --target Qwen/Qwen2.5-7B --order 3 --out mine.ngram
    """
    from slipstream.drafters.ngram_model import KIND, NgramModel
    from slipstream.models.loading.load import EMBEDDED, load_tokenizer, vocabulary
    from slipstream.text.documents import read

    start, target = perf_counter(), EMBEDDED / "target" if tokenizer is None else tokenizer
    check_writable(out, KIND, force, text)
    words, size = load_tokenizer(target), vocab or vocabulary(target)
    counted = Counter[str](documents=0, bytes=0)
    skipped = list[Path]()
    try:
        with _bar() as bar:
            ids = list(_tokens(read(text, skipped=skipped), words, counted, bar))
            bar.add_task("counting", total=None)
            model = NgramModel.fit(ids, order, size)
        model.save(out)
    except KeyboardInterrupt:
        say(f"interrupted: {out} was not written.")
        raise typer.Exit(INTERRUPTED) from None
    tell_skipped(skipped)
    seconds = perf_counter() - start
    speed = {"seconds": seconds, "megabytes_per_second": counted["bytes"] / 1e6 / seconds}
    _tell({**_facts(out, model), **counted, "tokens": sum(map(len, ids)), **speed}, as_json)


@ngram.command()
def info(file: Annotated[str, typer.Argument(metavar="FILE")], as_json: Json = False) -> None:
    """Show what an n-gram model holds.

    Example: slipstream ngram info mine.ngram
    """
    from slipstream.drafters.ngram_model import NgramModel

    _tell(_facts(file, NgramModel.load(file)), as_json)


def _tokens(
    documents: Iterable[tuple[str, Document]], tokenizer: Any, counted: Counter[str], bar: Progress
) -> Iterator[Any]:
    """Yield the token ids of every document; several texts are tokenized at once, which is faster."""
    import numpy as np

    def ids(some: list[str]) -> Iterator[Any]:
        encoded = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        yield from (np.asarray(one, np.int32) for one in encoded)

    task, waiting, size = bar.add_task("reading", total=None), list[str](), 0
    for _, document in documents:
        counted["documents"] += 1
        if not isinstance(document, str):
            yield document
            continue
        new = len(document.encode())
        counted["bytes"] += new
        bar.advance(task, new)
        waiting, size = [*waiting, document], size + new
        if size >= BATCH:
            yield from ids(waiting)
            waiting, size = [], 0
    if waiting:
        yield from ids(waiting)


def _bar() -> Progress:
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeElapsedColumn(), console=screen, transient=True, disable=not screen.is_terminal)


def _facts(file: str, model: Any) -> dict[str, Any]:
    grams = [model.vocab, *(len(table.tokens) for table in model.tables)]
    return {
        "file": file,
        "order": model.order,
        "vocab": model.vocab,
        "ngrams": grams,
        "file_bytes": Path(file).stat().st_size,
    }


def _tell(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json_text(facts))
        return
    grams = ", ".join(f"{count} of order {n}" for n, count in enumerate(facts["ngrams"], 1))
    print(f"{facts['file']}: order {facts['order']}, {facts['vocab']} token ids, {facts['file_bytes'] / 1e6:.1f} MB")
    print(f"n-grams: {grams}")
    if "tokens" in facts:
        print(
            f"built from {facts['tokens']} tokens of {facts['documents']} documents ({facts['bytes'] / 1e6:.1f} MB) in "
            f"{facts['seconds']:.1f} s, {facts['megabytes_per_second']:.1f} MB/s"
        )
        print(f"use it: slipstream generate --draft ngram:{facts['file']}")
