"""Loading models and tokenizers by hub name or folder, with a one-sentence error for what cannot be loaded."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto as auto

from slipstream.core.values import first_sentence
from slipstream.execution.backends import execution
from slipstream.execution.passes import EAGER, Mode
from slipstream.kernels.packing import can_pack, is_packed
from slipstream.kernels.stored_codes import UnreadFormat
from slipstream.kernels.threads import use_threads
from slipstream.models.causal import CausalScorer
from slipstream.models.families import refuse_unsupported
from slipstream.models.loading import faults
from slipstream.models.loading.adapters import read_adapter, with_adapter
from slipstream.models.loading.dropped_tensors import read_record
from slipstream.models.loading.gguf import load_gguf
from slipstream.models.loading.gguf_file import GgufFile
from slipstream.models.loading.gguf_tokenizer import tokenizer_of
from slipstream.models.loading.origin import Origin, source_name
from slipstream.models.loading.quantized import (
    INT8,
    Loaded,
    Reading,
    leave_to_transformers,
    load_quantized,
    stored_quantization,
)
from slipstream.models.loading.twins import packed_twin, quantized_twin, with_encoder_dtype, with_kept_tokens
from slipstream.models.recurrent.scorer import StateScorer


def load_model(
    source: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    encoder_dtype: str | torch.dtype | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a model by its hub name, folder or .gguf file; a loaded model is returned as it is.

    With `encoder_dtype`, it is a twin whose encoder has that type. An `adapter` (or one in place of the source) is
    merged into its weights, dequantized if need be; into a copy of a loaded model. `kwargs` go to `from_pretrained`
    (quantization, `device_map`, ...). Weights that are stored in codes multiply inputs rounded to 8 bits, or inputs as
    they are with activations="float"; with `dequantize=True` they become plain numbers. Code that comes with a model
    runs only with `trust_remote_code=True`. `device` defaults to the GPU if there is one. A loaded model stays where it
    is unless `device` is given. Raises ValueError in one sentence if there is no such model, or if its encoder cannot
    have a type of its own.
    """
    if encoder_dtype is not None:
        own = _dtype("encoder_dtype", encoder_dtype)
        return with_encoder_dtype(load_model(source, dtype, device, **kwargs), own)
    faults.refuse_missing(source)  # a .gguf file is no folder, but holds a model
    place, adapter = faults.usable_device(device), kwargs.pop("adapter", None)
    if isinstance(source, PreTrainedModel):
        if kwargs:
            raise TypeError(f"unknown option {', '.join(sorted(kwargs))}: a loaded model is used as it is.")
        model = with_adapter(copy.deepcopy(source), adapter) if adapter else source
        return model.to(place) if device else model
    use_threads()
    origin = Origin.of(source, kwargs.pop("trust_remote_code", False), adapter)
    reading = Reading(kwargs.pop("activations", INT8), kwargs.pop("dequantize", origin.adapter is not None))
    if origin.adapter:
        read_adapter(origin.adapter)  # which may be refused, before the model is read
    wanted, kind = "auto" if dtype == "auto" else _dtype("dtype", dtype), _kind(origin)
    if fault := faults.damaged_record(origin.file, faults.MODEL_RECORDS):  # transformers leaves out damaged settings
        raise ValueError(f"cannot load the model {str(source)!r}: {fault}.")
    try:
        model, about = _read(kind, origin, place, wanted, reading, kwargs)
    except Exception as error:  # the files come from elsewhere, and damaged ones raise errors of any type
        raise cannot_load(origin, error) from error
    faults.refuse_missing_weights(source, about["missing_keys"])
    placed = getattr(model, "hf_device_map", None) or getattr(model, "hf_quantizer", None)
    model = model if placed else model.to(place)
    return with_adapter(model, origin.adapter) if origin.adapter else model


def _read(
    kind: Any, origin: Origin, place: torch.device, dtype: str | torch.dtype, reading: Reading, options: dict[str, Any]
) -> Loaded:
    """Return a model and transformers' loading report; quantized weights keep their codes if their format is read.
    Raises ValueError, whose message is only the fault, if they are to be read in another way and cannot be."""
    try:
        stored = stored_quantization(origin, place, options)
        if stored:
            return load_quantized(kind, origin, stored, dtype, reading, options)
        if (loaded := load_gguf(kind, origin, place, dtype, reading, options)) is not None:
            return loaded
    except UnreadFormat as unread:
        leave_to_transformers(origin, unread)
    if reading != Reading() and not origin.gguf and not origin.adapter:
        raise ValueError("activations= and dequantize= are for quantized weights that are read from their own codes")
    return kind.from_pretrained(origin.place, dtype=dtype, output_loading_info=True, **origin.options, **options)


AnyScorer = CausalScorer | StateScorer  # the kinds of Scorers that a model can be wrapped in


def load_scorer(
    source: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    mode: Mode = EAGER,
    kept: Tensor | None = None,
    **kwargs: Any,
) -> AnyScorer:
    """Load a model with the arguments of `load_model`, and return its Scorer, which runs in `mode`.

    The weights of a loaded model stay as they are; the Scorer has copies where they are packed or quantized. `kept`
    (n,) cuts the model's head to these tokens, which makes another model: all other tokens become impossible. A model
    that cannot be rolled back by a length is tried with states.
    """
    model = load_model(source, dtype, device, **kwargs)
    name = source_name(source) or source_name(model.config.name_or_path) or type(model).__name__
    # The plain weights of a model that was loaded here have no other user, so they can be replaced.
    packs = mode.compiled or not isinstance(source, PreTrainedModel) if mode.packed is None else mode.packed
    packs = packs and mode.precision is None and can_pack(model)
    model = model if kept is None else with_kept_tokens(model, name, kept)
    if mode.precision is not None:
        if is_packed(model):
            raise ValueError(f"the weights of {name} are quantized already: leave quantize={mode.precision} out.")
        model = quantized_twin(model, name, mode.precision, progress=mode.progress)
    return scorer_of(model, name, mode, packs)


