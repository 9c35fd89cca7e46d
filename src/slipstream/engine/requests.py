"""What users pass to a call -> prompts and options that can be worked with, or one sentence, before any work."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from slipstream.core.protocols import Controller
from slipstream.core.source import Frame
from slipstream.core.values import is_whole, true_or_false, whole_number
from slipstream.decoding.controllers import controller
from slipstream.decoding.rules import Rule, rule
from slipstream.decoding.sampling import Sampling

Message: TypeAlias = Mapping[str, Any]

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Tensor
"""Text, token ids, the messages of a chat, or audio features (bins, frames)."""

ALLOWED = (
    "a prompt is a text, token ids (a list, an array, or what a tokenizer returns) or a chat (a list of messages with "
    '"role" and "content")'
)

MOST = 1 << 32
"""Above all token ids."""


# ---- prompts ----------------------------------------------------------------------------------------------------


def read_prompts(given: Any) -> list[Prompt]:
    """One prompt or several, in any form that transformers' users pass -> the prompts, in order.

    A prompt is a text; token ids as a list, a range, a 1-D array or tensor; a chat; or audio features as a 2-D tensor
    of floats. Several come as an iterable, as the rows of an array or tensor, or as a tokenizer's `BatchEncoding`,
    whose attention mask takes the padding away. Raises ValueError in one sentence for anything else.
    """
    if isinstance(given, str):
        return [read_prompt(given)]
    if isinstance(given, Mapping):
        return _encoded(given, "prompts")
    if _is_array(given):
        return _from_array(given)
    items = _listed(given, "prompts")
    if items and (_is_id(items[0]) or _is_message(items[0])):
        return [read_prompt(items)]
    return [read_prompt(item, f"prompt {number}") for number, item in enumerate(items)]


def read_prompt(given: Any, where: str = "prompt 0") -> Prompt:
    """A single prompt. Raises ValueError, which names it by `where`, for what is none."""
    if isinstance(given, str):
        return _text(given, where)
    if isinstance(given, Mapping) or _is_array(given):
        several = _encoded(given, where) if isinstance(given, Mapping) else _from_array(given)
        if len(several) != 1:
            raise ValueError(f"{where} is {_shown(given)}, which holds {len(several)} prompts: pass them one by one.")
        return several[0]
    items = _listed(given, where)
    if all(map(_is_id, items)):
        if any(not -1 <= int(item) < MOST for item in items):
            raise ValueError(f"{where} has a token id that no model knows: {reprlib.repr(items)}.")
        return tuple(map(int, items))
    if all(map(_is_message, items)):
        return [_message(item, where) for item in items]
    alien = next(item for item in items if not (_is_message if _is_message(items[0]) else _is_id)(item))
    raise ValueError(f"{where} is a list that holds {_shown(alien)}: {ALLOWED}.")


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} is not valid Unicode text: it holds half of a surrogate pair.") from None
    return text


def _is_id(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and _kind(value) == "ids"
    return is_whole(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "input_ids" not in value and "input_features" not in value


def _listed(given: Any, where: str, allowed: str = ALLOWED) -> list[Any]:
    """The items of an iterable with an order."""
    if isinstance(given, Set):
        raise ValueError(f"{where} is {_shown(given)}, which has no order: pass a list.")
    if isinstance(given, bytes | bytearray | memoryview) or not isinstance(given, Iterable):
        raise ValueError(f"{where} is {_shown(given)}: {allowed}.")
    return list(given)


def _message(message: Message, where: str) -> dict[str, Any]:
    """A message of a chat, with its text parts as one text."""
    content = message.get("content")
    if isinstance(content, list | tuple) and all(map(_is_text_part, content)):
        content = "\n".join(part["text"] for part in content)
    complete = isinstance(content, str) or (content is None and "tool_calls" in message)
    if not isinstance(message.get("role"), str) or not complete:
        raise ValueError(
            f'{where} holds {_shown(message)}, but a message of a chat has a "role" and a "content", which is a '
            'text or a list of parts {"type": "text", "text": ...}.'
        )
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _encoded(given: Message, where: str) -> list[Prompt]:
    """The prompts of what a tokenizer or a feature extractor returns."""
    if "input_features" in given:
        return _from_array(torch.as_tensor(np.asarray(given["input_features"])))
    if "input_ids" not in given:
        hint = " (put a message into a list)" if "role" in given else ""
        raise ValueError(f"{where} is {_shown(given)}: {ALLOWED}{hint}.")
    rows = _matrix(given["input_ids"], f"input_ids of {where}")
    mask = given.get("attention_mask")
    if mask is None:
        return [*rows]
    masks = _matrix(mask, f"attention_mask of {where}")
    if list(map(len, masks)) != list(map(len, rows)):
        raise ValueError(f"{where} has an attention_mask of another shape than its input_ids.")
    return [_unpadded(ids, seen, where) for ids, seen in zip(rows, masks, strict=True)]


def _unpadded(ids: tuple[int, ...], mask: tuple[int, ...], where: str) -> tuple[int, ...]:
    """The ids without padding on the left or on the right."""
    kept = [place for place, seen in enumerate(mask) if seen]
    if kept != list(range(kept[0], kept[-1] + 1) if kept else ()):
        raise ValueError(
            f"{where} has an attention_mask with holes: only padding on the left or the right is possible."
        )
    return tuple(ids[place] for place in kept)


def _matrix(given: Any, where: str) -> list[tuple[int, ...]]:
    """Rows of token ids; a single row may come without the list around it."""
    rows = [given] if isinstance(given, str | Mapping) else read_prompts(given) or [()]
    wrong = next((row for row in rows if not isinstance(row, tuple)), None)
    if wrong is not None:
        raise ValueError(f"{where} holds {_shown(wrong)}, but token ids are whole numbers.")
    return [row for row in rows if isinstance(row, tuple)]


def _is_array(given: Any) -> bool:
    return isinstance(given, Tensor) or (hasattr(given, "__array__") and not isinstance(given, type))


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool or tensor.is_complex():
        return "neither"
    return "features" if tensor.is_floating_point() else "ids"


def _from_array(given: Any) -> list[Prompt]:
    """The prompts of an array: of ids one or its rows, of features one (bins, frames) or several; or its items."""
    if not isinstance(given, Tensor):
        array = np.asarray(given)
        if array.dtype.kind in "OUST" and array.ndim:
            return read_prompts(array.tolist())
        if array.dtype.kind not in "iuf" or not array.ndim:
            raise ValueError(f"prompts is {_shown(given)}: {ALLOWED}.")
        given = torch.as_tensor(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))
    shape = (_kind(given), given.dim())
    if shape in (("ids", 1), ("ids", 2)):
        rows = given.tolist()
        return [tuple(row) for row in (rows if given.dim() == 2 else [rows])]
    if shape in (("features", 2), ("features", 3)):
        return list(given) if given.dim() == 3 else [given]
    raise ValueError(f"prompts is {_shown(given)}: {ALLOWED}.")


def _shown(value: Any) -> str:
    """What something is, in a few words."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {reprlib.repr(list(value))}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {kind} of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"{reprlib.repr(value)} ({kind})"


