"""Grammars: which texts are allowed, as masks of tokens, computed by llguidance.

A mask is made for every position after its own prefix, for the target's law p and for a draft's q, so that the rules
are exact for the masked law. Text that must come is never inserted as tokens: every token is drawn from the law.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from slipstream.core.draft import common_length
from slipstream.text.jsontext import json_text

ANSWER = "@answer"  # the name, in Lark, of the grammar that `Grammars.within` is given
MATCHERS = 64  # the number of texts per grammar whose states are kept; any other text is matched from its beginning
Found = TypeVar("Found")


class GrammarStopped(RuntimeError):
    """Raised if a grammar cannot be followed any further, since it has become too complex for llguidance."""


class Grammar:
    """The outputs that are allowed, for one tokenizer: `allowed` returns the tokens that may come after an output.
    It is made by `Grammars`, keeps the matcher states of the latest texts, and may be used by one thread at a time."""

    def __init__(self, source: str, tokens: Any, vocab: int) -> None:
        self.source, self._tokens, self.vocab = source, tokens, vocab
        self._states: OrderedDict[int, _State] = OrderedDict()  # by a running number, the most recently used last
        self._count = 0

    def allowed(self, output: Sequence[int]) -> Tensor:
        return self.masks([output])[0]

    def masks(self, outputs: Sequence[Sequence[int]]) -> Tensor:
        """Return the tokens that may come after each of these outputs, bool (outputs, vocab).

        After an output that is not allowed itself, every token is allowed: it contains a drafted token that is refused.
        """
        words = np.stack([np.frombuffer(self._mask(list(output)), np.uint8) for output in outputs])
        bits = np.unpackbits(words, axis=-1, count=self.vocab, bitorder="little")
        return torch.from_numpy(bits.view(bool))

    def fitting(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may follow an output one after another."""
        return self._drafted(output, lambda state: state.matcher.validate_tokens(list(tokens))) or 0

    def forced(self, output: Sequence[int]) -> list[int]:
        """Return the usual tokens of the only text that may come next; empty if several may."""
        return self._drafted(output, lambda state: state.matcher.compute_ff_tokens()) or []

    def _drafted(self, output: Sequence[int], question: Callable[[_State], Found]) -> Found | None:
        """Return an answer that only drafts depend on: None also where the grammar stops: the target will see."""
        try:
            return self._ask(output, question)
        except GrammarStopped:
            return None

    def _mask(self, output: list[int]) -> bytes:
        """Return the mask after an output, in bits; the target reuses masks that were computed for the draft."""
        for known in reversed(self._states.values()):
            if len(output) in known.masks and known.tokens[: len(output)] == output:
                return known.masks[len(output)]
        return self._ask(output, _State.mask) or b"\xff" * (4 * -(-self.vocab // 32))

    def _ask(self, output: Sequence[int], question: Callable[[_State], Found]) -> Found | None:
        """Return the answer of the state after an output; None if the output is not allowed.

        A matcher never recovers from an error, to which other texts may have led it, such as refused drafts: a new one
        answers then, so that the answer depends on the output alone. Raises GrammarStopped if that one fails too.
        """
        tokens = list(output)
        for find in (self._nearest, lambda tokens: self._fresh()):
            number, state = find(tokens)
            answer = question(state) if state.move_to(tokens) else None
            self._states[number] = state
            self._states.move_to_end(number)
            if not state.matcher.is_error():
                while len(self._states) > MATCHERS:
                    self._states.popitem(last=False)
                return answer
            del self._states[number]
        raise GrammarStopped(f"the grammar cannot be followed any further: {_line(state.matcher.get_error())}")

    def _nearest(self, tokens: list[int]) -> tuple[int, _State]:
        for number, state in reversed(self._states.items()):
            if state.tokens == tokens[: len(state.tokens)] or tokens == state.tokens[: len(tokens)]:
                return number, state
        best = max(self._states.items(), key=lambda item: common_length(item[1].tokens, tokens), default=None)
        if best and common_length(best[1].tokens, tokens) >= len(best[1].tokens) - DRAFTED:
            return best  # only tokens of a draft have to be rolled back
        return self._fresh()

    def _fresh(self) -> tuple[int, _State]:
        self._count += 1
        return self._count, _State(new_matcher(self._tokens, self.source))


DRAFTED = 64  # the number of tokens by which a state may be ahead of its text, because it followed a draft


@dataclass
class _State:
    """A matcher, the tokens that it has consumed, and the latest masks by the number of tokens before them."""

    matcher: Any
    tokens: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)

    def move_to(self, tokens: list[int]) -> bool:
        """Roll back and consume another text -> whether it is allowed; if not, the state keeps the allowed part."""
        shared = common_length(self.tokens, tokens)
        if shared < len(self.tokens):
            self.matcher.rollback(len(self.tokens) - shared)
            del self.tokens[shared:]
        least = len(tokens) - DRAFTED  # older masks are not needed any more
        self.masks = {length: mask for length, mask in self.masks.items() if least <= length <= shared}
        rest = tokens[shared:]
        taken = self.matcher.try_consume_tokens(rest) if rest else 0
        self.tokens += rest[:taken]
        return taken == len(rest)

    def mask(self) -> bytes:
        bits: bytes = self.matcher.compute_bitmask()
        self.masks[len(self.tokens)] = bits
        return bits


def new_matcher(tokens: Any, source: str) -> Any:
    """Make llguidance's matcher of a grammar, which writes no warnings: its errors are asked for."""
    from llguidance import LLMatcher

    return LLMatcher(tokens, source, log_level=0)


class GrammarMask(LogitsProcessor):
    """Forbids the tokens that a grammar does not allow after the output, which begins after `prompt_length` tokens."""

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.grammar, self.prompt_length = grammar, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.process_positions(list(input_ids), scores)

    def process_positions(self, prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        if scores.shape[-1] != self.grammar.vocab:
            return scores  # a draft with another vocabulary, for which any law is exact
        allowed = self.grammar.masks([prefix[self.prompt_length :].tolist() for prefix in prefixes])
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))


