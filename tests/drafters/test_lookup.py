"""Copying drafts: the match is the naive longest suffix, the draft what followed it, and the law stays the target's."""

import gc
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from slipstream.core.draft import Draft
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.core.request import Row
from slipstream.decoding import rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, rounds
from slipstream.drafters.copying import DEPTH, SuffixAutomaton
from slipstream.drafters.lookup import Lookup
from toys.drafts import Altered, drafted, flat, law_distance, propose
from toys.enumeration import EXACT, WRONG, enumerate_outcomes, total_variation
from toys.tables import PAIRS, VOCAB, dirichlet_table, plain_law, scorer
from toys.texts import Cycle, rare, request, row

TARGET = PAIRS["generic"][0]
PROMPT = (0, 1, 2, 0, 1)  # the first round copies 2, 0, 1


# ---- the automaton ----------------------------------------------------------------------------------------------


def naive(text: Sequence[int], limit: int | None = None) -> tuple[int, int]:
    """The longest suffix that occurred before and where its most recent earlier occurrence ends; (0, 0) if none."""
    for length in range(min(len(text) - 1, limit or len(text)), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                return length, end
    return 0, 0


def continuation(text: Sequence[int], end: int, count: int) -> list[int]:
    """What follows the place `end`, token by token, the copied tokens being part of the text."""
    longer = list(text)
    for place in range(end, end + count):
        longer.append(longer[place])
    return longer[len(text) :]


def copied(text: Sequence[int], limit: int | None, count: int) -> list[int]:
    length, end = naive(text, limit)
    return continuation(text, end, count) if length else []


texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=DEPTH))
limits = st.one_of(st.none(), st.integers(1, 6))


@given(texts, limits)
def test_the_match_is_the_longest_suffix_that_occurred_before(text: list[int], limit: int | None) -> None:
    automaton = SuffixAutomaton(limit)
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        assert automaton.length == naive(text[:end], limit)[0]
        assert automaton.following(9) == copied(text[:end], limit, 9)


def test_the_naive_search_would_notice() -> None:
    """The comparison fails for the first occurrence instead of the last, and for a match one token too short."""
    text = [0, 1, 2, 0, 1, 3, 0, 1]
    assert naive(text) == (2, 5) and copied(text, None, 2) == [3, 0]
    assert continuation(text, 2, 2) != copied(text, None, 2)
    assert naive([0, 1, 0, 2, 1, 0], 1) == (1, 3) and naive([0, 1, 0, 2, 1, 0]) == (2, 3)


class Reads(list[int]):
    """A list that counts how often it is read."""

    count = 0

    def __getitem__(self, place: Any) -> Any:
        self.count += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("limit", [None, 1, 3, 100])
@pytest.mark.parametrize("alphabet", [1, 2, 50])
@pytest.mark.parametrize("period", [1, 3, 10**6])
def test_the_work_per_token_is_bounded(limit: int | None, alphabet: int, period: int) -> None:
    """Steps along links per token, in loops too, where the nested suffixes are as many as the text is long."""
    rng = random.Random(0)
    automaton, text = SuffixAutomaton(limit), list[int]()
    automaton.links = reads = Reads(automaton.links)
    for place in range(3000):
        text.append(text[place - period] if place >= period else rng.randrange(alphabet))
    automaton.extend(text)
    assert reads.count / len(text) < DEPTH + 6
    assert len(automaton.followers) <= 2 * len(text)


def test_a_deep_loop_goes_on_and_what_follows_it_was_there() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7, *[0, 1] * 5 * DEPTH])
    assert automaton.length == 10 * DEPTH - 2
    assert automaton.following(5) == [0, 1, 0, 1, 0]
    automaton.extend([2, 0])
    assert automaton.length == 1 and automaton.following(1) in ([1], [2])


# ---- what is drafted --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(texts.filter(len), st.integers(0, 8)), min_size=1, max_size=4), limits)
def test_the_draft_is_the_naive_continuation(rows: list[tuple[list[int], int]], limit: int | None) -> None:
    """Ragged rows; each grows by three tokens, then all are asked again."""
    lookup = Lookup(max_matching_ngram_size=limit)
    running, gammas = [row(text) for text, _ in rows], [gamma for _, gamma in rows]
    for _ in range(2):
        want = [
            copied(one.tokens, limit, min(gamma, naive(one.tokens, limit)[0] + 1))
            for one, gamma in zip(running, gammas, strict=True)
        ]
        assert drafted(lookup, running, gammas) == want
        for one in running:
            one.tokens += [1, 0, 1]


