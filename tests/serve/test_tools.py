"""Reading what models write: reasoning, content and calls of tools, piece by piece, in the forms of their families."""

import json
import random
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.core.stats import Stats
from slipstream.decoding.grammar import Grammars
from slipstream.engine.generation import Completion, Piece
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.serve.families import form_of
from slipstream.serve.readers import ByFamily, Reader, as_message, many_calls, one_call, read_all, verbatim
from slipstream.serve.response_format import AnswerForm
from slipstream.serve.tools import CallGrammar
from slipstream.text.detokenize import Detokenizer
from toys import closed

DEFINED = {"properties": {"a": {"$ref": "#/$defs/number"}}, "$defs": {"number": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": DEFINED}}
HARMONY = {  # A form in the way of gpt-oss: nothing is content unless a mark says so
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
CALL = '{"name": "add", "arguments": {"a": 7}}'
GEMMA = '<|tool_call>call:add{a:7,b:<|"|>x<|"|>}<tool_call|>'
FORMS: dict[str, tuple[str, Any, str, list[str]]] = {
    "qwen3": (
        "qwen3",
        None,
        "<think>let me see</think>Now:" + "".join(f"\n<tool_call>{CALL.replace('7', a)}</tool_call>" for a in "78"),
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    ),
    "qwen3_5": (
        "qwen3_5_text",
        None,
        "<think>let me see</think>Now:"
        + "".join(
            f"\n<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n</function>\n</tool_call>"
            for a in (7, 8)
        ),
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>"],
    ),
    "gemma4": (
        "gemma4",
        None,
        f"<|channel>thought\nlet me see<channel|>Now:{GEMMA}{GEMMA.replace('7', '8')}",
        ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
    ),
    "harmony": (
        "llama",
        HARMONY,
        "<|channel|>analysis<|message|>let me see<|end|><|channel|>final<|message|>Now:<|end|>"
        + "".join(f'<|channel|>commentary to=functions.add <|message|>{{"a": {a}}}<|call|>' for a in (7, 8)),
        ["<|channel|>", "<|message|>", "<|end|>", "<|call|>"],
    ),
    "lists": (
        "llama",
        form_of("[TOOL_CALLS]"),
        f"Now:[TOOL_CALLS] [{CALL}, {CALL.replace('7', '8')}]",
        ["[TOOL_CALLS]"],
    ),
}
"""By family: the type of its models, its form if transformers does not know it by that, a text, its marks."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED / "target")


def form(family: str) -> AnswerForm:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    kind, tokenizer.response_template = FORMS[family][:2]
    found = AnswerForm.of(model(kind), tokenizer, [ADD])
    assert found is not None
    return found


def model(kind: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=kind))


@pytest.fixture(scope="module", params=FORMS)
def family(request: pytest.FixtureRequest) -> tuple[str, AnswerForm]:
    return request.param, form(request.param)


def streamed(made: AnswerForm, parts: list[str], most: int | None = None) -> list[Any]:
    regions = made.regions([], most)
    return [delta for part in [*parts] for delta in regions.feed(part)] + [*regions.finish()]


def letters(text: str) -> list[str]:
    return list(text)


def test_the_form_of_a_family_is_read(family: tuple[str, AnswerForm]) -> None:
    name, made = family
    message = as_message(streamed(made, letters(FORMS[name][2])))
    assert message.content == "Now:" and message.reasoning_content == (None if name == "lists" else "let me see")
    assert [json.loads(call.function.arguments)["a"] for call in message.tool_calls or ()] == [7, 8]
    assert [call.function.name for call in message.tool_calls or ()] == ["add", "add"]
    assert len({call.id for call in message.tool_calls or ()}) == 2
    one = as_message(streamed(made, letters(FORMS[name][2]), most=1))
    assert [json.loads(call.function.arguments)["a"] for call in one.tool_calls or ()] == [7]


def test_without_tools_marks_of_calls_are_content(family: tuple[str, AnswerForm]) -> None:
    name, made = family
    text = "see " + FORMS[name][2].partition("Now:")[2]
    message = as_message(streamed(AnswerForm(made.template, made.tokenizer), letters(text)))
    assert message.tool_calls is None
    assert message.content == text


MALFORMED = {
    "escape": '<tool_call>{"name": "add", "arguments": {"a": "\\d+"}}</tool_call>',
    "no name": '<tool_call>{"arguments": {"a": 7}}</tool_call> and more',
    "text for arguments": '<tool_call>{"name": "add", "arguments": "no"}</tool_call>',
    "list for arguments": '<tool_call>{"name": "add", "arguments": [7]}</tool_call>',
    "half a character": '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "number for a name": '<tool_call>{"name": 7}</tool_call>',
    "list": "<tool_call>[]</tool_call>",
    "nothing": "<tool_call></tool_call>",
    "deep": f"<tool_call>{'[' * 2_000}</tool_call>",
    "mention": 'use <tool_call>, then {"name"',
    "cut": "a\n<tool_call>\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_calls_are_content(case: str) -> None:
    text = MALFORMED[case]
    for parts in (letters(text), [text]):
        message = as_message(streamed(form("qwen3"), parts))
        assert message.content == text and message.tool_calls is None and message.reasoning_content is None


def test_a_call_behind_a_malformed_one_is_a_call() -> None:
    message = as_message(streamed(form("qwen3"), letters(f"<tool_call>no <tool_call>{CALL}</tool_call>")))
    assert message.content == "<tool_call>no" and message.tool_calls is not None
    xml = FORMS["qwen3_5"][2].partition("Now:")[2]
    lost = xml.replace("<parameter=a>", "lost <parameter=a>", 1)
    message = as_message(streamed(form("qwen3_5"), letters(lost)))
    assert len(message.tool_calls or ()) == 1 and "lost" in (message.content or "")


def test_calls_without_arguments_and_texts_behind_calls() -> None:
    message = as_message(streamed(form("qwen3"), letters('<tool_call>{"name": "now"}</tool_call>\n\n')))
    assert message.tool_calls and message.tool_calls[0].function.arguments == "{}" and message.content is None
    message = as_message(streamed(form("qwen3"), letters(f"<tool_call>{CALL}</tool_call>\ndone")))
    assert message.tool_calls and message.content == "\ndone"


def test_a_message_that_the_prompt_begins(tokenizer: Any) -> None:
    made = form("qwen3")

    def read(prompt: str, text: str) -> Any:
        regions = made.regions(tokenizer.encode(prompt, add_special_tokens=False))
        return as_message([delta for part in letters(text) for delta in regions.feed(part)] + [*regions.finish()])

    message = read("<think>x</think><|im_start|>assistant\n<think>\n", "hm</think>yes")
    assert (message.reasoning_content, message.content) == ("hm", "yes")
    message = read("<|im_start|>user\n<think><|im_start|>assistant\n", "yes")
    assert (message.reasoning_content, message.content) == (None, "yes")
    message = read("<think>no anchor", "yes")
    assert (message.reasoning_content, message.content) == (None, "yes")
    message = read("<|im_start|>assistant\n<think>\n\n</think>\n\n", "use <think> tags")
    assert (message.reasoning_content, message.content) == (None, "use <think> tags")


def test_text_outside_all_regions_is_the_content_of_a_message_without_any() -> None:
    assert as_message(streamed(form("harmony"), letters("just text"))).content == "just text"
    assert as_message(streamed(form("harmony"), letters("x<|channel|>final<|message|>yes"))).content == "yes"


def test_a_family_without_a_form_is_read_as_it_is(tokenizer: Any) -> None:
    assert AnswerForm.of(model("llama"), tokenizer, None) is None
    assert read(verbatim, "<think>x</think> y", tokenizer).content == "<think>x</think> y"


def mutated(text: str, marks: list[str], chance: random.Random) -> str:
    """A text with some pieces dropped, doubled, moved or replaced, mostly at its marks."""
    pieces = [text]
    for mark in marks:
        pieces = [part for piece in pieces for part in split(piece, mark)]
    for _ in range(chance.randint(0, 5)):
        place = chance.randrange(len(pieces) + 1)
        what = chance.randrange(5)
        if what == 0:
            pieces[place : place + chance.randint(1, 3)] = []
        elif what == 1:
            pieces[place:place] = [chance.choice([*marks, " ", "\n", '"', "{", "\\d", "é🙂", "\ufffd", "</", "<|"])]
        elif what == 2 and pieces:
            pieces.insert(place, chance.choice(pieces))
        elif what == 3 and place < len(pieces) and pieces[place]:
            cut = chance.randrange(len(pieces[place]) + 1)
            pieces[place] = pieces[place][:cut] + chance.choice(['"', "}", "x", "\\", "\n"]) + pieces[place][cut + 1 :]
        elif pieces:
            pieces = pieces[: len(pieces) - chance.randrange(2)]
    return "".join(pieces)


def split(text: str, mark: str) -> Iterator[str]:
    first, *rest = text.split(mark)
    yield first
    for each in rest:
        yield from (mark, each)


def at_random(marks: list[str], chance: random.Random) -> str:
    parts = [*marks, *marks, CALL, "a", " ", "\n", "<", ">", "|", "{", "}", '"', ":", "\\", "\x00", "\x01", "é", "🙂"]
    return "".join(chance.choice(parts) for _ in range(chance.randint(0, 30)))


def in_parts(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(0, len(text))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def plain(message: Any) -> Any:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", message.reasoning_content, calls


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_text_is_read(family: tuple[str, AnswerForm], count: int) -> None:
    name, made = family
    _, _, well_formed, marks = FORMS[name]
    chance, seen = random.Random(name), set[tuple[bool, bool, bool]]()
    for number in range(count):
        text = at_random(marks, chance) if number % 2 else mutated(well_formed, marks, chance)
        whole = plain(as_message(streamed(made, [text])))
        assert plain(as_message(read_all(lambda delta: [delta], streamed(made, in_parts(text, chance))))) == whole, text
        content, reasoning, calls = whole
        json.loads(json.dumps([json.loads(arguments) for _, arguments in calls]))
        seen.add((bool(content), bool(reasoning), bool(calls)))
        if not reasoning and not calls and name != "harmony" and not any(f"{mark}" in text for mark in marks[:1]):
            assert content == text
        kept = iter(text)
        assert all(letter in kept for letter in content) or reasoning, text  # in order: nothing was made up
    assert len(seen) > 3


def test_parts_that_are_read_alone_are_caught() -> None:
    made, (_, _, text, _) = form("qwen3"), FORMS["qwen3"]
    alone = [delta for part in in_parts(text, random.Random(0)) for delta in streamed(made, [part])]
    assert plain(as_message(alone)) != plain(as_message(streamed(made, [text])))
    with pytest.raises(ValueError, match="escape"):  # what transformers does of itself
        made.tokenizer.get_response_parser(made.template, prefix="").feed(MALFORMED["escape"])


def pieces(text: str, tokenizer: Any, stop: str | None = None) -> list[Piece]:
    """A text as the pieces of a stream, a token each; what a stop string cuts off has tokens and no text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    printed = [tokenizer.decode(ids[:i], skip_special_tokens=True).rstrip("\ufffd") for i in range(1, len(ids))]
    printed.append(whole)
    end = printed[-1].find(stop) if stop else len(printed[-1])
    done = Completion(printed[-1][:end], tuple(ids), "stop", Stats(), 1)
    texts = [after[len(before) : end] for before, after in zip(["", *printed], printed, strict=False)]
    last = len(ids) - 1
    return [Piece(texts[i], token, "draft", done if i == last else None) for i, token in enumerate(ids)]


def read(reader: Reader, text: str, tokenizer: Any, stop: str | None = None) -> Any:
    return as_message([delta for piece in pieces(text, tokenizer, stop) for delta in reader(piece)])


def by_family(made: AnswerForm) -> ByFamily:
    hidden = {number: str(token) for number, token in made.tokenizer.added_tokens_decoder.items() if token.special}
    printed = Detokenizer(lambda ids: made.tokenizer.decode(ids, skip_special_tokens=True))
    return ByFamily(made.regions([]), printed, hidden)


def test_what_was_emitted_is_read() -> None:
    made = form("qwen3")
    end = made.tokenizer.eos_token
    assert read(by_family(made), f"hello{end}", made.tokenizer).content == "hello"
    assert read(by_family(made), "hello world### and", made.tokenizer, stop="###").content == "hello world"
    text = f"Now:<tool_call>{CALL}"
    assert read(by_family(made), f"{text}</tool_call>", made.tokenizer, stop="</tool").content == text


def test_marks_may_be_tokens_that_are_not_printed() -> None:
    made = form("gemma4")
    made.tokenizer.add_special_tokens({"additional_special_tokens": FORMS["gemma4"][3]})
    message = read(by_family(made), FORMS["gemma4"][2], made.tokenizer)
    assert (message.reasoning_content, message.content) == ("let me see", "Now:")
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": a, "b": "x"} for a in (7, 8)]
    stray = "é<|tool_call>call:add{<channel|>🙂 x"
    assert read(by_family(made), stray, made.tokenizer).content == "écall:add{🙂 x"  # as it is printed


def test_arguments_of_one_call_come_as_they_are_written(tokenizer: Any) -> None:
    reader = one_call("add")
    deltas = [delta for piece in pieces('{"a": 12345}', tokenizer) for delta in reader(piece)]
    assert len(deltas) > 1 and deltas[0].tool_calls[0].function.name == "add"
    assert all(delta.tool_calls[0].function.name is None for delta in deltas[1:])
    assert as_message(deltas).tool_calls[0].function.arguments == '{"a": 12345}'


def test_many_calls_are_told_one_by_one(tokenizer: Any) -> None:
    text = ' [{"name": "add", "parameters": {"a": "],["}}, {"name": "sub", "parameters": {}}, {"name": "cu'
    reader, seen = many_calls(), []
    for place, piece in enumerate(pieces(text, tokenizer)):
        seen += [place for delta in reader(piece) for _ in delta.tool_calls]
    assert len(seen) == 2 and seen[0] < seen[1] < len(pieces(text, tokenizer)) - 1
    message = read(many_calls(), text, tokenizer)
    assert [call.function.name for call in message.tool_calls] == ["add", "sub"] and message.content is None
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": "],["}


THING = closed(tag={"type": "string"})


@cache
def marked(family: str, special: bool) -> tuple[AnswerForm, Grammars]:
    """The form of a family, and grammars, whose tokenizer has its marks as tokens."""
    made = form(family)
    marks = [mark for mark in FORMS[family][3] if "=" not in mark and "/f" not in mark]
    (made.tokenizer.add_special_tokens if special else made.tokenizer.add_tokens)(
        {"additional_special_tokens": marks} if special else marks
    )
    return made, Grammars(made.tokenizer, len(made.tokenizer), frozenset([made.tokenizer.eos_token_id]))


def fits(text: str, family: str, special: bool, parallel: bool = True, answer: Any = None) -> bool:
    """Whether a text is an answer by `THING`, or another grammar, or calls in the form of a family."""
    made, grammars = marked(family, special)
    lark = CallGrammar(made, grammars).lark(parallel)
    assert lark is not None
    ids = [*made.tokenizer.encode(text, add_special_tokens=False), made.tokenizer.eos_token_id]
    made_of = answer(grammars) if answer else grammars.json_schema(THING)
    return grammars.within(lark, made_of).fitting([], ids) == len(ids)


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_by_a_schema_may_be_calls_instead(family: tuple[str, AnswerForm], special: bool) -> None:
    name, _ = family
    text = FORMS[name][2].replace("Now:", "").replace("<|channel|>final<|message|><|end|>", "")
    assert fits('{"tag": "red"}', name, special) and fits(text, name, special)
    assert not fits(text.replace("add", "sub"), name, special) and not fits("Now:" + text, name, special)
    assert not fits("{}", name, special) and not fits(text + '{"tag": "red"}', name, special)
    assert name == "lists" or not fits(text, name, special, parallel=False)


OTHERS: dict[str, Any] = {
    "a regular expression": lambda grammars: grammars.regex("ab+x"),
    "a choice": lambda grammars: grammars.choice(["abx", "y"]),
    "Lark": lambda grammars: grammars.lark('start: thing "x"\nthing: "a" | /ab/'),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_answer_of_any_form_may_be_calls_instead(case: str) -> None:
    for text, right in (("abx", True), (f"<tool_call>{CALL}</tool_call>", True), ("abc", False)):
        assert fits(text, "qwen3", False, answer=OTHERS[case]) is right


def test_arguments_fit_their_schemas_and_marks_in_a_formed_answer_are_content() -> None:
    assert not fits(f"<tool_call>{CALL.replace('7', '[]')}</tool_call>", "qwen3", False)
    for text in (
        '{"tag": "use <tool_call>"}',
        f'{{"tag": "<think>x</think><tool_call>{json.dumps(CALL)[1:-1]}</tool_call>"}}',
    ):
        for parts in ([text], letters(text)):
            regions = form("qwen3").regions([], formed=True)
            message = as_message([delta for part in parts for delta in regions.feed(part)] + [*regions.finish()])
            assert (message.content, message.tool_calls, message.reasoning_content) == (text, None, None)
    regions = form("qwen3").regions([], formed=True)
    message = as_message([*regions.feed(f"<think>x</think>\n<tool_call>{CALL}</tool_call>"), *regions.finish()])
    assert message.reasoning_content == "x" and len(message.tool_calls or ()) == 1 and not message.content
