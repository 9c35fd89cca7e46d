"""Drafts with another tokenizer: the law of the output, exactly; the same greedy text; the contract of drafters."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict, Verifier
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Scorer
from slipstream.core.request import Row, Sampler
from slipstream.core.round import Context
from slipstream.decoding.acceptance import block, match, token
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain, rounds
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.cross_tokenizer.reader import RetokenizingReader
from slipstream.drafters.cross_tokenizer.token_intersection import StringMatch, TokenIntersection
from slipstream.drafters.cross_tokenizer.vocabulary import CommonTokens, Vocabulary
from tongues import TEXT, tongue, toy
from toys.drafts import Altered, first_tokens, flat, same_texts
from toys.enumeration import EXACT, WRONG, Distribution, enumerate_outcomes, total_variation
from toys.tables import Table, dirichlet_table, plain_law, scorer, some
from toys.texts import GREEDY, SAMPLE, Cycle, request

METHODS = {"intersection": TokenIntersection, "strings": StringMatch}
every_method = pytest.mark.parametrize("method", METHODS)
PROMPT, COUNT = (0, 2), 3


def reader(draft: Scorer, ours: Any, draft_tokenizer: Any, vocab: int) -> RetokenizingReader:
    """A reader of a draft with the tokenizer `draft_tokenizer` for a target with `ours`."""
    target, other = Vocabulary.of(ours), Vocabulary.of(draft_tokenizer)
    return RetokenizingReader(draft, target, other, CommonTokens.of(target, other, (vocab, draft.vocab)))


# ---- the law of the output --------------------------------------------------------------------------------------

TOYS = {
    "one missing": (toy("a", "b", "ab"), toy("b", "a", "ba")),
    "other numbers": (toy("a", "b", "ab"), toy("b", "a", "ab")),
    "one common": (toy("a", "b", "ab"), toy("c", "a", "ca")),
    "an end": (toy("a", "b", end="</s>"), toy("b", "a", end="<end>")),
}
"""Pairs of tokenizers with three tokens each; "ab" of a target may be written by two tokens of the draft."""

TABLES = {
    "generic": (dirichlet_table(1), dirichlet_table(2)),
    "zeros": (dirichlet_table(13, some), dirichlet_table(35, some)),
}
Wrap = Callable[[Drafter], Drafter]


@dataclass(frozen=True)
class Case:
    method: str
    toys: str = "one missing"
    tables: tuple[Table, Table] = TABLES["generic"]
    gammas: tuple[int, ...] = (2,)
    sampler: Sampler = SAMPLE
    verifier: Verifier = token
    wrap: Wrap = lambda drafter: drafter

    def law(self, count: int = COUNT) -> Distribution:
        def decoder(rng: Rng) -> Decoder:
            view = reader(scorer(self.tables[1], "draft"), *TOYS[self.toys], vocab=3)
            drafter = self.wrap(METHODS[self.method](view))
            return Decoder(scorer(self.tables[0]), drafter, self.verifier, Cycle(self.gammas), rng=rng)

        return first_tokens(decoder, PROMPT, count, count, self.sampler, eos=self.eos)

    @property
    def eos(self) -> frozenset[int]:
        end = TOYS[self.toys][0].eos_token_id
        return frozenset() if end is None else frozenset([end])

    def want(self, count: int = COUNT) -> Distribution:
        return plain_law(self.tables[0], PROMPT, count, tuple(self.eos))


@pytest.mark.parametrize("gammas", [(2,), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("toys", TOYS)
@every_method
def test_the_output_law_is_the_targets(method: str, toys: str, tables: str, gammas: tuple[int, ...]) -> None:
    case = Case(method, toys, TABLES[tables], gammas)
    assert total_variation(case.law(), case.want()) < EXACT


@pytest.mark.parametrize(("verifier", "count"), [(block, 3), (match, 2)])  # matching draws at every position
@every_method
def test_with_every_rule(method: str, verifier: Verifier, count: int) -> None:
    case = Case(method, verifier=verifier)
    assert total_variation(case.law(count), case.want(count)) < EXACT


def forbid_common(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that lets only "ab" follow an "a"; the draft of "one missing" does not have it."""
    if ids[0, -1] == 0:
        scores[:, :2] = float("-inf")
    return scores


@every_method
def test_settings_that_forbid_every_common_token(method: str) -> None:
    def step(prefix: tuple[int, ...]) -> list[float]:
        return [0, 0, 1] if prefix[-1] == 0 else list(TABLES["generic"][0](prefix))

    case = Case(method, sampler=Sampling(temperature=1.0, processors=[forbid_common]))
    assert total_variation(case.law(), plain_law(step, PROMPT, COUNT)) < EXACT


# Controls: plausible mistakes, each of which has to be caught.


def unnormalised(draft: Draft) -> Draft:
    """q as it was before it was renormalised on the common tokens."""
    return draft if draft.law is None else replace(draft, law=Law(probs=draft.law.dense * 0.7))


