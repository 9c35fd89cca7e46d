"""Which layers should draft: choices, predictions and the race, on models whose answer is known."""

import pytest
import torch

from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.models.causal import CausalScorer
from slipstream.plan import layers as exits
from slipstream.plan.layers import Finish, LayerSearch, Trial, first_layers, search_exit, texts_of, thinned
from toys import FAMILIES, SAMPLE, ragged, tiny

REQUESTS = ragged(SAMPLE, 6)


def target_of(idle: tuple[int, ...] = (), layers: int = 4) -> CausalScorer:
    """A random model in which the layers `idle` add nothing."""
    model = tiny(FAMILIES["llama"], num_hidden_layers=layers)
    with torch.no_grad():
        for layer in idle:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return CausalScorer(model)


def test_idle_layers_are_left_out_first() -> None:
    target = target_of(idle=(1, 3))
    decoder = Decoder(target)
    lines: list[str] = []
    found = thinned(target, texts_of(decoder, REQUESTS), lines.append)
    assert found == [(0, 2, 3), (0, 2)] or found == [(0, 2)]  # the last one alone is an exit
    assert lines[1] == "layers 0,2: alpha about 1.000"


@pytest.mark.slow
def test_every_choice_is_tried_and_the_best_race() -> None:
    target = target_of(idle=(2, 3))
    lines: list[str] = []
    found = search_exit(Decoder(target, batch_size=3), REQUESTS, watch=lines.append)
    assert [trial.layers for trial in found.trials[:3]] == first_layers(target) == [(0,), (0, 1), (0, 1, 2)]
    assert found.trials[1].alpha == pytest.approx(1, abs=1e-4)
    assert found.trials[0].alpha < 0.99
    assert found.trials[1].mean_acceptance_length > 2
    assert found.plain > 0 and len(found.race) <= exits.FINALISTS
    assert not target.lengths  # the target is free for the next call
    assert found.as_dict()["trials"][1]["layers"] == "2"


def timed(target: float, draft: float, gamma: int = 3) -> Stats:
    """100 rounds with these times of a pass of the target and of a drafted token."""
    drafted = 100 * gamma
    counts = {"emitted": 100 + drafted // 2, "accepted": drafted // 2, "drafted": drafted, "tested": drafted}
    seconds = {"prefill": 5.0, "draft": draft * drafted, "target": target * 100}
    return Stats(**counts, beta=0.8 * drafted, target_calls=100, seconds=seconds)


def test_the_prediction_is_the_formula_on_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft step of a tenth of a plain step, four rows for the price of 1.6: gamma by trying all."""
    monkeypatch.setattr(exits, "pooled_stats", lambda *_: timed(0.16, 0.01))
    base = Stats(emitted=100, target_calls=100, seconds={"prefill": 9.0, "target": 10.0})
    trial = exits.try_layers(Decoder(target_of()), REQUESTS, (0,), 3, base)

    def speed(gamma: int) -> float:
        return sum(0.8**i for i in range(gamma + 1)) / (1 + 0.2 * gamma + 0.1 * gamma)

    best = max(range(exits.MOST + 1), key=speed)
    assert (trial.best_gamma, trial.alpha) == (best, pytest.approx(0.8))
    assert trial.factor == pytest.approx(speed(best)) and best > 0


@pytest.mark.slow
def test_a_draft_that_costs_too_much_does_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Stats(emitted=100, target_calls=100, seconds={"target": 10.0})
    monkeypatch.setattr(exits, "pooled_stats", lambda decoder, requests, layers: timed(0.3, 0.2) if layers else base)
    found = search_exit(Decoder(target_of()), REQUESTS, [(0,), (0, 1)])
    assert found.race == () and found.best is None and found.layers == ()
    assert [trial.best_gamma for trial in found.trials] == [0, 0]


def test_plain_decoding_may_win_the_race() -> None:
    slow, fast = Finish((0,), 2, 90.0, 0.9), Finish((0, 1), 3, 120.0, 1.2)
    trials: tuple[Trial, ...] = ()
    assert LayerSearch(100.0, trials, (slow,)).layers == ()
    assert LayerSearch(100.0, trials, (slow,)).as_dict()["best"] is None
    assert LayerSearch(100.0, trials, (slow, fast)).layers == (0, 1)


def test_nothing_to_measure_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to measure on"):
        search_exit(Decoder(target_of(), controller=Fixed(2)), [], [(0,)])
