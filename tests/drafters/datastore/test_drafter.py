"""Drafts from documents and responses: the longest match drafts, tenants are apart, and the law stays the target's."""

import gc
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.draws import draw_coupled
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request
from slipstream.decoding import rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain, rounds
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import Datastore, DatastoreSettings, fingerprint
from slipstream.drafters.datastore.embedding import InputEmbeddings
from slipstream.drafters.datastore.memory import ResponseMemory, read_totals
from toys.drafts import Altered, drafted, flat, law_distance
from toys.enumeration import EXACT, WRONG
from toys.tables import PAIRS, VOCAB, dirichlet_table, scorer
from toys.texts import GREEDY, SAMPLE, request, row

WORDS = 50
ALONE = DatastoreSettings(own=False)
"""The text itself is no source, so that a test sees the others."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[ResponseMemory]:
    torch.manual_seed(0)
    memory = ResponseMemory(tmp_path / "memory.sqlite", InputEmbeddings(torch.randn(WORDS, 16)))
    yield memory
    memory.close()


# ---- which source drafts ----------------------------------------------------------------------------------------


def test_the_longest_match_drafts(memory: ResponseMemory) -> None:
    corpus = Corpus.build([[3, 4, 5, 20, 21]], WORDS)
    memory.add("default", [9], [4, 5, 30])
    store = Datastore(WORDS, corpus, memory, settings=DatastoreSettings(begin=1))
    assert drafted(store, [row([1, 3, 4, 5])], [1]) == [[20]]  # three tokens in the corpus
    assert drafted(store, [row([3, 4, 5, 40, 3, 4, 5])], [1]) == [[40]]  # as many in the text itself, which is first
    assert drafted(store, [row([9, 8, 4, 5], prompt_length=2)], [1]) == [[30]]  # all of the response so far


def test_a_response_is_drafted_from_its_first_token(memory: ResponseMemory) -> None:
    memory.add("default", [1, 2, 3], [7, 8, 9, 10, 11, 12])
    memory.add("default", [20, 21], [30, 31])
    store = Datastore(WORDS, memory=memory, settings=replace(ALONE, nearest=1))
    assert drafted(store, [row([1, 2, 3]), row([20, 21])], [3, 3]) == [[7, 8, 9], [30, 31]]
    assert drafted(store, [row([1, 2, 3, 7, 8], prompt_length=3)], [9]) == [[9, 10, 11, 12]]


def test_a_place_in_mid_response_is_found_again(memory: ResponseMemory) -> None:
    """After a token that no response has, the text is aligned anew."""
    memory.add("default", [1], [7, 8, 9, 10, 11, 12])
    store = Datastore(WORDS, memory=memory, settings=ALONE)
    assert drafted(store, [row([1, 7, 8, 40, 10], prompt_length=1)], [9]) == [[11, 12]]


def test_the_draft_grows_with_the_match_and_ends_with_its_evidence() -> None:
    texts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [1, 2, 3, 4, 9], [1, 2, 3, 4, 9]]
    corpus = Corpus.build(texts, WORDS)
    for settings, text, want in (
        ({}, [4], [9]),
        ({}, [1, 2], [3, 4, 9]),
        ({"factor": 0, "offset": 1}, [1, 2], [3]),
        ({"factor": 9}, [1, 2], [3, 4, 9]),
        ({"factor": 9, "chance": 0.8}, [1, 2], [3, 4]),
        ({"factor": 9}, [4, 5], [6, 7, 8]),
        ({"factor": 0, "offset": 0}, [1, 2], []),
        ({}, [40], []),
    ):
        store = Datastore(WORDS, corpus, settings=DatastoreSettings(own=False, **settings))
        assert drafted(store, [row(text)], [9]) == [want]
    assert drafted(Datastore(WORDS, corpus, settings=ALONE), [row([1, 2])], [2]) == [[3, 4]]  # gamma


def test_a_text_that_was_cut_is_read_anew() -> None:
    """Inside a chain of drafts a text is cut where its draft is refused."""
    store, one = Datastore(WORDS), row([1, 2, 3, 4, 1, 2])
    assert drafted(store, [one], [2]) == [[3, 4]]
    one.tokens += [3, 40]
    assert drafted(store, [one], [2]) == [[]]
    one.tokens[-1:] = [4]
    assert drafted(store, [one], [2]) == [[1, 2]]
    del one.tokens[-3:]
    assert drafted(store, [one], [2]) == [[2, 3]]


def test_ids_that_the_target_does_not_have_are_never_drafted(memory: ResponseMemory) -> None:
    memory.add("default", [1], [7, WORDS + 3])  # a damaged file
    store = Datastore(WORDS, memory=memory, settings=ALONE)
    assert drafted(store, [row([1])], [4]) == [[]]
    with pytest.raises(ValueError, match=r"has 60 token ids, the target 50: build it for this target\.$"):
        Datastore(WORDS, Corpus.build([[1]], 60))


NONSENSE: list[dict[str, Any]] = [{"learn": True}, {"settings": ALONE}]


@pytest.mark.parametrize("settings", NONSENSE, ids=str)
def test_a_store_of_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nothing to draft from|needs a memory"):
        Datastore(WORDS, **settings)


@pytest.mark.parametrize("settings", [{"nearest": 0}, {"factor": -1}, {"chance": float("nan")}, {"begin": 0}], ids=str)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is not possible: it must be . or more\."):
        DatastoreSettings(**settings)


# ---- learning ---------------------------------------------------------------------------------------------------


def saying(text: Sequence[int]) -> Callable[[tuple[int, ...]], list[float]]:
    """A target that says one text behind a prompt of two tokens, whatever came before."""
    return lambda prefix: [float(token == text[len(prefix) - 2]) for token in range(WORDS)]


def decoder(store: Drafter, text: Sequence[int], **settings: Any) -> Decoder:
    return Decoder(scorer(saying(text), vocab=WORDS), store, controller=Fixed(6), **settings)


TEXT = [*range(10, 30), 0]


def test_a_response_that_was_learned_is_drafted(memory: ResponseMemory) -> None:
    store = Datastore(WORDS, memory=memory, learn=True)
    calls = [generate(decoder(store, TEXT), [request([1, 2], 21, GREEDY)])[0].stats.target_calls for _ in range(3)]
    assert calls[0] == 21 and calls[1] == calls[2] < 7
    assert read_totals(memory.path)[0].entries == 1  # the same response to the same request is one entry
    silent = Datastore(WORDS, memory=memory)
    generate(decoder(silent, TEXT), [request([3, 4], 21, GREEDY)])
    assert read_totals(memory.path)[0].entries == 1


def test_what_was_cut_off_is_not_learned(memory: ResponseMemory) -> None:
    store = Datastore(WORDS, memory=memory, learn=True)
    stream = rounds(decoder(store, TEXT), [request([1, 2], 21, GREEDY)])
    next(stream)
    stream.close()
    assert read_totals(memory.path) == []
    del stream
    gc.collect()
    assert not store.known  # nobody else holds the row: neither do we


def test_a_stop_in_mid_round_learns_what_was_emitted(memory: ResponseMemory) -> None:
    store = Datastore(WORDS, memory=memory, learn=True)
    generate(decoder(store, TEXT), [request([1, 2], 21, GREEDY)])
    (done,) = generate(decoder(store, TEXT), [request([1, 2], 21, GREEDY, eos=frozenset({15}))])
    assert done.output == TEXT[:6] and done.finish_reason == "stop"
    assert sorted(len(response) for _, response in memory.nearest("default", [1, 2], 9)) == [6, 21]


def test_one_tenant_s_response_is_no_other_s_draft(memory: ResponseMemory) -> None:
    def tenant(request: Request) -> str:
        return "one" if request.prompt[0] == 1 else "two"

    store = Datastore(WORDS, memory=memory, namespace=tenant, learn=True)
    learned = [request([1, 2], 21, GREEDY), request([1, 2], 21, GREEDY), request([3, 2], 21, GREEDY)]
    calls = [generate(decoder(store, TEXT), [one])[0].stats.target_calls for one in learned]
    assert calls[1] < calls[0] == calls[2] == 21
    assert [(total.namespace, total.entries) for total in read_totals(memory.path)] == [("one", 1), ("two", 1)]


def test_rows_of_one_batch_keep_to_their_namespaces(memory: ResponseMemory) -> None:
    memory.add("one", [5, 5], TEXT)
    store = Datastore(
        WORDS, memory=memory, namespace=lambda request: "one" if request.prompt[0] == 1 else "two", settings=ALONE
    )
    assert drafted(store, [row([1, 5]), row([3, 5]), row([1, 5])], [2, 2, 2]) == [TEXT[:2], [], TEXT[:2]]


def test_a_memory_that_cannot_be_written_costs_no_response(memory: ResponseMemory) -> None:
    store = Datastore(WORDS, memory=memory, learn=True)
    with closing(sqlite3.connect(memory.path)) as other, other:
        other.execute("CREATE TRIGGER no BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.warns(RuntimeWarning, match=r"full.*no longer learned\.$"):
        (done,) = generate(decoder(store, TEXT), [request([1, 2], 21, GREEDY)])
    assert done.output == TEXT and not store.learn


# ---- the law ----------------------------------------------------------------------------------------------------

PROMPT = (0, 1, 2, 0, 1)


def documents() -> Datastore:
    """A corpus that always has something to say, right or wrong."""
    return Datastore(VOCAB, Corpus.build([[0, 1, 2, 2, 1, 0, 0, 2], [1, 1, 0, 2, 1, 2]], VOCAB))


def recalling(memory: ResponseMemory) -> Callable[[], Datastore]:
    """The same of a memory, which answers from the beginning on."""
    memory.add("default", PROMPT, [2, 0, 1, 1])
    memory.add("default", PROMPT[1:], [2, 1, 1, 0])
    return lambda: Datastore(VOCAB, memory=memory, settings=ALONE)


@pytest.mark.parametrize("gammas", [(1,), (2,), (3, 0, 1)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_target_s(rule: rules.Rule, pair: str, gammas: tuple[int, ...]) -> None:
    assert law_distance(PAIRS[pair][0], documents, rule, gammas, PROMPT) < EXACT


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK], ids=lambda rule: rule.name)
def test_the_law_with_a_memory_is_the_target_s(rule: rules.Rule, pair: str, memory: ResponseMemory) -> None:
    assert law_distance(PAIRS[pair][0], recalling(memory), rule, (2, 1), PROMPT) < EXACT


def test_a_law_that_hides_the_draft_would_be_noticed() -> None:
    found = law_distance(PAIRS["generic"][0], lambda: Altered(documents(), flat), rules.TOKEN, (2,), PROMPT)
    assert found > WRONG


def test_coupled_texts_do_not_depend_on_the_store(memory: ResponseMemory) -> None:
    target = scorer(dirichlet_table(3))
    memory.add("default", [1, 0], [0, 1, 2, 0, 1])
    texts = []
    for store in (documents(), Datastore(VOCAB, memory=memory, learn=True)):
        one = Decoder(target, store, rules.COUPLED.verify, Fixed(3), rng=draw_coupled)
        requests = [request([i % VOCAB, 1, 0], 12 + i, SAMPLE, key=i, seed=4) for i in range(4)]
        texts.append([done.output for done in generate(one, requests)])
        assert texts[-1] == [done.output for done in plain(one, requests)]
    assert texts[0] == texts[1]


def test_a_tokenizer_is_known_by_its_words() -> None:
    class Words:
        def __init__(self, **words: int) -> None:
            self.get_vocab = lambda: words

    assert fingerprint(Words(a=1, b=2)) == fingerprint(Words(b=2, a=1)) != fingerprint(Words(a=2, b=1))
    assert fingerprint(None) == ""
