"""Reads users' prompts from arguments, files and stdin, as texts, chats or token ids.

A prompt that cannot be read becomes an item with an error, so that the others can still be used.
"""

import gzip
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.text.jsontext import read_json


@dataclass(frozen=True)
class Item:
    """A prompt as it was given: a text, messages or token ids; or, in `error`, the reason why it cannot be used.
    `where` names the prompt in error messages; `shown` is printed before its completion."""

    where: str
    prompt: Any = None
    shown: str = ""
    error: str = ""


def gather(prompts: Sequence[str], file: str | None, chat: bool) -> list[Item]:
    """Return the prompts of the arguments, then those of the file. Raises ValueError if there are none."""
    if [*prompts, file].count("-") > 1:
        raise ValueError("stdin (-) can be read only once: drop one of the dashes.")

    def read_stdin() -> str:
        return _utf8(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")

    items = [
        _item("stdin", read_stdin, chat) if text == "-" else _item(f"prompt {number}", partial(str, text), chat)
        for number, text in enumerate(prompts, 1)
    ]
    items += _from_file(file, chat) if file else []
    if not items:
        raise ValueError(f"{file} holds no prompt." if file else "there is no prompt: give a PROMPT or --prompts FILE.")
    return items


def usable(items: list[Item]) -> list[Item]:
    for item in items:
        if item.error:
            raise ValueError(f"{item.where}: {item.error}")
    return items


PARTS = {"images": "image", "audio": "audio"}  # a part of a message with one of them


def with_media(item: Item, media: Mapping[str, Sequence[str]]) -> Item:
    """Return the item with files of images and audio before its prompt, or with an error if that is not possible."""
    media_files = {name: [*files] for name, files in media.items() if files}
    if not media_files or item.error:
        return item
    if isinstance(item.prompt, str):
        return replace(item, prompt={"text": item.prompt, **media_files})
    if isinstance(item.prompt[0], int):
        options = " and ".join(f"--{PARTS[name]}" for name in media_files)
        return replace(item, error=f"{options} cannot go with token ids: give a text.")
    *before, last = item.prompt
    content = last["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    parts = [{"type": PARTS[name], PARTS[name]: file} for name, files in media_files.items() for file in files]
    return replace(item, prompt=[*before, {**last, "content": [*parts, *texts]}])


def _item(where: str, read: Callable[[], Any], chat: bool) -> Item:
    """Make an item of the prompt that `read` returns; a ValueError becomes its error."""
    try:
        prompt = read()
        if not prompt:
            raise ValueError("the prompt is empty.")
        if isinstance(prompt, str):
            prompt.encode()
            asked = [{"role": "user", "content": prompt}]
            return Item(where, asked, f"{prompt}\n\n") if chat else Item(where, prompt, prompt)
        if chat and isinstance(prompt[0], int):
            raise ValueError("--chat cannot wrap token ids.")
        last = "" if isinstance(prompt[0], int) else prompt[-1].get("content")
        return Item(where, prompt, f"{last}\n\n" if last and isinstance(last, str) else "")
    except UnicodeEncodeError:
        return Item(where, error="the prompt is not valid Unicode text.")
    except ValueError as error:
        return Item(where, error=str(error))


def read_unpacked(name: str) -> tuple[bytes, str]:
    """Read a file, or stdin for "-", and unpack it if it is gzip -> its bytes without a byte order mark, and its name
    without .gz.

    Raises ValueError for damaged gzip data, and OSError as the system does.
    """
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data, name = gzip.decompress(data), name.removesuffix(".gz")
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"cannot read {name}: damaged gzip data ({error}).") from error
    return data.removeprefix(b"\xef\xbb\xbf"), name


def _from_file(name: str, chat: bool) -> list[Item]:
    try:
        data, name = read_unpacked(name)
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}.") from error
    if b"\0" in data:
        raise ValueError(f"{name} is no text: it holds bytes that are 0.")
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    read = _from_json if name.endswith((".jsonl", ".json")) or any(map(_is_record, lines)) else _utf8
    where = "stdin" if name == "-" else name
    return [_item(f"{where}:{i}", partial(read, line), chat) for i, line in enumerate(lines, 1) if line.strip()]


def _utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8.") from error


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return False
    # An assistant's message may call tools instead.
    return all("role" in each and ("content" in each or each["role"] == "assistant") for each in value)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda value: isinstance(value, str), "a string"),
    "messages": (_is_chat, 'a list of objects with "role" and "content"'),
    "tokens": (lambda value: isinstance(value, list) and all(type(x) is int for x in value), "a list of token ids"),
}
"""The fields that may hold the prompt in a JSON line: a check of the value, and the allowed type in words."""


def prompt_in(record: Any) -> tuple[str, Any]:
    """Return the field of a JSON line that holds its prompt, and the prompt. Raises ValueError for none, or several."""
    forms = [form for form in FORMS if isinstance(record, dict) and form in record]
    if len(forms) != 1:
        raise ValueError('the line must be a JSON object with one of "prompt", "messages", "tokens".')
    check, allowed = FORMS[forms[0]]
    if not check(record[forms[0]]):
        raise ValueError(f'"{forms[0]}" must be {allowed}.')
    return forms[0], record[forms[0]]


def _from_json(line: bytes) -> Any:
    return prompt_in(read_json(line))[1]


def _is_record(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        _from_json(line)
    except ValueError:
        return False
    return True