def scorer_of(model: PreTrainedModel, name: str, mode: Mode = EAGER, packs: bool = False) -> AnyScorer:
    try:
        return _causal(model, name, mode, packs)
    except (ValueError, AttributeError, KeyError, TypeError):  # a family that lacks attributes which others have
        return _stateful(model, name, mode, packs)


def _causal(model: PreTrainedModel, name: str, mode: Mode, packs: bool) -> CausalScorer:
    refuse_unsupported(model, name)
    if packs:
        model = packed_twin(model, name)
    scorer = CausalScorer(model, name, execution(model, name, mode), mode.kv_dtype)
    if scorer.execution is not None and mode.ahead is not None:
        scorer.make_draft_graphs(mode.ahead, mode.progress)
    return scorer


def _stateful(model: PreTrainedModel, name: str, mode: Mode, packs: bool) -> StateScorer:
    if mode.kv_dtype:
        raise ValueError(f"{name} keeps a state per row, which has no form in {mode.kv_dtype}: leave kv_dtype out.")
    try:
        scorer = StateScorer(packed_twin(model, name) if packs else model, name)
    except (AttributeError, KeyError, TypeError) as error:
        kind = type(model).__name__
        raise ValueError(
            f"{name} ({kind}) is not called as language models are ({first_sentence(error)}); use another model."
        ) from error
    if mode.compiled:
        warnings.warn(f"{name} runs eagerly: it keeps a state per row.", RuntimeWarning, stacklevel=4)
    return scorer


def _kind(origin: Origin) -> Any:
    try:
        config = origin.config()
    except Exception as error:  # of any type, depending on the contents of the file
        raise cannot_load(origin, error) from error
    faults.refuse_other_kinds(origin.source, config)
    faults.refuse_unknown_quantization(origin.source, config)
    kind = type(config)
    causal, reads_source = (
        kind in mapping for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    )
    if kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        # Some configurations have two classes; the one that wrote the checkpoint decides then.
        images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
        names = {each.__name__ for each in (images if isinstance(images, tuple) else (images,))}
        if not (causal or reads_source) or not names.isdisjoint(config.architectures or ()):
            return auto.AutoModelForImageTextToText
    # transformers lists models that read sound among encoder-decoders only, though they are not encoder-decoders.
    if not config.is_encoder_decoder and (causal or not reads_source):
        alone = kind in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING and not causal
        return auto.AutoModelForMultimodalLM if alone else auto.AutoModelForCausalLM
    return auto.AutoModelForSeq2SeqLM if reads_source else auto.AutoModelForSpeechSeq2Seq


def cannot_load(origin: Origin, error: Exception) -> ValueError:
    fault = f"{faults.model_fault(origin.file, error)}{faults.proposal(origin.source)}."
    return ValueError(f"cannot load the model {str(origin.source)!r}: {fault.replace('?.', '?')}")


def load_tokenizer(
    source: str | Path | PreTrainedModel, trust_remote_code: bool = False, adapter: str | Path | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an adapter if it has one, else of its model. Raises ValueError in one sentence if none."""
    name = source.config.name_or_path if isinstance(source, PreTrainedModel) else source
    if not name and isinstance(source, str):
        raise ValueError("cannot load a tokenizer: the name of its model is empty.")
    if not name:
        raise ValueError("the loaded model does not know its name; pass tokenizer=... as well.")
    origin = Origin.of(name, trust_remote_code, adapter)
    try:
        if origin.adapter and read_record(origin.adapter, "tokenizer_config.json"):
            return AutoTokenizer.from_pretrained(origin.adapter, **{**origin.options, "gguf_file": None})
        if origin.gguf:
            return tokenizer_of(GgufFile.read(origin.gguf))
        tokenizer = AutoTokenizer.from_pretrained(origin.place, **origin.options)
        faults.refuse_without_words(origin.place, tokenizer)
        return tokenizer
    except Exception as error:  # of any type, depending on the contents of the files
        reason = faults.tokenizer_fault(origin.file, error)
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {reason}.") from error


def find_tokenizer(
    source: str | Path | PreTrainedModel, trust_remote_code: bool = False, adapter: str | Path | None = None
) -> PreTrainedTokenizerBase | None:
    name = source.config.name_or_path if isinstance(source, PreTrainedModel) else source
    faults.refuse_other_types(name or "")
    try:
        return load_tokenizer(source, trust_remote_code, adapter)
    except ValueError as error:
        if name and faults.has_tokenizer(name):
            advice = "" if "tokenizer=" in str(error) else ", or pass tokenizer=... to load()"
            raise ValueError(f"{str(error).removesuffix('.')}{advice}.") from error
        return None


def vocabulary(source: str | Path) -> int:
    """Return the size of a model's logits from its configuration, without loading it. ValueError if there is none."""
    try:
        return int(Origin.of(source).config().get_text_config().vocab_size)
    except Exception as error:  # of any type, depending on the contents of the file
        reason = faults.model_fault(source, error)
        raise ValueError(f"cannot tell the vocabulary of {str(source)!r} (pass its size): {reason}.") from error


def _dtype(option: str, dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ValueError(f"{option}={dtype!r} is not known: use {', '.join(known)}, or leave it out.")
    return known[dtype]
