"""Reads and checks the prompts that users pass to a call, before any work; errors are one sentence each."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.core.media import Media, Modality, named, only
from slipstream.core.source import Source, SourceFrame
from slipstream.core.values import OptionError, is_whole
from slipstream.engine.chat_template import WITHHELD, ChatTemplate, chat_template
from slipstream.engine.media import (
    FIELDS,
    TextLimit,
    TextWithMedia,
    contents,
    in_parts,
    in_text,
    media_in,
    media_part,
    open_medium,
    part_content,
    part_modality,
)
from slipstream.models.media.processor import MediaProcessor
from slipstream.text.detokenize import Decode
from slipstream.text.spelling import Spelling

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, with the tools that may be called and further variables for the chat template.

    `template_kwargs` such as `{"enable_thinking": False}` go to the template, with `tools`, by transformers'
    `apply_chat_template`; parameters that change anything but the text (`WITHHELD`) are not allowed among them.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] | None = None


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Chat | TextWithMedia | Tensor
"""A prompt: a text, token ids, a chat (messages or a `Chat`), a text with images or sounds, or audio features."""

ALLOWED = (
    "a prompt is a text, token ids (a list, an array, or what a tokenizer returns), a chat (a list of messages with "
    '"role" and "content") or {"text": ..., "images": [...], "audio": [...]}'
)

MOST = 1 << 32  # an exclusive upper bound of token ids; larger ids in a prompt are refused


def read_prompts(prompts: Any) -> list[Prompt]:
    """Read one prompt or several, in any form that users of transformers pass -> the prompts, in order.

    A prompt is a text; token ids as a list, a range, a 1-D array or tensor; a chat; a text with images or sounds; or
    audio features as a 2-D tensor of floats. Several come as an iterable, as the rows of an array or tensor, or as a
    tokenizer's `BatchEncoding`, whose attention mask takes the padding away. Raises ValueError in one sentence for
    anything else.
    """
    if isinstance(prompts, str | Chat) or _is_with_media(prompts):
        return [read_prompt(prompts)]
    if isinstance(prompts, Mapping):
        return _encoded(prompts, "prompts")
    if _is_array(prompts):
        return _from_array(prompts)
    items = listed(prompts, "prompts")
    if items and (_is_id(items[0]) or _is_message(items[0])):
        return [read_prompt(items)]
    return [read_prompt(item, f"prompt {number}") for number, item in enumerate(items)]


def read_prompt(prompt: Any, where: str = "prompt 0") -> Prompt:
    if isinstance(prompt, str):
        return _text(prompt, where)
    if isinstance(prompt, Chat):
        return _chat(prompt, where)
    if _is_with_media(prompt):
        return _with_media(prompt, where)
    if isinstance(prompt, Mapping) or _is_array(prompt):
        several = _encoded(prompt, where) if isinstance(prompt, Mapping) else _from_array(prompt)
        if len(several) != 1:
            raise ValueError(f"{where} is {shown(prompt)}, which holds {len(several)} prompts: pass them one by one.")
        return several[0]
    items = listed(prompt, where)
    if all(map(_is_id, items)):
        if any(not 0 <= int(item) < MOST for item in items):
            raise ValueError(f"{where} has a token id that no model knows: {reprlib.repr(items)}.")
        return tuple(map(int, items))
    if all(map(_is_message, items)):
        return [_message(item, where) for item in items]
    stray = next(item for item in items if not (_is_message if _is_message(items[0]) else _is_id)(item))
    raise ValueError(f"{where} is a list that holds {shown(stray)}: {ALLOWED}.")


def _is_with_media(value: Any) -> bool:
    fields = isinstance(value, Mapping) and "text" in value and not value.keys().isdisjoint(FIELDS.values())
    return isinstance(value, TextWithMedia) or fields


def _with_media(prompt: TextWithMedia | Message, where: str) -> Prompt:
    fields = prompt if isinstance(prompt, Mapping) else vars(prompt)
    text = fields["text"]
    if not isinstance(text, str):
        raise ValueError(f"{where} has images or sounds with {shown(text)}, but a text is needed: leave it empty.")
    media = {
        name: listed(fields.get(name, ()), f"{name} of {where}", f"they are a list of {modality}")
        for modality, name in FIELDS.items()
    }
    return TextWithMedia(_text(text, where), **media) if any(media.values()) else _text(text, where)


def modalities(prompt: Prompt) -> frozenset[Modality]:
    if isinstance(prompt, TextWithMedia):
        return frozenset(prompt.media)
    messages = prompt.messages if isinstance(prompt, Chat) else prompt if isinstance(prompt, list) else ()
    return frozenset(media_in(cast("Sequence[Message]", messages)))


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} is not valid Unicode text: it holds half of a surrogate pair.") from None
    return text


def _chat(chat: Chat, where: str) -> Chat:
    messages = listed(chat.messages, f"messages of {where}", "they are a list of messages")
    if strays := [message for message in messages if not _is_message(message)]:
        raise ValueError(f"messages of {where} holds {shown(strays[0])}, but a message is a dict.")
    variables = {} if chat.template_kwargs is None else chat.template_kwargs
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ValueError(f"template_kwargs of {where} is {shown(variables)}, but it is a dict of names and values.")
    if withheld := [name for name in WITHHELD if name in variables]:
        message = f"template_kwargs of {where} sets {withheld[0]}, which is not for the template: leave it out."
        raise OptionError(message)
    tools = None if chat.tools is None else listed(chat.tools, f"tools of {where}", "they are a list of tools")
    return replace(chat, messages=[_message(each, where) for each in messages], tools=tools)


def _is_id(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and _kind(value) == "ids"
    return is_whole(value)


def _is_message(value: Any) -> bool:
    encoded = isinstance(value, Mapping) and ("input_ids" in value or "input_features" in value)
    return isinstance(value, Mapping) and not encoded and not _is_with_media(value)


def listed(value: Any, where: str, allowed: str = ALLOWED) -> list[Any]:
    if isinstance(value, Set):
        raise ValueError(f"{where} is {shown(value)}, which has no order: pass a list.")
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Iterable):
        raise ValueError(f"{where} is {shown(value)}: {allowed}.")
    return list(value)


def _message(message: Message, where: str) -> dict[str, Any]:
    """Return a message with its text parts joined into one text; if media are among the parts, keep them separate."""
    content = message.get("content")
    in_parts = isinstance(content, list | tuple) and all(part_modality(each) or _is_text_part(each) for each in content)
    if in_parts and any(map(part_modality, content or ())):
        content = [
            media_part(modality, part_content(part, where))
            if (modality := part_modality(part))
            else {"type": "text", "text": part["text"]}
            for part in content or ()
        ]
    elif in_parts:
        content = "\n".join(part["text"] for part in content or ())
    left_out = content is None and message.get("role") in ("assistant", "tool")
    complete = isinstance(content, str) or in_parts or left_out
    if not isinstance(message.get("role"), str) or not complete:
        raise ValueError(
            f'{where} holds {shown(message)}, but a message of a chat has a "role" and a "content", which is a '
            'text or a list of parts {"type": "text", "text": ...}, {"type": "image_url", ...} and '
            '{"type": "input_audio", ...}.'
        )
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _encoded(encoding: Message, where: str) -> list[Prompt]:
    if "input_features" in encoding:
        return _from_array(torch.as_tensor(np.asarray(encoding["input_features"])))
    if "input_ids" not in encoding:
        hint = " (put a message into a list)" if "role" in encoding else ""
        raise ValueError(f"{where} is {shown(encoding)}: {ALLOWED}{hint}.")
    rows = _matrix(encoding["input_ids"], f"input_ids of {where}")
    mask = encoding.get("attention_mask")
    if mask is None:
        return [*rows]
    masks = _matrix(mask, f"attention_mask of {where}")
    if list(map(len, masks)) != list(map(len, rows)):
        raise ValueError(f"{where} has an attention_mask of another shape than its input_ids.")
    kept = [[place for place, seen in enumerate(row) if seen] for row in masks]
    if any(places != list(range(places[0], places[-1] + 1)) for places in kept if places):
        raise ValueError(f"{where} has an attention_mask with holes: only padding on the left or right is possible.")
    return [tuple(ids[place] for place in places) for ids, places in zip(rows, kept, strict=True)]


def _matrix(values: Any, where: str) -> list[tuple[int, ...]]:
    """Return rows of token ids; a single row may be given without a list around it."""
    rows = [values] if isinstance(values, str | Mapping) else read_prompts(values) or [()]
    wrong = next((row for row in rows if not isinstance(row, tuple)), None)
    if wrong is not None:
        raise ValueError(f"{where} holds {shown(wrong)}, but token ids are whole numbers.")
    return [row for row in rows if isinstance(row, tuple)]


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "__array__") and not isinstance(value, type))


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool or tensor.is_complex():
        return "neither"
    return "features" if tensor.is_floating_point() else "ids"


def _from_array(values: Any) -> list[Prompt]:
    """Return the prompts in an array or tensor.

    Token ids may be (n,) or (rows, n), audio features (bins, frames) or (rows, bins, frames); an array of strings or
    objects is read item by item.
    """
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype.kind in "OUST" and array.ndim:
            return read_prompts(array.tolist())
        if array.dtype.kind not in "iuf" or not array.ndim:
            raise ValueError(f"prompts is {shown(values)}: {ALLOWED}.")
        values = torch.as_tensor(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))
    shape = (_kind(values), values.dim())
    if shape in (("ids", 1), ("ids", 2)):
        rows = values.tolist()
        return [read_prompt(row, f"prompt {place}") for place, row in enumerate(rows if values.dim() == 2 else [rows])]
    if shape in (("features", 2), ("features", 3)):
        return list(values) if values.dim() == 3 else [values]
    raise ValueError(f"prompts is {shown(values)}: {ALLOWED}.")


def shown(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {reprlib.repr(list(value))}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {kind} of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"{reprlib.repr(value)} ({kind})"


@dataclass(frozen=True)
class Encoder:
    """Turns prompts into token ids or audio features, the input of a model.

    `name` is for messages; without a `tokenizer` only token ids are read. `frame` is the text around the sources of an
    encoder-decoder, `media` reads images and sounds, `limit` is that of texts, `spelling` says what tokens write.
    """

    name: str
    tokenizer: Any = None
    frame: SourceFrame | None = None
    media: MediaProcessor | None = None
    limit: TextLimit | None = None
    spelling: Spelling | None = None

    def read(self, prompt: Prompt) -> tuple[Source, Media | None]:
        """Return token ids, or audio features unchanged, and the media that some of the ids stand for."""
        if isinstance(prompt, Tensor | tuple):
            return prompt, None
        if self.limit is not None:
            self.limit.check(vars(prompt) if isinstance(prompt, Chat | TextWithMedia) else prompt, "the prompt")
        processor, kinds = self.media, modalities(prompt)
        if kinds - (read := processor.modalities if processor else frozenset()):
            raise ValueError(
                f"the prompt has {named(kinds - read)}, but {self.name} reads {only(read)} here: leave them out, or "
                "take a model that reads them, with its processor."
            )
        tokenizer = self.needed()
        if isinstance(prompt, str):
            return tuple(tokenizer(f"{self.frame.prefix}{prompt}" if self.frame else prompt)["input_ids"]), None
        if isinstance(prompt, TextWithMedia):
            assert processor is not None, "without one, images and sounds are refused"
            opened = {
                modality: [open_medium(modality, each, processor.rate) for each in items]
                for modality, items in prompt.media.items()
            }
            return processor.text(prompt.text, opened)
        if (template := self.template) is None:
            raise ValueError(f"{self.name} has no chat template; pass the prompt as text.")
        chat = _chat(prompt if isinstance(prompt, Chat) else Chat(cast("Any", prompt)), "the prompt")
        if chat.tools:
            template.check_tools(self.name)
        messages = template.fit(chat.messages)
        variables = {"add_generation_prompt": True, **(chat.template_kwargs or {})}
        if processor is None:
            return tuple(template.write(messages, chat.tools, **variables)), None
        parts = [in_parts(message, processor.rate) for message in messages]
        messages = parts if template.in_parts else [in_text(message, processor.mark) for message in parts]
        # It only writes the text: what it has no variable for would go to the processor, which opens files.
        return processor.chat(template.write(messages, chat.tools, **variables, tokenize=False), contents(parts))

    @property
    def template(self) -> ChatTemplate | None:
        owner = self.tokenizer if self.media is None else self.media.processor
        source = getattr(owner, "chat_template", None)
        return chat_template(owner, str(source), self.media is not None) if source else None

    def text(self, prompt: Prompt, ids: Source, decode: Decode) -> str:
        """Return the text of a prompt, decoded from its `ids` if need be, for `echo`. Raises ValueError for audio."""
        prompt = prompt.text if isinstance(prompt, TextWithMedia) else prompt
        if isinstance(ids, Tensor):
            raise OptionError("echo is not possible for audio features, which have no text: leave it out.")
        return prompt if isinstance(prompt, str) else decode(ids)

    def needed(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer; pass tokenizer=... to load(), or prompts as token ids.")
        return self.tokenizer

    def spellings(self, word: Any) -> list[list[int]]:
        """Return the token ids of a banned word behind each sign, without those that only the sign needs."""
        if not isinstance(word, str):
            return [listed(word, "a word of bad_words", "it is a text or a list of token ids")]
        if not word:
            raise OptionError("bad_words holds an empty text: leave it out.")
        written, forms = (self.spelling or Spelling(self.needed())).write, set[tuple[int, ...]]()
        for sign in ("", *" \n\t([{<>\"'`-/=:,.*_"):  # the tokens depend on what is before the word
            tokens = tuple(self.needed().encode(sign + word, add_special_tokens=False))
            while tokens and b"".join(map(written, tokens[1:])).endswith(word.encode()):
                tokens = tokens[1:]
            forms |= {tokens} - {()}
        return list(map(list, sorted(forms)))
