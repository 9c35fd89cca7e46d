"""Tokenizers of the tests: of several kinds, trained on one text, and a few of three or four tokens."""

import inspect
import json
import textwrap
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = f"{textwrap.__doc__}\n{inspect.getsource(textwrap)}"
"""What they are trained on: Python and English, from the standard library."""

STRANGE = "naïve café:\n\t日本語 и 🙂🙂  x = [1,  2]   \n\n\n    return 'ß'\n"
"""Characters of one to four bytes, and runs of white space."""

END = "<|end|>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(size: int, regex: bool = True) -> PreTrainedTokenizerFast:
    """GPT-2's kind."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


def marked(size: int, prepend: bool = False) -> PreTrainedTokenizerFast:
    """Sentencepiece's kind, unknown characters as bytes; with `prepend`, as in Llama 2: a beginning and a space."""
    core = Tokenizer(models.Unigram())
    steps: list[Any] = [normalizers.Prepend("▁")] if prepend else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*[^\s▁]+|\n+|▁+"), "isolated")
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prepend else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *BYTES], unk_token="<unk>", show_progress=False
    )
    return _with_bytes(core, trainer, prepend)


def metaspace(size: int, scheme: str) -> PreTrainedTokenizerFast:
    """Sentencepiece's kind in its later form: pairs, and a pre-tokenizer that marks spaces and may prepend one."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoder])
    if scheme == "first":
        ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    made = _with_bytes(core, trainer, scheme != "never")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return made


SPECIAL = ["<unk>", "<s>", "</s>"]


def _with_bytes(core: Tokenizer, trainer: Any, begins: bool) -> PreTrainedTokenizerFast:
    """Train a tokenizer of sentencepiece's kind; the trainer knows no bytes: they become ordinary tokens here."""
    core.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    state = json.loads(core.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    core = Tokenizer.from_str(json.dumps(state))
    if begins:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def word_pieces(size: int) -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, white space is lost."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    core.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", eos_token="[SEP]")


@cache
def tongue(name: str) -> PreTrainedTokenizerFast:
    """One of the kinds above, made once."""
    return {
        "bytes": lambda: byte_level(420),
        "fewer bytes": lambda: byte_level(330),
        "bytes across words": lambda: byte_level(400, regex=False),
        "marked": lambda: marked(450),
        "prepended": lambda: marked(420, prepend=True),
        "word pieces": lambda: word_pieces(300),
        **{f"metaspace {scheme}": partial(metaspace, 430, scheme) for scheme in ("always", "first", "never")},
    }[name]()


TONGUES = ("bytes", "fewer bytes", "bytes across words", "marked", "prepended", "word pieces")
SENTENCEPIECE = ("marked", "prepended", "metaspace always", "metaspace first", "metaspace never")


def toy(*tokens: str, end: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of a few given tokens, numbered in order; longer ones are merged from two shorter ones."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [_halves(token, vocabulary) for token in tokens if len(token) > 1]
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, **({"eos_token": end} if end else {}))


def _halves(token: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    cuts: Sequence[int] = range(1, len(token))
    return next((token[:cut], token[cut:]) for cut in cuts if {token[:cut], token[cut:]} <= set(vocabulary))
