"""Several independent paths through the code that users run: batches, calls of their own rules, certificate, plans."""

from typing import Any

import pytest

import slipstream
from slipstream.check import check
from slipstream.check.enumeration import PATHS
from slipstream.check.record import watch
from slipstream.core.stats import Stats
from slipstream.decoding import rules
from slipstream.engine.engine import Engine
from terminal import run

PROMPTS = ["def add(a, b):", "import", "class Stack:\n    def push(self, item):"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return slipstream.load(verify="gbv:3", gamma=3)


def test_greedy_texts_are_those_of_plain_decoding(engine: Engine) -> None:
    ours, plain = (engine.generate(PROMPTS, max_new_tokens=12, plain=plain) for plain in (False, True))
    assert [each.tokens for each in ours] == [each.tokens for each in plain]
    assert all(each.stats.target_calls < 12 for each in ours)


@pytest.mark.parametrize("verify", [None, "block", "token", "match"])
def test_a_text_is_the_same_alone_and_in_a_ragged_batch(engine: Engine, verify: str | None) -> None:
    how: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.0, "seed": 4, "verify": verify}
    together = engine.generate(PROMPTS, **how)
    for prompt, one in zip(PROMPTS, together, strict=True):
        assert engine.generate(prompt, **how)[0].tokens == one.tokens


@pytest.mark.slow
def test_more_paths_are_accepted_more_often() -> None:
    kept = {}
    for paths in (1, 4):
        made = slipstream.load(verify=f"gbv:{paths}", gamma=3).generate(PROMPTS, max_new_tokens=48, temperature=1.0)
        kept[paths] = sum((each.stats for each in made), Stats()).mean_acceptance_length
    assert kept[4] > kept[1] + 0.2


def test_the_certificate_enumerates_paths(engine: Engine) -> None:
    case = [
        request
        for job in [engine.prepare(PROMPTS, {"max_new_tokens": 6, "temperature": 1.0})]
        for request in [generation.request for generation in job.generations]
    ]
    assert watch(engine.decoder, case).form is PATHS


@pytest.mark.slow
def test_the_certificate_passes(engine: Engine) -> None:
    report = check(engine, PROMPTS, max_new_tokens=16, samples=300)
    assert report.verdict == "pass", report.text()


def test_the_length_may_be_chosen_while_decoding() -> None:
    made = slipstream.load(verify="gbv:2", gamma="auto")
    assert made.generate(PROMPTS, max_new_tokens=8, temperature=1.0)[0].stats.drafted >= 0
    assert made.decoder.drafter.shape == (2, *(1,) * (made.decoder.controller.most - 1))  # type: ignore[attr-defined]


def test_other_drafts_are_refused_in_one_sentence(engine: Engine) -> None:
    for other in (engine, slipstream.load()):
        with pytest.raises(ValueError, match=r"^verify='gbv:2' drafts 2 paths, but .* load them with verify='gbv:2'"):
            other.generate("x", verify="gbv:2")
    with pytest.raises(ValueError, match="cannot have a tree"):
        slipstream.load(verify="gbv:2", tree=(2, 1))
    with pytest.raises(ValueError, match="several paths"):
        slipstream.load(verify="gbv:2", exact_shape=True)
    with pytest.raises(ValueError, match="too large"):
        slipstream.load(verify="gbv:32", gamma=60)
    with pytest.raises(ValueError, match="use slipstream"):
        slipstream.custom_generate("draft", verifier=rules.gbv(2))
    with pytest.raises(ValueError, match="needs a model as draft"):
        slipstream.load(None, "lookup", verify="gbv:2")


@pytest.mark.slow
def test_a_plan_measures_paths() -> None:
    found = run("plan", "--quick", "--verify", "gbv:2", "--temperature", "1", "--gamma", "2", "--json")
    assert found.exit_code == 0 and '"verify": "gbv:2"' in found.output, found.output
