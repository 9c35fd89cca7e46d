"""Which way a draft with another tokenizer goes: chosen and told, asked for, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.draft import Draft
from slipstream.core.round import Context, Round
from slipstream.drafters.cross_tokenizer.reader import RetokenizingReader
from slipstream.drafters.cross_tokenizer.token_intersection import (
    BySampling,
    StringMatch,
    TokenIntersection,
    foreign,
    share,
)
from slipstream.drafters.cross_tokenizer.vocabulary import CommonTokens, Vocabulary
from tongues import TEXT, tongue, toy
from toys.families import FAMILIES, tiny
from toys.tables import dirichlet_table, scorer
from toys.texts import GREEDY, SAMPLE, row

KINDS = {"intersection": TokenIntersection, "strings": StringMatch}


def save(folder: Path, name: str, seed: int, **changes: Any) -> str:
    tokenizer = tongue(name)
    model = tiny(FAMILIES["llama"], seed, torch.float64, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "target", "bytes", 1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "draft", "marked", 2)


def test_another_tokenizer_is_noticed_and_told(target: str, draft: str) -> None:
    engine = slipstream.load(target, draft)
    assert isinstance(engine.decoder.drafter, BySampling)
    (note,) = engine.notes
    found = re.search(r"has another tokenizer than .* (\d+) tokens in common.* it samples\.$", note)
    assert found and 280 < int(found[1]) < 310, note  # libraries learn tokenizers a little differently
    prompts = [TEXT[:70], "naïve 日本", "x = [1,"]
    for temperature in (0.0, 1.0):
        outputs = engine.generate(prompts, max_new_tokens=12, temperature=temperature)
        assert sum(output.stats.drafted for output in outputs) > 0
        plain = engine.generate(prompts, max_new_tokens=12, temperature=temperature, plain=True)
        assert temperature or [output.tokens for output in outputs] == [output.tokens for output in plain]


def test_the_targets_own_tokenizer_says_nothing(target: str) -> None:
    assert slipstream.load(target, target).notes == slipstream.load(target).notes == ()


@pytest.mark.parametrize("method", KINDS)
def test_a_way_may_be_asked_for(target: str, draft: str, method: str) -> None:
    engine = slipstream.load(target, f"{draft}?vocabulary={method}")
    assert isinstance(engine.decoder.drafter, KINDS[method])
    assert f"it drafts by {method}, as asked." in engine.notes[0]


def test_impossible_combinations_are_one_sentence(target: str, draft: str) -> None:
    for wrong, kwargs, says in (
        (f"{draft}?vocabulary=tokens", {}, "vocabulary='tokens' is not possible: choose intersection or strings"),
        (draft, {"tree": (2, 1)}, "a tree of candidates needs a draft with the target's tokenizer"),
        (tiny(FAMILIES["llama"], vocab_size=5000), {}, "has no tokenizer to translate with"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            slipstream.load(target, wrong, **kwargs)
        assert len(str(error.value).splitlines()) == 1


def test_only_nothing_in_common_is_refused() -> None:
    big, small = scorer(dirichlet_table(1), "big"), scorer(dirichlet_table(2), "small")
    with pytest.raises(ValueError, match="no token of the draft's vocabulary"):
        foreign(big, small, (toy("a", "b", "ab"), toy("x", "y", "xy")))
    drafter, note = foreign(big, small, (toy("a", "b", "ab"), toy("x", "a", "xa")))
    assert note.startswith("small has another tokenizer than big; they have 1 tokens in common")
    assert isinstance(drafter, StringMatch | BySampling)


def test_the_share_is_counted_in_what_the_draft_writes() -> None:
    ours, draft_vocabulary = Vocabulary.of(toy("a", "b", "ab")), Vocabulary.of(toy("b", "a", "x"))

    def writes(*weights: float) -> float:
        reader = RetokenizingReader(
            scorer(lambda prefix: weights), ours, draft_vocabulary, CommonTokens.of(ours, draft_vocabulary, (3, 3))
        )
        found = share(reader)
        assert reader.scorer.lengths == []
        return found

    assert writes(1, 0, 0) == writes(0, 1, 0) == 1
    assert writes(0, 0, 1) == 0  # the target has no token for any of it
    assert 0.3 < writes(0.5, 0.5, 0) < 0.9  # "ab" is one token of the target, but not of the draft


def test_greedy_rows_go_one_way_and_sampling_rows_the_other() -> None:
    class Named:
        def __init__(self, lengths: tuple[int, ...]) -> None:
            self.lengths = lengths

        def propose(self, context: Context, gammas: Any) -> Draft:
            return Draft(torch.zeros(1, 1, dtype=torch.long), None, self.lengths)

        def observe(self, round: Round) -> None:
            raise AssertionError

    either = BySampling(Named((1,)), Named((0,)))
    for sampler, lengths in ((GREEDY, (1,)), (SAMPLE, (0,))):
        context = Context((row([1], sampler=sampler),), rng=lambda law, key: law.tokens)
        assert either.propose(context, [1]).lengths == lengths
