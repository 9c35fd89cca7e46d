"""A model on several ranks: the Scorer on rank 0 sends every call to the others, which repeat it on their parts.

Rank 0 alone draws and decides (which rows run, what is drafted and accepted, which are aborted, when a text ends). The
others get the resulting calls of the target's Scorer, so ranks cannot decide differently; their return values are not
used. Calls without a pass are sent with the next call that has one, so a round costs one message; it carries the
lengths of all rows, so that a rank whose rows differ is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from slipstream.cache.prefixes import PrefixCache, recalling
from slipstream.core.draft import Tree
from slipstream.core.source import Source
from slipstream.core.values import first_sentence
from slipstream.execution.ranks import RankLost, Ranks
from slipstream.models.families import allowed_gap
from slipstream.models.loading.load import AnyScorer, load_model, scorer_of
from slipstream.models.loading.origin import Origin
from slipstream.models.loading.twins import logits_gap
from slipstream.models.media.processor import proven_modalities
from slipstream.models.tiny import tiny_config, tiny_model

Plan = str | dict[str, str]
"""The `tp_plan` of transformers: "auto" is the model's own, a dictionary changes some of its rules."""


def load_sharded(
    source: str | Path, dtype: str | torch.dtype, plan: Plan, size: int, **options: Any
) -> PreTrainedModel:
    """Load this rank's part of a model, by hub name or folder; all `size` ranks call this together.

    With accelerate every rank reads its own part of the checkpoint; without, or with an adapter, each reads all of it
    on the CPU and keeps its part. Raises ValueError in one sentence for a model that cannot be divided.
    """
    try:
        if find_spec("accelerate") and not Origin.of(source, adapter=options.get("adapter")).adapter:
            model = load_model(source, dtype, distributed_config=_settings(plan), **options)
        else:
            model = shard(load_model(source, dtype, "cpu", **options), plan)
    except ValueError as error:
        if "has no `tp_plan`" not in str(error):
            raise
        raise ValueError(
            f"{source} has no plan for tensor parallelism in transformers, as most encoder-decoders and GPT-2 have "
            "none: spread its layers by device_map instead, or give a plan of your own as tp_plan={...}."
        ) from error
    # A number of key-value heads that is no multiple of the ranks would cut heads apart.
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        fitting = [str(count) for count in range(2, heads + 1) if not heads % count]
        several = f"start {' or '.join(fitting)} processes" if fitting else "spread its layers by device_map instead"
        raise ValueError(
            f"{model.config.name_or_path} has {heads} heads of keys and values, which {size} ranks cannot divide: "
            f"{several}."
        )
    _try_plan(model, plan, size)
    return model


