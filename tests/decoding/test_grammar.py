"""Grammars: the law is the target's law, masked and made whole, by enumeration; and texts fit what was asked for."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import slipstream
from slipstream.core.draws import Rng
from slipstream.core.protocols import Drafter
from slipstream.core.stats import Stats
from slipstream.decoding import grammar as grammar_module
from slipstream.decoding import rules
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate, rounds
from slipstream.decoding.grammar import Grammar, GrammarLimits, Grammars, GrammarStopped
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.choice import Forced
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter
from toys.enumeration import EXACT, WRONG, Script, SharedScript, enumerate_outcomes, total_variation
from toys.tables import PAIRS, VOCAB, plain_law, scorer
from toys.texts import Cycle, request

EOS, PROMPT = 2, (0, 1)
TEXTS = ("ab", "ba", "aab", "b")


def toy_grammars() -> Grammars:
    """Grammars over the letters a and b, tokens 0 and 1, and the end of text, token 2."""
    words = {"a": 0, "b": 1, "<end>": EOS}
    letters = Tokenizer(models.BPE(words, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    return Grammars(tokenizer, VOCAB, frozenset({EOS}))


def allowed(output: Sequence[int]) -> set[int]:
    """What may come next, from the list of texts alone."""
    text = "".join("ab"[token] for token in output)
    letters = {"ab".index(each[len(text)]) for each in TEXTS if each.startswith(text) and len(each) > len(text)}
    return letters | ({EOS} if text in TEXTS else set())


def masked(pair: str) -> Callable[[tuple[int, ...]], list[float]]:
    def step(prefix: tuple[int, ...]) -> list[float]:
        law = PAIRS[pair][0](prefix)
        kept = [law[token] if token in allowed(prefix[len(PROMPT) :]) else 0.0 for token in range(VOCAB)]
        return [weight / sum(kept) for weight in kept]

    return step


class Late(Grammar):
    """The control: every mask is that of one position before."""

    def masks(self, outputs: Sequence[Sequence[int]]) -> Tensor:
        return super().masks([output[:-1] for output in outputs])


def distance(pair: str, rule: rules.Rule, make: Callable[[], Drafter], grammar: Grammar) -> float:
    """Total variation of whole outputs from the masked law."""
    sampler = Sampling(temperature=1.0, eos=frozenset({EOS}), grammar=grammar)

    def run(rng: Rng) -> tuple[int, ...]:
        decoder = Decoder(scorer(PAIRS[pair][0]), make(), rule.verify, Cycle((2, 0, 3)), rng=rng)
        asked = request(PROMPT, 4, sampler, eos=frozenset({EOS}))
        return tuple(list(rounds(decoder, [asked]))[-1].rows[0].output)

    script = SharedScript if rule.rng.coupled else Script
    return total_variation(enumerate_outcomes(run, 60_000, script), plain_law(masked(pair), PROMPT, 4, ends=[EOS]))


def drafters(pair: str) -> dict[str, Callable[[], Drafter]]:
    """Drafts of all kinds: masked ones, ones that know nothing of grammars, and what has to come."""
    return {
        "none": NoDraft,
        "model": lambda: ModelDrafter(scorer(PAIRS[pair][1])),
        "copy": Lookup,
        "tree": lambda: TreeDrafter(scorer(PAIRS[pair][1]), (2, 1)),
        "forced": lambda: Forced(),
    }


@pytest.mark.parametrize("drafter", drafters("generic"))
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK, rules.MATCH, rules.COUPLED], ids=lambda rule: rule.name)
def test_the_law_is_the_target_s_behind_the_mask(rule: rules.Rule, drafter: str) -> None:
    for pair in ("generic", "same"):  # with the others, what is allowed may have no chance
        grammar = toy_grammars().choice(TEXTS)
        assert distance(pair, rule, drafters(pair)[drafter], grammar) < EXACT


@pytest.mark.parametrize("rule", [rules.TOKEN, rules.COUPLED], ids=lambda rule: rule.name)
def test_a_mask_that_comes_late_is_noticed(rule: rules.Rule) -> None:
    late = toy_grammars().choice(TEXTS)
    late.__class__ = Late
    found = [distance("generic", rule, drafters("generic")[name], late) for name in ("none", "model")]
    assert min(found) > WRONG


def test_copies_that_the_grammar_forbids_are_not_drafted() -> None:
    """The prompt repeats a, b; the grammar allows b alone after the first a b."""
    prompt, eos = (0, 1, 0, 1, 0, 1), frozenset({EOS})

    def drafted(pattern: str) -> Stats:
        sampler = Sampling(eos=eos, grammar=toy_grammars().regex(pattern))
        decoder = Decoder(scorer(PAIRS["generic"][0]), Lookup(), controller=Cycle((4,)))
        (row,) = generate(decoder, [request(prompt, 9, sampler, eos=eos)])
        assert row.output == ["ab".index(letter) for letter in pattern] + [EOS]
        return row.stats

    free, cut = drafted("ababab"), drafted("abbbbb")
    assert free.drafted >= free.accepted >= 4
    assert cut.drafted == cut.accepted >= 2  # the a after it was in the copy, and could not stand


def test_rows_with_and_without_grammars_share_a_batch() -> None:
    made, eos = toy_grammars(), frozenset({EOS})
    samplers = [
        Sampling(temperature=1.0, eos=eos, grammar=made.choice(TEXTS)),
        Sampling(temperature=1.0, eos=eos),
        Sampling(eos=eos, grammar=made.regex("a{3}b")),
    ]
    target, draft = PAIRS["generic"]

    def outputs(some: Sequence[Sampling], first: int = 0) -> list[list[int]]:
        decoder = Decoder(scorer(target), ModelDrafter(scorer(draft)), controller=Cycle((3,)))
        asked = [request(PROMPT, 9, one, eos=eos, key=first + place) for place, one in enumerate(some)]
        return [row.output for row in generate(decoder, asked)]

    together = outputs(samplers)
    assert together == [outputs([sampler], place)[0] for place, sampler in enumerate(samplers)]
    assert together[2] == [0, 0, 0, 1, EOS]
    assert "".join("ab"[token] for token in together[0][:-1]) in TEXTS


def test_what_has_to_come_is_drafted() -> None:
    sampler = Sampling(temperature=1.0, eos=frozenset({EOS}), grammar=toy_grammars().regex("abab"))
    decoder = Decoder(scorer(PAIRS["generic"][0]), Forced(), controller=Cycle((8,)))
    (row,) = generate(decoder, [request(PROMPT, 9, sampler, eos=frozenset({EOS}))])
    assert row.output == [0, 1, 0, 1, EOS]
    assert row.stats.drafted == row.stats.accepted == 4 and row.stats.target_calls == 1


def test_masks_are_those_of_any_order_of_questions() -> None:
    grammar = toy_grammars().choice(TEXTS)
    outputs: list[list[int]] = [[0], [0, 0, 1], [], [1], [0, 1], [0, 0], [1, 0], [0]]
    for output in [*outputs, *reversed(outputs)]:
        assert set(torch.nonzero(grammar.allowed(output)).flatten().tolist()) == allowed(output)
    together = grammar.masks(outputs)
    assert [set(torch.nonzero(mask).flatten().tolist()) for mask in together] == [allowed(each) for each in outputs]
    assert grammar.allowed([1, 1]).all()  # no text begins so: what stands behind it was refused before


# ---- with a real model ------------------------------------------------------------------------------------------


TEXT = {"type": "string", "maxLength": 4, "format": "password"}  # a format that JSON Schema does not define
KINDS: dict[str, Any] = {
    "enum": {"enum": ["red", "green", 3, None]},
    "const": {"const": {"a": [1, True]}},
    "integer": {"type": "integer", "minimum": -5, "maximum": 17},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "text": TEXT,
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "boolean"}], "items": False, "minItems": 2},
    "union": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "reference": {"$ref": "#/$defs/color"},
    "tree": {"$ref": "#/$defs/tree"},
}
DEFINITIONS = {
    "color": {"enum": ["red", "blue"]},
    "tree": {
        "type": "object",
        "properties": {"leaf": {"type": "boolean"}, "left": {"$ref": "#/$defs/tree"}},
        "required": ["leaf"],
        "additionalProperties": False,
    },
}


def schema_of(number: int) -> dict[str, Any]:
    """The schema of a number: an object of some kinds, alone, nested, or as the call of a tool."""
    names = list(KINDS)
    some = [names[(number * step + step) % len(names)] for step in range(1, 2 + number % 4)]
    inner: dict[str, Any] = {
        "type": "object",
        "properties": {f"{name}_{place}": KINDS[name] for place, name in enumerate(some)},
        "required": [f"{name}_{place}" for place, name in enumerate(some) if (number + place) % 3],
        "additionalProperties": False,
    }
    if number % 5 == 3:
        inner = {"type": "object", "properties": {"inner": inner}, "required": ["inner"], "additionalProperties": False}
    if number % 5 == 4:
        call = {"name": {"const": f"tool{number}"}, "arguments": inner}
        inner = {"type": "object", "properties": call, "required": list(call), "additionalProperties": False}
    return {**inner, "$defs": DEFINITIONS}


def answers_fit(engine: slipstream.Engine, numbers: Sequence[int]) -> int:
    """Check the answers to some schemas, greedy and sampled -> how many of them ended."""
    ended = 0
    for number in numbers:
        schema = schema_of(number)
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
        form = engine.grammars.json_schema(schema)
        [done] = engine.generate("json = ", grammar=form, max_new_tokens=160, stop=[], **sampled)
        assert done.error is None
        if done.finish_reason == "stop":
            ended += 1
            assert jsonschema_rs.validator_for(schema).is_valid(json.loads(done.text)), (schema, done.text)
        else:
            grammar = engine.grammars.json_schema(schema)
            assert not grammar.allowed(done.tokens).all()  # a beginning that can go on
    return ended


def test_answers_fit_their_schemas(engine: slipstream.Engine) -> None:
    assert answers_fit(engine, range(0, 200, 20)) >= 8


@pytest.mark.slow
def test_answers_fit_two_hundred_schemas(engine: slipstream.Engine) -> None:
    assert answers_fit(engine, range(200)) >= 180


def test_samples_of_a_choice(engine: slipstream.Engine) -> None:
    grammar = engine.grammars.choice(["yes", "no", "perhaps not"])
    for options in ({}, {"verify": "coupled"}, {"gamma": 0}):
        done = engine.generate("Is it?", grammar=grammar, n=4, temperature=1.5, **options)
        assert {one.text for one in done} <= {"yes", "no", "perhaps not"}
        assert {one.finish_reason for one in done} == {"stop"}


def test_speculative_text_is_plain_text(engine: slipstream.Engine) -> None:
    grammar = engine.grammars.json_schema(schema_of(7))
    for options in ({}, {"temperature": 1.0, "verify": "coupled"}):
        texts = {engine.generate("x", grammar=grammar, plain=plain, **options)[0].text for plain in (False, True)}
        assert len(texts) == 1


WRONG_ONES: dict[str, tuple[Callable[[Grammars], object], str]] = {
    "regex": (lambda make: make.regex("("), "regular expression"),
    "schema": (lambda make: make.json_schema({"type": "string", "format": "idn-email"}), "JSON schema"),
    "schema text": (lambda make: make.json_schema("{"), "no JSON"),
    "schema list": (lambda make: make.json_schema([]), "is an object"),  # type: ignore[arg-type]
    "lark": (lambda make: make.lark("start: unknown"), "unknown"),
    "choice": (lambda make: make.choice([]), "list of texts"),
    "choice of nothing": (lambda make: make.choice([""]), "none of them empty"),
    "long": (lambda make: make.regex("a" * 3000), "2000 bytes"),
    "deep": (lambda make: make.json_schema(json.loads('{"items":' * 30 + "{}" + "}" * 30)), "9 levels"),
}


@pytest.mark.parametrize("case", WRONG_ONES)
def test_what_is_no_grammar(engine: slipstream.Engine, case: str) -> None:
    wrong, says = WRONG_ONES[case]
    with pytest.raises(ValueError, match=says) as caught:
        wrong(engine.new_grammars(GrammarLimits(size=2000, depth=9)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"ignore_eos": True}, {"min_new_tokens": 3}])
def test_a_grammar_alone_says_where_a_text_ends(engine: slipstream.Engine, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a grammar says where a text may end"):
        engine.generate("x", grammar=engine.grammars.choice(["a"]), **option)


def test_a_grammar_of_another_model_is_refused(engine: slipstream.Engine) -> None:
    for grammar, says in ((toy_grammars().regex("a"), "made for a model of 3 tokens"), ("a+", "engine.grammars")):
        with pytest.raises(ValueError, match=says):
            engine.generate("x", grammar=grammar)


# ---- matchers that stop -------------------------------------------------------------------------------------------


class Stopping:
    """llguidance's matcher, faked to stop at the texts that `stops` names: it forbids everything from then on."""

    def __init__(self, matcher: Any, stops: Callable[[list[int]], bool]) -> None:
        self.matcher, self.stops, self.tokens, self.stopped = matcher, stops, list[int](), False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        taken = 0 if self.is_error() else self.matcher.try_consume_tokens(tokens)
        self.tokens += tokens[:taken]
        return taken

    def rollback(self, count: int) -> bool:
        del self.tokens[len(self.tokens) - count :]
        return self.matcher.rollback(count)

    def compute_bitmask(self) -> bytes:
        return bytes(4) if self.is_error() else self.matcher.compute_bitmask()

    def is_error(self) -> bool:
        self.stopped |= self.stops(self.tokens)
        return self.stopped

    def get_error(self) -> str:
        return "too many states\n<state>\nof the matcher"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def stopping(monkeypatch: pytest.MonkeyPatch, stops: Callable[[list[int]], bool]) -> Grammar:
    """The grammar of `TEXTS`, whose matchers stop."""
    made, real = toy_grammars().choice(TEXTS), grammar_module.new_matcher
    monkeypatch.setattr(grammar_module, "new_matcher", lambda *about: Stopping(real(*about), stops))
    return made


