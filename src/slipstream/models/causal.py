"""Hugging Face causal language models as Scorers, unmodified.

A Scorer feeds the model explicit positions and an explicit 4-D mask, and a `RowCache` that writes each row at its own
slots; the model's own code is not touched. Models that cannot be rolled back, or do not obey positions and mask, are
refused at construction. `ModelFacts` holds facts about the model, `Memory` its rows, `PassBuilder` makes passes over
them, and `PassRunner` runs those.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from slipstream.cache.stores import store_format
from slipstream.core.draft import Tree, padded, runs_of_texts
from slipstream.core.law import Law
from slipstream.core.media import Media
from slipstream.core.protocols import Shape
from slipstream.core.source import Source
from slipstream.execution.backends import Native, draft_graphs
from slipstream.execution.draft_graphs import DraftGraphs, ModelNetwork, Room, Wish
from slipstream.execution.names import with_cache
from slipstream.execution.passes import Execution, Pass, PassMasks, PassResult, causal_mask
from slipstream.kernels.placement import input_device
from slipstream.models.encoder_decoder import SourceDecoder
from slipstream.models.families import ModelFacts, probe, refuse_unsupported, trial_text
from slipstream.models.heads.hidden_states import HiddenStates
from slipstream.models.media.processor import modalities_of, read_with_media
from slipstream.models.memory import HFCache, Memory, OnMemory
from slipstream.models.recurrent.calls import CausalCalls, SourceCalls


class PassBuilder:
    """Makes a `Pass` of new tokens for the rows of a memory that take part in its present pass."""

    def __init__(self, facts: ModelFacts, memory: Memory) -> None:
        self._facts, self._memory = facts, memory
        self._looks_at_distance = facts.relative or any(sight.limited for sight in facts.kinds.values())

    def build(self, tokens: Tensor, slots: Tensor, tree: Tree | None = None) -> Pass:
        """Return the pass of tokens (rows, n) that go to slots (rows, n), after the rows' texts or within a tree."""
        texts, facts, positions, back = self._memory.texts, self._facts, slots, None
        context, end = facts.context, texts.end
        if tree is None and texts.alike and not self._looks_at_distance:  # what there mostly is: a single text
            masks = dict.fromkeys(facts.kinds, causal_mask(slots, texts.past, end, facts.dtype))
        else:
            pass_masks = PassMasks.chain(slots, end) if tree is None else PassMasks.tree(slots, end, tree)
            masks = {kind: pass_masks.mask(sight, facts.dtype) for kind, sight in facts.kinds.items()}
            positions, back = pass_masks.own, pass_masks.back if facts.relative else None
        if context and end > context:  # padding may stand beyond the last learned position
            positions = positions.clamp(max=context - 1)
        if any(shifts := self._memory.shifts[texts.part]):  # images may take fewer positions than tokens
            shifts += [0] * (len(positions) - len(shifts))  # rows that only fill a shape
            positions = positions + torch.tensor(shifts, device=positions.device)[:, None]
        cross = sources.cross(texts.part, back) if (sources := self._memory.sources) else None
        return Pass(tokens, positions, slots, masks, cross)


NO_LOGITS = torch.empty(0, dtype=torch.long)  # the positions to have logits in a pass that only fills the cache


class PassRunner:
    """Runs passes of a model (or of the decoder of one) over a memory; graphs on a GPU run its first rows."""

    def __init__(self, module: nn.Module, facts: ModelFacts, memory: Memory, execution: Execution | None) -> None:
        self._call = with_cache(module)
        self._facts, self._memory, self.execution = facts, memory, execution
        self._cache = HFCache(memory)
        self.recorded: WeakSet[HiddenStates] = WeakSet()  # hidden states to record

    def logits(self, work: Pass) -> Tensor:
        if (result := self._run(work)) is not None:
            return result.logits
        return self._eager(work.to(work.tokens.device), keep=0)

    def _run(self, work: Pass, logits: bool = True) -> PassResult | None:
        """Run a pass by the execution, and store its hidden states; None if it has to run eagerly."""
        if not self.execution or (self._memory.texts.part.start and work.tokens.device.type == "cuda"):
            return None
        recorded = [*self.recorded] if len(self.recorded) else ()  # mostly none, which a weak set is slow to say
        places = tuple(sorted({place for states in recorded for place in states.places}))
        result = self.execution.run(
            work, self._memory.texts.taking_part, places, self._watching if places else None, logits
        )
        if result is not None:
            for states in recorded:
                states.store(result.states)
        return result

    @contextmanager
    def _watching(self) -> Iterator[Mapping[int, Tensor]]:
        """Yield a mapping that a pass in the block fills with the states to record, by place."""
        with ExitStack() as watched:
            yield ChainMap(*[watched.enter_context(states.watching()) for states in self.recorded])

    def feed(self, work: Pass) -> None:
        if self._run(work, logits=False) is None:
            self._eager(work, keep=NO_LOGITS)

    def _eager(self, work: Pass, keep: int | Tensor) -> Tensor:
        """Call the model on a pass -> logits of the positions `keep`, or of that many last ones (0: of all).
        Models that cannot leave out logits return all of them."""
        with ExitStack() as watched:
            seen = [(states, watched.enter_context(states.watching())) for states in self.recorded]
            out = self._call(
                input_ids=work.tokens,
                attention_mask=work.mask,
                position_ids=work.positions,
                cache=self._cache,
                use_cache=True,
                **work.cross_arguments,
                **({"logits_to_keep": keep} if self._facts.drops_logits else {}),
            )
        for states, by_place in seen:
            states.store(by_place)
        return out.logits


