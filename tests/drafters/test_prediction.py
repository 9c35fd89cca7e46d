"""Drafts from predictions: what is copied and from where, that fewer calls are made, and the law stays the target's."""

from collections.abc import Callable

import pytest

import slipstream
from slipstream.core.draws import Rng
from slipstream.core.protocols import Drafter
from slipstream.core.request import Row
from slipstream.decoding import rules
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.drafters.choice import KnownFirst
from slipstream.drafters.lookup import Prediction
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter
from toys.drafts import Altered, drafted, first_tokens, flat
from toys.enumeration import EXACT, WRONG, total_variation
from toys.tables import PAIRS, VOCAB, plain_law, scorer
from toys.texts import GREEDY, Cycle, request

PROMPT, PREDICTED = (0, 1), (2, 0, 1, 2)


def row(
    prompt: tuple[int, ...], prediction: tuple[int, ...], output: tuple[int, ...], eos: tuple[int, ...] = ()
) -> Row:
    return Row(request(prompt, 100, prediction=prediction, eos=frozenset(eos)), 0, [*prompt, *output])


@pytest.mark.parametrize(
    ("output", "gamma", "want"),
    [
        ((), 3, [10, 11, 12]),  # nothing is written yet: the prediction's beginning
        ((10, 11), 2, [12, 13]),  # it agrees: what comes next
        ((10, 11, 12, 13), 0, []),
        ((10, 99), 3, []),  # 99 stands nowhere
        ((10, 99, 12), 2, [13, 14]),  # it found its place again, behind what was changed
        ((10, 99, 5), 2, [6, 10]),  # the prompt is copied from as well; the prediction stands behind it
    ],
)
def test_what_is_copied(output: tuple[int, ...], gamma: int, want: list[int]) -> None:
    assert drafted(Prediction(), [row((5, 6), (10, 11, 12, 13, 14), output)], [gamma]) == [want]


def test_rows_without_a_prediction_draft_nothing_beside_one_that_has() -> None:
    rows = [row((5, 6, 5), (), ()), row((5, 6), (10, 11, 12), ())]
    assert drafted(Prediction(), rows, [2, 2]) == [[], [10, 11]]


def test_a_copy_ends_at_the_end_of_text() -> None:
    assert drafted(Prediction(), [row((5,), (10, 2, 11), (), eos=(2,))], [3]) == [[10, 2]]


def test_a_true_prediction_saves_target_calls_and_a_wrong_one_changes_no_token() -> None:
    target = PAIRS["zeros"][0]
    written = Decoder(scorer(target), Prediction())
    want = plain(written, [request(PROMPT, 12, GREEDY)])[0].output
    for prediction, calls in ((tuple(want), 3), (tuple((token + 1) % VOCAB for token in want), None)):
        decoder = Decoder(scorer(target), Prediction(), rules.TOKEN.verify, Cycle((4,)))
        (done,) = generate(decoder, [request(PROMPT, 12, GREEDY, prediction=prediction)])
        assert done.output == want
        assert calls is None or done.stats.target_calls == calls


def distance(pair: str, rule: rules.Rule, make: Callable[[], Drafter]) -> float:
    def decoder(rng: Rng) -> Decoder:
        return Decoder(scorer(PAIRS[pair][0]), make(), rule.verify, Cycle((2, 0, 3)), rng=rng)

    found = first_tokens(decoder, PROMPT, 3, 4, prediction=PREDICTED)
    return total_variation(found, plain_law(PAIRS[pair][0], PROMPT, 3))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK, rules.MATCH], ids=lambda rule: rule.name)
def test_the_law_is_the_target_s(rule: rules.Rule, pair: str) -> None:
    assert distance(pair, rule, Prediction) < EXACT


def test_a_wrong_law_of_the_copies_is_noticed() -> None:
    assert max(distance(pair, rules.TOKEN, lambda: Altered(Prediction(), flat)) for pair in PAIRS) > WRONG


@pytest.mark.parametrize("pair", list(PAIRS)[:3])
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK, rules.MATCH], ids=lambda rule: rule.name)
def test_the_law_is_the_target_s_in_front_of_a_model(rule: rules.Rule, pair: str) -> None:
    def make() -> Drafter:
        return KnownFirst(ModelDrafter(scorer(PAIRS[pair][1])))

    assert distance(pair, rule, make) < EXACT


def test_a_text_is_the_same_beside_texts_with_predictions() -> None:
    target, draft = PAIRS["zeros"]
    alone = [request(PROMPT, 20, seed=3), request((1,), 20, seed=4)]
    batch = [request(PROMPT, 20, seed=5, prediction=PREDICTED * 4), *alone]
    for settings in (rules.TOKEN, rules.COUPLED):
        decoder = Decoder(
            scorer(target), KnownFirst(ModelDrafter(scorer(draft))), settings.verify, Cycle((3,)), rng=settings.rng
        )
        want = [row.output for row in generate(decoder, alone)]
        rows = generate(decoder, batch)
        assert [row.output for row in rows[1:]] == want
        assert rows[0].stats.predicted >= rows[0].stats.predicted_accepted > 0
        assert not rows[1].stats.predicted


def test_a_tree_cannot_stand_behind_predictions() -> None:
    with pytest.raises(ValueError, match="leave the tree out"):
        KnownFirst(TreeDrafter(scorer(PAIRS["zeros"][1]), (2, 1)))


def test_a_prediction_of_a_call_is_copied_whatever_the_draft(engine: slipstream.Engine) -> None:
    prompt = "def add(a, b):\n    return"
    [plainly] = engine.generate(prompt, max_new_tokens=24, plain=True)
    for options in ({}, {"gamma": 3}):
        [done] = engine.generate(prompt, max_new_tokens=24, prediction=plainly.text, **options)
        assert done.text == plainly.text and done.stats.predicted_accepted > 12
    [none] = engine.generate(prompt, max_new_tokens=24, prediction=plainly.text, plain=True)
    assert none.text == plainly.text and not none.stats.drafted