@torch.no_grad()
def shard(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """Return this rank's part, on its own device, of a model that every rank has loaded whole."""
    settings, _, mesh = type(model).prepare_distribute_model(_settings(plan))
    # Give tied weights a parameter each, since a plan names every layer's own.
    for name in getattr(model, "all_tied_weights_keys", None) or {}:
        owner, _, own = name.rpartition(".")
        layer = model.get_submodule(owner)
        weight = getattr(layer, own)
        setattr(layer, own, nn.Parameter(weight.detach(), requires_grad=weight.requires_grad))
    model = type(model).maybe_distribute_model(model, settings, mesh)
    model.tie_weights()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return model.to(device)


def _settings(plan: Plan) -> Any:
    """Return a tensor-parallel plan in the form that `from_pretrained` takes. Raises ValueError if impossible."""
    try:
        return DistributedConfig(tp_plan=plan)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tp_plan={plan!r} is not possible: {first_sentence(error)}") from error


def _try_plan(model: PreTrainedModel, plan: Plan, size: int) -> None:
    """Divide a tiny random model of the same class, and compare its logits with those of the whole model.

    Nothing else would show that a plan computes something else. Raises ValueError if the logits differ. A class without
    a tiny model that runs is not tried.
    """
    heads = {} if size == 2 else dict.fromkeys(("num_attention_heads", "num_key_value_heads"), max(4, size))
    with torch.random.fork_rng():
        try:
            whole, other = (tiny_model(type(model), tiny_config(type(model.config), **heads)) for _ in range(2))
            difference = logits_gap(whole, shard(other, plan))
        except Exception:  # sizes that do not fit each other, in a way specific to the family
            return
    if not difference <= allowed_gap(torch.float32):
        raise ValueError(
            f"{model.config.name_or_path} ({type(model).__name__}) gives other logits when its weights are divided by "
            f"transformers' plan (difference {difference:.2g} standard deviations): spread its layers by device_map "
            "instead, or give a plan of your own as tp_plan={...}."
        )


# ---- messages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScorerCall:
    """A call of a Scorer: the method's name and its arguments."""

    method: str
    arguments: tuple[Any, ...]

    def on(self, part: ModelShard) -> Any:
        return getattr(part, self.method)(*self.arguments)


@dataclass(frozen=True)
class Build:
    """The message to load a model: every rank loads its part."""

    source: str | Path
    dtype: Any
    plan: Plan
    options: dict[str, Any]

    def part(self, ranks: Ranks) -> ModelShard:
        with ranks.working():
            model = load_sharded(self.source, self.dtype, self.plan, ranks.size, **self.options)
            return ModelShard(
                scorer_of(model, Path(self.source).name if isinstance(self.source, Path) else self.source)
            )

    def obey(self, follower: FollowingRank) -> None:
        """Load this rank's part, kept under the number of this message from now on, and report that it is loaded."""
        follower.parts[follower.ranks.count] = self.part(follower.ranks)
        follower.ranks.answer()


@dataclass(frozen=True)
class ScorerCalls:
    """A message of calls in order, only the last with a pass. `lengths` are those of the model's rows before it."""

    number: int
    calls: tuple[ScorerCall, ...]
    lengths: tuple[int, ...]

    def obey(self, follower: FollowingRank) -> None:
        """Repeat the calls. Raises RankLost if the rows of this rank differ from those of rank 0."""
        part = follower.parts[self.number]
        *before, last = self.calls
        for call in before:
            call.on(part)
        if tuple(part.scorer.lengths) != self.lengths:
            raise RankLost(f"its rows have {part.scorer.lengths} tokens, and those of rank 0 {list(self.lengths)}.")
        with follower.ranks.working():
            last.on(part)


@dataclass(frozen=True)
class Failed:
    """The message that rank 0, or some rank, could not carry out its last message about a model."""

    number: int

    def obey(self, follower: FollowingRank) -> None:
        """Drop this rank's part: this rank did carry it out, and now differs from the others."""
        follower.parts.pop(self.number, None)
        follower.ranks.answer()


# ---- both sides -------------------------------------------------------------------------------------------------


class ModelShard:
    """A rank's part of a model, as all ranks call it: tokens come as lists, since ranks have different devices."""

    def __init__(self, scorer: AnyScorer) -> None:
        self.scorer: Any = scorer
        self.store = recalling(scorer)
        self.recall, self.remember = self.store.recall, self.store.remember

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)

    def extend(self, tokens: list[list[int]], counts: Sequence[int], first: int, tree: Tree | None) -> Tensor:
        return self.scorer.extend(torch.tensor(tokens, device=self.scorer.device), counts, first, tree)

    def use_prefixes(self, limit: int | None, block: int) -> None:
        """Store texts in a prefix cache of this part's own: all ranks store, and so evict, the same texts."""
        self.store.use_prefixes(None if limit is None else PrefixCache(limit, block))


# ---- rank 0 -----------------------------------------------------------------------------------------------------


def _own(argument: Any) -> Any:
    return [*map(_own, argument)] if isinstance(argument, Sequence) and not isinstance(argument, str) else argument


