"""The images of a prompt: the tensors that a model's processor made of them, and their placeholder tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one prompt, as arguments of the model.

    `inputs` are the model's arguments besides the tokens, such as pixel values; `along` are those with a number for
    every token of the prompt, (1, n). `placeholders` are the token ids that stand for images, and `digest` is a hash of
    the images' content.
    """

    inputs: Mapping[str, Tensor]
    along: Mapping[str, Tensor]
    placeholders: frozenset[int]
    digest: bytes

    @staticmethod
    def of(inputs: Mapping[str, Tensor], along: Mapping[str, Tensor], placeholders: frozenset[int]) -> Images:
        """Make the record of these arguments, with the digest of all their tensors."""
        content = blake2b(digest_size=16)
        for name, tensor in sorted([*inputs.items(), *along.items()]):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return Images(inputs, along, placeholders, content.digest())

    def beside(self, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the model's arguments for the first `length` tokens; those after the prompt count as text."""
        per_token = {name: pad(each, (0, length - each.shape[1])) for name, each in self.along.items()}
        return {
            name: each.to(device, dtype) if each.is_floating_point() else each.to(device)
            for name, each in (*self.inputs.items(), *per_token.items())
        }

    def text(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens without those that stand for images."""
        return [token for token in tokens if token not in self.placeholders]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The digest as integers, for the keys of draws."""
        return tuple(self.digest)


def same_images(left: Images | None, right: Images | None) -> bool:
    """Return whether two prompts have the same images, or both have none."""
    return (left and left.digest) == (right and right.digest)


@runtime_checkable
class SeesImages(Protocol):
    """A Scorer whose model reads images."""

    @property
    def sees_images(self) -> bool:
        """Whether the model can read images."""
        ...

    def show(self, row: int, images: Images) -> None:
        """Give an empty row the images of its text; the whole text is then read in one piece."""
        ...


def check_images(scorer: object, images: Images | None, prompt: Sequence[int], where: str) -> None:
    """Raise ValueError if a model cannot read a prompt with these images (None for a prompt without images)."""
    if images is None:
        return
    name = getattr(scorer, "name", "the model")
    if not (isinstance(scorer, SeesImages) and scorer.sees_images):
        raise ValueError(f"{where} has images, but {name} reads text only: leave them out, or take a vision model.")
    if prompt[-1] in images.placeholders:
        raise ValueError(f"{where} ends with an image, behind which {name} cannot begin: put a text behind it.")