def test_a_ragged_draft_is_a_padded_point_mass() -> None:
    draft = propose(Lookup(), [row([5, 6, 7, 5, 6]), row([1, 2, 3]), row([4, 4])], [3, 3, 1])
    assert draft.lengths == (3, 0, 1)
    assert draft.tokens.tolist() == [[7, 5, 6], [0, 0, 0], [4, 0, 0]]
    assert draft.law is not None and draft.law.point and draft.law.tokens is draft.tokens
    assert draft.tokens.device.type == "cpu" and draft.parents is None


@pytest.mark.parametrize(("text", "gamma"), [([1, 2, 3], 5), ([1], 5), ([1, 1, 1], 0)], ids=str)
def test_nothing_to_copy_is_an_empty_draft(text: list[int], gamma: int) -> None:
    draft = propose(Lookup(), [row(text), row(text)], [gamma, gamma])
    assert draft.law is None and draft.tokens.shape == (2, 0) and draft.lengths == (0, 0)


SETTINGS: list[tuple[dict[str, Any], int]] = [
    ({}, 4),  # the match has 3 tokens
    ({"factor": 2}, 7),
    ({"factor": 0.5, "offset": 0}, 1),
    ({"factor": 0, "offset": 6}, 6),
    ({"factor": 100}, 10),  # gamma
    ({"factor": 100, "prompt_lookup_num_tokens": 4}, 4),
    ({"max_matching_ngram_size": 2}, 3),
    ({"max_matching_ngram_size": 1, "offset": 0}, 1),
    ({"min_matching_ngram_size": 3}, 4),
    ({"min_matching_ngram_size": 4}, 0),
]


@pytest.mark.parametrize(("settings", "length"), SETTINGS, ids=str)
def test_the_draft_grows_with_the_match(settings: dict[str, Any], length: int) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 2, 3]
    assert drafted(Lookup(**settings), [row(text)], [10]) == [[*range(4, 13), 0][:length]]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(1, 4))
def test_matches_are_those_of_transformers(text: list[int], size: int) -> None:
    """It takes the first occurrence and ends where the text ends; where there is one only, the drafts agree."""
    other = PromptLookupCandidateGenerator(num_output_tokens=5, max_matching_ngram_size=size, max_length=10**6)
    expected = other.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
    (ours,) = drafted(Lookup(5, size, factor=0, offset=5), [row(text)], [5])
    assert bool(ours) == bool(expected)
    length, end = naive(text, size)
    if length and all(text[e - length : e] != text[-length:] for e in range(length, end)):
        assert ours[: len(expected)] == expected == text[end : end + 5]


NONSENSE: list[dict[str, Any]] = [
    {"prompt_lookup_num_tokens": 0},
    {"max_matching_ngram_size": 0},
    {"min_matching_ngram_size": 0},
    {"max_matching_ngram_size": 2, "min_matching_ngram_size": 3},
    {"factor": -1},
    {"factor": float("nan")},
    {"factor": float("inf")},
    {"offset": float("nan")},
    {"factor": 0, "offset": 0.5},
]


@pytest.mark.parametrize("settings", NONSENSE, ids=str)
def test_settings_that_draft_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is not possible: it must be .*\.$"):
        Lookup(**settings)


# ---- ends of texts ----------------------------------------------------------------------------------------------


def test_nothing_is_copied_behind_the_end_of_a_text() -> None:
    text = [1, 2, 9, 3, 4, 1, 2]
    for eos, want in (({9}, [9]), ({3}, [9, 3]), ({1}, [9, 3, 4, 1]), (set(), [9, 3, 4, 1, 2])):
        one = Row(request(text, 9, eos=frozenset(eos)), 0, list(text))
        assert drafted(Lookup(factor=5), [one], [5]) == [want]


