"""Sources: the inputs of an encoder, for which the decoder writes the text."""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

Source = tuple[int, ...] | Tensor  # the input of an encoder: token ids, or audio features (bins, frames)


@dataclass(frozen=True)
class SourceForm:
    """The sources that an encoder can read: ids below `vocab`, at most `longest` of them (None: no limit), or, if
    `features` is not None, audio features of that shape (bins, frames)."""

    vocab: int
    longest: int | None = None
    features: tuple[int, int] | None = None

    def example(self, length: int = 2) -> Source:
        if self.features is not None:
            return torch.zeros(self.features)
        return tuple((5 * place + length) % self.vocab for place in range(length))

    def check(self, source: Source, where: str, model: str) -> None:
        if self.features is not None:
            if not isinstance(source, Tensor) or tuple(source.shape) != self.features:
                actual = tuple(source.shape) if isinstance(source, Tensor) else "token ids"
                raise ValueError(f"{where} is {actual}, but {model} takes features {self.features} (bins, frames).")
            return
        if isinstance(source, Tensor):
            raise ValueError(f"{where} is audio, but {model} reads text.")
        if not source:
            raise ValueError(f"{where} is empty: its source needs at least one token.")
        if self.longest and len(source) > self.longest:
            raise ValueError(
                f"{where} has {len(source)} tokens, but the encoder of {model} reads {self.longest}; "
                f"shorten it to at most {self.longest}."
            )
        if not all(0 <= token < self.vocab for token in source):
            raise ValueError(f"{where} has token ids outside 0..{self.vocab - 1}, which {model} reads.")

    def cut(self, source: Source) -> Source:
        return source if isinstance(source, Tensor) else source[: self.longest]


@dataclass(frozen=True)
class SourceFrame:
    """The fixed parts around a source: `prefix` before its text, and `begin`, the decoder's first tokens."""

    prefix: str
    begin: tuple[int, ...]


def framed(frame: SourceFrame | None, user_input: Source) -> tuple[tuple[int, ...], Source | None]:
    """Convert a user's input to the prompt and the source of a request; without a frame, the input is the prompt."""
    if frame is not None:
        return frame.begin, user_input
    if isinstance(user_input, Tensor):
        raise ValueError("a causal model reads text, not audio features: give a text or token ids.")
    return user_input, None


def numbers(source: Source) -> tuple[int, ...]:
    """Return integers that identify a source: its token ids, or a digest of its features."""
    if isinstance(source, tuple):
        return source
    return tuple(blake2b(source.float().cpu().numpy().tobytes(), digest_size=16).digest())


def check_source(form: SourceForm | None, source: Source | None, where: str, model: str) -> None:
    if form is None:
        if source is not None:
            raise ValueError(f"{where} has a source, but {model} has no encoder to read it.")
    elif source is None:
        raise ValueError(f"{where} has no source, but {model} is an encoder-decoder and reads one.")
    else:
        form.check(source, where, model)


def same_source(left: Source | None, right: Source | None) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right
