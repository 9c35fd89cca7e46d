"""One contract for all drafters: exact with every rule, ragged, rolled back, reused, and blind to the batch around.

Laws are enumerated, so no test can fail by chance; a drafter that misreports its law must be caught.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from recipes.ahead import new_eagle3
from slipstream.core.draws import Rng, draw
from slipstream.core.protocols import Drafter, Scorer
from slipstream.core.request import Request, Row, Sampler
from slipstream.core.round import Context
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN, Rule
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.choice import Bandit, Choice
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import Datastore
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import Ngram, NgramModel
from slipstream.drafters.phrases import PhraseDrafter, Phrases
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.models.causal import CausalScorer
from slipstream.models.layers import part_of
from toys.drafts import Altered, first_tokens, flat
from toys.enumeration import total_variation
from toys.families import FAMILIES, tiny
from toys.tables import PAIRS, VOCAB, dirichlet_table, plain_law, scorer
from toys.texts import GREEDY, SAMPLE, Cycle, request

TARGET, DRAFT = PAIRS["zeros"]
GRAMS = NgramModel.fit([[0, 2, 1, 1, 0, 2, 2, 0, 1, 2, 0, 2]], 3, VOCAB)


def small() -> ModelDrafter:
    return ModelDrafter(scorer(DRAFT, "draft"))


def chain() -> ChainDrafter:
    return ChainDrafter(scorer(DRAFT, "draft"), ModelDrafter(scorer(dirichlet_table(21), "tiny")), gamma=2)


@cache
def llama() -> Any:
    return tiny(FAMILIES["llama"], vocab_size=VOCAB, num_hidden_layers=3).double()


def eagle3(target: CausalScorer) -> HeadDrafter:
    net = new_eagle3(llama(), [0, 1, 2, 1], 2, seed=3).double().eval()  # one of three tokens it does not know
    return HeadDrafter(target, net, "eagle3")


MADE: dict[str, Callable[[Any], Drafter]] = {
    "model": lambda target: small(),
    "tree": lambda target: TreeDrafter(scorer(DRAFT, "draft"), (2, 1)),
    "ngram": lambda target: Ngram(GRAMS, VOCAB),
    "lookup": lambda target: Lookup(),
    "phrases": lambda target: PhraseDrafter(Phrases.fit([[0, 2, 1], [1, 2, 1, 0], [2, 1, 0]], VOCAB), VOCAB),
    "datastore": lambda target: Datastore(VOCAB, Corpus.build([[0, 2, 1, 1, 0, 2, 2, 0, 1]], VOCAB)),
    "chain": lambda target: chain(),
    "lookup in a chain": lambda target: ChainDrafter(scorer(DRAFT, "draft"), Lookup(), gamma=2),
    "choice": lambda target: Choice([Lookup(), small()]),
    "choice of choices": lambda target: Choice([Lookup(min_matching_ngram_size=2), Choice([Lookup(), chain()])]),
    "bandit": lambda target: Bandit([small(), Lookup(), NoDraft()], hold=1, clock=lambda round: 1.0),
    "exit": lambda target: SameRowsDrafter(part_of(target, 1)),
    "eagle3": lambda target: eagle3(target),
}
OWN = {"exit", "eagle3"}  # made of the target's own layers and states: their target is a real model
BY_CONTEXT = {"bandit"}  # learn from all texts: which text a seed gives depends on the others
every = pytest.mark.parametrize("name", MADE)


def decoder(name: str, gammas: tuple[int, ...], rule: Rule = TOKEN, **kwargs: Any) -> Decoder:
    target: Scorer = CausalScorer(llama(), "target") if name in OWN else scorer(TARGET, "target")
    return Decoder(target, MADE[name](target), rule.verify, Cycle(gammas), **{"rng": rule.rng, **kwargs})


def step(name: str) -> Callable[[tuple[int, ...]], Any]:
    """The target's own law of the next token."""
    if name not in OWN:
        return TARGET

    @cache
    def law(prefix: tuple[int, ...]) -> tuple[float, ...]:
        with torch.inference_mode():
            return tuple(llama()(torch.tensor([prefix])).logits[0, -1].float().softmax(-1).tolist())

    return law


