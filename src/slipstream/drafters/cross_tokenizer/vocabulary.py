"""Compares two vocabularies: the bytes that each token writes, and the tokens that write the same in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from slipstream.core.protocols import Scorer
from slipstream.text.spelling import BYTE, DecodedAfter, reading_of

ABSENT = -1  # the id that marks a token without a counterpart


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer, and the bytes that each of them writes.

    `pieces[id]` are a token's bytes as they stand inside a text, None for special tokens and for ids without a token.
    `ids` maps bytes to ids; if two tokens write the same, to the one that the tokenizer uses itself. `special` names
    the special tokens; `prefix` is what the tokenizer puts before a text. If `strips`, a text's first token loses
    its leading space when it is decoded.
    """

    tokenizer: Any
    pieces: tuple[bytes | None, ...]
    ids: Mapping[bytes, int]
    special: Mapping[int, str]
    prefix: tuple[int, ...]
    strips: bool

    @staticmethod
    def of(tokenizer: Any) -> Vocabulary:
        """Make the vocabulary of a transformers tokenizer. Raises ValueError if no token of it writes anything."""
        names = {number: name for name, number in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        special = {number: token.content for number, token in added.items() if token.special}
        special |= {number: names[number] for number in tokenizer.all_special_ids if number in names}
        plain = {number: name for number, name in names.items() if number not in special}
        ordinary = {number: name for number, name in plain.items() if number not in added}
        decoded = DecodedAfter(tokenizer, ordinary)
        reading = reading_of(decoded)  # of names, if decoding confirms one
        spelled = {number: reading(name) if reading else decoded.piece(number) for number, name in ordinary.items()}
        spelled |= {number: added[number].content.encode() for number in plain if number in added}
        if not any(spelled.values()):
            raise ValueError("the tokenizer has no token that writes a character: it cannot be compared.")
        pieces = tuple(spelled.get(number) for number in range(max(names) + 1))
        order = sorted(spelled, key=lambda number: (bool(BYTE.fullmatch(names[number])), number))
        ids = {piece: number for number in reversed(order) if (piece := spelled[number])}
        spaced = next((number for piece, number in ids.items() if piece.startswith(b" ") and piece.strip()), None)
        strips = spaced is not None and not tokenizer.decode([spaced]).startswith(" ")
        bare, full = (tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
        before = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return Vocabulary(tokenizer, pieces, ids, special, tuple(full[:before]), strips)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def write(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes that tokens write, up to the first that writes nothing."""
        return b"".join(takewhile(lambda piece: piece is not None, map(self.piece, tokens)))  # type: ignore[arg-type]

    def piece(self, token: int) -> bytes | None:
        return self.pieces[token] if token < len(self.pieces) else None

    def role(self, name: str) -> int | None:
        """Return the token id of a role, "bos" or "eos"; None if the tokenizer has none."""
        number = getattr(self.tokenizer, f"{name}_token_id", None)
        return int(number) if number is not None else None


@dataclass(frozen=True, eq=False)
class CommonTokens:
    """The common tokens of a draft and a target: they write the same bytes, or are special with one name or role.

    `drafted` and `wanted` (n,) list the pairs, as ids of the draft and of the target. `to_draft` (target's logits,)
    maps the target's ids to the draft's, ABSENT without a counterpart. `special` does so for special tokens in texts
    that are read.
    """

    drafted: Tensor
    wanted: Tensor
    to_draft: Tensor
    special: Mapping[int, int]

    @staticmethod
    def of(target: Vocabulary, draft: Vocabulary, sizes: tuple[int, int]) -> CommonTokens:
        """Find the common tokens; `sizes` are those of target's and draft's logits. Raises ValueError for none."""
        names = {name: number for number, name in draft.special.items()}
        special = {number: names[name] for number, name in target.special.items() if name in names}
        target_end, draft_end = target.role("eos"), draft.role("eos")
        if target_end is not None and draft_end is not None and target.special.get(target_end) not in names:
            special[target_end] = draft_end  # both end a text
        pairs = {number: draft.ids[piece] for piece, number in target.ids.items() if piece in draft.ids} | special
        good = sorted((t, d) for t, d in pairs.items() if t < sizes[0] and d < sizes[1])
        if not any(t not in special for t, _ in good):
            raise ValueError(
                f"no token of the draft's vocabulary ({sizes[1]}) writes what one of the target's ({sizes[0]}) does: "
                "choose a draft whose tokenizer knows the same script."
            )
        wanted, drafted = torch.tensor(good).T
        to_draft = torch.full((sizes[0],), ABSENT).scatter(0, wanted, drafted)
        if (begin := target.role("bos")) is not None and begin not in special and draft.prefix:
            special[begin] = draft.prefix[0]
        return CommonTokens(drafted, wanted, to_draft, special)

    def translate(self, logits: Tensor) -> Tensor:
        """Convert the draft's logits (..., its vocabulary) to (..., target's), with -inf for other tokens."""
        out = logits.new_full((*logits.shape[:-1], self.to_draft.shape[0]), float("-inf"))
        out[..., self.wanted.to(logits.device)] = logits[..., self.drafted.to(logits.device)]
        return out


def same_vocabulary(target: Scorer, draft: Scorer, target_tokenizer: Any, draft_tokenizer: Any) -> bool:
    """Return whether ids mean the same tokens, but for a few: others would just never be accepted."""
    if target_tokenizer is None or draft_tokenizer is None:
        return abs(target.vocab - draft.vocab) <= max(1024, target.vocab // 100)
    target_ids, draft_ids = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    common = sum(draft_ids.get(token) == number for token, number in target_ids.items())
    return common >= 0.99 * max(len(target_ids), len(draft_ids))
