"""Images and sounds beside a text: what a model's processor has made of them, and which tokens stand for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad


class Modality(StrEnum):
    """What a model may read beside text; the value is what several of them are called in messages."""

    IMAGE = "images"
    AUDIO = "sounds"


def named(modalities: frozenset[Modality]) -> str:
    """The modalities as words, for messages."""
    return " and ".join(each.value for each in Modality if each in modalities)


@dataclass(frozen=True, eq=False)
class Media:
    """The images and sounds of one prompt as a model reads them.

    `inputs` are the model's arguments beside the tokens, such as pixel values; `along` are those with a number for
    every token of the prompt, (1, n). `placeholders` are the token ids that stand for each kind of media, and `digest`
    tells media apart by their content.
    """

    inputs: Mapping[str, Tensor]
    along: Mapping[str, Tensor]
    placeholders: Mapping[Modality, int]
    digest: bytes

    @staticmethod
    def of(inputs: Mapping[str, Tensor], along: Mapping[str, Tensor], placeholders: Mapping[Modality, int]) -> Media:
        """The media, with the digest of all that is read of them."""
        content = blake2b(digest_size=16)
        for name, tensor in sorted([*inputs.items(), *along.items()]):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return Media(inputs, along, placeholders, content.digest())

    @property
    def modalities(self) -> frozenset[Modality]:
        """The kinds of media that there are."""
        return frozenset(self.placeholders)

    def arguments(self, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The model's arguments beside the first `length` tokens; what was written behind the prompt is text."""
        per_token = {name: pad(each, (0, length - each.shape[1])) for name, each in self.along.items()}
        return {
            name: each.to(device, dtype) if each.is_floating_point() else each.to(device)
            for name, each in (*self.inputs.items(), *per_token.items())
        }

    def text(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without those that stand for media."""
        return [token for token in tokens if token not in self.placeholders.values()]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Integers that name the media."""
        return tuple(self.digest)


def same_media(left: Media | None, right: Media | None) -> bool:
    """Whether two prompts have the same media, or none."""
    return (left and left.digest) == (right and right.digest)


@runtime_checkable
class ReadsMedia(Protocol):
    """A Scorer whose model may read images or sounds."""

    @property
    def modalities(self) -> frozenset[Modality]:
        """What the model reads beside text."""
        ...

    def attach(self, row: int, media: Media) -> None:
        """Give an empty row the media of its text, all of which is then read in one piece."""
        ...


def check_media(scorer: object, media: Media | None, prompt: Sequence[int], where: str) -> None:
    """Raises ValueError if a model cannot read a prompt with these media (None: there are none)."""
    if media is None:
        return
    name = getattr(scorer, "name", "the model")
    read = scorer.modalities if isinstance(scorer, ReadsMedia) else frozenset[Modality]()
    if unread := media.modalities - read:
        raise ValueError(
            f"{where} has {named(unread)}, but {name} reads {only(read)}: leave them out, or take a model that reads "
            "them."
        )
    if prompt[-1] in media.placeholders.values():
        raise ValueError(
            f"{where} ends with an image or a sound, behind which {name} cannot begin: put a text behind it."
        )


def only(modalities: frozenset[Modality]) -> str:
    """What a model reads that reads these beside text, for messages."""
    return f"text and {named(modalities)} only" if modalities else "text only"
