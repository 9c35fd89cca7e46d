"""Builds the drafter of a draft server, which has no target, and the vocabulary of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from slipstream.core.protocols import Drafter
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram_model import NgramModel
from slipstream.drafters.remote.hello import VocabularySketch
from slipstream.drafters.specification import DrafterTerm, Syntax, drafter, parse
from slipstream.execution.passes import Mode
from slipstream.models.loading.load import find_tokenizer, load_scorer, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED


def build(
    draft: str, dtype: Any = "auto", device: str | None = None, compile: bool = False, tokenizer: str | None = None
) -> tuple[Drafter, VocabularySketch]:
    """Build the drafter of a specification -> the drafter, and the vocabulary of its tokens; `tokenizer` is a name.

    Raises ValueError for a draft that cannot be parsed or loaded, or that needs a target.
    """
    syntax = parse(draft)
    parts = list(_parts(syntax))
    if any(part.kind in ("tcp", "tls") for part in parts):
        raise ValueError("a draft server cannot pass on another one: name that one to the clients.")
    if any("draft_vocab" in dict(part.options) for part in parts):
        raise ValueError("a draft server does not know the target whose tokens draft_vocab counts: leave it out.")
    models = [EMBEDDED / "draft" if part.kind == "embedded" else part.value for part in parts if part.kind in NAMED]
    reader = load_tokenizer(tokenizer) if tokenizer else find_tokenizer(models[-1]) if models else None
    if isinstance(syntax, DrafterTerm) and syntax.kind in NAMED and {*dict(syntax.options)} <= {"dtype", "device"}:
        options = dict(syntax.options)
        place = (options.get("dtype", dtype), options.get("device", device))
        scorer = load_scorer(models[0], *place, Mode(compile))  # perhaps an encoder-decoder
        size = scorer.vocab if reader is None else min(scorer.vocab, _size(reader))  # without ids for padding
        return ModelDrafter(scorer, size), VocabularySketch.of(size, reader)
    sizes = [NgramModel.load(part.value).vocab for part in parts if part.kind == "ngram"]
    if reader is None and not sizes:
        raise ValueError(f"the tokenizer of {draft!r} is unknown: name that of the clients, --tokenizer NAME.")
    size = sizes[0] if sizes else _size(reader)
    # Of the clients' targets only the size of their vocabulary is known.
    target: Any = SimpleNamespace(vocab=size, name="the clients' target", source_form=None)
    context = BuildContext(target, reader, dtype, device, mode=Mode(compile), waits=True)
    return drafter(draft, context), VocabularySketch.of(size, reader)


NAMED = ("model", "embedded")


def _size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _parts(syntax: Syntax) -> Iterator[DrafterTerm]:
    if isinstance(syntax, DrafterTerm):
        yield syntax
        return
    for each in (*getattr(syntax, "among", ()), *getattr(syntax, "parts", ())):
        yield from _parts(each)
