"""The builders of `slipstream draft build`: each returns a report, as an object and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream.cli.console import busy, progress
from slipstream.cli.settings import read_documents
from slipstream.engine.load import alone, load
from slipstream.files import check_folder, check_writable
from slipstream.models.loading import load as models
from slipstream.text.prompts import gather, usable

Built = tuple[dict[str, Any], str]
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # frequent tokens whose share is reported


def _documents(sources: Sequence[str], params: dict[str, Any]) -> tuple[Any, list[Any]]:
    with busy("reading"):
        return read_documents(params["target"], sources, params["field"])


def ngram(file: str, sources: Sequence[str], params: dict[str, Any]) -> Built:
    from slipstream.drafters.ngram import KIND, NgramModel

    check_writable(file, KIND, params["force"], sources)
    start, (_, ids) = perf_counter(), _documents(sources, params)
    size = params["vocab"] or models.vocabulary("embedded" if params["target"] is None else params["target"])
    with busy("counting"):
        model = NgramModel.fit(ids, params["order"], size)
        model.save(file)
    tokens, seconds = sum(map(len, ids)), perf_counter() - start
    report = {"file": file, "order": model.order, "vocab": size, "file_bytes": Path(file).stat().st_size}
    report |= {"ngrams": model.sizes, "documents": len(ids), "tokens": tokens, "seconds": seconds}
    built = f"{file}: {model.facts}\nbuilt from {tokens} tokens of {len(ids)} documents in {seconds:.1f} s"
    return report, f"{built}\nuse it: slipstream generate --draft ngram:{file}"


def datastore(folder: str, sources: Sequence[str], params: dict[str, Any]) -> Built:
    from slipstream.drafters.datastore.corpus import KIND, Corpus
    from slipstream.drafters.datastore.drafter import CORPUS, fingerprint

    check_folder(folder, {CORPUS: KIND}, params["force"], sources)
    tokenizer, documents = _documents(sources, params)
    with busy("sorting"):
        corpus = Corpus.build(documents, max(tokenizer.get_vocab().values()) + 1, fingerprint(tokenizer))
        Path(folder).mkdir(parents=True, exist_ok=True)
        corpus.save(Path(folder) / CORPUS)
    tokens, size = len(corpus) - corpus.documents, (Path(folder) / CORPUS).stat().st_size
    report = {"folder": folder, "documents": corpus.documents, "tokens": tokens, "vocab": corpus.vocab, "bytes": size}
    return report, f"{folder}: {corpus.facts}, {size} bytes\nuse it: slipstream generate --draft datastore:{folder}"


def vocabulary(file: str, sources: Sequence[str], params: dict[str, Any]) -> Built:
    from slipstream.drafters.frequent_tokens import KIND, TokenCounts, kept_counts

    prompts = [item.prompt for source in sources for item in usable(gather([], source, params["chat"]))]
    if file:
        check_writable(file, KIND, params["force"], sources)
    with busy("loading"):
        target, dtype = alone(params["target"], params["dtype"])
        how = {name: params[name] for name in ("device", "quantize", "batch_size")}
        engine = load(target, dtype=dtype, **how)
    options = {name: params[name] for name in ("max_new_tokens", "temperature", "seed")}
    with progress(len(prompts), options["max_new_tokens"]) as on_round:
        completions = engine.generate(prompts, on_round=on_round, **options)
    scorer = engine.decoder.target
    counts = TokenCounts.of([each.tokens for each in completions], scorer.vocab, scorer.name, engine.tokenizer)
    place = Path(file) if file else kept_counts(scorer.name, scorer.vocab, engine.tokenizer)
    place.parent.mkdir(parents=True, exist_ok=True)
    counts.save(place)
    shares = {size: counts.share(counts.most_frequent(size)) for size in SIZES if size < scorer.vocab}
    report = {"file": str(place), "target": counts.target, "vocab": scorer.vocab, "texts": counts.texts}
    report |= {"tokens": counts.total, "different": counts.different, "shares": shares}
    written = f"{counts.target} wrote {counts.total} tokens in {counts.texts} texts, {counts.different} different ones"
    use = f'use it: slipstream generate --draft "int4?draft_vocab={f"2048:{file}" if file else 2048}"'
    lines = [f"{size:>8} tokens make up {share:.2%}" for size, share in shares.items()]
    return report, "\n".join([f"{place}: {written} of {scorer.vocab}", *lines, use])


@dataclass(frozen=True)
class Builder:
    """How a kind of draft is built, the options that it has besides those of all, and whether its file is named."""

    build: Callable[[str, Sequence[str], dict[str, Any]], Built]
    options: frozenset[str]
    needs_place: bool = True


DOCUMENTS = frozenset({"field", "force"})
WRITTEN = frozenset(
    {"dtype", "device", "seed", "chat", "max_new_tokens", "temperature", "batch_size", "quantize", "force"}
)

BUILDERS = {  # kinds of drafts that can be built
    "ngram": Builder(ngram, DOCUMENTS | {"order", "vocab"}),
    "datastore": Builder(datastore, DOCUMENTS),
    "vocabulary": Builder(vocabulary, WRITTEN, needs_place=False),
}