@dataclass(frozen=True)
class Encoder:
    """Turns prompts into what a model reads: its `name`, its tokenizer (None: ids only), what stands around sources."""

    name: str
    tokenizer: Any = None
    frame: Frame | None = None

    def __call__(self, prompt: Prompt) -> tuple[int, ...] | Tensor:
        """Token ids, or audio features as they are. Raises ValueError without a tokenizer, or a chat template."""
        if isinstance(prompt, Tensor | tuple):
            return prompt
        tokenizer = self.needed()
        if isinstance(prompt, str):
            return tuple(tokenizer(f"{self.frame.prefix}{prompt}" if self.frame else prompt)["input_ids"])
        if not tokenizer.chat_template:
            raise ValueError(f"{self.name} has no chat template; pass the prompt as text.")
        try:
            return tuple(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        except Exception as error:  # templates are programs of the model's maker and raise what they like
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def needed(self) -> Any:
        """The tokenizer. Raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer; pass tokenizer=... to load(), or prompts as token ids.")
        return self.tokenizer

    def spellings(self, word: Any) -> list[list[int]]:
        """A banned word, at the beginning of a line and after a space; or its token ids."""
        if not isinstance(word, str):
            return [_listed(word, "a word of bad_words", "it is a text or a list of token ids")]
        if not word:
            raise ValueError("bad_words holds an empty text: leave it out.")
        return [self.needed().encode(form, add_special_tokens=False) for form in (word, f" {word}")]


# ---- options ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a call may ask for besides the fields of `Sampling`. Raises ValueError for what cannot be."""

    max_new_tokens: int = 128
    stop: str | Sequence[str] = ()
    seed: int = 0
    gamma: int | str | Controller | None = None
    verify: str | Rule | None = None
    lossless: bool = False
    plain: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        whole_number("max_new_tokens", self.max_new_tokens, 1)
        whole_number("seed", self.seed, 0)
        for name in ("lossless", "plain", "ignore_eos"):
            true_or_false(name, getattr(self, name))
        stops = [self.stop] if isinstance(self.stop, str) else _listed(self.stop, "stop", "it is one text or several")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {_shown(text)}, but it is one text or several, none of them empty.")
        object.__setattr__(self, "stop", tuple(stops))
        if self.gamma is not None:
            controller(self.gamma)
        if self.verify is not None:
            rule(self.verify)

    @property
    def stops(self) -> list[str]:
        """The texts to end before."""
        return list(self.stop)


def read_options(given: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of a call, and those of `Sampling`; None stands for the default, as in transformers.

    Raises TypeError for one that is not known, ValueError for a value that cannot be.
    """
    names = {field.name for field in fields(Options)}
    known = sorted(names | {field.name for field in fields(Sampling) if field.init} - {"eos"})
    if unknown := sorted(given.keys() - set(known)):
        raise TypeError(f"unknown option {', '.join(unknown)}; known are {', '.join(known)}.")
    meant = {name: value for name, value in given.items() if value is not None}
    options = Options(**{name: value for name, value in meant.items() if name in names})
    return options, {name: value for name, value in meant.items() if name not in names}


def sampling(settings: Mapping[str, Any], eos: frozenset[int], encoder: Encoder, vocab: int) -> Sampling:
    """The settings of a call, with words spelled and ids checked against the vocabulary.

    Raises ValueError for what cannot be.
    """
    words, processors = settings.get("bad_words", ()), settings.get("processors", ())
    words = [words] if isinstance(words, str) else _listed(words, "bad_words", "it is a list of texts or of ids")
    processors = [processors] if not isinstance(processors, Iterable) else list(processors)
    bans = encoder.frame.bans if encoder.frame else ()
    made = {
        **settings,
        "bad_words": [form for word in words for form in encoder.spellings(word)],
        "processors": (*bans, *processors),
    }
    found = Sampling(eos=eos, **made)
    banned = {token for word in found.bad_words for token in word}
    for name, ids in (("logit_bias", found.logit_bias), ("bad_words", banned)):
        if (most := max(ids, default=0)) >= vocab:
            raise ValueError(f"{name} has the token id {most}, but {encoder.name} knows 0..{vocab - 1}.")
    return found
