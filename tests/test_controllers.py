"""Controllers: gammas per row, and the exactness of any choice that is made before anything is drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from slipstream.controllers import Fixed, Planned
from slipstream.decoding import Decoder, generate
from slipstream.drafters.model import ModelDrafter
from slipstream.records import Draft, Drafter, Round, Row, Seam
from slipstream.rules import BLOCK, TOKEN, Rule
from toys import (
    PAIRS,
    Altered,
    Distribution,
    enumerate_outcomes,
    plain_law,
    request,
    row,
    scorer,
    total_variation,
)

EXACT = 1e-12
WRONG = 1e-3


@dataclass(frozen=True)
class Chooser:
    """A controller that asks a function of a row; the state is the last round."""

    choose: Callable[[Row, Round | None], int]
    most: int = 2

    def init(self) -> Round | None:
        """Nothing was seen."""
        return None

    def gammas(self, state: Round | None, rows: Sequence[Row]) -> list[int]:
        """The function, row by row."""
        return [self.choose(row, state) for row in rows]

    def update(self, state: Round | None, round: Round) -> Round:
        """The round itself."""
        return round


def by_text(row: Row, last: Round | None) -> int:
    """Depends on everything that a controller may know: the text, and what was accepted."""
    return (sum(row.tokens) + (sum(last.accepted) if last else 1)) % 3


def law(pair: str, rule: Rule, wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter) -> Distribution:
    """The joint law of the first three tokens."""

    def run(seam: Seam) -> tuple[int, ...]:
        target, draft = (scorer(table, name) for table, name in zip(PAIRS[pair], ("target", "draft"), strict=True))
        decoder = Decoder(target, wrap(ModelDrafter(draft)), rule.verify, Chooser(by_text), seam=seam)
        (row,) = generate(decoder, [request((0, 2), 3)])
        return tuple(row.output)

    return enumerate_outcomes(run)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("pair", PAIRS)
def test_gammas_that_depend_on_the_past_leave_the_law_exact(pair: str, rule: Rule) -> None:
    assert total_variation(law(pair, rule), plain_law(PAIRS[pair][0], (0, 2), 3)) < EXACT


def less_when_unlikely(draft: Draft) -> Draft:
    """The mistake: gamma is chosen after a look at the drafted tokens, so an unlikely one is taken back."""
    if draft.law is None or draft.law.probs is None:
        return draft
    chances = draft.law.probs.gather(-1, draft.tokens.unsqueeze(-1))[0, :, 0].tolist()
    kept = next((place for place, chance in enumerate(chances) if chance < 0.3), len(chances))
    return replace(draft, lengths=(min(kept, draft.lengths[0]),))


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_gamma_chosen_after_a_look_at_the_draft_is_caught(rule: Rule) -> None:
    wrong = law("generic", rule, lambda drafter: Altered(drafter, less_when_unlikely))
    assert total_variation(wrong, plain_law(PAIRS["generic"][0], (0, 2), 3)) > WRONG


def test_rows_of_one_round_draft_as_many_tokens_as_each_was_given() -> None:
    seen: list[Round] = []

    def choose(row: Row, last: Round | None) -> int:
        seen.extend([last] if last else [])
        return row.index

    target, draft = PAIRS["generic"]
    requests = [request((index, 2), 12, key=index) for index in range(3)]

    def texts(controller: Chooser | Fixed) -> list[list[int]]:
        decoder = Decoder(scorer(target, "target"), ModelDrafter(scorer(draft, "draft")), controller=controller)
        rows = generate(decoder, requests)
        if isinstance(controller, Chooser):
            assert [row.stats.drafted > 0 for row in rows] == [False, True, True]
            assert [len(row.stats.drafted_by_position) for row in rows] == [0, 1, 2]
        return [row.output for row in rows]

    mixed = texts(Chooser(choose))
    assert seen[0].gammas == seen[0].draft.lengths == (0, 1, 2)
    # A row's text depends on its own gammas alone.
    assert mixed == [texts(Fixed(gamma))[gamma] for gamma in range(3)]


# ---- planned ----------------------------------------------------------------------------------------------------


def test_a_plan_gives_each_number_of_rows_its_gamma() -> None:
    plan = Planned({8: 0, 1: 5, 4: 2})
    given = [plan.gammas(plan.init(), [row([1])] * count) for count in (1, 2, 4, 5, 8, 9)]
    assert [gammas[0] for gammas in given] == [5, 2, 2, 0, 0, 0]
    assert [len(gammas) for gammas in given] == [1, 2, 4, 5, 8, 9]
    assert plan.most == 5


@pytest.mark.parametrize("by_rows", [{}, {0: 5}, {1: -1}, {1: 3, -2: 3}], ids=str)
def test_an_impossible_plan_is_refused(by_rows: dict[int, int]) -> None:
    with pytest.raises(ValueError, match=r"^the plan .* is not possible: give a gamma of 0"):
        Planned(by_rows)


def test_a_plan_cannot_be_changed() -> None:
    given = {1: 5}
    plan = Planned(given)
    given[1] = 9
    assert plan.most == 5
    with pytest.raises(TypeError):
        plan.by_rows[1] = 9  # type: ignore[index]
