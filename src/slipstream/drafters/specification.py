"""The language in which users name a draft, and its reading into a Drafter.

A specification names a drafter: a model, or a kind from the table `KINDS`, with its value and options.

    Qwen/Qwen2.5-0.5B      ngram:code.ngram      lookup?max_matching_ngram_size=3&prompt_lookup_num_tokens=10
    ngram:code.ngram>tiny>small       a chain: each drafts for the next, the last for the target
    lookup|small                      a choice: the first that has something to say, row by row
    lookup|small||plain               whichever has given the most tokens per second

`>` binds tighter than `|`, and that tighter than `||`. A prefix is a kind only if the table knows it, so hub names and
folders (C:\\models\\tiny) mean themselves; `model:lookup` is the model of that name, and a path object is never read as
a specification. A new drafter is reached from strings by a line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.core.protocols import Drafter, HasModel, Scorer
from slipstream.decoding.decoder import NoDraft
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.checkpoint_heads import DFlashDrafter, HeadDrafter
from slipstream.drafters.choice import Bandit, Choice
from slipstream.drafters.cross_tokenizer.choose import foreign
from slipstream.drafters.cross_tokenizer.vocabulary import same_vocabulary
from slipstream.drafters.datastore.drafter import (
    MEMORY,
    Datastore,
    DatastoreSettings,
    fingerprint,
    open_corpus,
    open_memory,
)
from slipstream.drafters.datastore.embedding import InputEmbeddings, SentenceEmbedder
from slipstream.drafters.datastore.index import Embedder
from slipstream.drafters.datastore.memory import Limits
from slipstream.drafters.early_exit import ExitDrafter
from slipstream.drafters.heads import HeadsDrafter, ParallelHeads
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import Ngram
from slipstream.drafters.ngram_model import NgramModel
from slipstream.drafters.tree import TreeDrafter, tree_shape
from slipstream.execution.passes import EAGER, Mode
from slipstream.models.dflash import load_dflash
from slipstream.models.eagle3 import load_eagle3
from slipstream.models.layers import read_layers
from slipstream.models.loading import EMBEDDED, find_tokenizer, load_scorer
from slipstream.models.mtp import load_mtp


@dataclass(frozen=True)
class BuildContext:
    """Where a draft has to work: its target, and how models are loaded beside it. `notes` are for the user to read."""

    target: Scorer
    tokenizer: Any = None
    dtype: Any = "auto"
    device: str | None = None
    tree: tuple[int, ...] | None = None
    notes: list[str] = field(default_factory=list)
    mode: Mode = EAGER


@dataclass(frozen=True)
class DrafterKind:
    """A kind of draft: how it is written, what it is, the types of its options, and who builds it.

    A `form` with a colon needs a value. `build(context, value, **options)` raises ValueError in one sentence.
    """

    form: str
    about: str
    build: Callable[..., Drafter]
    options: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One drafter of a specification."""

    kind: str
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Chain:
    """Drafters of drafters, the fastest first; the last one drafts for the target."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class OneOf:
    """Several, of which one drafts: the first that can, or (`measured`) the fastest so far."""

    among: tuple[Syntax, ...]
    measured: bool = False


Syntax = Part | Chain | OneOf


def parse(text: str) -> Syntax:
    """A specification -> its syntax. Raises ValueError for one that cannot be read."""
    for mark in ("||", "|"):
        if mark in text:
            return OneOf(tuple(parse(part) for part in text.split(mark)), measured=mark == "||")
    parts = tuple(_part(part.strip()) for part in text.split(">"))
    return parts[0] if len(parts) == 1 else Chain(parts)


def _part(text: str) -> Part:
    name, mark, tail = text.partition("?")
    prefix, colon, value = name.partition(":")
    kind, value = (prefix, value) if prefix in KINDS else ("model", name)
    if not name:
        raise ValueError(f"a draft has no name: use {forms()}, chains a>b and choices a|b of them.")
    if (":" in KINDS[kind].form) != bool(value) or (kind != "model" and colon and not value):
        raise ValueError(f"draft {text!r} is not possible: write {KINDS[kind].form}.")
    pairs = [pair.partition("=") for pair in tail.split("&")] if mark else []
    for key, equals, _ in pairs:
        if not (key and equals):
            raise ValueError(f"draft {text!r} has an option without a value: write {name}?name=value&name=value.")
    return Part(kind, value, tuple((ALIASES.get(key, key), setting) for key, _, setting in pairs))


def drafter(source: Any, context: BuildContext) -> Drafter:
    """A specification, a folder, a loaded model or a Drafter -> a Drafter for the target of `context`.

    Raises ValueError in one sentence if it cannot be read, loaded, or used with this target.
    """
    if isinstance(source, str):
        syntax = parse(source)
        if context.tree and not (isinstance(syntax, Part) and syntax.kind in MODELS):
            raise ValueError(f"a tree of candidates needs a model as draft, not {source!r}: leave one of them out.")
        return _build(syntax, context)
    if callable(getattr(source, "propose", None)):
        if context.tree:
            raise ValueError("tree=... goes with a model; a Drafter is used as it is: leave one of them out.")
        return source
    return _model(context, source)


def read_tree(tree: Sequence[int] | None, gamma: Any, draft: Any) -> tuple[int, ...] | None:
    """The tree of candidates as it was asked for. Raises ValueError if it is none or does not go with the rest."""
    if tree is None:
        return None
    shape = tree_shape(tree)
    if draft is None:
        raise ValueError("a tree of candidates needs a draft model: give a draft, or leave the tree out.")
    if isinstance(gamma, int):
        raise ValueError(f"tree and gamma={gamma} exclude each other: a tree is as deep as it has levels.")
    return shape


def _build(syntax: Syntax, context: BuildContext) -> Drafter:
    if isinstance(syntax, OneOf):
        among = [_build(one, context) for one in syntax.among]
        return Bandit(among) if syntax.measured else Choice(among)
    if isinstance(syntax, Chain):
        return _chain(syntax.parts, context)
    return KINDS[syntax.kind].build(context, syntax.value, **_options(syntax))


def _chain(parts: Sequence[Part], context: BuildContext) -> Drafter:
    """The last part drafts for the target, with the chain before it as its own draft."""
    *faster, last = parts
    if not faster:
        return _build(last, context)
    if last.kind not in MODELS:
        raise ValueError(f"{last.kind!r} cannot be drafted for: only a model can stand behind a >.")
    model = _build(last, context)
    if not isinstance(model, ModelDrafter):
        raise ValueError(f"{last.value} has another tokenizer than {context.target.name}, so nothing can draft for it.")
    options = dict(faster[-1].options)
    step = {"gamma": _typed("gamma", options.pop("gamma"), int)} if "gamma" in options else {}
    faster[-1] = replace(faster[-1], options=tuple(options.items()))
    inside = replace(context, target=model.scorer, tokenizer=find_tokenizer(_source(last)) or context.tokenizer)
    return ChainDrafter(model.scorer, _chain(faster, inside), model.vocab, **step)


def _source(part: Part) -> Any:
    return EMBEDDED / "draft" if part.kind == "embedded" else part.value


def forms() -> str:
    """Say in one line what can be written."""
    return ", ".join(kind.form for kind in KINDS.values())


def _options(part: Part) -> dict[str, Any]:
    """The options in their own types."""
    known, found = KINDS[part.kind].options, {}
    for name, text in part.options:
        if name not in known:
            allowed = f"it knows {', '.join(known)}" if known else "it has none"
            raise ValueError(f"draft {part.kind!r} has no option {name!r}: {allowed}.")
        found[name] = _typed(name, text, known[name])
    return found


def _typed(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number", switch: "true or false"}.get(kind, kind.__name__)
        raise ValueError(f"draft option {name}={text!r} is not possible: write {wanted}.") from None


# ---- the kinds --------------------------------------------------------------------------------------------------


def _model(
    context: BuildContext,
    source: Any,
    dtype: str | None = None,
    device: str | None = None,
    vocabulary: str | None = None,
) -> Drafter:
    """A hub name, a folder or a loaded model."""
    scorer = load_scorer(source, dtype or context.dtype, device or context.device, context.mode)
    tokenizer = find_tokenizer(source)
    _refuse_reader(context.target, scorer)
    if vocabulary or not same_vocabulary(context.target, scorer, context.tokenizer, tokenizer):
        return _foreign(context, scorer, tokenizer, vocabulary)
    if context.tree:
        return TreeDrafter(scorer, context.tree, context.target.vocab)
    return ModelDrafter(scorer, context.target.vocab)


def _refuse_reader(target: Scorer, draft: Scorer) -> None:
    """An encoder needs a source, in its own form."""
    ours, form = target.source_form, draft.source_form
    if form is None:
        return
    if ours is None:
        raise ValueError(f"{draft.name} is an encoder-decoder, but {target.name} reads no source that it could share.")
    if ours.features != form.features:
        raise ValueError(f"{draft.name} hears other features ({form.features}) than {target.name} ({ours.features}).")


def _foreign(context: BuildContext, scorer: Scorer, tokenizer: Any, method: str | None) -> Drafter:
    """A model with another tokenizer. Raises ValueError if one is missing, or nothing is common."""
    if context.tree:
        raise ValueError(f"a tree of candidates needs a draft with the target's tokenizer, {scorer.name} has another.")
    if scorer.source_form:
        raise ValueError(f"{scorer.name} is an encoder-decoder, so it needs the tokenizer of {context.target.name}.")
    if context.tokenizer is None or tokenizer is None:
        name = context.target.name if context.tokenizer is None else scorer.name
        raise ValueError(
            f"{context.target.name} has {context.target.vocab} tokens and {scorer.name} {scorer.vocab}, and {name} has "
            "no tokenizer to translate with: name a folder that has one, or choose a draft of the target's own family."
        )
    drafter, note = foreign(context.target, scorer, (context.tokenizer, tokenizer), method)
    context.notes.append(note)
    return drafter


def _embedded(context: BuildContext, value: str, **options: Any) -> Drafter:
    return _model(context, EMBEDDED / "draft", **options)


def _ngram(context: BuildContext, file: str, online: bool = False) -> Drafter:
    return Ngram(NgramModel.load(file), context.target.vocab, online)


def _lookup(context: BuildContext, value: str, **options: Any) -> Drafter:
    return Lookup(**options, vocab=context.target.vocab)


def _exit(context: BuildContext, layers: str) -> Drafter:
    return ExitDrafter(_own(context), read_layers(layers))


def _heads(context: BuildContext, folder: str) -> Drafter:
    return HeadsDrafter(_own(context), ParallelHeads.load(folder))


def _eagle3(context: BuildContext, source: str) -> Drafter:
    target = _own(context)
    return HeadDrafter(target, load_eagle3(source, target.model), f"eagle3:{source}")


def _dflash(context: BuildContext, source: str) -> Drafter:
    target = _own(context)
    return DFlashDrafter(target, load_dflash(source, target.model), f"dflash:{source}")


def _mtp(context: BuildContext, value: str) -> Drafter:
    target = _own(context)
    return HeadDrafter(target, load_mtp(target.model, target.name), "mtp")


def _own(context: BuildContext) -> HasModel:
    """The target, where it drafts for itself."""
    if not isinstance(context.target, HasModel) or context.target.source_form:
        raise ValueError(f"{context.target.name} is no causal language model, so it cannot draft for itself.")
    return context.target


def _datastore(
    context: BuildContext,
    folder: str,
    namespace: str = "default",
    learn: bool = False,
    sentence: str | None = None,
    entries: int = Limits.entries,
    **settings: Any,
) -> Drafter:
    """The corpus and the memory of a folder, whichever are there; with `learn`, the memory is made."""
    name, target = fingerprint(context.tokenizer), context.target
    corpus = open_corpus(folder, target.vocab, name)
    memory = None
    if learn or (Path(folder) / MEMORY).exists():
        memory = open_memory(folder, _embedder(context, sentence), name, Limits(entries), make=learn)
    if corpus is None and memory is None:
        raise ValueError(
            f"{folder} holds no datastore: build one with `slipstream datastore build {folder} FILES`, or let it "
            f"learn responses: datastore:{folder}?learn=true."
        )
    return Datastore(target.vocab, corpus, memory, namespace, learn, DatastoreSettings(**settings))


def _embedder(context: BuildContext, sentence: str | None) -> Embedder:
    """How requests are compared: by a sentence model, or by the target's own input embeddings."""
    if sentence:
        if context.tokenizer is None:
            raise ValueError("a sentence model reads text: pass tokenizer=... to load().")
        return SentenceEmbedder(sentence, context.tokenizer.decode, context.device)
    if not isinstance(context.target, HasModel):
        raise ValueError(
            f"{context.target.name} has no input embeddings to compare requests by: name a model, sentence=NAME."
        )
    return InputEmbeddings(context.target.model.get_input_embeddings().weight)


