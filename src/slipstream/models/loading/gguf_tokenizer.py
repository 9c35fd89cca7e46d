"""The tokenizer in a .gguf file, which splits texts as llama.cpp does before it merges."""

import json
import re
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from slipstream.models.loading.gguf_config import SPECIAL
from slipstream.models.loading.gguf_file import TOKENS, GgufFile
from slipstream.text.jsontext import json_text

OF_USERS = 4  # llama.cpp's kind of tokens that are found before a text is split
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
HAN = "[一-龥぀-ゟ゠-ヿ]+"
SIGNS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[str, ...]] = {  # expressions by llama.cpp's names, whose matches are split off in turn
    **{name: (split,) for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()},
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "granite-docling"), (WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", WORDS)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"],)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", HAN, SIGNS)),
    "falcon": (r"[\p{P}$+<=>^~|`]+", WORDS, "[0-9][0-9][0-9]"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-llm": (
        *("[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$"),
        *("[一-龥ࠀ-一가-퟿]+", r"\p{N}+"),
    ),
}
# Of these vocabularies a whole word is taken first, whatever merges would make of it.
WHOLE_WORDS = (GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"], GGUF_PRE_TOKENIZER_SPLITS["tekken"])


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    parts = {
        part: {
            name: file.metadata[f"tokenizer.{key}"]
            for key, name in names.items()
            if f"tokenizer.{key}" in file.metadata
        }
        for part, names in GGUF_TOKENIZER_MAPPING.items()
    }
    words, settings = parts["tokenizer"], parts["tokenizer_config"]
    if "tokens" not in words:
        raise ValueError("the file holds no tokenizer: pass tokenizer=... as well")
    flags = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("add_bos_token", "add_eos_token")}
    settings.update({name: flag for name, flag in flags.items() if flag is not None})  # older transformers reads none
    if (kind := words.get("tokenizer_type")) in ("llama", "gemma4"):  # as llama.cpp; Gemma 4's template begins with it
        settings["add_bos_token"] = kind == "llama" and settings.get("add_bos_token", True)
    for key, role in SPECIAL.items():
        number = file.special(key)
        settings[f"{role}_token"] = None if number is None else words["tokens"][number]
    spaces = _spaces(words)
    words |= {"tokens": [spaces.get(number, token) for number, token in enumerate(words["tokens"])]} if spaces else {}
    backend, more = convert_gguf_tokenizer(file.architecture, words)
    _split_as_llama_cpp(backend, file)
    if spaces:
        backend = _with_spaces(backend, {name: file.metadata[TOKENS][number] for number, name in spaces.items()})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
    tokenizer.name_or_path = str(file.path)  # not before: where there are many tokens, the hub would be asked about it
    return tokenizer


def _spaces(words: dict[str, Any]) -> dict[int, str]:
    """Return names without spaces for the tokens of a byte-level vocabulary that stand for spaces before any split.
    transformers would take them for the ones that merges make of single spaces."""
    kinds = words.get("token_type", ()) if words.get("tokenizer_type") == "gpt2" else ()
    numbers = [number for number, kind in enumerate(kinds) if kind == OF_USERS]
    return {number: f"<spaces_{number}>" for number in numbers if re.search(r"\s", words["tokens"][number])}


def _with_spaces(backend: Tokenizer, spaces: dict[str, str]) -> Tokenizer:
    """Return a tokenizer whose tokens of these names are the spaces that they stand for."""
    record = json.loads(backend.to_str())
    record["model"]["vocab"] = {spaces.get(name, name): number for name, number in record["model"]["vocab"].items()}
    for token in record["added_tokens"]:
        token["content"] = spaces.get(token["content"], token["content"])
    return Tokenizer.from_str(json_text(record))


def _split_as_llama_cpp(backend: Tokenizer, file: GgufFile) -> None:
    """Set what a tokenizer does with a text before it merges. Raises ValueError for an unknown way."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "llama" and not file.architecture.startswith("gemma"):
        prefix = [normalizers.Prepend("▁")] if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    way = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and way not in SPLITS:
        raise ValueError(f"its tokenizer splits texts by {way!r}, which is not known: pass tokenizer=... as well")
    if kind == "gpt2":
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[way]]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
        backend.model.ignore_merges = SPLITS[way][0] in WHOLE_WORDS
