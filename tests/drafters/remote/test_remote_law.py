"""The output law beside a draft server, exactly: honest ones in every mode, liars in the default one, and the control.

Every outcome of every draw is enumerated, as in `test_exact_law`. In the mode that trusts the server, its draws come
from numbers of the client; they are enumerated as the middles of four equal cells, on which the draft's laws fit.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from remotes import Here, Liar, Policy
from slipstream.core.draws import Key, Rng, draw, uniforms
from slipstream.core.law import Law
from slipstream.core.protocols import Traits
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN, Rule
from slipstream.drafters.choice import Choice, KnownFirst
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.remote.drafter import RemoteDrafter
from slipstream.drafters.remote.messages import AskRow, DraftRow, SentLaw
from toys.drafts import first_tokens
from toys.enumeration import EXACT, WRONG, Script, SharedScript, enumerate_outcomes, total_variation
from toys.tables import PAIRS, VOCAB, Table, plain_law, scorer
from toys.texts import SAMPLE, Cycle, request

PROMPT, COUNT = (0, 2), 3
SLOW = pytest.mark.slow
RULES = {"token": TOKEN, "block": BLOCK, "match": MATCH}


def decoder(target: Table, link: Any, rule: Rule, rng: Rng, gammas: Sequence[int], **use: Any) -> Decoder:
    drafter = RemoteDrafter(link, VOCAB, **use)
    return Decoder(scorer(target, "target"), drafter, rule.verify, Cycle(tuple(gammas)), rng=rng)


# ---- honest servers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", ["zeros", pytest.param("generic", marks=SLOW), pytest.param("disjoint", marks=SLOW)])
def test_guesses_of_an_honest_server_leave_the_law_as_it_is(pair: str, rule: str) -> None:
    target, draft = PAIRS[pair]

    def make(rng: Rng) -> Decoder:
        return decoder(target, Here(ModelDrafter(scorer(draft, "draft"))), RULES[rule], rng, (2, 1))

    assert total_variation(first_tokens(make, PROMPT, COUNT, COUNT), plain_law(target, PROMPT, COUNT)) < EXACT


def test_coupled_guesses_leave_the_law_as_it_is() -> None:
    target, draft = PAIRS["generic"]

    def run(rng: Rng) -> tuple[int, ...]:
        one = decoder(target, Here(ModelDrafter(scorer(draft, "draft"))), MATCH, rng, (2, 1))
        return tuple(generate(one, [request(PROMPT, COUNT)])[0].output)

    assert total_variation(enumerate_outcomes(run, script_of=SharedScript), plain_law(target, PROMPT, COUNT)) < EXACT


CELLS = 4


@dataclass
class Grid(Script):
    """A script that also gives numbers to draw drafts with: the middle of one of four equal cells."""

    def chances(self, key: Key, positions: int) -> list[list[float]]:  # type: ignore[override]
        return [
            [
                (self.draw([1.0] * CELLS, (request, start + j), (origin, key.name)) + 0.5) / CELLS
                for j in range(positions)
            ]
            for request, origin, start in zip(key.requests, key.origins, key.positions, strict=True)
        ]


@cache
def quarters(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """A draft whose chances are quarters."""
    rng = random.Random(f"quarters {prefix}")
    counts = [0] * VOCAB
    for _ in range(CELLS):
        counts[rng.randrange(VOCAB)] += 1
    return tuple(count / CELLS for count in counts)


def cuttable(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """A draft whose two likeliest tokens, renormalised, have halves."""
    return (0.375, 0.375, 0.25) if sum(prefix) % 2 else (0.25, 0.375, 0.375)


@pytest.mark.parametrize(("top", "draft"), [(1, cuttable), (2, cuttable), (VOCAB, quarters)])
@pytest.mark.parametrize(("rule", "gamma"), [("token", 1), ("block", 1), pytest.param("block", 2, marks=SLOW)])
def test_a_trusted_law_that_is_honest_leaves_the_law_as_it_is(rule: str, gamma: int, top: int, draft: Table) -> None:
    """Cut to any number of candidates: what is cut is what is drawn from."""
    target, count = PAIRS["generic"][0], 1 + gamma

    def run(rng: Rng) -> tuple[int, ...]:
        link = Here(ModelDrafter(scorer(draft, "draft")))
        one = decoder(target, link, RULES[rule], rng, (gamma,), trust=True, top=top, ahead=False)
        return tuple(generate(one, [request(PROMPT, count)])[0].output)

    assert total_variation(enumerate_outcomes(run, 300_000, script_of=Grid), plain_law(target, PROMPT, count)) < EXACT


def test_a_trusted_law_gives_the_texts_of_the_same_draft_beside_the_target() -> None:
    """Its draws are those that the draft would make here, so texts agree token by token, ahead or not."""
    target, draft = PAIRS["generic"]
    requests = [request(PROMPT, 24, key=key) for key in range(6)]
    local = Decoder(scorer(target), ModelDrafter(scorer(draft)), BLOCK.verify, Fixed(3), batch_size=3)
    for ahead in (True, False):
        far = RemoteDrafter(Here(ModelDrafter(scorer(draft))), VOCAB, True, VOCAB, ahead)
        texts = [[row.tokens for row in generate(one, requests)] for one in (local, replace(local, drafter=far))]
        assert texts[0] == texts[1]


# ---- liars ------------------------------------------------------------------------------------------------------


def unlikely(table: Table) -> Policy:
    """Proposes what the target likes least."""
    return lambda text, ask: [min(range(VOCAB), key=table(tuple(text)).__getitem__)] * ask.gamma


def adaptive(text: list[int], ask: AskRow) -> Sequence[int] | None:
    """Changes with all that it has seen: silent, short, always the same token, or what was refused last."""
    return [None, [text[-1]], [0, 0], [2, 1]][(sum(text) + len(text)) % 4]


LIARS: dict[str, Policy] = {
    "one token": lambda text, ask: [1] * ask.gamma,
    "unlikely": unlikely(PAIRS["generic"][0]),
    "adaptive": adaptive,
}


SOON = {*product(["adaptive"], RULES), ("unlikely", "token"), ("one token", "block")}


@pytest.mark.parametrize(
    ("liar", "rule"), [pytest.param(*both, marks=() if both in SOON else SLOW) for both in product(LIARS, RULES)]
)
def test_no_server_can_change_the_law(liar: str, rule: str) -> None:
    target = PAIRS["generic"][0]
    law = first_tokens(lambda rng: decoder(target, Liar(LIARS[liar]), RULES[rule], rng, (2, 1)), PROMPT, COUNT, COUNT)
    assert total_variation(law, plain_law(target, PROMPT, COUNT)) < EXACT


def test_no_server_can_change_a_coupled_text_even_if_it_knows_the_seed() -> None:
    """It draws what the target will draw, by the shared number, and proposes it only where it likes it."""
    target = PAIRS["generic"][0]

    def run(rng: Rng) -> tuple[int, ...]:
        def peek(text: list[int], ask: AskRow) -> list[int]:
            law = Law(probs=torch.tensor([[target(tuple(text))]], dtype=torch.float64))
            key = Key((0,), (0,), (len(text),), (len(text),), "peek")
            choice = int(rng(law, key))
            return [choice] if choice != 1 else [0]

        one = decoder(target, Liar(peek), MATCH, rng, (2, 1))
        return tuple(generate(one, [request(PROMPT, COUNT)])[0].output)

    assert total_variation(enumerate_outcomes(run, script_of=SharedScript), plain_law(target, PROMPT, COUNT)) < EXACT


def test_control_a_liar_breaks_the_law_where_it_is_trusted() -> None:
    """Knowing the number, it claims a law from which that number draws token 1, with a quarter of the mass: no check
    can see that."""
    target = PAIRS["generic"][0]

    def lie(text: list[int], ask: AskRow) -> DraftRow:
        below = [min(0.75, max(0.0, number - 0.125)) for number in ask.numbers]
        laws = [_law([first, 0.25, 0.75 - first]) for first in below]
        assert all(law.draw(number) == 1 for law, number in zip(laws, ask.numbers, strict=True))
        return DraftRow(ask.row, (1,) * ask.gamma, tuple(laws))

    def run(rng: Rng) -> tuple[int, ...]:
        one = decoder(target, Liar(lie), TOKEN, rng, (1,), trust=True, ahead=False)
        row = generate(one, [request(PROMPT, 2)])[0]
        assert not row.stats.undrafted, "a check has seen it"
        return tuple(row.output)

    assert total_variation(enumerate_outcomes(run, 300_000, script_of=Grid), plain_law(target, PROMPT, 2)) > 10 * WRONG


def _law(weights: Sequence[float]) -> SentLaw:
    kept = [token for token, weight in enumerate(weights) if weight > 0]
    return SentLaw(tuple(kept), tuple(weights[token] for token in kept))


# ---- who knows the seed -----------------------------------------------------------------------------------------

SEEDS = 300


def foreseen(target: Table, secret: int | None, wrap: Any) -> float:
    """Of how many texts token 0 comes first, beside a server that knows seed and prompt and computes the coin from
    them: it proposes token 0 where that coin would keep it, and nothing else."""
    found = 0
    for seed in range(SEEDS):

        def wish(text: list[int], ask: AskRow, seed: int = seed) -> list[int]:
            key = Key((seed,), (0,), (len(text),), (len(text),), "accept")
            return [0] if uniforms(key, 1)[0][0] < target(tuple(text))[0] else []

        remote = RemoteDrafter(Liar(wish), VOCAB)
        remote.traits = Traits(secret=secret)
        one = Decoder(scorer(target), wrap(remote), TOKEN.verify, Fixed(1), rng=draw)
        found += generate(one, [request(PROMPT, 2, seed=seed)])[0].output[0] == 0
    return found / SEEDS


WRAPS: dict[str, Any] = {
    "alone": lambda drafter: drafter,
    "in a choice": lambda drafter: Choice([drafter, Lookup(min_matching_ngram_size=50)]),
    "behind what is known": KnownFirst,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_seed_that_is_known_does_not_help_a_liar(wrap: str) -> None:
    """With a secret in the coins: within 4.5 standard errors, which chance leaves once in 150,000 times."""
    target = PAIRS["generic"][0]
    p = target(PROMPT)[0]
    error = (p * (1 - p) / SEEDS) ** 0.5
    assert abs(foreseen(target, 12345, WRAPS[wrap]) - p) < 4.5 * error


def test_control_without_the_secret_it_would() -> None:
    target = PAIRS["generic"][0]
    p = target(PROMPT)[0]
    assert foreseen(target, None, WRAPS["alone"]) - p > 7 * (p * (1 - p) / SEEDS) ** 0.5


def test_every_server_has_a_secret_of_its_own_unless_it_is_trusted() -> None:
    link = Liar(adaptive)
    first, second = RemoteDrafter(link, VOCAB), RemoteDrafter(link, VOCAB)
    assert first.traits.secret != second.traits.secret and first.traits.secret and second.traits.secret
    assert RemoteDrafter(link, VOCAB, trust=True).traits.secret is None


def test_a_server_is_told_no_more_than_its_mode_needs() -> None:
    """Seeds for coupled texts only, which need them; temperature 0 where its law is not used."""
    for rule, trust, seeded in ((BLOCK, False, False), (BLOCK, True, False), (COUPLED, False, True)):
        link = Here(ModelDrafter(scorer(PAIRS["generic"][1])))
        remote = RemoteDrafter(link, VOCAB, trust=trust)
        used = Decoder(scorer(PAIRS["generic"][0]), remote, rule.verify, Fixed(2), rng=rule.rng)
        generate(used, [request(PROMPT, 6, seed=77, key=88)])
        assert [(each.seed, each.key) for each in link.opened] == [(77, 88) if seeded else (0, 0)]
        assert link.opened[0].sampler().greedy == (not trust and not seeded)
        assert link.opened[0].sampling["temperature"] == SAMPLE.temperature
