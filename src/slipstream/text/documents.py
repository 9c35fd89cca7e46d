"""Reads documents from text files, JSON lines, folders, arrays and datasets, as texts or token ids."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.text.jsontext import read_json
from slipstream.text.prompts import read_unpacked

DATASET = "dataset:"
TOGETHER = 64  # number of documents that are tokenized at once
Document = str | Sequence[int] | np.ndarray[Any, np.dtype[Any]] | Sequence[dict[str, Any]]
"""A document: a text, token ids (length,), or the messages of a chat that has no answer."""


class NotText(ValueError):
    """Raised if a file is not text in UTF-8."""


def read(
    sources: Sequence[str], field: str | None = None, skipped: list[Path] | None = None
) -> Iterator[tuple[str, Document]]:
    """Read files, folders and datasets, in order -> pairs (where it is from, document).

    `.jsonl` (also `.gz`) has a document per line: in `field`, or the first of "text", "tokens" and "messages"; in the
    last, the content of every assistant message is a document, or, without one, the chat itself. `.npy` holds token
    ids, a document per row if it has two dimensions. Any other file is one text. In a folder all files are read except
    hidden ones and those that are not text in UTF-8, which are added to `skipped`.
    `dataset:NAME`, `dataset:NAME:SPLIT` and `dataset:NAME:CONFIG:SPLIT` stream a dataset of the `datasets` library,
    with rows like those of JSON lines; the split is "train" unless given.

    Raises ValueError, in one sentence, for a source that cannot be read.
    """
    for source in sources:
        if not source:
            raise ValueError("a source has no name: give a file or a folder.")
        path = Path(source)
        if source.startswith(DATASET):
            yield from _dataset(source.removeprefix(DATASET), field)
        elif path.is_dir():
            yield from _folder(path, field, [] if skipped is None else skipped)
        elif path.is_file():
            yield from _file(path, field)
        else:
            raise ValueError(f"cannot read {source}: there is no such file or folder.")


def token_ids(
    sources: Sequence[str], tokenizer: Any, field: str | None = None, skipped: list[Path] | None = None
) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """Read documents as `read` does -> their token ids, each (length,); many texts are tokenized at once.
    Chats are written by the tokenizer's chat template. Raises ValueError if it has none."""
    documents = read(sources, field, skipped)
    while some := [_templated(*found, tokenizer) for found in islice(documents, TOGETHER)]:
        texts = [document for document in some if isinstance(document, str)]
        encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
        yield from (np.asarray(next(encoded) if isinstance(one, str) else one, np.int64) for one in some)


def _templated(where: str, document: Document, tokenizer: Any) -> Document:
    """Return a chat as the text that the template writes, up to where the answer begins; others as they are."""
    if not (isinstance(document, list) and document and isinstance(document[0], dict)):
        return document
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{where}: the messages have no answer, and the tokenizer no chat template to ask for one.")
    return str(tokenizer.apply_chat_template(document, tokenize=False, add_generation_prompt=True))


def _dataset(name: str, field: str | None) -> Iterator[tuple[str, Document]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"dataset {name!r} needs the datasets library: install it with pip install slipstream[datasets]."
        ) from None
    source, *rest = name.split(":")
    config, split = (None, *rest, "train")[:2] if len(rest) < 2 else rest[:2]
    try:
        for number, record in enumerate(load_dataset(source, config, split=split, streaming=True), 1):
            where = f"{DATASET}{name}:{number}"
            yield from ((where, document) for document in _documents(record, field, where))
    except (OSError, LookupError, ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot read dataset {name!r}: {reason}") from error


def _folder(folder: Path, field: str | None, skipped: list[Path]) -> Iterator[tuple[str, Document]]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                zeros = b"\0" in file.read(4096)
            if zeros and not path.name.endswith((".npy", ".jsonl.gz")):
                raise NotText(f"{path} holds zero bytes, which no text has.")
            yield from _file(path, field)
        except NotText:  # raised before any of its documents is yielded
            skipped.append(path)


def _file(path: Path, field: str | None) -> Iterator[tuple[str, Document]]:
    if path.suffix == ".npy":
        yield from _arrays(path)
        return
    try:
        data, name = read_unpacked(str(path))
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NotText(f"cannot read {path}: byte {error.start + 1} is not UTF-8.") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}.") from error
    if name.endswith(".jsonl"):
        for number, line in enumerate(data.splitlines(), 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = read_json(line)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            yield from ((where, document) for document in _documents(record, field, where))
    elif text:
        yield str(path), text


def _arrays(path: Path) -> Iterator[tuple[str, Document]]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"cannot read {path}: it is no array of numbers ({error}).") from error
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise ValueError(f"{path} has shape {array.shape} of {array.dtype}: token ids have one or two dimensions.")
    for number, row in enumerate(array if array.ndim == 2 else [array]):
        yield f"{path}[{number}]", row


def _documents(record: Any, field: str | None, where: str) -> Iterator[Document]:
    names = [field] if field else ["text", "tokens", "messages"]
    name = next((name for name in names if isinstance(record, dict) and name in record), None)
    if name is None:
        wanted = " or ".join(f'"{name}"' for name in names)
        raise ValueError(f"{where}: the line must be a JSON object with {wanted}; --field names another one.")
    value = record[name]
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        contents = [message.get("content") for message in value if message.get("role") == "assistant"]
        answers: list[Document] = [content for content in contents if isinstance(content, str) and content]
        yield from answers or ([value] if value else [])
    elif isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        yield value
    else:
        raise ValueError(f'{where}: "{name}" must be a text, a list of token ids, or the messages of a chat.')
