"""Images beside a text: what a model's processor has made of them, and which tokens stand for them."""

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
    """The images of one prompt as a model reads them.

    `inputs` are the model's arguments beside the tokens, as pixel values; `along` are those with a number for every
    token of the prompt, (1, n). `placeholders` are the token ids that stand for images, and `digest` tells images
    apart by their content.
    """

    inputs: Mapping[str, Tensor]
    along: Mapping[str, Tensor]
    placeholders: frozenset[int]
    digest: bytes

    @staticmethod
    def of(inputs: Mapping[str, Tensor], along: Mapping[str, Tensor], placeholders: frozenset[int]) -> Images:
        """The images, with the digest of all that is read of them."""
        content = blake2b(digest_size=16)
        for name, tensor in sorted([*inputs.items(), *along.items()]):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return Images(inputs, along, placeholders, content.digest())

    def beside(self, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The model's arguments beside the first `length` tokens; what was written behind the prompt is text."""
        per_token = {name: pad(each, (0, length - each.shape[1])) for name, each in self.along.items()}
        return {
            name: each.to(device, dtype) if each.is_floating_point() else each.to(device)
            for name, each in (*self.inputs.items(), *per_token.items())
        }

    def text(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without those that stand for images."""
        return [token for token in tokens if token not in self.placeholders]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Integers that name the images."""
        return tuple(self.digest)


def same_images(left: Images | None, right: Images | None) -> bool:
    """Whether two prompts have the same images, or none."""
    return (left and left.digest) == (right and right.digest)


@runtime_checkable
class SeesImages(Protocol):
    """A Scorer whose model reads images."""

    @property
    def sees_images(self) -> bool:
        """Whether the model has a part for images."""
        ...

    def show(self, row: int, images: Images) -> None:
        """Give an empty row the images of its text, all of which is then read in one piece."""
        ...


def check_images(scorer: object, images: Images | None, prompt: Sequence[int], where: str) -> None:
    """Raises ValueError if a model cannot read a prompt with these images (None: there are none)."""
    if images is None:
        return
    name = getattr(scorer, "name", "the model")
    if not (isinstance(scorer, SeesImages) and scorer.sees_images):
        raise ValueError(f"{where} has images, but {name} reads text only: leave them out, or take a vision model.")
    if prompt[-1] in images.placeholders:
        raise ValueError(f"{where} ends with an image, behind which {name} cannot begin: put a text behind it.")
