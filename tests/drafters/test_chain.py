"""A draft of a draft: exact at every depth, by enumeration; its statistics; controls that must fail."""

from typing import Any

import pytest
import torch

from slipstream.core.draws import DrawnBy, Key, Purpose, Rng, ScopedDraws, draw_coupled
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.round import Context
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, MATCH, TOKEN, Rule
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from toys.drafts import Altered, drop_what_looks_bad, first_tokens, flat
from toys.enumeration import EXACT, WRONG, enumerate_outcomes, total_variation
from toys.tables import PAIRS, dirichlet_table, plain_law, scorer
from toys.texts import GREEDY, SAMPLE, Cycle, request, row

THIRD, FOURTH = dirichlet_table(21), dirichlet_table(22)


def chain(tables: Any, gammas: tuple[int, ...] = (2, 2), wrap: Any = lambda drafter: drafter) -> ChainDrafter:
    """The first table is the draft; each further one drafts for the one before."""
    inner: Drafter = wrap(ModelDrafter(scorer(tables[-1], f"level{len(tables) - 1}")))
    for depth in range(len(tables) - 2, -1, -1):
        inner = ChainDrafter(scorer(tables[depth], f"level{depth}"), inner, gamma=gammas[depth])
    assert isinstance(inner, ChainDrafter)
    return inner


def law_of(
    drafter: Any, target: Any, gammas: tuple[int, ...], rule: Rule = TOKEN, count: int = 2, limit: int = 2
) -> Any:
    def decoder(rng: Rng) -> Decoder:
        return Decoder(scorer(target, "target"), drafter(), rule.verify, Cycle(gammas), rng=rng)

    return first_tokens(decoder, (0, 2), count, limit)


@pytest.mark.parametrize("inner", [1, 2])
def test_what_is_drafted_follows_the_drafts_own_law(inner: int) -> None:
    """The tokens of a chain are distributed jointly as the draft model alone would sample them, and say so."""
    draft, third = PAIRS["zeros"][1], PAIRS["zeros"][0]
    text, gamma = (0, 2), 3

    def run(rng: Rng) -> tuple[int, ...]:
        made = chain([draft, third], (inner,)).propose(Context((row(text),), rng), [gamma])
        tokens = made.tokens[0].tolist()
        assert made.lengths == (gamma,) and made.law is not None
        for i, probabilities in enumerate(made.law.dense[0]):
            assert probabilities.tolist() == pytest.approx(draft((*text, *tokens[:i])))
        return tuple(tokens)

    assert total_variation(enumerate_outcomes(run, 300_000), plain_law(draft, text, gamma)) < EXACT


@pytest.mark.parametrize("rule", [TOKEN, BLOCK, MATCH], ids=lambda rule: rule.name)
@pytest.mark.parametrize("pair", ["zeros"])
def test_the_output_law_is_the_targets(pair: str, rule: Rule) -> None:
    target, draft = PAIRS[pair]
    found = law_of(lambda: chain([draft, PAIRS["zeros"][0]]), target, (2,), rule, limit=3)
    assert total_variation(found, plain_law(target, (0, 2), 2)) < EXACT


def test_three_levels_are_exact() -> None:
    target, draft = PAIRS["points"]
    found = law_of(lambda: chain([draft, PAIRS["zeros"][1], PAIRS["points"][0]], (2, 1)), target, (2,), limit=3)
    assert total_variation(found, plain_law(target, (0, 2), 2)) < EXACT


def test_rounds_of_all_kinds_in_turn() -> None:
    """Gammas 0, 1, 2 in turn, over tokens that later rounds reuse the origins of."""
    target, draft = PAIRS["zeros"]
    found = law_of(lambda: chain([draft, PAIRS["zeros"][0]]), target, (2, 0, 1), limit=3)
    assert total_variation(found, plain_law(target, (0, 2), 2)) < EXACT


def test_control_an_inner_drafter_that_lies_is_caught() -> None:
    target, draft = PAIRS["generic"]
    lying = law_of(lambda: chain([draft, THIRD], wrap=lambda inner: Altered(inner, flat)), target, (2,), limit=3)
    assert total_variation(lying, plain_law(target, (0, 2), 2)) > WRONG / 10


