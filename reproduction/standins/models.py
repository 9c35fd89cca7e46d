"""The stand-ins for the paper's models: a T5-type target and three drafts of growing size, with one tokenizer.

The target is trained at a moderate width and then grown (Net2Net, arXiv 1511.05641): its feed-forward layers get
more hidden units, whose output weights start at zero so that the function stays the same, and all weights are trained
further.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

PAD, EOS = 0, 1
SPECIAL = 2  # the number of special tokens
DROPOUT = 0.1


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    head: int  # units of a head
    inner: int  # hidden units of a feed-forward layer
    encoder: int  # layers
    decoder: int


TARGET = Size(192, 6, 32, 512, 2, 2)
GROWN_INNER = 16384

DRAFTS = {
    "small": Size(64, 4, 16, 192, 1, 1),
    "base": Size(128, 4, 32, 320, 1, 2),
    "large": Size(192, 6, 32, 896, 2, 2),  # as the target before it grows; a wider one learned less in the same time
}
"""The sizes of the drafts: about 1/100, 1/30 and 1/10 of the grown target, as T5 small, base and large are of XXL."""


def new_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on texts; every encoded text ends with </s>, as T5's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def new_model(size: Size, vocab: int, seed: int = 0, dropout: float = DROPOUT) -> T5ForConditionalGeneration:
    """Return an untrained model of this size: T5 v1.1's layers with the embedding shared by input and output.

    A draft, which learns whole laws and has little capacity to memorize texts, needs no `dropout`.
    """
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=vocab,
        d_model=size.width,
        d_kv=size.head,
        num_heads=size.heads,
        d_ff=size.inner,
        num_layers=size.encoder,
        num_decoder_layers=size.decoder,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        dropout_rate=dropout,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
    )
    return T5ForConditionalGeneration(config)


@torch.no_grad()
def grown(model: T5ForConditionalGeneration, inner: int, seed: int = 0) -> T5ForConditionalGeneration:
    """Return a copy with every feed-forward layer widened to `inner` hidden units, which gives the same output."""
    config = T5Config(**{**model.config.to_dict(), "d_ff": inner})
    torch.manual_seed(seed)
    wide = T5ForConditionalGeneration(config)
    weights = wide.state_dict()
    for name, weight in model.state_dict().items():
        if name.endswith(".wo.weight"):
            weights[name].zero_()[:, : weight.shape[1]] = weight
        elif weight.shape == weights[name].shape:
            weights[name].copy_(weight)
        else:
            weights[name][: weight.shape[0]] = weight
    wide.load_state_dict(weights)
    wide.generation_config = model.generation_config
    return wide


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def save(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model and its tokenizer for `from_pretrained`. The folder appears only once it is whole."""
    part = folder.with_name(f"{folder.name}.part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.replace(folder)
