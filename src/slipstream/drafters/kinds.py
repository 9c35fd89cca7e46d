"""The kinds of drafts: the specification string of each, what it is, and how it is built for a target.

A builder that `kind` registers makes a new drafter available in specification strings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slipstream.core.protocols import Drafter, HasModel, LiesOnRanks, Scorer, SeesWindows
from slipstream.core.values import switch
from slipstream.decoding.decoder import NoDraft
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.cross_tokenizer.token_intersection import foreign
from slipstream.drafters.cross_tokenizer.vocabulary import same_vocabulary
from slipstream.drafters.datastore.drafter import MEMORY, Datastore, DatastoreSettings, fingerprint, open_corpus
from slipstream.drafters.datastore.embedding import InputEmbeddings
from slipstream.drafters.datastore.memory import NamespaceLimits, ResponseMemory
from slipstream.drafters.frequent_tokens import FrequentTokens
from slipstream.drafters.heads import DFlashDrafter, HeadDrafter
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.ngram import Ngram, NgramModel
from slipstream.drafters.phrases import PhraseDrafter, Phrases
from slipstream.drafters.remote.drafter import RemoteDrafter
from slipstream.drafters.remote.frames import VocabularySketch, read_key
from slipstream.drafters.remote.link import DraftConnection, Settings, split_address
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.execution.draft_graphs import DraftsInGraphs
from slipstream.kernels.quantization import NEAREST, Precision
from slipstream.models.heads.dflash import load_dflash
from slipstream.models.heads.eagle3 import load_eagle3
from slipstream.models.heads.mtp import load_mtp
from slipstream.models.layers import part_of
from slipstream.models.loading.load import find_tokenizer, load_scorer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.models.loading.twins import quantized_part, quantized_twin

Builder = Callable[..., Drafter]  # `build(context, value, **options)`; raises ValueError in one sentence
Parsers = Mapping[str, Callable[[str], Any]]
AScorer = TypeVar("AScorer")


@dataclass(frozen=True)
class DrafterKind:
    """A kind of draft, its builder, and the types of its options; a `form` with a colon needs a value."""

    form: str
    about: str
    build: Builder
    options: Parsers


KINDS: dict[str, DrafterKind] = {}  # the kinds of drafts by their names in specifications


def kind(form: str, about: str, **options: Callable[[str], Any]) -> Callable[[Builder], Builder]:
    """Register a builder under the name that its `form` begins with."""

    def register(build: Builder) -> Builder:
        KINDS[form.partition(":")[0]] = DrafterKind(form, about, build, options)
        return build

    return register


CUT: Parsers = {"draft_vocab": FrequentTokens.parse}
MODEL: Parsers = {"dtype": str, "device": str, **CUT, "quantize": Precision.read, "adapter": str}
OWN_WEIGHTS: Parsers = {"group": int, "rounding": str, **CUT}
FILES: Parsers = {"key_file": str, "ca_file": str}
SERVER: Parsers = {"timeout_ms": float, "trust": switch, "top": int, "ahead": switch, **FILES}
QUANTIZED = ("int4", "int8")
MODELS = ("model", "embedded", *QUANTIZED)

ALIASES = {"prompt_lookup_max": "max_matching_ngram_size", "prompt_lookup_min": "min_matching_ngram_size"}
"""The names of options in other engines, with ours."""


@kind("model:NAME", "a smaller model, by hub name or folder", **MODEL, vocabulary=str)
def build_model(
    context: BuildContext,
    source: Any,
    vocabulary: str | None = None,
    draft_vocab: FrequentTokens | None = None,
    **loading: Any,
) -> Drafter:
    """Build the drafter for a draft model: a hub name, a folder or a loaded model."""
    dtype, device = loading.pop("dtype", None) or context.dtype, loading.pop("device", None) or context.device
    mode = replace(context.mode, precision=loading.pop("quantize", None))
    scorer = load_scorer(source, dtype, device, mode, context.kept_tokens(draft_vocab), **loading)
    tokenizer = find_tokenizer(source, adapter=loading.get("adapter"))
    target, name, form = context.target, scorer.name, scorer.source_form
    if form is not None and (ours := target.source_form) is None:
        raise ValueError(f"{name} is an encoder-decoder, but {target.name} reads no source that it could share.")
    if form is not None and ours is not None and ours.features != form.features:
        raise ValueError(f"{name} takes other features ({form.features}) than {target.name} ({ours.features}).")
    if vocabulary or not same_vocabulary(context.target, scorer, context.tokenizer, tokenizer):
        if draft_vocab:
            raise ValueError(f"draft_vocab counts the target's tokens, and {scorer.name} has others: leave it out.")
        return _foreign(context, scorer, tokenizer, vocabulary)
    return context.drafting(scorer)


def _foreign(context: BuildContext, scorer: Scorer, tokenizer: Any, method: str | None) -> Drafter:
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


@kind("embedded", "the small draft model that ships with the package", **MODEL)
def embedded(context: BuildContext, value: str, **options: Any) -> Drafter:
    return build_model(context, EMBEDDED / "draft", **options)


@kind("ngram:FILE", "an n-gram model, by `slipstream draft build`")
def ngram(context: BuildContext, file: str) -> Drafter:
    return Ngram(NgramModel.load(file), context.target.vocab)


@kind("plain", "no draft: plain decoding, as one of several")
def plain(context: BuildContext, value: str) -> Drafter:
    return NoDraft()


@kind(
    "lookup",
    "copies what followed the last tokens when they occurred before",
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size", "min_matching_ngram_size"), int),
    **dict.fromkeys(("factor", "offset"), float),
)
def lookup(context: BuildContext, value: str, **options: Any) -> Drafter:
    return Lookup(**options, vocab=context.target.vocab)


@kind("phrases:FILE", "copies, and what the target often writes next; phrases:smollm2 ships with the package")
def phrases(context: BuildContext, file: str) -> Drafter:
    shipped = EMBEDDED / f"{file}.phrases"
    return PhraseDrafter(Phrases.load(shipped if shipped.is_file() else file), context.target.vocab)


@kind("exit:LAYERS", "the target's own first layers, as exit:4")
def exit_layers(context: BuildContext, layers: str) -> Drafter:
    if not layers.isdecimal():
        raise ValueError(f"exit:{layers} is not possible: write the number of first layers to run, as exit:4.")
    return SameRowsDrafter(part_of(_own(context), int(layers)))


def quantized(
    precision: str,
    context: BuildContext,
    value: str,
    group: int | None = None,
    rounding: str = NEAREST,
    draft_vocab: FrequentTokens | None = None,
) -> Drafter:
    """Build the drafter of the target's quantized weights, on its cache unless it needs one of its own."""
    target, weights = context.target, Precision.named(precision, group, rounding)
    if not isinstance(target, HasModel):
        raise ValueError(f"{target.name} has no weights to quantize: use another draft.")
    _refuse_ranks(target)
    kept, progress = context.kept_tokens(draft_vocab), context.mode.progress
    if not target.shares_rows or context.tree or context.drafted:
        twin = quantized_twin(target.model, target.name, weights, kept, progress)
        return context.drafting(load_scorer(twin, mode=replace(context.mode, packed=False)))
    return SameRowsDrafter(_graphed(context, quantized_part(target, weights, kept, progress)))