def test_ended_rows_are_forgotten() -> None:
    lookup = Lookup()
    decoder = Decoder(scorer(dirichlet_table(1)), lookup, controller=Fixed(3), batch_size=2)
    done = generate(decoder, [request(PROMPT, 5 + i, key=i) for i in range(4)])
    assert not lookup.known and all(one.finish_reason for one in done)
    stream = rounds(decoder, [request(PROMPT, 20)])
    next(stream)
    assert len(lookup.known) == 1
    stream.close()
    del stream
    gc.collect()
    assert not lookup.known  # nobody else holds the row: neither do we


def test_rows_are_known_by_identity_not_by_place() -> None:
    lookup = Lookup()
    first, second = row([1, 2, 1]), row([3, 4, 3])
    assert drafted(lookup, [first, second], [1, 1]) == [[2], [4]]
    assert drafted(lookup, [second, first], [1, 1]) == [[4], [2]]
    third = row([5, 6, 5])
    assert drafted(lookup, [third, second], [1, 1]) == [[6], [4]]
    assert len(lookup.known) == 2
    assert drafted(lookup, [first], [1]) == [[2]]  # read again from the start


def test_an_address_that_is_used_again_is_another_row() -> None:
    lookup, addresses = Lookup(), list[int]()
    for token in range(1, 30):
        one = row([token, token + 1, token])
        addresses.append(id(one))
        assert drafted(lookup, [one], [1]) == [[token + 1]]
        del one
    assert len(set(addresses)) < len(addresses)  # else nothing was shown


# ---- the law ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gammas", [(1,), (3, 0, 1), *rare((0,), (2,))], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_target_s(rule: rules.Rule, pair: str, gammas: tuple[int, ...]) -> None:
    assert law_distance(PAIRS[pair][0], Lookup, rule, gammas, PROMPT, 4) < EXACT


@pytest.mark.parametrize("gammas", [(0,), (1,), (2,), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("pair", ["generic", "zeros", "points"])
def test_the_law_of_sample_and_match_is_the_target_s(pair: str, gammas: tuple[int, ...]) -> None:
    assert law_distance(PAIRS[pair][0], Lookup, rules.MATCH, gammas, PROMPT, 2) < EXACT


@pytest.mark.parametrize(
    "settings", [{"max_matching_ngram_size": 1}, *rare({"factor": 3}), {"min_matching_ngram_size": 2}]
)
def test_the_law_is_exact_under_other_settings(settings: dict[str, Any]) -> None:
    assert law_distance(TARGET, lambda: Lookup(**settings), rules.TOKEN, (3,), PROMPT, 4) < EXACT


@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK, rules.MATCH], ids=lambda rule: rule.name)
def test_the_joint_law_of_ragged_rows_is_the_product(rule: rules.Rule) -> None:
    """One row copies two tokens, the other has nothing to copy at first; one ends in mid-draft."""
    table, prompts, counts = PAIRS["zeros"][0], (PROMPT, (2,)), (1, 2)

    def run(rng: Rng) -> tuple[tuple[int, ...], ...]:
        decoder = Decoder(scorer(table), Lookup(), rule.verify, Cycle((2,)), rng=rng)
        requests = [request(p, 2, eos=frozenset({1}), key=i) for i, p in enumerate(prompts)]
        return tuple(tuple(one.output[:n]) for one, n in zip(generate(decoder, requests), counts, strict=True))

    alone = [plain_law(table, p, n, ends=(1,)) for p, n in zip(prompts, counts, strict=True)]
    want = {(a, b): alone[0][a] * alone[1][b] for a, b in product(*alone)}
    assert total_variation(enumerate_outcomes(run, 60_000), want) < EXACT


def shifted(draft: Draft) -> Draft:
    """Half of the law is on the token that was copied, half on the next."""
    if draft.law is None:
        return draft
    one, other = (torch.nn.functional.one_hot((draft.tokens + i) % VOCAB, VOCAB).double() for i in range(2))
    return Draft(draft.tokens, Law(probs=(one + other) / 2), draft.lengths)


@pytest.mark.parametrize("fault", [flat, shifted])
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK], ids=lambda rule: rule.name)
def test_a_law_that_was_not_sampled_from_is_caught(rule: rules.Rule, fault: Callable[[Draft], Draft]) -> None:
    assert law_distance(TARGET, lambda: Altered(Lookup(), fault), rule, (2,), PROMPT) > WRONG
