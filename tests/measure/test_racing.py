"""Races: who runs when, and what is compared with what."""

import pytest

from slipstream.measure.timing import race, ratios, spread


def test_everybody_runs_once_per_lap_and_is_first_in_turn() -> None:
    order: list[tuple[int, str]] = []

    def run(name: str, lap: int) -> str:
        order.append((lap, name))
        return f"{name}{lap}"

    found = list(race("abc", range(4), run))
    assert found == [[f"{name}{lap}" for name in "abc"] for lap in range(4)]
    laps = ["".join(name for lap, name in order if lap == number) for number in range(4)]
    assert laps == ["abc", "bca", "cab", "abc"]


def test_a_lap_that_breaks_off_is_not_reported() -> None:
    def run(name: str, lap: int) -> int:
        if (name, lap) == ("a", 2):
            raise KeyboardInterrupt
        return lap

    found: list[list[int]] = []
    with pytest.raises(KeyboardInterrupt):
        for outcomes in race("ab", range(4), run):
            found.append(outcomes)
    assert found == [[0, 0], [1, 1]]
    assert list(race([], range(2), run)) == [[], []]


def test_a_drift_of_the_machine_leaves_ratios_within_laps_alone() -> None:
    """The machine is half as fast in the second lap."""
    assert ratios([20.0, 10.0, 20.0], [10.0, 5.0, 10.0]) == [2.0, 2.0, 2.0]
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
