"""Texts with a known beginning are read from where it ends, with the same bits as if all of it had been read."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream.cache.prefixes import PrefixCache
from slipstream.core.request import Request, Row
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.rules import COUPLED
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters.model import ModelDrafter
from slipstream.kernels.packing import can_pack, packed
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, GREEDY, SAMPLE, SEQ2SEQ, request, tiny

LONG = {"max_position_embeddings": 1024}


def model(family: str = "llama", seed: int = 0, kv_dtype: str | None = None) -> CausalScorer:
    made = tiny(FAMILIES[family], seed, **LONG)
    assert can_pack(made)
    return CausalScorer(packed(made), kv_dtype=kv_dtype)


def decoder(gamma: int = 3) -> Decoder:
    return Decoder(model(), ModelDrafter(model(seed=1)), controller=Fixed(gamma), batch_size=4)


def play(scheduler: Scheduler, *requests: Request) -> list[Row]:
    rows = [scheduler.add(each) for each in requests]
    for _ in scheduler.rounds():
        pass
    return rows


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def states(number: int, size: int = 4) -> Tensor:
    """A block of 16 bytes."""
    return torch.full((size,), float(number))


def numbers(blocks: Sequence[Tensor]) -> list[int]:
    return [int(block[0]) for block in blocks]


# ---- the store --------------------------------------------------------------------------------------------------


def test_the_longest_beginning_is_found_and_shared() -> None:
    shelf = (cache := PrefixCache(1000, block=2)).shelf(owner := torch.nn.Identity())
    shelf.store([1, 2, 3, 4, 5], "", lambda start, stop: states(start))
    shelf.store([1, 2, 3, 4, 9, 9], "", lambda start, stop: states(10 + start))
    assert cache is not None and cache.shelf(owner) is shelf
    assert numbers(shelf.longest([1, 2, 3, 4, 9, 9, 7], "")) == [0, 2, 14]
    assert numbers(shelf.longest([1, 2, 3, 4, 5, 6], "")) == [0, 2]
    assert numbers(shelf.longest([1, 2, 3], "")) == [0]
    assert shelf.longest([2, 1], "") == [] == shelf.longest([1, 2], "other")
    assert len(cache) == 3 and cache.bytes == 3 * 16


def test_models_have_shelves_of_their_own() -> None:
    cache, first, second = PrefixCache(1000, block=1), torch.nn.Identity(), torch.nn.Identity()
    cache.shelf(first).store([1], "", lambda start, stop: states(1))
    assert cache.shelf(second).longest([1], "") == []


def test_what_was_used_least_recently_goes_first_from_the_end_of_its_text() -> None:
    cache, owner = PrefixCache(4 * 16, block=1), torch.nn.Identity()
    shelf = cache.shelf(owner)
    shelf.store([1, 2], "", lambda start, stop: states(start))
    shelf.store([5, 6], "a", lambda start, stop: states(start))
    assert numbers(shelf.longest([1, 2], "")) == [0, 1]  # used again
    shelf.store([8], "b", lambda start, stop: states(start))
    assert numbers(shelf.longest([5, 6], "a")) == [0]
    assert numbers(shelf.longest([1, 2], "")) == [0, 1]
    shelf.store([9, 9, 9, 9, 9, 9], "", lambda start, stop: states(start))
    assert numbers(shelf.longest([9] * 6, "")) == [0, 1, 2, 3] and cache.bytes == 64 and len(cache) == 4
    assert shelf.longest([1, 2], "") == []


def test_random_stores_never_exceed_the_budget_nor_lose_a_middle() -> None:
    cache, owner = PrefixCache(20 * 16, block=2), torch.nn.Identity()
    shelf = cache.shelf(owner)
    for number in range(300):
        tokens = [token % 3 for token in text(2 + number % 17, number)]
        found = shelf.longest(tokens, "")
        shelf.store(tokens, "", lambda start, stop: states(start))
        assert cache.bytes == 16 * len(cache) <= 20 * 16
        assert numbers(found) == list(range(0, 2 * len(found), 2))


@pytest.mark.parametrize(("limit", "block"), [(0, 1), (1, 0)])
def test_sizes_that_cannot_be_are_refused(limit: int, block: int) -> None:
    with pytest.raises(ValueError, match="are not possible"):
        PrefixCache(limit, block)


# ---- with models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("llama", None), ("gemma3", None), ("mistral", None), ("llama", "int8"), ("gemma3", "int8")],
)
def test_logits_after_a_hit_have_the_same_bits(family: str, kv_dtype: str | None) -> None:
    scorer, tokens = model(family, kv_dtype=kv_dtype), text(200)
    more = torch.tensor([text(5, seed=1)])

    def logits() -> Tensor:
        return scorer.extend(more, [5])

    scorer.add(1)
    scorer.prefill([tokens])
    expected = logits()
    scorer.use_prefixes(PrefixCache(1 << 30))
    scorer.remember(0, [*tokens, *more[0].tolist()], "")
    scorer.free([0])
    scorer.add(2)
    assert scorer.recall(1, tokens, "other") == 0
    assert scorer.recall(1, tokens, "") == 192
    scorer.free([0])
    scorer.prefill([tokens[192:]])
    assert torch.equal(logits(), expected)


def test_control_a_block_of_another_text_is_caught() -> None:
    scorer, tokens, other = model(), text(100), text(100, seed=5)
    scorer.add(1)
    scorer.prefill([other])
    cache = PrefixCache(1 << 30)
    scorer.use_prefixes(cache)
    scorer.remember(0, tokens, "")  # not what the row holds
    more = torch.tensor([[1, 2]])
    scorer.rollback([0])
    assert scorer.recall(0, tokens, "") == 96
    scorer.prefill([tokens[96:]])
    wrong = scorer.extend(more, [2])
    scorer.rollback([0])
    scorer.prefill([tokens])
    assert not torch.equal(scorer.extend(more, [2]), wrong)


def conversation(first: Row, question: Sequence[int]) -> list[int]:
    return [*first.tokens, *question]


def test_a_second_turn_reads_only_what_is_new_and_has_the_same_text() -> None:
    cache, start = PrefixCache(1 << 30), text(300)
    samplers = [(GREEDY, None), (SAMPLE, COUPLED)]
    with Scheduler(decoder(), prefix_cache=cache) as scheduler:
        first = play(scheduler, request(start, 40, GREEDY))[0]
        prompt = conversation(first, text(20, seed=2))
        warm = play(scheduler, *(request(prompt, 30, sampler, rule=rule, key=3) for sampler, rule in samplers))
    with Scheduler(decoder()) as scheduler:
        cold = play(scheduler, *(request(prompt, 30, sampler, rule=rule, key=3) for sampler, rule in samplers))
    assert [row.output for row in warm] == [row.output for row in cold]
    assert [row.stats.drafted for row in warm] == [row.stats.drafted for row in cold]
    assert first.stats.cached == 0 and cold[0].stats.cached == 0
    assert warm[0].stats.cached == 336 and warm[0].stats.as_dict()["cached"] == 336


class Fed:
    """How many tokens a model was fed by `prefill` from now on."""

    def __init__(self, scorer: CausalScorer, patch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        prefill = scorer.prefill

        def counting(texts: Sequence[Sequence[int]], first: int = 0) -> None:
            self.tokens += sum(map(len, texts))
            prefill(texts, first)

        patch.setattr(scorer, "prefill", counting)


def test_the_draft_reads_only_what_is_new_too(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = model(seed=1)
    made = Decoder(model(), ModelDrafter(draft), controller=Fixed(3))
    with Scheduler(made, prefix_cache=PrefixCache(1 << 30)) as scheduler:
        first = play(scheduler, request(text(300), 20, GREEDY))[0]
        fed = Fed(draft, monkeypatch)
        row = play(scheduler, request(conversation(first, text(10)), 20, GREEDY))[0]
    assert 0 < fed.tokens < 60 and row.stats.drafted > 0


def test_tenants_are_apart_and_so_are_schedulers_without_a_cache() -> None:
    cache, prompt = PrefixCache(1 << 30), text(100)
    made = decoder()
    with Scheduler(made, prefix_cache=cache) as scheduler:
        mine = [play(scheduler, request(prompt, 4, GREEDY, cache_salt=salt))[0] for salt in ("a", "b", "a")]
    assert [row.stats.cached for row in mine] == [0, 0, 96]
    with Scheduler(made) as scheduler:
        assert play(scheduler, request(prompt, 4, GREEDY, cache_salt="a"))[0].stats.cached == 0
    with Scheduler(made, prefix_cache=cache) as scheduler:
        assert play(scheduler, request(prompt, 4, GREEDY, cache_salt="a"))[0].stats.cached == 96


def test_a_small_budget_is_kept() -> None:
    cache = PrefixCache(200_000)
    with Scheduler(decoder(), prefix_cache=cache) as scheduler:
        for seed in range(6):
            play(scheduler, request(text(200, seed), 10, GREEDY))
            assert 0 < cache.bytes <= 200_000


def test_encoder_decoders_store_nothing() -> None:
    scorer = CausalScorer(tiny(SEQ2SEQ["t5"]))
    cache = PrefixCache(1 << 30)
    scorer.use_prefixes(cache)
    scorer.add(1, [(1, 2, 3)])
    scorer.prefill([text(64)])
    scorer.remember(0, text(64), "")
    assert cache.bytes == 0
    scorer.rollback([0])
    assert scorer.recall(0, text(64), "") == 0
