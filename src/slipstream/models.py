"""Hugging Face causal language models as Scorers, unmodified.

A Scorer feeds the model explicit positions and an explicit 4-D mask, and a `Cache` that writes each row at its own
slots; the model's own code is not touched. What cannot be rolled back, or does not obey positions and mask, is
refused at construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from slipstream.cache import RowCache
from slipstream.execution import EAGER, Execution, Mode, Pass, execution
from slipstream.packing import can_pack, packed
from slipstream.records import Shape, Tree
from slipstream.sight import Sight, mask_kinds

EMBEDDED = Path(__file__).parent / "demo"
"""The pair that ships with the package: folders `target` and `draft`."""

PREFILL_TOKENS = 512
"""Columns of one prefill pass: bounds the memory of masks and activations for long prompts."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
STATEFUL = "keeps a state that cannot be rolled back to an earlier token"

# Model types covered by the contract tests; any other type has to pass `probe` when it is wrapped.
PROVEN = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3"),
        *("gpt2", "gpt_neox", "opt", "falcon", "mixtral", "qwen2_moe"),
    }
)


class _HFCache(Cache):
    """transformers' Cache interface over a RowCache."""

    def __init__(self, rows: RowCache) -> None:
        super().__init__(layers=[])
        self.rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.rows.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.rows.past

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.rows.end, 0


class CausalScorer:
    """A causal language model and its cache (see `records.Scorer` for the contract and the shapes).

    Raises ValueError if the model's state cannot be rolled back or its attention ignores positions and masks.
    """

    def __init__(self, model: PreTrainedModel, name: str | None = None, execution: Execution | None = None) -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        self.model = model.eval()
        self._config = model.config.get_text_config()
        _refuse_unsupported(model, self.name)
        self._kinds = mask_kinds(self._config)
        self.shape: Shape | None = None
        self.device = model.device  # where tokens go in and logits come out
        self._keeps = model._supports_logits_to_keep()  # looks at signatures: too slow for every pass
        self.execution = execution
        self._fresh()
        if self._config.model_type not in PROVEN:
            probe(self)

    def _fresh(self) -> None:
        self._rows = RowCache()
        self._cache = _HFCache(self._rows)

    @property
    def vocab(self) -> int:
        """Size of the logits."""
        head = self.model.get_output_embeddings()
        return int(getattr(head, "out_features", None) or self._config.vocab_size)

    @property
    def context(self) -> int | None:
        """The longest text, from `max_position_embeddings`, or before longrope would turn cached keys differently."""
        limits = (getattr(self._config, "max_position_embeddings", None), _longrope_switch(self._config))
        return min((limit for limit in limits if limit), default=None)

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return self._rows.lengths

    @property
    def bytes_per_token(self) -> int:
        """Of the cache; 0 before the first pass."""
        return self._rows.bytes_per_token

    def add(self, rows: int) -> None:
        """Append empty rows."""
        self._rows.add(rows)

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        self._rows.free(rows)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything after `lengths[r]` tokens of each row."""
        self._rows.rollback(lengths)

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted tokens of a tree together."""
        self._rows.keep(starts, paths)

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens (rows, n), of which `counts[r]` are real -> logits (rows, n, vocab) in the model's dtype."""
        if self.shape:
            return self._extend_exactly(self.shape, tokens, counts, tree)
        width = count = tokens.shape[1]
        if self.execution and tree is None:
            width = self.execution.width(count)
            tokens = torch.nn.functional.pad(tokens, (0, width - count))
        logits = self._forward(tokens, self._rows.place(width, first), keep=0, tree=tree)
        self._rows.advance(counts)
        return logits[:, :count]

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape, so that no bit of the logits depends on how many rows and
        tokens are scored together (None: in the shape of the work at hand, which is faster)."""
        self.shape = shape
        self._rows.least = shape.slots if shape else 0

    def _extend_exactly(self, shape: Shape, tokens: Tensor, counts: Sequence[int], tree: Tree | None) -> Tensor:
        rows, width = tokens.shape
        assert rows <= shape.rows and width <= shape.width and tree is None, f"{tokens.shape} does not fit {shape}"
        self._rows.add(shape.rows - rows)
        fed = torch.nn.functional.pad(tokens, (0, shape.width - width, 0, shape.rows - rows))
        logits = self._forward(fed, self._rows.place(shape.width), keep=0)
        self._rows.free(range(rows, shape.rows))
        self._rows.advance(counts)
        return logits[:rows, :width]

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed whole texts, one for each row from `first` on, in passes of bounded width."""
        if self.shape:  # one by one, so that a row's keys do not depend on which rows it came with
            for row, text in enumerate(texts, first):
                self._prefill([text], first=row, stop=row + 1)
        else:
            self._prefill(texts, first, None)

    def _prefill(self, texts: Sequence[Sequence[int]], first: int, stop: int | None) -> None:
        for start in range(0, max(map(len, texts), default=0), PREFILL_TOKENS):
            parts = [text[start : start + PREFILL_TOKENS] for text in texts]
            slots = self._rows.place(max(map(len, parts)), first, stop)
            self._forward(padded(parts, self.device), slots, keep=1)
            self._rows.advance([len(part) for part in parts])

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, slots: Tensor, keep: int, tree: Tree | None = None) -> Tensor:
        work = self._pass(tokens, slots.to(self.device), tree)
        if self.execution and not keep and not self._rows.partial:
            logits = self.execution.run(work, self._rows.stores)
            if logits is not None:
                return logits
        out = self.model(
            input_ids=tokens,
            attention_mask=work.mask,
            position_ids=work.positions,
            past_key_values=self._cache,
            use_cache=True,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )
        return out.logits.to(self.device)

    def _pass(self, tokens: Tensor, slots: Tensor, tree: Tree | None) -> Pass:
        sight = self._sight(slots, tree)
        masks = {kind: sight.mask(*rule, self.model.dtype) for kind, rule in self._kinds.items()}
        positions = sight.own
        if self.context and self._rows.end > self.context:  # padding may stand beyond the last learned position
            positions = positions.clamp(max=self.context - 1)
        return Pass(tokens, positions, slots, masks)

    def _sight(self, slots: Tensor, tree: Tree | None) -> Sight:
        if tree is not None:
            return Sight.tree(slots, self._rows.end, tree)
        if slots.shape[1] == 1 and self._rows.last_sees_all and not any(map(any, self._kinds.values())):
            return Sight.everything(slots, self._rows.end)  # a drafting step: nothing to compare
        return Sight.chain(slots, self._rows.end)


