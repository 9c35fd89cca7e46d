"""Sampled beams have the law of transformers' `do_sample` with `num_beams`, and the same texts with any draft.

Laws are compared by chi-square tests with fixed seeds; a test that would fail for one in 10,000 sets of seeds is the
bound for the right law, and one in a million that of the controls, which have to fail.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from transformers import GenerationMixin

from reference import text
from slipstream import custom_generate, load
from slipstream.check.samples import tail
from slipstream.core.beams import Beams
from slipstream.core.request import Request
from slipstream.decoding.beam import beam_search
from slipstream.decoding.beam_search import RANKED_BY_SCORE
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.models.causal import CausalScorer
from toys.families import embedded
from toys.tables import scorer
from toys.texts import rare

RIGHT, WRONG = 1e-4, 1e-6
TOKENS, END, WIDTH, LIMIT = 5, 0, 2, 2
PROMPT = (3, 1)
BEAMS = Beams(WIDTH, length_penalty=0.0, early_stopping=True, do_sample=True)
Text = tuple[int, ...]
Item = TypeVar("Item")


@cache
def table(prefix: Text) -> tuple[float, ...]:
    """A law of five tokens for every prefix: one whose beams have many best texts, in either ranking."""
    rng = random.Random(f"f {prefix}")
    weights = [rng.gammavariate(3.0, 1.0) + 0.05 for _ in range(TOKENS)]
    return tuple(weight / math.fsum(weights) for weight in weights)


# ---- the law by enumeration -----------------------------------------------------------------------------------------


def drawn(weights: Mapping[Item, float], count: int) -> Iterator[tuple[tuple[Item, ...], float]]:
    """All draws of `count` items without replacement, in order, and their probabilities."""
    if not count or not weights:
        yield (), 1.0
        return
    total = math.fsum(weights.values())
    for item, weight in weights.items():
        rest = {other: each for other, each in weights.items() if other != item}
        for others, chance in drawn(rest, count - 1):
            yield (item, *others), chance * weight / total


def law_of_best() -> dict[Text, float]:
    """The law of the best text of the toy, by all ways in which its searches can go."""
    law: Counter[Text] = Counter()

    def play(live: list[tuple[float, Text]], finished: list[tuple[float, Text]], chance: float) -> None:
        depth = len(live[0][1]) + 1
        weights = {
            (*prefix, token): weight * share
            for weight, prefix in live
            for token, share in enumerate(table((*PROMPT, *prefix)))
        }
        # Where the limit ends all texts, and ranks are the order of draws, only the first draws are looked at.
        for order, share in drawn(weights, WIDTH if depth == LIMIT and not RANKED_BY_SCORE else 2 * WIDTH):
            order = tuple(sorted(order, key=weights.__getitem__, reverse=True)) if RANKED_BY_SCORE else order
            over = [one for rank, one in enumerate(order) if rank < WIDTH and (one[-1] == END or depth == LIMIT)]
            done = sorted([*finished, *((weights[one], one) for one in over)], reverse=True)[:WIDTH]
            going = sorted(((weights[one], one) for one in order if one[-1] != END), reverse=True)[:WIDTH]
            if depth == LIMIT or len(done) == WIDTH:
                law[done[0][1]] += chance * share
            else:
                play(going, done, chance * share)

    play([(1.0, ())], [], 1.0)
    return dict(law)


def searched(beams: Beams, count: int, temperature: float = 1.0) -> Counter[Text]:
    """The best texts of so many searches of the toy, each with a seed of its own."""
    request = Request(PROMPT, Sampling(temperature=temperature).for_beams(), LIMIT, frozenset({END}), beams=beams)
    decoder = Decoder(scorer(table, vocab=TOKENS), batch_size=250)
    searches = beam_search(decoder, [replace(request, seed=seed) for seed in range(count)])
    return Counter(search.hypotheses()[0].tokens for search in searches)


def fit(seen: Counter[Text], law: Mapping[Text, float]) -> float:
    """The p-value of texts that are said to have a law; rare ones are one cell."""
    count, cells = sum(seen.values()), list[tuple[float, float]]()
    common = {one for one, share in law.items() if count * share >= 8}
    cells = [(seen[one], count * law[one]) for one in common]
    rest = (count - sum(have for have, _ in cells), count - sum(want for _, want in cells))
    if rest[1] >= 1:
        cells.append(rest)
    assert len(cells) > 5, "the toy is too simple"
    return tail(sum((have - want) ** 2 / want for have, want in cells), len(cells) - 1)


def test_the_law_is_that_of_draws_without_replacement() -> None:
    law = law_of_best()
    assert math.fsum(law.values()) == pytest.approx(1)
    assert (END,) in law, "a text that ends early can be the best"
    assert fit(searched(BEAMS, 2000), law) > RIGHT


def test_control_another_law_is_seen() -> None:
    """Of beams that are not drawn, and of beams at another temperature."""
    assert fit(searched(replace(BEAMS, do_sample=False), 400), law_of_best()) < WRONG
    assert fit(searched(BEAMS, 2000, temperature=1.6), law_of_best()) < WRONG


# ---- beside transformers --------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "cuts": {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
}


def by_transformers(prompt: Sequence[int], beams: Beams, count: int, limit: int, **shape: Any) -> Counter[Text]:
    torch.manual_seed(1)
    ids = torch.tensor([prompt] * count)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    search = {"num_beams": beams.num_beams, "length_penalty": beams.length_penalty, "do_sample": True, "top_k": 0}
    length = {"max_new_tokens": limit, "min_new_tokens": limit}
    out = GenerationMixin.generate(embedded("target"), **inputs, **length, **search | shape)
    return Counter(map(tuple, out[:, len(prompt) :].tolist()))


def samples(prompt: Sequence[int], beams: Beams, count: int, limit: int, **shape: Any) -> Counter[Text]:
    ends = frozenset({0})
    request = Request(tuple(prompt), Sampling(eos=ends, **shape).for_beams(), limit, frozenset(), beams=beams)
    decoder = Decoder(CausalScorer(embedded("target")), batch_size=100)
    searches = beam_search(decoder, [replace(request, seed=seed) for seed in range(count)])
    return Counter(search.hypotheses()[0].tokens for search in searches)


def difference(one: Counter[Text], other: Counter[Text]) -> float:
    """The p-value of two samples that are said to have one law; rare texts are one cell."""
    both = one + other
    common = [text for text, count in both.items() if count >= 10]  # five expected of each
    cells = [(one[text], other[text]) for text in common]
    cells.append((sum(one.values()) - sum(a for a, _ in cells), sum(other.values()) - sum(b for _, b in cells)))
    sizes, statistic = (sum(one.values()), sum(other.values())), 0.0
    for pair in cells:
        for have, size in zip(pair, sizes, strict=True):
            want = size * sum(pair) / sum(sizes)
            statistic += (have - want) ** 2 / want if want else 0.0
    assert len(cells) > 3
    return tail(statistic, len(cells) - 1)


@pytest.mark.parametrize("name", ["cuts", *rare("temperature")])
def test_texts_have_the_law_of_transformers(name: str) -> None:
    prompt, beams, shape = text(5, 3), Beams(2, do_sample=True), SHAPES[name]
    expected = by_transformers(prompt, beams, 250, 2, **shape)
    assert difference(samples(prompt, beams, 250, 2, **shape), expected) > RIGHT
    hotter = samples(prompt, beams, 250, 2, temperature=2 * shape["temperature"])
    assert difference(hotter, expected) < WRONG, "control: another temperature, without cuts, is seen"


# ---- drafts, seeds, and where users ask for it ----------------------------------------------------------------------


def requests(count: int = 12) -> list[Request]:
    sampler = Sampling(temperature=0.8, top_k=20, eos=frozenset({0})).for_beams()
    beams = Beams(3, num_return_sequences=2, do_sample=True)
    lengths = enumerate([9, 1, 4, 17, 30, 2])
    return [
        Request(tuple(text(seed, length)), sampler, count, frozenset({0}), seed=seed, key=seed, beams=beams)
        for seed, length in lengths
    ]


@pytest.mark.parametrize("kind", ["model", *rare("lookup")])
def test_a_draft_changes_only_the_number_of_calls(kind: str) -> None:
    """It ranks by the noise that the target ranks by, and so most of its beams are those that are drawn."""
    target = CausalScorer(embedded("target"))
    drafter = Lookup(vocab=target.vocab) if kind == "lookup" else ModelDrafter(CausalScorer(embedded("draft")))
    plain = beam_search(Decoder(target, NoDraft(), batch_size=4), requests())
    drafted = beam_search(Decoder(target, drafter, controller=Fixed(4), batch_size=4), requests())
    for one, other in zip(drafted, plain, strict=True):
        assert [each.tokens for each in one.hypotheses()] == [each.tokens for each in other.hypotheses()]
        scores = [each.score for each in other.hypotheses()]
        assert [each.score for each in one.hypotheses()] == pytest.approx(scores, abs=1e-4)
    stats = sum((search.stats for search in drafted[1:]), drafted[0].stats)
    if kind == "model":
        assert (stats.alpha or 0) > 0.25 and stats.target_calls < 0.8 * stats.emitted


def test_a_temperature_samples_beams_and_a_seed_says_which() -> None:
    engine, prompts = load(dtype="float32"), ["def add(a, b):", "import os", "def add(a, b):"]
    asked: dict[str, Any] = {"num_beams": 3, "temperature": 1.0, "max_new_tokens": 8}
    first, again, other = (engine.generate(prompts, seed=seed, **asked) for seed in (1, 1, 2))
    alone = engine.generate(prompts[1], seed=1, **asked)
    assert [one.tokens for one in first] == [one.tokens for one in again] != [one.tokens for one in other]
    assert alone[0].tokens == first[1].tokens, "whatever is in the batch"
    assert first[0].tokens != first[2].tokens, "equal prompts of one call draw by themselves"


def test_generate_of_transformers_samples_beams_with_a_draft() -> None:
    target, speculate = embedded("target"), custom_generate(embedded("draft"), gamma=3)
    ids = torch.tensor([text(3, 9)])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": True, "num_beams": 3, "top_k": 20}
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(target.generate(ids, max_new_tokens=10, custom_generate=speculate, **asked).tolist())
    assert found[0] == found[1] != found[2]
    assert 0 < speculate.stats.target_calls < speculate.stats.emitted
