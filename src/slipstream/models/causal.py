"""Hugging Face causal language models as Scorers, unmodified.

A Scorer feeds the model explicit positions and an explicit 4-D mask, and a `RowCache` that writes each row at its own
slots; the model's own code is not touched. Models that cannot be rolled back, or do not obey positions and mask, are
refused at construction. `ModelFacts` holds facts about the model, `Memory` its rows, `PassBuilder` makes passes over
them, and `PassRunner` runs those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from slipstream.cache.prefixes import PrefixCache
from slipstream.cache.stores import store_format
from slipstream.core.draft import Tree, padded, runs_of_texts
from slipstream.core.law import Law
from slipstream.core.media import Media, Modality
from slipstream.core.protocols import Shape
from slipstream.core.source import Source, SourceForm
from slipstream.execution.backends import draft_graphs
from slipstream.execution.draft_graphs import DraftGraphs, ModelNetwork, Room, Wish
from slipstream.execution.names import with_cache
from slipstream.execution.native import Native
from slipstream.execution.passes import Execution
from slipstream.kernels.placement import input_device
from slipstream.models.encoder_decoder import SourceDecoder
from slipstream.models.facts import ModelFacts
from slipstream.models.families import probe, refuse_unsupported, trial_text, windows_of
from slipstream.models.heads.hidden_states import HiddenStates
from slipstream.models.media.processor import modalities_of, read_with_media
from slipstream.models.memory import Memory, OnMemory
from slipstream.models.pass_runner import PassBuilder, PassRunner
from slipstream.models.recurrent.calls import CausalCalls, SourceCalls

PREFILL_TOKENS = 512  # columns of one prefill pass: bounds the memory of masks and activations for long prompts

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
        if decoder and execution:
            execution = execution.of(cast(Any, decoder), self.name)  # the decoder runs the passes
        self._memory = Memory(decoder)
        self._builder = PassBuilder(self.facts, self._memory)
        self._runner = PassRunner(decoder or model, self.facts, self._memory, execution)
        self.draft_graphs: DraftGraphs | None = None
        self.fix_shape(None)
        if not self.facts.proven:
            probe(self, model.config.get_text_config().model_type)
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
        """Return a Scorer that runs another model, of this one's layers or of copies, over the same rows and cache.

        What it adds to the rows has to be rolled back before this one goes on.
        """
        other, execution = copy.copy(self), self.execution
        other.name, other.model, other.draft_graphs = name, model, None
        execution = execution and execution.of(model, name)  # graphs of this model's layers cannot be used for others
        other._runner = PassRunner(model, self.facts, self._memory, execution)
        return other

    def seeing(self, window: int, sinks: int) -> CausalScorer:
        """Return a Scorer of the same model and rows that attends to a text's last `window` and first `sinks` tokens.

        What it adds has to be rolled back before this one goes on.
        """
        other = self.sharing_rows(self.model, f"{self.name} in a window of {window}")
        other.facts = self.facts.within(window, sinks)
        other._builder = PassBuilder(other.facts, self._memory)
        other._runner = PassRunner(self.model, other.facts, self._memory, other.execution)
        return other

    @property
    def vocab(self) -> int:
        return self.facts.vocab

    @property
    def context(self) -> int | None:
        return self.facts.context

    @property
    def execution(self) -> Execution | None:
        return self._runner.execution

    @property
    def source_form(self) -> SourceForm | None:
        return self._memory.sources.form if self._memory.sources else None

    @property
    def windows(self) -> set[int]:
        return windows_of(self.model.config.get_text_config())

    @property
    def modalities(self) -> frozenset[Modality]:
        return modalities_of(self.model)

    @property
    def bytes_per_token(self) -> int:
        return self._memory.texts.bytes_per_token

    def attach(self, row: int, media: Media) -> None:
        self._memory.media[row] = media

    def fill(self, row: int, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> None:
        """Fill an empty row with a text of `length` tokens.

        `layers` have keys and values (heads, count, head_dim) of its last tokens, as many as each layer ever looks back
        at.
        """
        self._memory.texts.fill(row, layers, length)

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        """Store texts in this prefix cache from now on, and look them up there; None for no cache.

        Encoder-decoders store nothing.
        """
        self._memory.use_prefixes(cache)

    def recall(self, row: int, text: Sequence[int], salt: str) -> int:
        return self._memory.recall(row, text, salt)

    def remember(self, row: int, text: Sequence[int], salt: str) -> None:
        self._memory.remember(row, text, salt)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes of keys and values of texts of these lengths, with the room allocated ahead.

        For an encoder-decoder this is 0 before its first pass.
        """
        self._touch()
        possible = [length if self.context is None else min(length, self.context) for length in lengths]
        return self._memory.texts.bytes_for(possible)

    @property
    def bytes_allocated(self) -> int:
        """The bytes that the keys and values of all texts take now, with the room allocated ahead."""
        return self._memory.texts.bytes_allocated

    @torch.inference_mode()
    def _touch(self) -> None:
        """Run one token, if nothing was run yet, since the bytes of a token are only known after a first pass."""
        if self._decoder is None and not self.lengths and not self.bytes_per_token:
            self.add(1)
            self._prefill([[0]], 0)
            self.free([0])

    def record(self, places: Sequence[int]) -> HiddenStates:
        """Record the hidden states at some places (see `HiddenStates`) of every token, as long as the result lives."""
        states = HiddenStates(self.model, self.name, places, self._memory)
        if self.device.type == "cuda" and self.execution is not None and states.last_layer in places:
            raise ValueError(
                f"{self.name} is compiled, which hides its hidden states between the last layer and the norm behind "
                "it: use this draft without compiling."
            )
        self._runner.recorded.add(states)
        return states

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape; None: in the shape of the work at hand, which is faster.

        With one shape no bit of the logits depends on how many rows and tokens are scored together.
        """
        self.shape: Shape | None = shape
        self._memory.texts.least = shape.slots if shape else self.execution.least if self.execution else 0

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        if self.shape:
            assert tree is None, "trees have shapes of their own"
            return self._extend_exactly(self.shape, tokens, counts, first)
        logits = self._score(tokens, first, tree)
        self._memory.texts.advance(counts)
        return logits

    def _extend_exactly(self, shape: Shape, tokens: Tensor, counts: Sequence[int], first: int) -> Tensor:
        """Run `extend` in a fixed shape: rows after those of the tokens, or empty ones, and padding fill it."""
        (rows, width), texts, real = tokens.shape, self._memory.texts, len(self.lengths)
        assert rows <= shape.rows and width <= shape.width, f"{tokens.shape} does not fit {shape}"
        texts.add(max(0, first + shape.rows - real))
        logits = self._score(pad(tokens, (0, shape.width - width, 0, shape.rows - rows)), first, None)
        texts.free(range(real, len(texts.lengths)))
        texts.advance(counts)
        return logits[:rows, :width]

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
        for start in range(0, max(map(len, texts), default=0), PREFILL_TOKENS):
            parts = [text[start : start + PREFILL_TOKENS] for text in texts]
            counts = [len(part) for part in parts]
            slots = self._memory.texts.place(max(counts), first, first + len(parts)).to(self.device)
            self._runner.feed(self._builder.build(padded(parts, self.device), slots))
            self._memory.texts.advance(counts)

    @torch.inference_mode()
    def alone(self, text: Sequence[int], source: Source | None = None) -> Tensor:
        return (SourceCalls if self._decoder else CausalCalls)(self.model).alone(text, source)

    def make_draft_graphs(self, sizes: Sequence[int], progress: Callable[[str], object] | None = None) -> None:
        """Draft by graphs from now on, where possible: on a GPU by one graph for chains of each of these sizes."""
        facts, module = self.facts, self._decoder or self.model
        network = ModelNetwork(with_cache(module), module.dtype, facts.kinds, facts.relative, facts.drops_logits)
        self.draft_graphs = draft_graphs(network, self.name, self.device, sizes, progress=progress)

    @torch.inference_mode()
    def chain(self, wish: Wish) -> tuple[Tensor, Law] | None:
        """Draft chains for the first rows of the cache, one per text of the wish -> tokens (rows, gamma), and their q.

        None if that is not possible by graphs.
        """
        graphs, texts, sources, rows = self.draft_graphs, self._memory.texts, self._memory.sources, len(wish.fed)
        if graphs is None:
            return None
        room = graphs.most_fed + sum(graphs.steps(wish))
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