def test_control_dropping_by_what_was_sampled_is_caught() -> None:
    """Cutting to a fixed length is fine (above); cutting where the draft dislikes its token is not."""
    target, draft = PAIRS["zeros"]
    found = law_of(lambda: Altered(chain([draft, THIRD]), drop_what_looks_bad), target, (2,), limit=3)
    assert total_variation(found, plain_law(target, (0, 2), 2)) > WRONG


PROMPTS = [(0, 2), (1,), (2, 2, 0, 1), (1, 0)]


def run_texts(
    drafter: Drafter, sampler: Any, rule: Rule, gammas: tuple[int, ...], prompts: Any = PROMPTS, **kw: Any
) -> Any:
    requests = [request(prompt, 12, sampler, key=hash(prompt)) for prompt in prompts]
    decoder = Decoder(scorer(PAIRS["generic"][0]), drafter, rule.verify, Cycle(gammas), rng=rule.rng, **kw)
    return generate(decoder, requests)


def test_coupled_drafts_are_those_of_the_draft_alone() -> None:
    """Under shared noise the inner rounds draw exactly what the draft would have drawn by itself."""
    draft = PAIRS["generic"][1]
    contexts = Context((row((0, 2)), row((1,), index=3)), draw_coupled)
    fast = chain([draft, THIRD]).propose(contexts, [6, 4])
    slow = ModelDrafter(scorer(draft)).propose(contexts, [6, 4])
    assert fast.tokens[0].tolist() == slow.tokens[0].tolist()
    assert fast.tokens[1, :4].tolist() == slow.tokens[1, :4].tolist()


def test_levels_count_what_happens_inside() -> None:
    done = run_texts(chain([PAIRS["generic"][1], THIRD, FOURTH], (3, 2)), SAMPLE, TOKEN, (4,))
    pooled = sum((r.stats for r in done[1:]), done[0].stats)
    small = pooled.levels["level0"]
    tiny = small.levels["level1"]
    assert not tiny.levels
    assert small.emitted >= pooled.drafted and tiny.emitted >= small.drafted
    assert 0 < small.target_calls < small.emitted and 0 < small.alpha < 1
    assert pooled.as_dict()["levels"]["level0"]["levels"]["level1"]["target_calls"] == tiny.target_calls
    assert small.seconds["draft"] > 0 and small.seconds["target"] > 0


def test_a_small_context_is_followed_in_windows() -> None:
    small = scorer(PAIRS["generic"][1], "small", context=16)
    tiny = ModelDrafter(scorer(THIRD, "tiny", context=9))
    done = run_texts(ChainDrafter(small, tiny), GREEDY, TOKEN, (3,), [(0, 1, 2) * 6])
    assert done[0].stats.drafted > 0
    assert done[0].output == run_texts(NoDraft(), GREEDY, TOKEN, (0,), [(0, 1, 2) * 6])[0].output


def test_a_draft_with_another_amount_of_padding() -> None:
    for vocab in (2, 4):
        table = (0.5, 0.5) if vocab == 2 else (0.1, 0.2, 0.3, 0.4)
        small = scorer(lambda prefix, table=table: table, "small", vocab=vocab)
        drafter = ChainDrafter(small, ModelDrafter(scorer(THIRD, "tiny")), vocab=3)
        found = law_of(
            lambda drafter=drafter: ChainDrafter(drafter.scorer, drafter.inner, 3), PAIRS["generic"][0], (2,), limit=2
        )
        assert total_variation(found, plain_law(PAIRS["generic"][0], (0, 2), 2)) < EXACT


def test_names_of_inner_draws_tell_the_outer_origin() -> None:
    keys: list[Key] = []

    def listen(law: Law, key: Key) -> Any:
        keys.append(key)
        return torch.zeros(2, 1, dtype=torch.long)

    rng = ScopedDraws(ScopedDraws(DrawnBy(listen), "inner.1", ((7, 2), (9, 0))), "inner.0", ((5, 1), (9, 0)))
    rng(Law(probs=torch.ones(2, 1, 3)), Key((0, 0), (1, 2), (6, 11), (6, 11), Purpose.DRAFT))
    assert keys == [Key((0, 0), (1, 2), (7, 9), (9, 11), Purpose.DRAFT, scope=("inner.1", "inner.0"))]
    assert keys[0].name == "inner.1.inner.0.draft"  # the numbers of a seed are made from it


def test_impossible_settings_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="gamma=0 is not possible within a chain"):
        ChainDrafter(scorer(THIRD), Lookup(), gamma=0)
