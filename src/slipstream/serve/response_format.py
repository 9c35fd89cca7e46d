"""Parsing the reasoning and tool calls in a model's answers, in the form that transformers keeps for its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel


def response_parser(
    model: PreTrainedModel, tokenizer: Any, prompt: Sequence[int], tools: Sequence[dict[str, Any]] | None
) -> Any:
    """Return transformers' parser for the answer to a prompt of these token ids; None if the model's form is not known.

    The form is the tokenizer's `response_template`, else the one that transformers keeps for the model's type.
    """
    template = getattr(tokenizer, "response_template", None) or _of_family(model, tokenizer)
    if template is None:
        return None
    return tokenizer.get_response_parser(template, prefix=tokenizer.decode(list(prompt)), tools=tools)


def _of_family(model: PreTrainedModel, tokenizer: Any) -> dict[str, Any] | None:
    """Return the form of answers that transformers keeps for the model's family; None if it keeps none."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # an older version of transformers, or one without the packages of its server
        return None
    return get_response_template(tokenizer, model)