def padded(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Texts of different lengths -> (rows, longest), padded on the right with zeros."""
    width = max(map(len, texts), default=0)
    return torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], dtype=torch.long, device=device)


def _longrope_switch(config: Any) -> int | None:
    """The length beyond which longrope changes the rotation of all tokens, of the cached ones and of other rows too."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    return min((kind["original_max_position_embeddings"] for kind in kinds), default=None)


def _refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; only causal language models are supported.")
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    alien = sorted(map(str, types - ATTENTION_LAYERS - {"attention"}))
    if alien:
        raise ValueError(f"{name} has layers of type {', '.join(alien)}, which {STATEFUL}; use another model.")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} ({config.model_type}) {STATEFUL}; use another model.")
    if config.model_type in {"bloom", "mpt"} or getattr(config, "alibi", False):
        raise ValueError(f"{name} uses ALiBi, whose bias cannot follow rows of different lengths; use another model.")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"{name} ({config.model_type}) counts its local attention from the longest row, so rows of different "
            "lengths would see too little; use another model."
        )
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in {"sdpa", "eager", None}:
        raise ValueError(f"{name} uses attn_implementation={kernel!r}, which takes no mask; load it with 'sdpa'.")


@torch.inference_mode()
def probe(scorer: CausalScorer) -> None:
    """Compare extend, rollback and ragged rows with fresh forwards on a few tokens.

    Raises ValueError if they differ by more than rounding: the model does not obey positions, mask or cache.
    """
    half = min(12, (scorer.context or 12)) // 2
    texts = [[(7 * i + 3 * r + 1) % scorer.vocab for i in range(half + half * r)] for r in range(2)]
    wrong = torch.zeros(2, 3, dtype=torch.long, device=scorer.device)
    try:
        scorer.add(2)
        scorer.prefill([text[:-2] for text in texts])
        scorer.extend(wrong, [1, 2])
        scorer.rollback([len(text) - 2 for text in texts])
        ours = scorer.extend(torch.tensor([text[-2:] for text in texts], device=scorer.device), [2, 2])
        fresh = [scorer.model(torch.tensor([text], device=scorer.device), use_cache=False).logits for text in texts]
    except Exception as error:
        reason = f"{type(error).__name__}: {_first_sentence(error)}"
        raise ValueError(
            f"{scorer.name} ({scorer._config.model_type}) does not run with our cache: {reason}"
        ) from error
    finally:
        scorer._fresh()
    theirs = torch.cat([logits[:, -2:].to(ours.device) for logits in fresh]).float()
    gap = float((ours.float() - theirs).abs().max() / theirs.std())
    allowed = 0.01 if ours.dtype in {torch.float32, torch.float64} else 0.3
    if not gap <= allowed:
        raise ValueError(
            f"{scorer.name} ({scorer._config.model_type}) gives other logits with a rolled-back cache "
            f"(difference {gap:.2g} standard deviations, rounding explains {allowed}); it cannot be used."
        )