def _without_pass(method: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._later(method, *map(_own, arguments))


class LeadingScorer:
    """A model divided among several ranks, on rank 0 (see `core.protocols.Scorer` for the contract and the shapes).
    Every method may raise RankLost; after that, all methods that run a pass raise it."""

    execution = None  # passes run eagerly, since they contain the exchange between ranks

    def __init__(self, ranks: Ranks, number: int, part: ModelShard) -> None:
        self._ranks, self._number, self._part = ranks, number, part
        self._waiting: list[ScorerCall] = []
        self._lock = threading.RLock()
        inner = part.scorer
        self.name, self.model, self.device = inner.name, inner.model, inner.device
        self.vocab, self.context, self.way = inner.vocab, inner.context, inner.way
        self.source_form, self.ranks = inner.source_form, ranks.size
        self.shares_rows: bool = inner.shares_rows
        # Only proven ones, as one rank cannot try them alone.
        self.modalities = inner.modalities & proven_modalities(self.model)

    @property
    def lengths(self) -> list[int]:
        return self._part.scorer.lengths

    @property
    def bytes_per_token(self) -> int:
        return self._part.scorer.bytes_per_token

    def check(self) -> None:
        self._ranks.check()

    def call_on_loss(self, function: Callable[[], object]) -> None:
        self._ranks.on_loss = function

    def sharing_rows(self, model: Any, name: str) -> Any:
        raise ValueError(f"{self.name} lies on {self.ranks} ranks, so no part of it can run for a draft on one.")

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        (self._together if self.source_form else self._later)("add", rows, list(sources))

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        return self._together("extend", tokens.tolist(), list(counts), first, tree)

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        self._together("prefill", [list(text) for text in texts], first)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        if not self.bytes_per_token:
            self._together("bytes_for", list(lengths))
        return self._part.scorer.bytes_for(lengths)

    fork = _without_pass("fork")
    free = _without_pass("free")
    rollback = _without_pass("rollback")
    scrub = _without_pass("scrub")
    keep = _without_pass("keep")
    fix_shape = _without_pass("fix_shape")
    attach = _without_pass("attach")
    recall = _without_pass("recall")
    remember = _without_pass("remember")

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        self._later("use_prefixes", *((None, 1) if cache is None else (cache.limit, cache.block)))

    def _later(self, method: str, *arguments: Any) -> Any:
        """Make a call without communication at once, and send it to the other ranks with the next pass."""
        with self._lock:
            call = ScorerCall(method, arguments)
            result = call.on(self._part)
            self._waiting.append(call)
            return result

    def _together(self, method: str, *arguments: Any) -> Any:
        """Make a call in which the ranks exchange results of layers, after sending it and those that wait."""
        with self._lock, self._ranks.working():
            call = ScorerCall(method, arguments)
            calls, self._waiting = (*self._waiting, call), []
            number = self._ranks.tell(ScorerCalls(self._number, calls, tuple(self.lengths)))
            try:
                return call.on(self._part)
            except Exception as error:
                self._ranks.agree(number, Failed(self._number), error)
                raise


def lead(ranks: Ranks, source: Any, dtype: Any, plan: Plan, **options: Any) -> LeadingScorer:
    """Load a model by hub name or folder on all ranks, each its part -> its Scorer on rank 0."""
    build = Build(source, dtype, plan, options)
    number = ranks.tell(build)
    try:
        part = build.part(ranks)
    except Exception as error:
        ranks.agree(number, Failed(number), error)
        raise
    faults = {rank: fault for rank, fault in ranks.answers(number).items() if fault}
    if faults:
        ranks.tell(Failed(number))
        raise ValueError("; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items()))
    return LeadingScorer(ranks, number, part)


# ---- the other ranks --------------------------------------------------------------------------------------------


@dataclass
class FollowingRank:
    """A rank that carries out the messages of rank 0: `parts` are its parts of models, by the number of the message."""

    ranks: Ranks
    parts: dict[int, ModelShard] = field(default_factory=dict)

    def run(self) -> None:
        """Carry out messages until rank 0 has ended. Raises RankLost if the ranks cannot go on."""
        message: Build | ScorerCalls | Failed | None
        while (message := self.ranks.listen()) is not None:
            try:
                message.obey(self)
            except RankLost as error:
                self.ranks.answer(str(error))
                raise
            except Exception as error:
                # Report an error; go on if rank 0 had one too, as it was the request's fault.
                fault = first_sentence(error)
                self.ranks.answer(fault)
                if not self.ranks.leader_agrees() or not isinstance(self.ranks.listen(), Failed):
                    raise RankLost(fault) from error
