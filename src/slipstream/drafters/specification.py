"""Parses the specification strings with which users name a draft, and builds Drafters from them.

A specification names a drafter: a model, or a kind from the table `KINDS`, with its value and options.

    Qwen/Qwen2.5-0.5B      ngram:code.ngram      lookup?max_matching_ngram_size=3&prompt_lookup_num_tokens=10
    Qwen/Qwen2.5-0.5B?quantize=int8           a model with weights in 8 bits
    ngram:code.ngram>tiny>small       a chain: each drafts for the next, the last for the target
    lookup|small                      a choice: the first that returns a draft, row by row
    lookup|small||plain               the one that was measured to be the fastest so far

`>` binds tighter than `|`, and that tighter than `||`. A prefix is a kind only if it is in the table, so hub names and
folders (C:\\models\\tiny) need no prefix; `model:lookup` is the model of that name, and a path object is never parsed
as a specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.core.protocols import Drafter
from slipstream.core.values import switch
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.choice import Bandit, Choice
from slipstream.drafters.frequent_tokens import FrequentTokens
from slipstream.drafters.kinds import ALIASES, KINDS, MODELS, QUANTIZED, build_model
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import tree_shape
from slipstream.kernels.quantization import Precision
from slipstream.models.loading.adapters import merged
from slipstream.models.loading.load import find_tokenizer
from slipstream.models.loading.pairings import EMBEDDED

VOCABULARIES = "a number of tokens, a file of counts, or NUMBER:FILE"


@dataclass(frozen=True)
class DrafterTerm:
    """A single drafter of a specification: its kind, its value and its options."""

    kind: str
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Chain:
    """Drafters of drafters, the fastest first; the last one drafts for the target."""

    parts: tuple[DrafterTerm, ...]


@dataclass(frozen=True)
class OneOf:
    """Several alternatives, one of which drafts: the first that can, or (`measured`) the fastest so far."""

    among: tuple[Syntax, ...]
    measured: bool = False


Syntax = DrafterTerm | Chain | OneOf


def parse(text: str) -> Syntax:
    for mark in ("||", "|"):
        if mark in text:
            return OneOf(tuple(parse(part) for part in text.split(mark)), measured=mark == "||")
    parts = tuple(_part(part.strip()) for part in text.split(">"))
    return parts[0] if len(parts) == 1 else Chain(parts)


def _part(text: str) -> DrafterTerm:
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
    options = [(key.replace("-", "_"), setting) for key, _, setting in pairs]
    return DrafterTerm(kind, value, tuple((ALIASES.get(key, key), setting) for key, setting in options))


def drafter(source: Any, context: BuildContext) -> Drafter:
    if isinstance(source, str):
        syntax = parse(source)
        if context.tree and not (isinstance(syntax, DrafterTerm) and syntax.kind in MODELS):
            raise ValueError(f"a tree of candidates needs a model as draft, not {source!r}: leave one of them out.")
        return _build(syntax, context)
    if callable(getattr(source, "propose", None)):
        if context.tree:
            raise ValueError("tree=... goes with a model; a Drafter is used as it is: leave one of them out.")
        return source
    return build_model(context, merged(source))


def read_tree(tree: Sequence[int] | None, gamma: Any, draft: Any) -> tuple[int, ...] | None:
    if tree is None:
        return None
    shape = tree_shape(tree)
    if draft is None:
        raise ValueError("a tree of candidates needs a draft model: give a draft, or leave the tree out.")
    if isinstance(gamma, int):
        raise ValueError(f"tree and gamma={gamma} exclude each other: a tree is as deep as it has levels.")
    return shape


def paths_shape(paths: int, depth: int, tree: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the shape of the tree that consists of `paths` independent paths of `depth` tokens."""
    if tree is not None:
        raise ValueError(f"verify='gbv:{paths}' drafts {paths} paths, so it cannot have a tree: leave one of them out.")
    return tree_shape((paths, *(1,) * (max(depth, 1) - 1)))


def _build(syntax: Syntax, context: BuildContext) -> Drafter:
    if isinstance(syntax, OneOf):
        among = [_build(one, context) for one in syntax.among]
        return Bandit(among) if syntax.measured else Choice(among)
    if isinstance(syntax, Chain):
        return _chain(syntax.parts, context)
    try:
        known, values = KINDS[syntax.kind].options, dict[str, Any]()
        for name, text in syntax.options:
            if name not in known:
                allowed = f"it knows {', '.join(known)}" if known else "it has none"
                raise ValueError(f"draft {syntax.kind!r} has no option {name!r}: {allowed}.")
            values[name] = _typed(name, text, known[name])
        return KINDS[syntax.kind].build(context, syntax.value, **values)
    except ValueError as error:
        if syntax.kind != "model" or "/" in syntax.value or Path(syntax.value).exists():
            raise
        near = get_close_matches(syntax.value.partition(":")[0], KINDS, 1)
        others = f"Did you mean {KINDS[near[0]].form}?" if near else f"Besides models a draft is {forms()}."
        raise ValueError(f"{error} {others}") from error


def _chain(parts: Sequence[DrafterTerm], context: BuildContext) -> Drafter:
    *faster, last = parts
    if not faster:
        return _build(last, context)
    if last.kind not in MODELS:
        raise ValueError(f"{last.kind!r} cannot be drafted for: only a model can stand behind a >.")
    model = _build(last, replace(context, drafted=True))
    if not isinstance(model, ModelDrafter):
        raise ValueError(f"{last.value} has another tokenizer than {context.target.name}, so nothing can draft for it.")
    options = dict(faster[-1].options)
    step = {"gamma": _typed("gamma", options.pop("gamma"), int)} if "gamma" in options else {}
    faster[-1] = replace(faster[-1], options=tuple(options.items()))
    source: Any = EMBEDDED / "draft" if last.kind == "embedded" else last.value
    own = None if last.kind in QUANTIZED else find_tokenizer(source)
    inside = replace(context, target=model.scorer, tokenizer=own or context.tokenizer)
    return ChainDrafter(model.scorer, _chain(faster, inside), model.vocab, **step)


def forms() -> str:
    return ", ".join(kind.form for kind in KINDS.values())


def _typed(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = {
            int: "a whole number",
            float: "a number",
            switch: "true or false",
            FrequentTokens.parse: VOCABULARIES,
            Precision.read: "int8, int4, or with a group as int4?group=64",
        }.get(kind, kind.__name__)
        raise ValueError(f"draft option {name}={text!r} is not possible: write {wanted}.") from None


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
    syntax, about = parse(draft), "a chain: each drafts for the next, the last for the target"
    if isinstance(syntax, DrafterTerm):
        about = KINDS[syntax.kind].about
    elif isinstance(syntax, OneOf):
        about = "a choice: the fastest so far" if syntax.measured else "a choice: for each text the first that can"
    return Offer(draft, True, "; ".join(filter(None, [about, getattr(built, "facts", ""), *context.notes[known:]])))