# ---- loading ----------------------------------------------------------------------------------------------------


def load_model(
    source: str | Path | PreTrainedModel, dtype: str | torch.dtype = "auto", device: str | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A hub name, a folder or a loaded model -> the model. `kwargs` go to `from_pretrained` (quantization, ...).

    `device` defaults to the GPU if there is one. A loaded model stays where it is unless `device` is given.
    Raises ValueError in one sentence if there is no such model.
    """
    place = _device(device)
    if isinstance(source, PreTrainedModel):
        return source.to(place) if device else source
    _refuse_missing(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=_dtype(dtype), **kwargs)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ValueError(f"cannot load the model {str(source)!r}: {_first_sentence(error)}") from error
    placed = getattr(model, "hf_device_map", None) or getattr(model, "hf_quantizer", None)
    return model if placed else model.to(place)


def load_scorer(
    source: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    mode: Mode = EAGER,
    **kwargs: Any,
) -> CausalScorer:
    """A hub name, a folder or a loaded model -> its Scorer, running in `mode`; otherwise as `load_model`."""
    name = str(source.name if isinstance(source, Path) else source) if isinstance(source, str | Path) else None
    model = load_model(source, dtype, device, **kwargs)
    pack = mode.packed
    if pack is None:  # of a model that we loaded ourselves nobody holds the plain weights, so they can go
        pack = mode.compiled or not isinstance(source, PreTrainedModel)
    if pack and can_pack(model):
        model = packed(model)
    return CausalScorer(model, name, execution(model, name or type(model).__name__, mode))


def _device(device: str | None) -> torch.device:
    """The device asked for, or the GPU if there is one. Raises ValueError if it is not there."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used: {_first_sentence(error)}") from error
    return place


def _refuse_missing(source: str | Path) -> None:
    """A path that looks like one and is not there is no hub name with odd characters."""
    path = Path(source)
    if isinstance(source, Path) or path.is_absolute() or str(source).startswith((".", "~")):
        if not path.is_dir():
            raise ValueError(f"cannot load the model {str(source)!r}: there is no such folder.")
        if not (path / "config.json").is_file():
            raise ValueError(f"cannot load the model {str(source)!r}: the folder has no config.json.")


def load_tokenizer(source: str | Path | PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises ValueError in one sentence if there is none."""
    name = source.config.name_or_path if isinstance(source, PreTrainedModel) else source
    if not name:
        raise ValueError("the loaded model does not know its name; pass tokenizer=... as well.")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {_first_sentence(error)}") from error


def vocabulary(source: str | Path) -> int:
    """The size of a model's logits by its configuration, without loading it. ValueError if there is none."""
    try:
        return int(AutoConfig.from_pretrained(source).get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        reason = _first_sentence(error)
        raise ValueError(f"cannot tell the vocabulary of {str(source)!r} (pass its size): {reason}") from error


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ValueError(f"dtype={dtype!r} is not known: use auto, {', '.join(known)}.")
    return known[dtype]


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
