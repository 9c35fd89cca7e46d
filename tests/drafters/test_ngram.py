"""n-gram drafts: tables as the textbook defines them, files whole or refused, and the law stays the target's."""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from slipstream.core.draft import Draft
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.decoding import rules
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.ngram import FALLBACK, Ngram, NgramModel, Table, discounts
from slipstream.files import TensorFileKind, save_tensors
from toys.drafts import Altered, law_distance, propose
from toys.enumeration import EXACT, WRONG, enumerate_outcomes, total_variation
from toys.tables import PAIRS, VOCAB, plain_law, scorer
from toys.texts import GREEDY, SAMPLE, Cycle, rare, request, row

FLOAT = 1e-6  # tables are stored in float32
TARGET = PAIRS["generic"][0]
PROMPT = (0, 2)


# ---- the reference: the same smoothing, as the definition says it, with dictionaries -------------------------------


Gram = tuple[int, ...]


@dataclass
class Reference:
    """Interpolated modified Kneser-Ney."""

    sequences: Sequence[Sequence[int]]
    order: int
    vocab: int

    def __post_init__(self) -> None:
        padded = [(self.vocab, *text) for text in self.sequences if text]
        plain = {
            n: Counter(text[i : i + n] for text in padded for i in range(n == 1, len(text) - n + 1))
            for n in range(1, self.order + 1)
        }
        self.counts = {n: self._appearances(plain, n) for n in plain}

    def _appearances(self, plain: dict[int, Counter[Gram]], n: int) -> dict[Gram, int]:
        """How many different tokens stand before an n-gram, if anything can."""
        if n == self.order:
            return dict(plain[n])
        before: dict[Gram, set[int]] = {}
        for gram in plain[n + 1]:
            before.setdefault(gram[1:], set()).add(gram[0])
        return {gram: count if gram[0] == self.vocab else len(before[gram]) for gram, count in plain[n].items()}

    def discount(self, n: int, count: int) -> float:
        """D of a count, equation 26."""
        of = Counter(self.counts[n].values())
        d = FALLBACK
        if all(of[k] for k in (1, 2, 3, 4)):
            y = of[1] / (of[1] + 2 * of[2])
            found = (1 - 2 * y * of[2] / of[1], 2 - 3 * y * of[3] / of[2], 3 - 4 * y * of[4] / of[3])
            d = found if all(0 <= x <= k for k, x in enumerate(found, 1)) else FALLBACK
        return d[min(count, 3) - 1]

    def smoothed(self, context: Gram, lower: Sequence[float]) -> Sequence[float]:
        """p_n(. | context) from p_{n-1}."""
        n = len(context) + 1
        here = {gram[-1]: count for gram, count in self.counts[n].items() if gram[:-1] == context}
        if not here:
            return lower
        total = sum(here.values())
        gamma = sum(self.discount(n, count) for count in here.values()) / total
        alpha = {token: (count - self.discount(n, count)) / total for token, count in here.items()}
        return [alpha.get(token, 0.0) + gamma * lower[token] for token in range(self.vocab)]

    def law(self, text: Sequence[int]) -> Sequence[float]:
        law: Sequence[float] = [1 / self.vocab] * self.vocab
        known = (self.vocab, *text)
        for size in range(self.order):
            if size <= len(known):
                law = self.smoothed(known[len(known) - size :], law)
        return law


corpora = st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=4).filter(any)
orders = st.integers(1, 5)


def model_law(model: NgramModel, text: Sequence[int]) -> list[float]:
    return model.law(model.state(text)).tolist()


def some_texts(seed: int, count: int = 12, length: int = 60, vocab: int = 6) -> list[list[int]]:
    """Texts in which some continuations are much more frequent than others."""
    rng = random.Random(seed)
    draw = rng.randrange
    return [[min(draw(vocab), draw(vocab)) for _ in range(draw(length))] for _ in range(count)]


@given(corpora, orders, st.lists(st.integers(0, 4), max_size=7))
def test_the_tables_are_those_of_the_definition(sequences: list[list[int]], order: int, text: list[int]) -> None:
    """Token 4 is never seen; contexts may be unseen, shorter than the order, or the start of a text."""
    model = NgramModel.fit(sequences, order, 5)
    want = Reference(sequences, order, 5)
    for end in range(len(text) + 1):
        got = model_law(model, text[:end])
        assert got == pytest.approx(want.law(text[:end]), abs=FLOAT)
        assert sum(got) == pytest.approx(1, abs=FLOAT) and min(got) > 0


