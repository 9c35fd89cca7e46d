"""`slipstream models`: tiny models of architectures are tried as transformers has them, and what is wrong is seen."""

import json
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from transformers import __version__

from slipstream.check import families
from slipstream.check.families import FamilyTrial, attempt, attempts, counted, table
from terminal import run
from toys import rare

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
LLAMA = FamilyTrial("llama", "LlamaForCausalLM")

WAYS = {
    "OlmoForCausalLM": "length",
    "RobertaForCausalLM": "length",
    "BartForCausalLM": "state, one pass",
    "BloomForCausalLM": "state, one pass",
    "GPTNeoForCausalLM": "state, one pass",
    "Qwen3NextForCausalLM": "state, one pass",
    "Lfm2ForCausalLM": "state, one pass",
    "NemotronHForCausalLM": "state, one pass",
    "DeepseekV32ForCausalLM": "length",
    "GlmMoeDsaForCausalLM": "length",
    "xLSTMForCausalLM": "state, two passes",
    "JambaForCausalLM": "state, token by token",
    "T5ForConditionalGeneration": "length",
    "LEDForConditionalGeneration": "state, two passes",
    "VoxtralForConditionalGeneration": "length",
    "MambaForCausalLM": "state, token by token",
    "NllbMoeForConditionalGeneration": "state, two passes",
}


def one(name: str) -> FamilyTrial:
    (found,) = families.architectures([name])
    return found


SIMILAR = ("RobertaForCausalLM", "BartForCausalLM", "GPTNeoForCausalLM", "GlmMoeDsaForCausalLM", "NemotronHForCausalLM")
SIMILAR += ("OlmoForCausalLM", "JambaForCausalLM", "xLSTMForCausalLM", "BloomForCausalLM", "DeepseekV32ForCausalLM")
SIMILAR += ("NllbMoeForConditionalGeneration", "VoxtralForConditionalGeneration", "MambaForCausalLM")
"""Those that work in the way of another one, by the same lines."""


@pytest.mark.parametrize("name", [*(name for name in WAYS if name not in SIMILAR), *rare(*SIMILAR)])
def test_what_works_and_by_which_way(name: str) -> None:
    outcome = attempt(one(name))
    assert (outcome.verdict, outcome.way) == ("works", WAYS[name]), outcome.why


SEEING = {
    "Qwen2_5_VLForConditionalGeneration": "length",
    "Mistral3ForConditionalGeneration": "length",
    "Lfm2VlForConditionalGeneration": "state, one pass",
    "Florence2ForConditionalGeneration": "state, two passes",
}
SHOWN = "Lfm2VlForConditionalGeneration"


@pytest.mark.parametrize("name", [SHOWN, *rare(*(name for name in SEEING if name != SHOWN))])
def test_vision_models_work_on_texts_by_name(name: str) -> None:
    assert one(name).vision
    outcome = attempt(one(name))
    assert (outcome.verdict, outcome.way) == ("works", SEEING[name]), outcome.why
    assert counted([outcome]) == "1 vision architectures: 1 works."


def test_what_depends_on_how_much_was_read_first_is_refused() -> None:
    outcome = attempt(one("UnlimitedOcrForConditionalGeneration"))
    assert outcome.verdict == "refused" and "cannot be read in pieces" in outcome.why


@pytest.mark.parametrize("name", ["RecurrentGemmaForCausalLM", *rare("OpenAIGPTLMHeadModel", "XLMWithLMHeadModel")])
def test_what_hands_out_no_state_is_refused_in_one_sentence(name: str) -> None:
    outcome = attempt(one(name))
    assert outcome.verdict == "refused"
    assert outcome.why.startswith(f"{name} hands out no state") and outcome.why.endswith("use another model.")


def test_control_texts_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is never rolled back, in a model that is not tried when it is loaded."""
    name = "Qwen3NextForCausalLM"
    monkeypatch.setattr("slipstream.models.recurrent.scorer.probe", lambda scorer, kind: None)
    monkeypatch.setattr("slipstream.models.recurrent.rewinding.Within.shortened", lambda self, tokens: self)
    assert attempt(one(name)).verdict == "differs"


def test_a_process_that_dies_or_never_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(architecture: FamilyTrial) -> Any:
        raise SystemExit(1)

    monkeypatch.setattr(families, "attempt", die)
    (died,) = attempts([LLAMA])
    assert (died.verdict, died.why) == ("fails", "its process died")
    monkeypatch.setattr(families, "attempt", lambda architecture: sleep(60))
    (late,) = attempts([LLAMA], seconds=0.5)
    assert late.verdict == "fails" and "did not end within 0.5 seconds" in late.why


def test_the_table_counts_and_gives_reasons() -> None:
    works = attempt(LLAMA)
    refused = replace(works, family="x", name="X", encoder=True, verdict="refused", why="first\nsecond | third")
    text = table([refused, works])
    assert counted([works]) == "1 causal architectures: 1 works."
    assert "- **causal, length**: LlamaForCausalLM\n" in text
    assert text.endswith("| x | X | refused | first second / third |")


def test_the_command_prints_a_line_for_each_and_names_the_unknown() -> None:
    done = run("models", "--try", "--json", "olmo2")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[0])
    assert (found["family"], found["verdict"], found["way"]) == ("olmo2", "works", "length")
    listed = run("models", "qwen3_next")
    assert listed.stdout.split() == ["qwen3_next", "Qwen3NextForCausalLM"]
    with pytest.raises(ValueError, match=r"^no_such: transformers has no such model .*\.$"):
        families.architectures(["no_such"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(f"transformers {__version__[:4]} " not in PAGE, reason="the page is of another transformers")
def test_the_table_in_the_docs_is_what_is_found() -> None:
    """A family that stops working is seen, and one that begins to."""
    assert table(list(attempts(families.architectures()))) in PAGE
