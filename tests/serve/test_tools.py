"""Reading what models write: reasoning, content and calls of tools, piece by piece, in the forms of their families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.core.stats import Stats
from slipstream.engine.generation import Completion, Piece
from slipstream.models.loading.load import EMBEDDED
from slipstream.serve.response_format import response_parser
from slipstream.serve.tools import ByFamily, ManyCalls, OneCall, Reader, Verbatim, as_message
from toys import Family, tiny

ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
QWEN = Family(
    "Qwen2Config", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, {}
)
LLAMA = Family(
    "LlamaConfig", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, {}
)


def pieces(text: str, tokenizer: Any) -> list[Piece]:
    """A text as the pieces of a stream, a token each."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    done = Completion(text, tuple(ids), "stop", Stats(), 1)
    texts = [tokenizer.decode(ids[: i + 1])[len(tokenizer.decode(ids[:i])) :] for i in range(len(ids))]
    last = len(ids) - 1
    return [Piece(texts[i], token, "draft", done if i == last else None) for i, token in enumerate(ids)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED / "target")


def read(reader: Reader, text: str, tokenizer: Any) -> Any:
    """The message that a reader makes of a text."""
    return as_message([delta for piece in pieces(text, tokenizer) for delta in reader.read(piece)])


def test_the_form_of_a_family_is_read(tokenizer: Any) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    parser = response_parser(tiny(QWEN), tokenizer, prompt, [ADD])
    reader = ByFamily(parser, lambda tokens: tokenizer.decode(tokens))
    calls = '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>'
    message = read(reader, f"<think>let me see</think>Now:\n{calls}\n{calls.replace('7', '8')}", tokenizer)
    assert message.reasoning_content == "let me see" and message.content == "Now:"
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 7}, {"a": 8}]
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_family_without_a_form_is_read_as_it_is(tokenizer: Any) -> None:
    assert response_parser(tiny(LLAMA), tokenizer, [1], None) is None
    assert read(Verbatim(), "<think>x</think> y", tokenizer).content == "<think>x</think> y"


def test_arguments_of_one_call_come_as_they_are_written(tokenizer: Any) -> None:
    reader = OneCall("add")
    deltas = [delta for piece in pieces('{"a": 12345}', tokenizer) for delta in reader.read(piece)]
    assert len(deltas) > 1 and deltas[0].tool_calls[0].function.name == "add"
    assert all(delta.tool_calls[0].function.name is None for delta in deltas[1:])
    assert as_message(deltas).tool_calls[0].function.arguments == '{"a": 12345}'


def test_many_calls_are_told_one_by_one(tokenizer: Any) -> None:
    text = ' [{"name": "add", "parameters": {"a": "],["}}, {"name": "sub", "parameters": {}}, {"name": "cu'
    reader, seen = ManyCalls(), []
    for place, piece in enumerate(pieces(text, tokenizer)):
        seen += [place for delta in reader.read(piece) for _ in delta.tool_calls]
    assert len(seen) == 2 and seen[0] < seen[1] < len(pieces(text, tokenizer)) - 1
    message = read(ManyCalls(), text, tokenizer)
    assert [call.function.name for call in message.tool_calls] == ["add", "sub"] and message.content is None
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": "],["}
