"""Train a draft whose tokenizer differs from that of the embedded target.

It is the embedded draft with another vocabulary, trained further on the standard library's part of the embedded
pair's text and on continuations that the target wrote, as text. The kind `bytes` is a byte-level BPE that splits text
as GPT-2's does; `words` is a Unigram vocabulary that writes a space as a mark and unknown characters as their bytes, as
sentencepiece does. An interrupted run continues where it stopped.

    python recipes/foreign_draft.py --out DIR --kind bytes --minutes 10
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from pair import corpus
from pair.budget import Seconds, train
from pair.models import CONTEXT, save_pretrained, text_loss
from pair.writing import written_texts
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.training.trainer import muon_and_adam

EMBEDDED = Path(__file__).parents[1] / "src" / "slipstream" / "demo"
VOCABULARY = 3072
FROM_TARGET = 0.4  # the share of batches that are texts written by the target
ROWS, LENGTH = 8, 256  # windows of a batch, and tokens of a window
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_tokenizer() -> tuple[Tokenizer, trainers.Trainer]:
    """Return a byte-level BPE tokenizer like GPT-2's, and its trainer."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return core, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[corpus.END], initial_alphabet=alphabet, show_progress=False
    )


def word_tokenizer() -> tuple[Tokenizer, trainers.Trainer]:
    """Return a Unigram tokenizer like sentencepiece's, without its dummy space before a text, and its trainer."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*\p{L}+|▁*\p{N}|▁*[^\s▁\p{L}\p{N}]+|\n+|▁+"), "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [corpus.END, "<unk>", *BYTES]
    return core, trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
    )


def train_tokenizer(kind: str, sources: list[corpus.Source]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of this kind on the training files."""
    core, trainer = {"bytes": byte_tokenizer, "words": word_tokenizer}[kind]()
    core.train_from_iterator((source.text for source in sources), trainer)
    if kind == "words":  # the trainer lacks byte fallback: switch it on, and make bytes ordinary tokens
        core = _with_byte_fallback(core)
    end = corpus.END
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=end, eos_token=end, model_max_length=CONTEXT)


def _with_byte_fallback(core: Tokenizer) -> Tokenizer:
    state = json.loads(core.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(state))


def new_draft(ours: PreTrainedTokenizerFast, target_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the embedded draft with the vocabulary of `ours`.

    The embedding of a new token starts as the mean of those of the old tokens for the same text.
    """
    draft = AutoModelForCausalLM.from_pretrained(EMBEDDED / "draft", dtype=torch.float32)
    known = draft.get_input_embeddings().weight.detach().clone()
    draft.resize_token_embeddings(len(ours), mean_resizing=False)
    weight = draft.get_input_embeddings().weight
    with torch.no_grad():
        for token in range(1, len(ours)):
            pieces = target_tokenizer(ours.decode([token])).input_ids
            weight[token] = known[pieces].mean(0) if pieces else known.mean(0)
    return draft


def main() -> None:
    """Train the tokenizer, let the target write texts, and train and save the draft."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the draft goes")
    parser.add_argument("--kind", choices=("bytes", "words"), default="bytes")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of training")
    parser.add_argument("--tokens-written", type=int, default=300_000, help="that the target writes for the draft")
    parser.add_argument("--work", type=Path, default=Path("build/foreign_draft"), help="checkpoints")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    library = corpus.read_library()
    ours, target_tokenizer = (
        train_tokenizer(args.kind, library.train),
        AutoTokenizer.from_pretrained(EMBEDDED / "target"),
    )
    prompts = corpus.prompts(library.train, corpus.Stream.of(library.train, target_tokenizer), target_tokenizer)
    file = args.work / "written.safetensors"  # shared by both kinds
    rows = written_texts(EMBEDDED / "target", prompts, args.tokens_written, file)
    written = [corpus.Source("", text) for text in target_tokenizer.batch_decode(rows, skip_special_tokens=True)]
    streams = [corpus.Stream.of(sources, ours) for sources in (library.train, written)]
    print(f"{len(ours)} tokens; {[f'{len(stream.tokens):,}' for stream in streams]} tokens of library and target")

    def step(fraction: float, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        tokens = streams[rng.random() < FROM_TARGET].windows(rng, ROWS, LENGTH + 1)
        return text_loss(draft, tokens), ROWS * LENGTH

    draft = new_draft(ours, target_tokenizer).train()
    optimizers, budget = muon_and_adam(draft, muon=0.01, adam=2e-3), Seconds(60.0 * args.minutes)
    print(train(draft, optimizers, budget, args.work / f"{args.kind}.safetensors", step))
    save_pretrained(draft, ours, args.out)


if __name__ == "__main__":
    main()