def switch(text: str) -> bool:
    """ "true" or "false", as people write it. Raises ValueError for anything else."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


PLACE: dict[str, Callable[[str], Any]] = {"dtype": str, "device": str}
MODEL: dict[str, Callable[[str], Any]] = {**PLACE, "vocabulary": str}
LOOKUP: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size", "min_matching_ngram_size"), int),
    **dict.fromkeys(("factor", "offset"), float),
}
STORE: dict[str, Callable[[str], Any]] = {
    "namespace": str,
    "learn": switch,
    "sentence": str,
    "entries": int,
    "factor": float,
    "offset": float,
    "chance": float,
    "nearest": int,
    "own": switch,
}

KINDS: dict[str, DrafterKind] = {
    "model": DrafterKind("model:NAME", "a smaller model, by hub name or folder", _model, MODEL),
    "embedded": DrafterKind("embedded", "the small draft model that ships with the package", _embedded, PLACE),
    "ngram": DrafterKind(
        "ngram:FILE", "an n-gram model, built by `slipstream ngram build`", _ngram, {"online": switch}
    ),
    "datastore": DrafterKind(
        "datastore:DIR",
        "copies from documents and past responses, built by `slipstream datastore build`",
        _datastore,
        STORE,
    ),
    "plain": DrafterKind("plain", "no draft: plain decoding, as one of several", lambda context, value: NoDraft()),
    "lookup": DrafterKind("lookup", "copies what followed the last tokens when they occurred before", _lookup, LOOKUP),
    "exit": DrafterKind(
        "exit:LAYERS", "the target's own first layers, or others as in 0-3,8-11; see `slipstream exits`", _exit
    ),
    "mtp": DrafterKind("mtp", "the target's own heads for several tokens, where its checkpoint has them", _mtp),
    "eagle3": DrafterKind("eagle3:NAME", "an EAGLE-3 draft of the target, by hub name or folder", _eagle3),
    "dflash": DrafterKind("dflash:NAME", "a DFlash draft of the target: a block of tokens in one call", _dflash),
    "heads": DrafterKind("heads:DIR", "parallel heads, trained by `slipstream heads train`", _heads),
}
"""kind -> how it is written and built."""

MODELS = ("model", "embedded")

ALIASES = {"prompt_lookup_max": "max_matching_ngram_size", "prompt_lookup_min": "min_matching_ngram_size"}
"""Names of options in other engines."""