def picky(draft: Draft) -> Draft:
    """Drop what was drafted if it begins with "b"."""
    begins = draft.tokens[:, :1].sum(1).tolist()
    return replace(draft, lengths=tuple(most * (first != 1) for first, most in zip(begins, draft.lengths, strict=True)))


@pytest.mark.parametrize(
    ("method", "change"), [("intersection", unnormalised), ("intersection", picky), ("strings", flat)]
)
def test_controls_are_caught(method: str, change: Callable[[Draft], Draft]) -> None:
    case = Case(method, wrap=lambda drafter: Altered(drafter, change))
    assert total_variation(case.law(), case.want()) > WRONG


def test_what_was_written_may_be_dropped() -> None:
    """What is biased for sampled tokens (above) is exact for a fixed draft: q is no claim about how it was made."""
    case = Case("strings", wrap=lambda drafter: Altered(drafter, picky))
    assert total_variation(case.law(), case.want()) < EXACT


@dataclass
class Coins:
    """Proposes "a" or "b" by a coin, as a fixed draft. If `shared`, the verifier looks at the very same coin."""

    shared: bool
    coin: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.long))

    def propose(self, context: Context, gammas: tuple[int, ...]) -> Draft:
        self.coin = context.draw(Law(probs=torch.full((1, 1, 2), 0.5)), "coin")
        return Draft(self.coin, Law(tokens=self.coin), (1,)) if gammas[0] else Draft.empty(1, self.coin.device)

    def observe(self, round: Any) -> None:
        pass

    def verify(self, p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
        """A fair coin decides about a token of chance 1/2: as exact as any other, unless the draft was made by it."""
        return token(p, draft, (lambda law, purpose: self.coin) if self.shared else draw)


@pytest.mark.parametrize("shared", [False, True])
def test_a_fixed_draft_may_be_chosen_by_coins_that_the_verifier_does_not_look_at(shared: bool) -> None:
    def fair(prefix: tuple[int, ...]) -> tuple[float, ...]:
        return (0.5, 0.5, 0.0)

    def run(rng: Rng) -> tuple[int, ...]:
        coins = Coins(shared)
        decoder = Decoder(scorer(fair), coins, coins.verify, Cycle((1,)), rng=rng)
        return tuple(generate(decoder, [request(PROMPT, 2)])[0].output)

    gap = total_variation(enumerate_outcomes(run), plain_law(fair, PROMPT, 2))
    assert gap > WRONG if shared else gap < EXACT


# ---- the same text ----------------------------------------------------------------------------------------------


def reciter(name: str, errors: int) -> Table:
    """A process that recites TEXT in the tokens of a tokenizer, goes on after mistakes, and errs now and then."""
    found, size = Vocabulary.of(tongue(name)), len(tongue(name))
    eos = tongue(name).eos_token_id
    before = "\n" if found.strips else ""  # or a text in the middle of a word would be given a space

    @cache
    def table(prefix: tuple[int, ...]) -> list[float]:
        written = b"".join(found.piece(number) or b"" for number in prefix).decode(errors="ignore")
        place = len(written) - found.strips
        ids = found.encode(before + TEXT[place : place + 20])[len(found.encode(before)) :]
        law = [1e-6] * size
        law[ids[0] if ids else eos] = 1.0
        if (place * 2654435761 >> 7) % errors == 0:
            law[(7 * place) % size] = 2.0
        total = sum(law)
        return [weight / total for weight in law]

    return table


PAIRS = [("bytes", "fewer bytes"), ("fewer bytes", "bytes"), ("bytes", "marked"), ("prepended", "bytes across words")]
every_pair = pytest.mark.parametrize(("target", "draft"), PAIRS)


def reciters(target: str, draft: str, method: str, context: int | None = None) -> Decoder:
    """A target and a draft that recite the same text, with different mistakes."""
    ours, draft_tokenizer = tongue(target), tongue(draft)
    small = scorer(reciter(draft, 31), "draft", len(draft_tokenizer), context)
    view = reader(small, ours, draft_tokenizer, len(ours))
    return Decoder(scorer(reciter(target, 23), "target", len(ours)), METHODS[method](view), batch_size=2)


def requests(target: str, **kwargs: Any) -> list[Any]:
    prompts = [tongue(target)(TEXT[:length])["input_ids"] for length in (40, 9, 171)]
    kwargs = {"sampler": GREEDY, **kwargs}
    return [request(prompt, count, **kwargs) for prompt, count in zip(prompts, (30, 44, 21), strict=True)]


def length(rows: list[Row]) -> float:
    return sum(row.stats.emitted for row in rows) / sum(row.stats.target_calls for row in rows)


@every_pair
@every_method
def test_greedy_output_is_that_of_plain_decoding(method: str, target: str, draft: str) -> None:
    decoder, asked = reciters(target, draft, method), requests(target)
    rows = generate(decoder, asked)
    assert [row.tokens for row in rows] == [row.tokens for row in plain(decoder, asked)]
    assert length(rows) > 1.5, "hardly any draft is accepted"


@every_method
def test_sampled_output_does_not_depend_on_the_batch(method: str) -> None:
    decoder, asked = reciters("bytes", "marked", method), requests("bytes", sampler=SAMPLE)
    together = [row.tokens for row in generate(decoder, asked)]
    assert together == [generate(decoder, [one])[0].tokens for one in asked]


@every_method
def test_gammas_of_all_sizes_and_rounds_without_drafts(method: str) -> None:
    decoder = replace(reciters("bytes", "fewer bytes", method), controller=Cycle((3, 0, 1, 8, 0, 0, 2)))
    asked = requests("bytes")
    rows, drafted = {}, []
    for round in rounds(decoder, asked):
        rows |= {row.index: row for row in round.rows}
        drafted.append(max(round.draft.lengths))
        assert all(n <= most for n, most in zip(round.draft.lengths, round.gammas, strict=True))
    assert 0 in drafted and max(drafted) > 3
    assert [rows[i].tokens for i in range(3)] == [row.tokens for row in plain(decoder, asked)]


@every_method
def test_stops_in_mid_round_and_use_for_another_call(method: str) -> None:
    decoder = reciters("bytes", "marked", method)

    def stop(tokens: list[int]) -> str | None:
        return "stop" if len(tokens) % 17 == 0 else None

    stopped = requests("bytes", stop=stop)
    for asked in (stopped, requests("bytes")):
        same_texts(decoder, asked)
    stream = rounds(decoder, requests("bytes"))
    next(stream)
    stream.close()  # its rows are gone without having ended
    same_texts(decoder, stopped)


@pytest.mark.parametrize("target", ["bytes", "marked"])
@every_method
def test_the_end_of_a_text_is_drafted(method: str, target: str) -> None:
    """The end has another name in each vocabulary."""
    decoder = reciters(target, "marked" if target == "bytes" else "bytes", method)
    end = tongue(target).eos_token_id
    asked = request(tongue(target)(TEXT[:-6])["input_ids"], 60, GREEDY, eos=frozenset([end]))
    stream = list(rounds(decoder, [asked]))
    assert stream[-1].rows[0].tokens == plain(decoder, [asked])[0].tokens
    assert stream[-1].rows[0].finish_reason == "stop"
    assert any(end in round.draft.tokens[0, : round.draft.lengths[0]].tolist() for round in stream)


@every_method
def test_a_text_beyond_the_drafts_context_is_followed_in_a_window(method: str) -> None:
    decoder, asked = reciters("bytes", "fewer bytes", method, context=40), requests("bytes")
    rows = generate(decoder, asked)
    assert [row.tokens for row in rows] == [row.tokens for row in plain(decoder, asked)]
    assert len(rows[2].request.prompt) > 40 and rows[2].stats.drafted > 0


def test_nothing_is_drafted_inside_a_character_that_the_draft_cannot_see() -> None:
    view = reader(scorer(lambda prefix: [1 / 300] * 300, "draft", 300), tongue("bytes"), tongue("word pieces"), 420)
    inside = Row(request(Vocabulary.of(tongue("bytes")).encode("a 日")[:-1], 9), 0, [])
    inside.tokens += inside.request.prompt
    for method in METHODS.values():
        assert method(view).propose(Context((inside,), rng=_first), [4]).lengths == (0,)


def _first(law: Law, key: Any) -> Tensor:
    return law.tokens if law.tokens is not None else law.dense.argmax(-1)


class Counting:
    def __init__(self, inner: Scorer) -> None:
        self.inner, self.fed = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def extend(self, tokens: Tensor, counts: Any, **kwargs: Any) -> Tensor:
        self.fed += sum(counts)
        return self.inner.extend(tokens, counts, **kwargs)

    def prefill(self, texts: Any, **kwargs: Any) -> None:
        self.fed += sum(map(len, texts))
        self.inner.prefill(texts, **kwargs)


@every_method
def test_the_cache_is_kept(method: str) -> None:
    """A round feeds its drafts and what the target changed, not the text."""
    draft_tokenizer = tongue("marked")
    counting = Counting(scorer(reciter("marked", 31), "draft", len(draft_tokenizer)))
    decoder = reciters("bytes", "marked", method)
    decoder = replace(decoder, drafter=METHODS[method](reader(counting, tongue("bytes"), draft_tokenizer, 420)))  # type: ignore[arg-type]
    asked = request(tongue("bytes")(TEXT[:600])["input_ids"], 60, GREEDY)
    row = generate(decoder, [asked])[0]
    prompt = len(draft_tokenizer(TEXT[:600])["input_ids"])
    assert counting.fed < prompt + 16 * row.stats.target_calls