# ---- exactness --------------------------------------------------------------------------------------------------


def law_of(name: str, rule: Rule, change: Any = None, gammas: tuple[int, ...] = (2,), limit: int = 3) -> Any:
    def make(rng: Rng) -> Decoder:
        parts = decoder(name, gammas, rule, rng=rng)
        return replace(parts, drafter=Altered(parts.drafter, change)) if change else parts

    return first_tokens(make, (0, 2), 2, limit)


def rounding(name: str) -> float:
    """Tables of tests are in float64, n-gram models and models in float32."""
    return 1e-5 if name in OWN else 1e-6 if "ngram" in name else 1e-12


RULES = (TOKEN, BLOCK, MATCH)
MANY = {"chain", "lookup in a chain", "choice of choices", *OWN}  # branches, or slow ones


def _slow(name: str, rule: Rule) -> bool:
    return (rule is MATCH and name not in {"model", "lookup"}) or (rule is TOKEN and name in MANY) or name in OWN


CASES = [
    pytest.param(name, rule, id=f"{name}-{rule.name}", marks=[pytest.mark.slow] if _slow(name, rule) else [])
    for name in MADE
    for rule in RULES
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_output_law_is_the_targets(name: str, rule: Rule) -> None:
    found = law_of(name, rule)
    assert total_variation(found, plain_law(step(name), (0, 2), 2)) < rounding(name)


@pytest.mark.parametrize("name", [name for name in MADE if name not in OWN])
def test_rounds_without_drafts_in_between_change_nothing(name: str) -> None:
    found = law_of(name, TOKEN, gammas=(1, 0, 1), limit=2)
    assert total_variation(found, plain_law(step(name), (0, 2), 2)) < rounding(name)


@pytest.mark.parametrize("name", ["model", "ngram", "lookup", "choice", "bandit"])
def test_control_a_drafter_that_misreports_its_law_is_caught(name: str) -> None:
    found = law_of(name, TOKEN, flat)
    assert total_variation(found, plain_law(step(name), (0, 2), 2)) > 1e-3


# ---- drafts -----------------------------------------------------------------------------------------------------


@every
def test_drafts_keep_to_their_gammas_and_to_their_laws(name: str) -> None:
    """Rows ask for different numbers, also for none; what is proposed has a chance under the reported law."""
    parts = decoder(name, (2,))
    rows = generate(replace(parts, batch_size=4), texts(SAMPLE, 4))  # it has served others before
    if name in OWN:
        parts.target.add(len(rows))
        parts.target.prefill([row.tokens[:-1] for row in rows])
    for gammas in ([0, 2, 1, 3], [0, 0, 0, 0], [3, 0, 0, 1]):
        rows = [Row(row.request, row.index, list(row.tokens)) for row in rows]  # nobody observes these rounds
        draft = parts.drafter.propose(Context(tuple(rows), draw), gammas)
        assert all(depth <= gamma for depth, gamma in zip(draft.depths, gammas, strict=True))
        assert (draft.law is None) == (draft.tokens.shape[1] == 0)
        if draft.law is None:
            continue
        likely = draft.law.of(draft.fed)
        for place, length in enumerate(draft.lengths):
            present = draft.tokens[place, :length] >= 0
            assert (likely[place, :length][present] > 0).all()
            if draft.law.probs is not None:
                sums = draft.law.dense[place, :length].sum(-1)
                assert sums.tolist() == pytest.approx([1.0] * length, abs=1e-6)


# ---- texts ------------------------------------------------------------------------------------------------------

PROMPTS = [(0, 2), (1,), (2, 2, 0, 1, 0, 2), (1, 0), (0, 1, 2, 0, 1, 2, 0, 1)]


def texts(sampler: Sampler, most: int = 5, **kwargs: Any) -> list[Request]:
    limits = [9, 5, 12, 1, 7]
    places = enumerate(zip(PROMPTS[:most], limits, strict=False))
    return [request(prompt, limit, sampler, key=key, **kwargs) for key, (prompt, limit) in places]


def outputs(parts: Decoder, requests: list[Request]) -> list[tuple[list[int], str | None]]:
    return [(row.output, row.finish_reason) for row in generate(parts, requests)]


def two_ones(tokens: list[int]) -> str | None:
    """A stop that lies in the middle of rounds."""
    return "stop" if tokens[-2:] == [1, 1] or tokens[-2:] == [0, 0] else None


@every
@pytest.mark.parametrize("ends", [{}, {"stop": two_ones}, {"eos": frozenset({1})}], ids=["limit", "stop", "eos"])
def test_greedy_texts_are_the_targets_own(name: str, ends: dict[str, Any]) -> None:
    """Ragged rows, two at a time, new ones joining; then the same drafter again, in another company."""
    wanted = outputs(Decoder(decoder(name, (0,)).target, controller=Cycle((0,))), texts(GREEDY, **ends))
    parts = decoder(name, (3, 0, 5, 1), batch_size=2)
    assert outputs(parts, texts(GREEDY, **ends)) == wanted
    assert outputs(replace(parts, batch_size=5), texts(GREEDY, **ends)[::-1]) == wanted[::-1]


@pytest.mark.parametrize("name", [name for name in MADE if name not in BY_CONTEXT])
@pytest.mark.parametrize("rule", [BLOCK, TOKEN], ids=lambda rule: rule.name)
def test_draws_do_not_depend_on_the_company(name: str, rule: Rule) -> None:
    one = decoder(name, (3,), rule)
    assert [outputs(one, [each])[0] for each in texts(SAMPLE)] == outputs(decoder(name, (3,), rule), texts(SAMPLE))


@pytest.mark.parametrize("name", [name for name in MADE if name != "tree"])
def test_coupled_texts_are_those_of_the_target_alone(name: str) -> None:
    alone = Decoder(decoder(name, (0,)).target, controller=Cycle((0,)), verifier=COUPLED.verify, rng=COUPLED.rng)
    assert outputs(decoder(name, (3, 1), COUPLED), texts(SAMPLE)) == outputs(alone, texts(SAMPLE))


# ---- choices ----------------------------------------------------------------------------------------------------


def test_rows_with_and_without_a_match_share_a_round() -> None:
    rows = (Row(request((0, 1, 2, 0, 1), 9), 0, [0, 1, 2, 0, 1]), Row(request((0, 1), 9, key=1), 1, [0, 1]))
    draft = Choice([Lookup(), small()]).propose(Context(rows, draw), [2, 2])
    assert draft.tokens[0].tolist() == [2, 0] and draft.law is not None
    assert draft.law.dense[0].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert draft.law.dense[1, 0].tolist() == pytest.approx(DRAFT((0, 1)))


def test_a_bandit_settles_on_the_faster_one() -> None:
    """Speeds 10, 30 and 20 tokens per second: after each was tried, the second is used nine times of ten."""
    bandit, speeds, used = Bandit([small(), Lookup(), NoDraft()], hold=2), (10, 30, 20), [0, 0, 0]
    for _ in range(300):
        bandit.choose()
        used[bandit.current] += 1
        bandit.count(speeds[bandit.current], 1.0)
    assert used[1] > 240 and min(used) >= 2


def test_a_bandit_follows_a_change() -> None:
    bandit = Bandit([small(), Lookup()])
    for number in range(1000):
        bandit.choose()
        fast = bandit.current == (number >= 200)
        bandit.count(30 if fast else 10, 1.0)
        assert number != 199 or bandit.arms[0].rounds > bandit.arms[1].rounds
    assert bandit.arms[1].rounds > bandit.arms[0].rounds


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Choice([small()]), "among 1 drafters"),
        (lambda: Bandit([small(), TreeDrafter(scorer(DRAFT), (2,))]), "takes chains only"),
    ],
)
def test_impossible_choices_are_one_sentence(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