kind("int8", "the target's own weights in 8 bits, on its own cache", **OWN_WEIGHTS)(partial(quantized, "int8"))
kind("int4", "the target's own weights in 4 bits, on its own cache", **OWN_WEIGHTS)(partial(quantized, "int4"))


def _graphed(context: BuildContext, scorer: AScorer) -> AScorer:
    runs_fast = getattr(context.target, "execution", None) is not None
    if runs_fast and context.mode.ahead is not None and isinstance(scorer, DraftsInGraphs):
        scorer.make_draft_graphs(context.mode.ahead, context.mode.progress)
    return scorer


SINKS = 4  # the first tokens of a text, which get much attention in every text (arXiv 2309.17453)


@kind(
    "window:TOKENS",
    "the target itself, seeing the end of a long text only; weights=int4 makes it cheaper",
    sinks=int,
    weights=str,
    group=int,
)
def window(
    context: BuildContext, tokens: str, sinks: int = SINKS, weights: str | None = None, group: int | None = None
) -> Drafter:
    target = _own(context)
    if not tokens.isdecimal() or int(tokens) < 1 or sinks < 0:
        raise ValueError(f"window:{tokens} with {sinks} sinks is not possible: write numbers, as window:1024?sinks=4.")
    part = quantized_part(target, Precision.named(weights, group)) if weights and target.shares_rows else target
    if not isinstance(part, SeesWindows):
        raise ValueError(f"{target.name} keeps a state, and nothing of which it could see a window: use int4 as draft.")
    return SameRowsDrafter(_graphed(context, part.seeing(int(tokens), sinks)))


@kind("eagle3:NAME", "an EAGLE-3 draft of the target, by hub name or folder")
def eagle3(context: BuildContext, source: str) -> Drafter:
    target = _own(context)
    drafter = HeadDrafter(target, load_eagle3(source, target.model), f"eagle3:{source}")
    _graphed(context, drafter.scorer)
    return drafter


