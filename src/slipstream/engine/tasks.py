"""The tasks of an encoder-decoder: text before every source, languages, and how the decoder's text begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.core.source import SourceFrame


@dataclass(frozen=True)
class Task:
    """A task, for models that can do several.

    `name` is one of the model's own (`task_specific_params` in its configuration, such as translation_en_to_de of
    T5), which stands for a prefix. `prefix` is such a text itself ("summarize: "), put before every source that is
    text. `src_lang` and `tgt_lang` are languages as the tokenizer writes them (eng_Latn, de_DE, de).
    """

    name: str | None = None
    prefix: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None

    @staticmethod
    def parse(text: str | None) -> Task:
        """Read a task as users write it: languages with a >, a prefix with a colon or a space, or a name."""
        if text is None:
            return Task()
        if ">" in text:
            src, _, tgt = text.partition(">")
            return Task(src_lang=src.strip() or None, tgt_lang=tgt.strip() or None)
        return Task(prefix=text) if ":" in text or " " in text else Task(text)


def frame(model: Any, tokenizer: Any, task: Task) -> SourceFrame:
    settings = model.generation_config
    start = _first(settings, model.config, "decoder_start_token_id", "bos_token_id")
    if start is None:
        raise ValueError(f"{type(model).__name__} does not say how its decoder begins: set decoder_start_token_id.")
    if task.src_lang is not None:
        _language(tokenizer, task.src_lang)
        tokenizer.src_lang = task.src_lang
    forced = _first(settings, model.config, "forced_bos_token_id")
    if task.tgt_lang is not None:
        forced = _language(tokenizer, task.tgt_lang)
    begin = (int(start), *([] if forced is None else [int(forced)]))
    return SourceFrame(_prefix(model.config, task), begin)


def _first(settings: Any, config: Any, *names: str) -> Any:
    values = (getattr(place, name, None) for name in names for place in (settings, config))
    return next((value for value in values if value is not None), None)


def _prefix(config: Any, task: Task) -> str:
    if task.name is None:
        return task.prefix or ""
    if task.prefix is not None:
        raise ValueError(f"task {task.name!r} has a prefix of its own: leave one of them out.")
    known = getattr(config, "task_specific_params", None) or {}
    if task.name not in known:
        choice = f"it knows {', '.join(known)}" if known else "it knows none by name"
        raise ValueError(
            f"the model does not know the task {task.name!r}: {choice}. A text before each source has a colon in it."
        )
    return known[task.name].get("prefix") or ""


def _language(tokenizer: Any, name: str) -> int:
    token = None
    if hasattr(tokenizer, "src_lang"):
        try:
            own = getattr(tokenizer, "get_lang_id", None)
            token = own(name) if own else tokenizer.convert_tokens_to_ids(name)
        except KeyError:
            token = None
    if token is None or token == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer does not know the language {name!r}; its documentation lists how to write it.")
    return int(token)
