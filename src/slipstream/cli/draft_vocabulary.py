"""The command `slipstream draft vocabulary`, which counts a target's tokens for drafts cut to the frequent ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.app import INTERRUPTED, say
from slipstream.cli.console import busy, console, progress
from slipstream.cli.draft import draft as commands
from slipstream.cli.options import (
    BatchSize,
    Chat,
    Device,
    Draft,
    Dtype,
    File,
    Force,
    Prompts,
    Quantize,
    ReportJson,
    Target,
    ThreadOptions,
    options_of,
    with_options,
)
from slipstream.files import check_writable
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import gather, usable

if TYPE_CHECKING:
    from slipstream.drafters.frequent_tokens import TokenCounts

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""The numbers of most frequent tokens whose share of the text is reported."""

WRITING = ("max_new_tokens", "temperature", "seed")
"""The options of the texts that are written."""

Out = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The counts. Without: kept for this target, so that draft_vocab=N finds them."),
]


@dataclass(frozen=True)
class CountReport:
    """The report of a count: the amount of text, and the `shares` (0 to 1) that the n most frequent tokens make up."""

    file: str
    target: str
    vocab: int
    texts: int
    tokens: int
    different: int
    shares: dict[int, float]

    @staticmethod
    def of(counts: TokenCounts, file: str) -> CountReport:
        """Create the report on counts that were written to `file`."""
        vocab = len(counts.counts)
        shares = {size: counts.share(counts.most_frequent(size)) for size in SIZES if size < vocab}
        return CountReport(file, counts.target, vocab, counts.texts, counts.total, counts.different, shares)


@commands.command("vocabulary")
@with_options(ThreadOptions, options_of(WRITING, temperature=1.0))
def count(
    context: typer.Context,
    prompts: Prompts = None,
    file: File = None,
    chat: Chat = False,
    out: Out = None,
    target: Target = None,
    draft: Draft = None,
    quantize: Quantize = None,
    dtype: Dtype = "auto",
    device: Device = None,
    batch_size: BatchSize = 8,
    force: Force = False,
    as_json: ReportJson = False,
) -> None:
    """Count the tokens of texts that the target writes, so that a draft can know the frequent ones only.

    Then: slipstream generate --draft "int4?draft_vocab=2048", or draft_vocab=FILE. A --draft makes the counting faster.

    Example: slipstream draft vocabulary --target Qwen/Qwen3-1.7B --prompts prompts.jsonl --out mine.counts
    """
    from slipstream.drafters.frequent_tokens import KIND, TokenCounts, kept_counts
    from slipstream.engine.engine import Interrupted
    from slipstream.engine.load import embedded, load

    items = usable(gather(prompts or [], file, chat))
    if out is not None:
        check_writable(out, KIND, force, [file] if file else [])
    with busy(console(stderr=True), "loading"):
        source, exact = embedded(target, dtype)
        engine = load(source, draft, dtype=exact, device=device, batch_size=batch_size, quantize=quantize)
    options: dict[str, Any] = {name: context.params[name] for name in WRITING}
    try:
        with progress(console(stderr=True), len(items), options["max_new_tokens"]) as on_round:
            completions = engine.generate([item.prompt for item in items], on_round=on_round, **options)
    except (Interrupted, KeyboardInterrupt):
        say("interrupted: no counts were written.")
        raise typer.Exit(INTERRUPTED) from None
    scorer, tokenizer = engine.decoder.target, engine.tokenizer
    counts = TokenCounts.of([each.tokens for each in completions], scorer.vocab, scorer.name, tokenizer)
    place = Path(out) if out else kept_counts(scorer.name, scorer.vocab, tokenizer)
    place.parent.mkdir(parents=True, exist_ok=True)
    counts.save(place)
    report = CountReport.of(counts, str(place))
    print(json_text(asdict(report)) if as_json else _report_text(report, kept=out is None))


def _report_text(report: CountReport, kept: bool) -> str:
    """Return the report as lines of text; `kept`: the counts are in the target's default file."""
    shares = [f"{size:>8} tokens make up {share:.2%}" for size, share in report.shares.items()]
    written = f"{report.target} wrote {report.tokens} tokens in {report.texts} texts, {report.different} different ones"
    name = "2048" if kept else report.file
    use = f'use it: slipstream generate --draft "int4?draft_vocab={name}"' + ("" if kept else f", or 2048:{name}")
    return "\n".join([f"{report.file}: {written} of {report.vocab}", *shares, use])