@pytest.mark.parametrize("drafter", drafters("generic"))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_written_after_a_matcher_has_stopped(
    drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    eos, ended = frozenset({EOS}), set()
    end = [0, 0] if temperature else [1]
    grammar = stopping(monkeypatch, lambda tokens: tokens[: len(end)] == end)
    sampler = Sampling(temperature=temperature, eos=eos, grammar=grammar)
    decoder = Decoder(scorer(PAIRS["generic"][0]), drafters("generic")[drafter](), controller=Cycle((3,)))
    for row in generate(decoder, [request(PROMPT, 4, sampler, eos=eos, key=key) for key in range(9)]):
        assert row.output == end or row.output[-1] == EOS
        assert (row.finish_reason == "error") == (row.output == end)
        assert row.error is None or "cannot be followed any further: too many states." in row.error
        ended.add(row.finish_reason)
    assert ended == ({"error", "stop"} if temperature else {"error"})


def test_a_matcher_that_a_refused_draft_has_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = stopping(monkeypatch, lambda tokens: tokens[:2] == [0, 0])
    assert grammar.allowed([0]).tolist() == [True, True, False]
    assert grammar.fitting([0, 0], [1]) == 0 and grammar.forced([0, 0]) == []
    with pytest.raises(GrammarStopped, match="too many states"):
        grammar.masks([[0], [0, 0]])
    assert grammar.allowed([0]).tolist() == [True, True, False]
    assert grammar.allowed([0, 1]).tolist() == [False, False, True]


def test_real_matchers_that_stop_are_noticed(engine: slipstream.Engine) -> None:
    grammar, letter = engine.grammars.regex("(a?){500}a{500}"), engine.encode("a")[-1]
    for count in range(3):  # the matcher that made the mask of the text before stops at every letter
        allowed = grammar.allowed([letter] * count)
        assert allowed[letter] and not allowed[engine.encode("b")[-1]]