@dataclass(frozen=True)
class GrammarLimits:
    """The limits of a grammar: the bytes of its text, and the nesting depth of a JSON schema."""

    size: int = 1 << 20
    depth: int = 256


class Grammars:
    """Makes grammars for one tokenizer and a model of `vocab` tokens; texts end with one of the tokens `eos`.

    Raises ValueError without llguidance, a fast tokenizer, or an end-of-text token. Its methods raise ValueError, in
    one sentence, for an invalid grammar or one above the `limits`.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: frozenset[int], limits: GrammarLimits | None = None) -> None:
        if not eos:
            raise ValueError("a grammar needs a model that knows how texts end: it has no end-of-text token.")
        try:
            from llguidance import LLTokenizer, hf
        except ImportError:
            raise ValueError("grammars need llguidance: pip install 'slipstream[grammar]'.") from None
        try:
            marked = _with_spaces(tokenizer)
            how: dict[str, Any] = {"n_vocab": vocab, "eos_token": sorted(eos)}
            self._tokens = LLTokenizer(marked, **how) if marked else hf.from_tokenizer(tokenizer, **how)
        except Exception as error:  # its type depends on the tokenizer
            raise ValueError(f"grammars cannot be used with this tokenizer: {_line(error)}") from error
        self.vocab, self.limits = vocab, limits or GrammarLimits()

    def json_schema(self, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Make the grammar of JSON texts that match a schema, given as an object or as its JSON text."""
        if isinstance(schema, str):
            self._check_size("JSON schema", len(schema))
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise ValueError(f"the JSON schema is no JSON: {error}.") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"a JSON schema is an object, but here is {type(schema).__name__}.")
        if _depth(schema, self.limits.depth) > self.limits.depth:
            raise ValueError(f"the JSON schema is nested deeper than the {self.limits.depth} levels that are taken.")
        return self._made("JSON schema", json_text(plain(schema)), "json_schema", defaults=WHITE)

    def json_object(self) -> Grammar:
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Make the grammar of texts that a regular expression matches as a whole (Rust syntax, no look-around)."""
        return self._made("regular expression", pattern, "regex")

    def choice(self, texts: Sequence[str]) -> Grammar:
        texts = list(texts)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"a choice is a list of texts, none of them empty, but here is {texts!r}.")
        self._check_size("choice", sum(map(len, texts)))
        lark = "start: " + " | ".join(json_text(text) for text in texts)
        return self._made("choice", lark, "lark")

    def lark(self, grammar: str) -> Grammar:
        """Make a context-free grammar from llguidance's dialect of Lark, whose start rule is `start`."""
        return self._made("grammar", grammar, "lark")

    def within(self, lark: str, answer: Grammar) -> Grammar:
        """Make a grammar from Lark in which `ANSWER` is another one that was made here."""
        bare = [{"lark_grammar": answer.source}]  # grammars in Lark are no JSON
        first, *others = json.loads(answer.source)["grammars"] if answer.source.startswith("{") else bare
        parts = [{"lark_grammar": lark}, {**first, "name": ANSWER[1:]}, *others]
        return self._made("grammar with calls", json_text({"grammars": parts}), "grammars")

    def special(self, token: int) -> bool:
        """Return whether a token is one that no text matches, only its own id."""
        return bool(self._tokens.is_special_token(token))

    def _check_size(self, what: str, size: int) -> None:
        if size > self.limits.size:
            raise ValueError(f"the {what} is longer than the {self.limits.size} bytes that are taken.")

    def _made(self, what: str, text: str, kind: str, **how: Any) -> Grammar:
        from llguidance import LLMatcher

        self._check_size(what, len(text.encode()))
        try:
            source = text if kind == "grammars" else getattr(LLMatcher, f"grammar_from_{kind}")(text, **how)
            matcher = new_matcher(self._tokens, source)
            matcher.compute_bitmask()  # some grammars are found to be too complex no earlier
        except Exception as error:
            raise ValueError(f"the {what} cannot be used: {_line(error)}") from error
        if matcher.is_error():
            raise ValueError(f"the {what} cannot be used: {_line(matcher.get_error())}")
        return Grammar(source, self._tokens, self.vocab)


