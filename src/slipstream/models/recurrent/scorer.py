"""Runs models that cannot be rolled back by a length, each row with a state of its own.

These are recurrent, convolutional and hybrid models, and models that need transformers' own cache. A row's state lies
in the kind of cache that transformers makes for the model. Rows share a pass if they have read equally many tokens and
get equally many, so that no padding ever reaches a state. After a rollback, a row's state from before the round is
brought forward over the accepted tokens: by their recurrences alone (`rewinding`) if these are known, otherwise by one
more pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.cache.recurrent import StateCache
from slipstream.core.draft import Tree
from slipstream.core.media import Media
from slipstream.core.protocols import Shape
from slipstream.core.source import Source
from slipstream.core.values import first_sentence
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.placement import input_device
from slipstream.models.families import longest_text, probe, vocabulary_of
from slipstream.models.heads.hidden_states import HiddenStates, Records
from slipstream.models.media.processor import RowMedia, modalities_of
from slipstream.models.recurrent.calls import calls_of
from slipstream.models.recurrent.recurrences import observe
from slipstream.models.recurrent.rewinding import RowState, Settled, Within, apart, joined, rewindable, size

PREFILL_TOKENS = 512  # the tokens of one prefill pass, which bounds the memory of activations for long prompts


@dataclass(frozen=True)
class Way:
    """Says how a model is run so that its logits are exact, which is found by trying.

    `width` is the number of tokens that a pass may add to a text (None: any number). The flags say whether rows share a
    pass (`together`), whether `positions` are given, and whether the states within a pass can be computed (`rewinds`).
    """

    width: int | None = None
    together: bool = True
    positions: bool = True
    rewinds: bool = False

    def __str__(self) -> str:
        if self.width is not None:
            return "state, token by token"
        return "state, one pass" if self.rewinds else "state, two passes"


WAYS = tuple(  # the ways that are tried, from the fastest to the slowest
    Way(width, together, positions, rewinds)
    for width, rewinds in ((None, True), (None, False), (1, False))
    for together in (True, False)
    for positions in (True, False)
)


class StateScorer:
    """Scores tokens by a model with a state per row (see `core.protocols.Scorer` for the contract and the shapes).

    It scores chains only, since a state follows one line of tokens. Passes run eagerly. States are not stored in the
    prefix cache (see `StateCache`). Raises ValueError if the model is exact in none of the `WAYS`.
    """

    execution = None

    def __init__(self, model: PreTrainedModel, name: str | None = None) -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        self.model: Any = model.eval()
        self.device = input_device(model)
        self.vocab, self.context = vocabulary_of(model), longest_text(model.config.get_text_config())
        self._calls = calls_of(model)
        self.source_form, self.modalities = self._calls.form, modalities_of(model)
        self._alone = False  # whether every token is fed by itself, so that no bit depends on the rest of the pass
        self._costs: tuple[int, int] | None = None
        observe(model)
        self._steps_by_kernel = self.device.type == "cpu" and kernel_missing() is None
        self._records = Records()
        self.clear()
        self.way = self._find_way()

    def _find_way(self) -> Way:
        self._refuse_stateless()
        faults = []
        for self.way in WAYS:
            if (self.way.positions and not self._calls.takes_positions) or (
                self.way.together and not self._calls.joins_rows
            ):
                continue
            try:
                probe(self, type(self.model).__name__)
                return self.way
            except ValueError as error:
                faults.append(error)
            finally:
                self.clear()
        raise faults[-1]  # that of the simplest way, which explains the fault best

    @torch.inference_mode()
    def _refuse_stateless(self) -> None:
        try:
            extra_inputs = self._calls.read(self.source_form.example(2) if self.source_form else None)
            out = self._calls(torch.tensor([[self.vocab - 1]], device=self.device), None, extra_inputs)
        except Exception as error:  # of any type, for example from models that need images
            reason = f"{type(error).__name__}: {first_sentence(error)}"
            raise ValueError(f"{self.name} does not run on a text alone ({reason}); use another model.") from error
        if getattr(out, "logits", None) is None:
            raise ValueError(f"{self.name} gives no scores of tokens: load it with its head (AutoModelForCausalLM).")
        if self._calls.state(out) is None:
            passes = "so every token would take a pass over the whole text; use another model"
            raise ValueError(f"{self.name} hands out no state and no keys of what it has read, {passes}.")

    def clear(self) -> None:
        self._cache: StateCache[RowState] = StateCache(lambda kept, tokens: kept.shortened(tokens))
        self._texts: list[list[int]] = []  # the tokens of every row, to read again those that a rolled-back state lacks
        self._extra_inputs: list[Any] = []  # per row: the encoder's output, or media, or None

    shares_rows = False

    def sharing_rows(self, model: Any, name: str) -> StateScorer:
        raise ValueError(f"{self.name} keeps a state, which its own layers cannot draft on; use a model of its own.")

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        with torch.inference_mode():
            self._extra_inputs += [self._calls.read(source) for source in sources or [None] * rows]
        self._cache.add(rows)
        for memory in self._records.memories:
            memory.add(rows)
        self._texts += [[] for _ in range(rows)]

    def fork(self, rows: Sequence[int]) -> None:
        self._cache.fork(rows)
        for memory in self._records.memories:
            memory.fork(rows)
        self._texts += [list(self._texts[row]) for row in rows]
        self._extra_inputs += [self._extra_inputs[row] for row in rows]

    def free(self, rows: Sequence[int]) -> None:
        freed = set(rows)
        self._cache.free(rows)
        for memory in self._records.memories:
            memory.free(rows)
        self._texts = [text for row, text in enumerate(self._texts) if row not in freed]
        self._extra_inputs = [each for row, each in enumerate(self._extra_inputs) if row not in freed]

    def attach(self, row: int, media: Media) -> None:
        self._extra_inputs[row] = RowMedia(media)

    def rollback(self, lengths: Sequence[int]) -> None:
        self._cache.rollback(lengths)
        for memory in self._records.memories:
            memory.texts.rollback(lengths)
        for text, length in zip(self._texts, lengths, strict=False):
            del text[length:]

    def scrub(self) -> None:
        """Do nothing: the states of tokens that were rolled back are dropped already."""

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self._cache.keep(starts, paths)

    @property
    def bytes_per_token(self) -> int:
        return self._costs[1] if self._costs else 0

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes of states of texts of these lengths: two per row, one of them from before the round."""
        # Two short texts show the bytes of a state without its tokens, and those per token.
        if self._costs is None:
            with torch.inference_mode():
                extra_inputs = self._calls.read(self.source_form.example(2) if self.source_form else None)
                made = (
                    self._run([], 0, torch.zeros(1, count, dtype=torch.long, device=self.device), 1, extra_inputs)[1]
                    for count in (1, 9)
                )
                short, long = (sum(size(kept.state) for kept in states) for states in made)
            self._costs = short - (long - short) // 8, (long - short) // 8
        fixed, each = self._costs
        return sum(2 * (fixed + each * length) for length in lengths)

    def record(self, places: Sequence[int]) -> HiddenStates:
        return self._records.begin(self.model, self.name, places, self.lengths)

    def fix_shape(self, shape: Shape | None) -> None:
        """Feed every token after the prefill in a pass of its own, whose bits depend on no other; None: together."""
        self._alone = shape is not None

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens; the logits of padding, which is not fed, are 0. Raises ValueError for a tree."""
        if tree is not None:
            raise ValueError(f"{self.name} keeps a state, which follows one line of tokens: draft chains, not trees.")
        fed = [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]
        by_place = self._feed(fed, first, keep=0)
        if not by_place:
            return torch.zeros(*tokens.shape, self.vocab, dtype=self.model.dtype, device=self.device)
        logits = next(iter(by_place.values())).new_zeros(*tokens.shape, self.vocab)
        for place, some in by_place.items():
            logits[place, : some.shape[0]] = some
        return logits

    @torch.inference_mode()
    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        # Unread media take all of a row's text.
        unread = [isinstance(each, RowMedia) and not self.lengths[row] for row, each in enumerate(self._extra_inputs)]
        whole = [bool(text) and unread[row] for row, text in enumerate(texts, first)]
        if any(whole):
            self._feed([list(text) if now else [] for text, now in zip(texts, whole, strict=True)], first, keep=1)
            texts = [() if now else text for text, now in zip(texts, whole, strict=True)]
        for start in range(0, max(map(len, texts), default=0), PREFILL_TOKENS):
            self._feed([list(text[start : start + PREFILL_TOKENS]) for text in texts], first, keep=1)
        # A prompt is never rolled back by a few tokens, so its earlier states are dropped.
        self._cache.rollback(self._cache.lengths[: first + len(texts)])

    def _feed(self, fed: Sequence[list[int]], first: int, keep: int) -> dict[int, Tensor]:
        for place, tokens in enumerate(fed):
            row, known = first + place, self._cache.known(first + place)
            if tokens and (lost := self._texts[row][known:]):  # accepted tokens that its state lost in a rollback
                again = torch.tensor([lost], device=self.device)
                _, (state,) = self._run(self._states([row]), known, again, 1, self._extra_inputs[row])
                self._cache.bring_forward(row, state)
        self._cache.reserve(max(map(len, fed), default=0), first, first + len(fed))
        by_place: dict[int, Tensor] = {}
        # Rows can share a pass if they are equally long, and fed equally many tokens.
        groups: dict[tuple[int, ...], list[int]] = {}
        apart = self._alone or not self.way.together
        for place, tokens in enumerate(fed):
            if tokens:
                by_itself = [place] if apart or self._extra_inputs[first + place] is not None else []
                groups.setdefault((self._cache.lengths[first + place], len(tokens), *by_itself), []).append(place)
        for places in groups.values():
            rows = [first + place for place in places]
            states, known = self._states(rows), self._cache.known(rows[0])
            new = torch.tensor([fed[place] for place in places], device=self.device)
            self._records.forget()
            logits, behind = self._run(states, known, new, keep, self._extra_inputs[rows[0]])
            self._records.store(rows)
            for place, row, state, some in zip(places, rows, behind, logits, strict=True):
                self._cache.write(row, state)
                self._texts[row] += fed[place]
                by_place[place] = some
        self._cache.advance([len(tokens) for tokens in fed])
        return by_place

    def _states(self, rows: Sequence[int]) -> list[Any]:
        return [kept.state for row in rows if (kept := self._cache.state(row)) is not None]

    def _run(
        self, states: Sequence[Any], known: int, tokens: Tensor, keep: int, extra_inputs: Any
    ) -> tuple[Tensor, list[RowState]]:
        """Run tokens (rows, n) after states of `known` tokens -> logits (rows, n, vocab), and the states after them."""
        width = 1 if self._alone and not keep else self.way.width
        count = tokens.shape[1]
        if self.way.rewinds and not keep and known and width is None and (count > 1 or self._steps_by_kernel):
            self._records.forget()
            out, rewind = rewindable(states, count, lambda state: self._call(tokens, state, known, extra_inputs, 0))
            return out.logits, [Within(rewind, row, count) for row in range(len(tokens))]
        state = joined(states) if known else None
        logits = []
        while tokens.shape[1]:
            # The beginning of a text can be read in one pass, even if later tokens have to be fed one by one.
            step = tokens[:, : width if width and (known or (self._alone and extra_inputs is None)) else None]
            out = self._call(step, state, known, extra_inputs, keep)
            state = self._calls.state(out)
            logits.append(out.logits)
            known, tokens = known + step.shape[1], tokens[:, step.shape[1] :]
        return torch.cat(logits, 1), [Settled(each) for each in apart(state, len(out.logits))]

    def _call(self, tokens: Tensor, state: Any, known: int, extra_inputs: Any, keep: int) -> Any:
        places = torch.arange(known, known + tokens.shape[1], device=self.device).repeat(len(tokens), 1)
        options = {"position_ids": places} if self.way.positions or extra_inputs is not None else {}
        with self._records.collecting():
            return self._calls(tokens, state, extra_inputs, logits_to_keep=keep, **options)

    @torch.inference_mode()
    def alone(self, text: Sequence[int], source: Source | None = None) -> Tensor:
        return self._calls.alone(text, source)