PREFILL_TOKENS = 512  # columns of one prefill pass: bounds the memory of masks and activations for long prompts
CACHED_TOKENS = 256  # of all rows in a prefill pass on a CPU, whose second cache holds their activations

WORTH_A_PASS, WORTHWHILE = 32, 0.9
"""Tokens of a text with which it may be read alone, and the share of real tokens up to which that saves padding."""


class CausalScorer(OnMemory):
    """A causal language model and its cache (see `core.protocols.Scorer` for the contract and the shapes)."""

    way = "length"  # the kind of rollback: by a length
    shares_rows = True

    def __init__(
        self,
        model: PreTrainedModel,
        name: str | None = None,
        execution: Execution | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        self.model, self.kv_dtype = model.eval(), kv_dtype
        self._decoder = decoder = SourceDecoder(model) if model.config.is_encoder_decoder else None
        refuse_unsupported(model, self.name)
        self.device = input_device(model)  # where tokens go in and logits come out
        self.facts = ModelFacts.of(model, decoder is not None and decoder.relative)
        self.vocab, self.context, self.modalities = self.facts.vocab, self.facts.context, modalities_of(model)
        if decoder and execution:
            execution = execution.of(cast("Any", decoder), self.name)  # the decoder runs the passes
        self._memory = memory = Memory(decoder)
        self.use_prefixes, self.recall, self.remember = memory.use_prefixes, memory.recall, memory.remember
        self.source_form = self._memory.sources.form if self._memory.sources else None
        self._builder = PassBuilder(self.facts, self._memory)
        self._runner = PassRunner(decoder or model, self.facts, self._memory, execution)
        self.draft_graphs: DraftGraphs | None = None
        self.fix_shape(None)
        if not self.facts.proven:
            probe(self, model.config.get_text_config().model_type)
            if execution and kv_dtype:  # what was recorded in the trial reads other stores
                self._runner.execution = execution = execution.of(cast("Any", decoder or model), self.name)
        self._memory.clear(store_format(kv_dtype))  # only now, since the probe compares with the model's own cache
        self.fix_shape(None)
        if decoder is None and isinstance(execution, Native):
            self._touch()  # a program writes to stores that are there already
            # Run a text, so that the program is made and compared before others wait for it.
            text = trial_text(self.vocab, min(8, self.context or 8))
            self.add(1)
            self.extend(torch.tensor([text]), [len(text)])
            self.free([0])

    def sharing_rows(self, model: Any, name: str) -> CausalScorer:
        other, execution = copy.copy(self), self.execution
        other.name, other.model, other.draft_graphs = name, model, None
        other._decoder = SourceDecoder(model) if self._decoder else None
        module: Any = other._decoder or model
        execution = execution and execution.of(module, name)  # graphs of this model's layers cannot be used for others
        other._runner = PassRunner(module, self.facts, self._memory, execution)
        return other

    def seeing(self, window: int, sinks: int) -> CausalScorer:
        other = self.sharing_rows(self.model, f"{self.name} in a window of {window}")
        other.facts = self.facts.within(window, sinks)
        other._builder = PassBuilder(other.facts, self._memory)
        other._runner = PassRunner(self.model, other.facts, self._memory, other.execution)
        return other

    @property
    def execution(self) -> Execution | None:
        return self._runner.execution

    @property
    def bytes_per_token(self) -> int:
        return self._memory.texts.bytes_per_token

    def attach(self, row: int, media: Media) -> None:
        self._memory.media[row] = media

    def fill(self, row: int, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> None:
        """Fill an empty row with a text of `length` tokens. `layers` have keys and values (heads, count, head_dim) of
        its last tokens, as many as each layer ever looks back at."""
        self._memory.texts.fill(row, layers, length)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes for texts of these lengths; 0 for an encoder-decoder before its first pass."""
        self._touch()
        possible = [length if self.context is None else min(length, self.context) for length in lengths]
        return self._memory.texts.bytes_for(possible)

    @property
    def bytes_allocated(self) -> int:
        return self._memory.texts.bytes_allocated

    @torch.inference_mode()
    def _touch(self) -> None:
        """Run one token if nothing was run yet: only then the bytes of a token are known."""
        if self._decoder is None and not self.lengths and not self.bytes_per_token:
            self.add(1)
            self._prefill([[0]], 0)
            self.free([0])

    def record(self, places: Sequence[int]) -> HiddenStates:
        states = HiddenStates(self.model, self.name, places, self._memory)
        if self.device.type == "cuda" and self.execution is not None and states.last_layer in places:
            raise ValueError(
                f"{self.name} is compiled, which hides its hidden states between the last layer and the norm behind "
                "it: use this draft without compiling."
            )
        self._runner.recorded.add(states)
        return states

    def fix_shape(self, shape: Shape | None) -> None:
        self.shape: Shape | None = shape
        self._memory.texts.least = shape.slots if shape else self.execution.least if self.execution else 0

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        (rows, width), texts, real, shape = tokens.shape, self._memory.texts, len(self.lengths), self.shape
        if shape:  # rows after those of the tokens, or empty ones, and padding fill it
            assert tree is None, "trees have shapes of their own"
            assert rows <= shape.rows and width <= shape.width, f"{tokens.shape} does not fit {shape}"
            texts.add(max(0, first + shape.rows - real))
            padded = pad(tokens, (0, shape.width - width, 0, shape.rows - rows))
            logits = self._score(padded, first, None)[:rows, :width]
            texts.free(range(real, len(texts.lengths)))
        else:
            logits = self._score(tokens, first, tree)
        texts.advance(counts)
        return logits

    def _score(self, tokens: Tensor, first: int, tree: Tree | None) -> Tensor:
        """Score a few tokens. Masks are made on the host, where a small tensor costs less than a kernel on a GPU."""
        # Outside of inference mode, like the caller's tokens: graphs treat tensors made inside it differently.
        slots = self._memory.texts.place(tokens.shape[1], first, first + len(tokens))
        with torch.inference_mode():
            return self._runner.logits(self._builder.build(tokens, slots, tree)).to(self.device)

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        texts = [self._read_media(row, text) for row, text in enumerate(texts, first)]
        # Texts are read one by one if they are so unequally long that padding costs more, and with a shape, so that a
        # row's keys do not depend on others.
        longest = max(map(len, texts), default=0) if self.device.type == "cpu" else 0
        unequal = longest > WORTH_A_PASS and sum(map(len, texts)) <= WORTHWHILE * longest * len(texts)
        if self.shape or unequal:
            for row, text in enumerate(texts, first):
                self._prefill([text], row)
        else:  # a row without text would cost as much attention as the longest one
            for row, part in runs_of_texts(texts):
                self._prefill(part, first + row)

    def _read_media(self, row: int, text: Sequence[int]) -> Sequence[int]:
        """Read a text with media, in an empty row, by the model's own forward -> the tokens that are left to read."""
        media, texts = self._memory.media[row], self._memory.texts
        if media is None or not text or texts.lengths[row]:
            return text
        layers, self._memory.shifts[row] = read_with_media(self.model, text, media)
        texts.fill(row, layers, len(text))
        return ()

    @torch.inference_mode()
    def _prefill(self, texts: Sequence[Sequence[int]], first: int) -> None:
        start, longest = 0, max(map(len, texts), default=0)
        while start < longest:
            stop = start + self._columns(len(texts), max(self.lengths[first : first + len(texts)]))
            parts = [text[start:stop] for text in texts]
            start, counts = stop, [len(part) for part in parts]
            slots = self._memory.texts.place(max(counts), first, first + len(parts)).to(self.device)
            self._runner.feed(self._builder.build(padded(parts, self.device), slots))
            self._memory.texts.advance(counts)

    def _columns(self, rows: int, past: int) -> int:
        """Return the columns of a prefill pass: the more tokens are in the cache, the longer it takes to read these."""
        cached = PREFILL_TOKENS if self.device.type != "cpu" else max(CACHED_TOKENS // rows, past // 8, 16)
        return min(PREFILL_TOKENS, cached)

    @torch.inference_mode()
    def alone(self, text: Sequence[int], source: Source | None = None) -> Tensor:
        return (SourceCalls if self._decoder else CausalCalls)(self.model).alone(text, source)

    def make_draft_graphs(self, sizes: Sequence[int], progress: Callable[[str], object] | None = None) -> None:
        facts, module = self.facts, self._decoder or self.model
        network = ModelNetwork(with_cache(module), module.dtype, facts.kinds, facts.relative, facts.drops_logits)
        self.draft_graphs = draft_graphs(network, self.name, self.device, sizes, progress=progress)

    @torch.inference_mode()
    def chain(self, wish: Wish) -> tuple[Tensor, Law] | None:
        graphs, texts, sources, rows = self.draft_graphs, self._memory.texts, self._memory.sources, len(wish.fed)
        if graphs is None:
            return None
        room = graphs.most_fed + graphs.length(wish)
        if self.context and max(texts.lengths[:rows]) + room > self.context:
            return None
        if not texts.stores:  # nothing was ever fed: the stores that a graph writes to do not exist yet
            lengths = list(self.lengths)
            self._prefill([[0]] * len(lengths), 0)
            self.rollback(lengths)
        texts.reserve(room, 0, rows)
        cross = sources.cross(texts.part, None) if sources else None
        drafted = graphs.run(wish, Room(texts.lengths[texts.part], texts.end, texts.taking_part, cross))
        if drafted is not None:
            fed = zip(wish.fed, wish.gammas, strict=True)
            texts.advance([len(tokens) + max(gamma, 1) - 1 if tokens else 0 for tokens, gamma in fed])
        return drafted