@pytest.mark.parametrize("order", range(1, 6))
def test_the_tables_are_those_of_the_definition_on_more_text(order: int) -> None:
    """Enough of it that the discounts come from the counts of counts, not from the fallback."""
    sequences = some_texts(order, vocab=20)
    model, want = NgramModel.fit(sequences, order, 20), Reference(sequences, order, 20)
    assert order == 1 or any(want.discount(n, 1) != FALLBACK[0] for n in range(1, order + 1))
    for text in some_texts(99, 40, 8, vocab=20):
        assert model_law(model, text) == pytest.approx(want.law(text), abs=FLOAT)


def test_a_bigram_by_hand() -> None:
    """One text 0 1 0 1 0: discounts are the fallback's, start -> 0 once; 0 -> 1 twice; 1 -> 0 twice."""
    model = NgramModel.fit([[0, 1, 0, 1, 0]], 2, 3)
    zero = (2 - 1.0) / 3 + 1.5 / 3 / 3  # token 0 stands behind two different ones, token 1 behind one
    one = (1 - 0.5) / 3 + 1.5 / 3 / 3
    assert model.unigram.tolist() == pytest.approx([zero, one, 1.5 / 9])
    assert model_law(model, [0])[1] == pytest.approx((2 - 1) / 2 + 1 / 2 * one)
    assert model_law(model, [])[0] == pytest.approx((1 - 0.5) / 1 + 0.5 * zero)
    assert model_law(model, [2]) == pytest.approx(model.unigram.tolist())


def test_discounts() -> None:
    """n1..n4 = 8, 4, 2, 1: Y = 8/16, D = 1 - 2Y/2, 2 - 3Y/2, 3 - 4Y/2."""
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] + [9] * 3 + [0])
    assert discounts(counts) == pytest.approx((0.5, 1.25, 2.0))
    assert discounts(np.array([1, 1, 2, 3])) == FALLBACK  # no 4
    assert discounts(np.array([1] * 2 + [2] + [3] * 9 + [4] * 99)) == FALLBACK  # negative


@given(corpora, orders, st.lists(st.integers(0, 3), max_size=12))
def test_a_state_goes_on_where_it_stands(sequences: list[list[int]], order: int, text: list[int]) -> None:
    model = NgramModel.fit(sequences, order, 4)
    state = model.state([])
    for end, token in enumerate(text, 1):
        state = model.advance(state, token)
        assert state == model.state(text[:end])
        if end >= order - 1:
            assert state == model.state(text[:end][-order:])
        assert len(state) <= order


def test_the_reference_would_notice() -> None:
    """The comparison tells plain counts from Kneser-Ney's, and other discounts from the right ones."""
    sequences = some_texts(3)
    model = NgramModel.fit(sequences, 3, 6)
    wrong = Reference(sequences, 3, 6)
    wrong.counts[2] = {gram: count + 1 for gram, count in wrong.counts[2].items()}
    assert max(abs(a - b) for a, b in zip(model_law(model, [0, 1]), wrong.law([0, 1]), strict=True)) > WRONG


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda text: np.array(text, np.uint16)])
def test_sequences_may_be_lists_arrays_or_tensors(make: Callable[[list[int]], Any]) -> None:
    texts = some_texts(1)
    model = NgramModel.fit((make(text) for text in texts if text), 3, 6)
    assert_equal(model, NgramModel.fit(texts, 3, 6))


def test_large_vocabularies_need_wider_ids() -> None:
    vocab = 70_000
    texts = [[69_999, 1, 65_536, 0, 69_999, 1]]
    model, want = NgramModel.fit(texts, 3, vocab), Reference(texts, 3, vocab)
    assert model.tables[0].tokens.dtype == np.uint32
    assert model_law(model, [69_999, 1]) == pytest.approx(want.law([69_999, 1]), abs=FLOAT)


BAD_FITS: list[tuple[Any, int, int, str]] = [
    ([[0, 1]], 0, 3, "order=0"),
    ([[0, 1]], 6, 3, "order=6"),
    ([[0, 1]], 2, 0, "vocab=0"),
    ([[0, 3]], 2, 3, r"ids 0\.\.3"),
    ([[-1, 1]], 2, 3, r"ids -1\.\.1"),
    ([], 2, 3, "no tokens"),
    ([[], []], 2, 3, "no tokens"),
    ([[0.5, 1.0]], 2, 3, "token ids"),
    ([[[0, 1], [1, 0]]], 2, 3, "one array per text"),
]