def _with_spaces(tokenizer: Any) -> str | None:
    """Return, as JSON text, a tokenizer whose decoder is Metaspace with one that llguidance reads; None for any other.
    llguidance learns that a mark is a space from a decoder that replaces it, and would take it for a letter here."""
    if (core := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    state = json.loads(core.to_str())
    decoder = state["decoder"] or {}
    if not any(each["type"] == "Metaspace" for each in (decoder, *decoder.get("decoders", ())) if each):
        return None
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return json_text({**state, "decoder": decoder, "padding": None, "truncation": None})


WHITE = {"whitespace_pattern": " ?"}
"""At most one space: otherwise an uncertain model could write nothing but white space up to its limit."""


FORMATS = ["date", "time", "date-time", "duration", "uuid", "regex", "ipv4", "ipv6", "uri-template", "json-pointer"]
FORMATS += ["relative-json-pointer", "email", "idn-email", "hostname", "idn-hostname"]
FORMATS += ["uri", "uri-reference", "iri", "iri-reference"]  # all that JSON Schema defines: others constrain nothing


def plain(schema: Any) -> Any:
    """Return a schema without `propertyNames` and `format` where they allow everything: llguidance reads no such."""

    def kept(part: dict[str, Any]) -> dict[str, Any]:
        kind, names = part.get("type"), part.get("propertyNames")
        free = ["propertyNames"] * (kind == "object" and names in ({}, {"type": "string"}))
        free += ["format"] * (kind in ("string", ["string", "null"]) and part.get("format", "date") not in FORMATS)
        return {name: value for name, value in part.items() if name not in free}

    return json.loads(json_text(schema), object_hook=kept)


def _depth(value: Any, most: int) -> int:
    level, depth = [value], 0
    while level and depth <= most:
        depth += 1
        inner = [list(each.values()) if isinstance(each, Mapping) else each for each in level]
        level = [item for each in inner if isinstance(each, list) for item in each]
    return depth


def _line(error: Any) -> str:
    """Convert an error to one sentence, without the state of the matcher that llguidance adds to its own."""
    text = " ".join(str(error).partition("<state>")[0].split())
    return text if text.endswith(".") else f"{text}."