@kind("dflash:NAME", "a DFlash draft of the target: a block of tokens in one call")
def dflash(context: BuildContext, source: str) -> Drafter:
    target = _own(context)
    return DFlashDrafter(target, load_dflash(source, target.model), f"dflash:{source}")


@kind("mtp", "the target's own heads for several tokens, where its checkpoint has them")
def mtp(context: BuildContext, value: str) -> Drafter:
    target = _own(context)
    drafter = HeadDrafter(target, load_mtp(target.model, target.name), "mtp")
    _graphed(context, drafter.scorer)
    return drafter


def _own(context: BuildContext) -> HasModel:
    if not isinstance(context.target, HasModel) or context.target.source_form:
        raise ValueError(f"{context.target.name} is no causal language model, so it cannot draft for itself.")
    _refuse_ranks(context.target)
    return context.target


def _refuse_ranks(target: Scorer) -> None:
    """Raises ValueError if the target is divided among ranks: drafts made from its weights run on one rank only."""
    if isinstance(target, LiesOnRanks):
        raise ValueError(
            f"{target.name} lies on {target.ranks} ranks, and drafts run on one of them, so its own layers, weights "
            "and states cannot draft: use a model of its own, lookup, ngram:FILE or datastore:DIR as draft."
        )


@kind(
    "datastore:DIR",
    "copies from documents and past responses, built by `slipstream draft build`",
    namespace=str,
    learn=switch,
    entries=int,
    factor=float,
    offset=float,
    chance=float,
    nearest=int,
    own=switch,
)
def datastore(
    context: BuildContext,
    folder: str,
    namespace: str = "default",
    learn: bool = False,
    entries: int = NamespaceLimits.entries,
    **settings: Any,
) -> Drafter:
    name, target = fingerprint(context.tokenizer), context.target
    corpus, path = open_corpus(folder, name), Path(folder) / MEMORY
    memory = None
    if learn or path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        memory = ResponseMemory(path, _embeddings(target), name, NamespaceLimits(entries))
    if corpus is None and memory is None:
        raise ValueError(
            f"{folder} holds no datastore: build one with `slipstream draft build datastore:{folder} FILES`, or let it "
            f"learn responses: datastore:{folder}?learn=true."
        )
    return Datastore(target.vocab, corpus, memory, namespace, learn, DatastoreSettings(**settings))


def _embeddings(target: Scorer) -> InputEmbeddings:
    if not isinstance(target, HasModel) or isinstance(target, LiesOnRanks):
        where = f"on {target.ranks} ranks" if isinstance(target, LiesOnRanks) else "elsewhere"
        raise ValueError(
            f"the input embeddings of {target.name} lie {where}, so requests cannot be compared by them: draft from a "
            "corpus alone, or give a Datastore with a memory of your own."
        )
    return InputEmbeddings(target.model.get_input_embeddings().weight)


WAIT = 5.0  # the seconds to wait for a draft server's first answer; after that, decoding starts without it


def remote(protocol: str, context: BuildContext, value: str, **options: Any) -> Drafter:
    host, port = split_address(protocol, value)
    key, timeout = read_key(options.pop("key_file", None)), options.pop("timeout_ms", 1000.0) / 1000
    settings = Settings(host, port, protocol == "tls", key, timeout=timeout, **options)
    if context.target.source_form is not None and context.target.source_form.features:
        raise ValueError(f"{context.target.name} takes audio, which is not sent to draft servers: use a local draft.")
    connection = DraftConnection(settings, VocabularySketch.of(context.target.vocab, context.tokenizer))
    try:
        fault = connection.first_word(WAIT)
    except ValueError as error:
        connection.close()
        raise ValueError(f"{settings.url}: {error}.") from None
    how = "whose distributions are trusted" if settings.trust else "whose tokens are guesses, exact whatever it sends"
    reached = f"{settings.url} drafts with {connection.peer}, {how}."
    absent = f"{settings.url} cannot be reached ({fault}): decoding goes on without a draft until it can."
    context.notes.append(absent if fault else reached)
    return RemoteDrafter(connection, context.target.vocab, settings.trust, settings.top, settings.ahead)


kind("tcp://HOST:PORT", "a draft on another machine, served by `slipstream serve-draft`", **SERVER)(
    partial(remote, "tcp")
)
kind("tls://HOST:PORT", "the same, over TLS", **SERVER)(partial(remote, "tls"))