@pytest.mark.parametrize(("sequences", "order", "vocab", "message"), BAD_FITS, ids=[bad[3] for bad in BAD_FITS])
def test_what_cannot_be_counted_is_refused(sequences: Any, order: int, vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramModel.fit(sequences, order, vocab)


# ---- files ------------------------------------------------------------------------------------------------------


def assert_equal(left: NgramModel, right: NgramModel) -> None:
    assert np.array_equal(left.unigram, right.unigram) and left.order == right.order
    for one, other in zip(left.tables, right.tables, strict=True):
        for name in Table.__slots__:
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype


@pytest.mark.parametrize("order", range(1, 6))
def test_a_saved_model_is_the_same_model(tmp_path: Path, order: int) -> None:
    model = NgramModel.fit(some_texts(1), order, 6)
    model.save(tmp_path / "model.ngram")
    loaded = NgramModel.load(str(tmp_path / "model.ngram"))
    assert_equal(model, loaded)
    assert (loaded.order, loaded.vocab) == (order, 6)
    assert model_law(loaded, [1, 0, 2]) == model_law(model, [1, 0, 2])
    assert os.listdir(tmp_path) == ["model.ngram"]


Arrays, About = dict[str, Any], dict[str, str]


def _short(name: str) -> Callable[[Arrays, About], None]:
    return lambda arrays, about: arrays.update({name: arrays[name][:-1]})


def _says(name: str, value: str) -> Callable[[Arrays, About], None]:
    return lambda arrays, about: about.update({name: value})


DAMAGES: dict[str, tuple[Callable[[Arrays, About], object], str]] = {
    "another format": (_says("format", "other"), "other version 2, this release reads"),
    "a later version": (_says("version", "3"), "version 3, this release reads"),
    "another order": (_says("order", "4"), "lacks '4.starts'"),
    "a lower order": (_says("order", "2"), "order or vocabulary is not the one it names"),
    "no order": (lambda _, about: about.pop("order"), "lacks 'order'"),
    "an order that is no number": (_says("order", "many"), "invalid literal"),
    "another vocabulary": (_says("vocab", "7"), "vocabulary is not the one it names"),
    "no unigrams": (lambda arrays, _: arrays.pop("1.unigram"), "lacks '1.unigram'"),
    "no index": (lambda arrays, _: arrays.pop("2.starts"), "lacks '2.starts'"),
    "fewer tokens": (_short("3.tokens"), "sizes that do not fit"),
    "fewer chances": (_short("2.alpha"), "sizes that do not fit"),
    "fewer contexts": (_short("3.gamma"), "sizes that do not fit"),
    "a shorter index": (_short("3.starts"), "sizes that do not fit"),
    "fewer unigrams": (_short("1.unigram"), "vocabulary is not the one it names"),
    "a shifted index": (lambda arrays, _: arrays.update({"3.starts": arrays["3.starts"] + np.uint32(1)}), "wrong ends"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_fit_together_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model"
    NgramModel.fit(some_texts(1), 3, 6).save(path)
    arrays, about = load_file(path), {"format": "slipstream.ngram", "version": "2", "order": "3", "vocab": "6"}
    change, message = DAMAGES[damage]
    change(arrays, about)
    kind = TensorFileKind("n-gram model", about.pop("format"), about.pop("version"), "build it again")
    save_tensors(path, kind, {name: torch.from_numpy(array) for name, array in arrays.items()}, about)
    with pytest.raises(ValueError, match=message) as error:
        NgramModel.load(path)
    assert str(path) in str(error.value) and "build it with" in str(error.value)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no n-gram model at"):
            NgramModel.load(path)


def test_a_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"knows 6 token ids, the target 7"):
        Ngram(NgramModel.fit(some_texts(1), 2, 6), 7)


# ---- what is drafted --------------------------------------------------------------------------------------------


def double(model: NgramModel) -> NgramModel:
    """The same tables in float64, so that exactness can be told from rounding."""
    tables = [replace(t, alpha=t.alpha.astype(float), gamma=t.gamma.astype(float)) for t in model.tables]
    return NgramModel(model.unigram.astype(float), tuple(tables))


TOY = {order: double(NgramModel.fit(some_texts(7, 8, 12, VOCAB), order, VOCAB)) for order in range(1, 6)}


def test_the_law_is_the_model_s_through_the_sampler_of_each_row() -> None:
    samplers = (SAMPLE, Sampling(temperature=0.5), Sampling(temperature=1, top_k=1))
    rows = [row([0, 1, 2][: i + 1], sampler=sampler, index=i) for i, sampler in enumerate(samplers)]
    draft = propose(Ngram(TOY[3], VOCAB), rows, [2, 1, 2])
    assert draft.law is not None and draft.lengths == (2, 1, 2) and draft.tokens.shape == (3, 2)
    for r, one in enumerate(rows):
        for i in range(2):
            q = np.array(model_law(TOY[3], [*one.tokens, *draft.tokens[r, :i].tolist()]))
            want = (q, q**2, q == q.max())[r]
            assert draft.law.dense[r, i].tolist() == pytest.approx((want / want.sum()).tolist())


def test_greedy_drafts_are_the_most_likely_tokens() -> None:
    draft = propose(Ngram(TOY[3], VOCAB), [row([0, 1], sampler=GREEDY)], [3])
    text = [0, 1]
    for _ in range(3):
        text.append(int(np.argmax(model_law(TOY[3], text))))
    assert draft.tokens.tolist() == [text[2:]]
    assert draft.law is not None and draft.law.point and draft.law.scores is None


# ---- the law ----------------------------------------------------------------------------------------------------


def toy(order: int) -> Callable[[], Drafter]:
    return lambda: Ngram(TOY[order], VOCAB)


by_name = pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK], ids=lambda rule: rule.name)


