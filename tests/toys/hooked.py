"""A target and a noisy draft for transformers' hook, a left-padded batch, and a tokenizer of letters."""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from toys.families import FAMILIES, HF_VOCAB, tiny

PAD = 0
BATCH = torch.tensor([[0, 0, 3, 4, 5], [0, 1, 2, 3, 9], [7, 8, 9, 10, 11], [0, 0, 0, 0, 5]])


@cache
def pair(family: str = "llama", noise: float = 0.012) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that agrees with it in every other token: the target with noise in its weights."""
    target = tiny(FAMILIES[family])
    draft = deepcopy(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += noise * torch.randn_like(weights)
    return target, draft


def padded(ids: Tensor = BATCH) -> dict[str, Any]:
    """A left-padded batch as a tokenizer gives it."""
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "pad_token_id": PAD}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Token 0 is padding, then come letters, then pairs of them."""
    letters = "abcdefghij"
    tokens = ["_", *letters, *(x + y for x in letters for y in letters)][:HF_VOCAB]
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    words = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    words.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_", bos_token="ij", padding_side="left")
