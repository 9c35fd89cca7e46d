"""Images and sounds of a prompt: the files that hold them, and the model's arguments that are made of them."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable
from urllib.parse import unquote, unquote_to_bytes

import torch
from torch import Tensor
from torch.nn.functional import pad


class Modality(StrEnum):
    """A kind of input besides text; the value is its plural noun for messages."""

    IMAGE = "images"
    AUDIO = "sounds"


def named(modalities: frozenset[Modality]) -> str:
    return " and ".join(each.value for each in Modality if each in modalities)


@dataclass(frozen=True, eq=False)
class Media:
    """The images and sounds of one prompt as arguments of a model.

    `inputs` are the model's arguments besides the tokens, such as pixel values; `along` are those with a number for
    every token of the prompt, (1, n). `placeholders` are the token ids that stand for each kind of media, and `digest`
    is a hash of the content, by which media are compared.
    """

    inputs: Mapping[str, Tensor]
    along: Mapping[str, Tensor]
    placeholders: Mapping[Modality, int]
    digest: bytes

    @staticmethod
    def of(inputs: Mapping[str, Tensor], along: Mapping[str, Tensor], placeholders: Mapping[Modality, int]) -> Media:
        content = blake2b(digest_size=16)
        for name, tensor in sorted([*inputs.items(), *along.items()]):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return Media(inputs, along, placeholders, content.digest())

    @property
    def modalities(self) -> frozenset[Modality]:
        return frozenset(self.placeholders)

    def arguments(self, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the model's arguments for the first `length` tokens, those after the prompt being text."""
        per_token = {name: pad(each, (0, length - each.shape[1])) for name, each in self.along.items()}
        return {
            name: each.to(device, dtype) if each.is_floating_point() else each.to(device)
            for name, each in (*self.inputs.items(), *per_token.items())
        }

    def text(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self.placeholders.values()]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The digest as integers, from which the keys of random numbers are derived."""
        return tuple(self.digest)


@runtime_checkable
class ReadsMedia(Protocol):
    """A Scorer whose model may read images or sounds."""

    @property
    def modalities(self) -> frozenset[Modality]:
        """The kinds of media that the model reads besides text."""

    def attach(self, row: int, media: Media) -> None:
        """Attach the media of its prompt to an empty row; the whole prompt must then be prefilled in one piece."""


def check_media(media: Media | None, prompt: Sequence[int], where: str) -> None:
    if media is not None and prompt[-1] in media.placeholders.values():
        raise ValueError(f"{where} ends with an image or a sound, behind which no answer begins: put a text there.")


def only(modalities: frozenset[Modality]) -> str:
    """Return what a model with these modalities reads, such as "text and images only", for messages."""
    return f"text and {named(modalities)} only" if modalities else "text only"


def open_file(file: bytes | str | Path, where: str) -> BinaryIO:
    """Open a file, its bytes, or a `data:` URL. Raises ValueError, in which `where` names it, for anything else."""
    if isinstance(file, bytes):
        return io.BytesIO(file)
    if isinstance(file, str) and file.startswith("data:"):
        return io.BytesIO(data_url(file, where))
    if isinstance(file, str) and file.startswith(("http://", "https://")):
        raise ValueError(f"{where} is a web address: load it, and pass the file or its bytes.")
    try:
        return Path(file).expanduser().open("rb")
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}: {str(file)[:256]}.") from error


def data_url(url: str, where: str) -> bytes:
    """Return the content of a `data:` URL. Raises ValueError, in which `where` names it, for one that is damaged."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{where} is no data: URL, which has a comma before its content.")
    if head.endswith(";base64"):
        return base64_content(unquote(body), f"{where} is a data: URL whose content")
    return unquote_to_bytes(body)


def base64_content(text: str, where: str) -> bytes:
    """Decode base64, perhaps in lines. Raises ValueError, in which `where` names the text, for anything else."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} is no base64: {error}.") from None