@pytest.mark.parametrize("gammas", [(1,), (2, 0, 1), *rare((0,), (2,))], ids=str)
@pytest.mark.parametrize("pair", [pytest.param("generic", marks=pytest.mark.slow), "zeros", "points"])
@by_name
def test_the_law_is_the_target_s(rule: rules.Rule, pair: str, gammas: tuple[int, ...]) -> None:
    assert law_distance(PAIRS[pair][0], toy(3), rule, gammas, PROMPT) < EXACT


@pytest.mark.parametrize("order", [5, *rare(1, 2)])
@by_name
def test_the_law_is_the_target_s_at_every_order(rule: rules.Rule, order: int) -> None:
    assert law_distance(PAIRS["zeros"][0], toy(order), rule, (1,), PROMPT, 4) < EXACT


@pytest.mark.parametrize("gammas", [(0,), (1,), (1, 0)], ids=str)
@pytest.mark.parametrize("pair", ["zeros", "points"])
def test_the_law_of_sample_and_match_is_the_target_s(pair: str, gammas: tuple[int, ...]) -> None:
    assert law_distance(PAIRS[pair][0], toy(2), rules.MATCH, gammas, PROMPT, 2) < EXACT


@by_name
def test_the_law_is_exact_at_other_temperatures(rule: rules.Rule) -> None:
    assert law_distance(TARGET, toy(3), rule, (2,), PROMPT, 2, Sampling(temperature=0.5)) < EXACT


def test_in_float32_the_law_is_exact_up_to_rounding() -> None:
    model = NgramModel.fit(some_texts(7, 8, 12, VOCAB), 3, VOCAB)
    assert law_distance(TARGET, lambda: Ngram(model, VOCAB), rules.TOKEN, (2,), PROMPT, 2) < FLOAT


@by_name
def test_the_joint_law_of_ragged_rows_is_the_product(rule: rules.Rule) -> None:
    """Rows of different prompts and lengths; an end token may stand in mid-draft."""
    table, prompts = PAIRS["zeros"][0], ((0, 2), (1,))

    def run(rng: Rng) -> tuple[tuple[int, ...], ...]:
        decoder = Decoder(scorer(table), toy(2)(), rule.verify, Cycle((1,)), rng=rng)
        requests = [request(p, 2, eos=frozenset({1}), key=i) for i, p in enumerate(prompts)]
        return tuple(tuple(one.output[:2]) for one in generate(decoder, requests))

    alone = [plain_law(table, p, 2, ends=(1,)) for p in prompts]
    want = {(a, b): alone[0][a] * alone[1][b] for a, b in product(*alone)}
    assert total_variation(enumerate_outcomes(run, 60_000), want) < EXACT


# ---- controls: each of these is a mistake one could make --------------------------------------------------------


def other_law(draft: Draft) -> Draft:
    """The law of the unigram model, though the tokens came from the trigram's."""
    if draft.law is None:
        return draft
    return replace(draft, law=Law(probs=torch.from_numpy(TOY[1].unigram).expand_as(draft.law.dense)))


def before_the_sampler(draft: Draft) -> Draft:
    """The law before temperature 0.5."""
    if draft.law is None:
        return draft
    root = draft.law.dense.sqrt()
    return replace(draft, law=Law(probs=root / root.sum(-1, keepdim=True)))


def that_knows_the_draft(draft: Draft) -> Draft:
    """A law that depends on what was sampled from it, as if drafted tokens were counted before they are."""
    if draft.law is None:
        return draft
    drafted = torch.nn.functional.one_hot(draft.tokens, VOCAB).to(draft.law.dense)
    return replace(draft, law=Law(probs=(draft.law.dense + drafted) / 2))


@by_name
def test_a_law_that_was_not_sampled_from_is_caught(rule: rules.Rule) -> None:
    assert law_distance(TARGET, lambda: Altered(toy(3)(), other_law), rule, (2,), PROMPT, 2) > WRONG
    assert law_distance(TARGET, lambda: Altered(toy(3)(), that_knows_the_draft), rule, (2,), PROMPT, 2) > WRONG
    half = Sampling(temperature=0.5)
    assert law_distance(TARGET, lambda: Altered(toy(3)(), before_the_sampler), rule, (1,), PROMPT, sampler=half) > WRONG
