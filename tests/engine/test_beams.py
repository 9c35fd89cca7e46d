"""Beam search through the engine: texts, scores, refusals, and calls that are broken off or go on."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.decoding.beam import BeamDecoder, most_tokens, searches_of
from slipstream.decoding.scheduler import MemoryLimit
from slipstream.engine.beams import BeamTexts
from slipstream.engine.engine import Engine, Interrupted
from slipstream.engine.generation import Completion
from slipstream.models.loading.pairings import EMBEDDED
from toys import rare

PROMPTS = ["def fibonacci(n):", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n"]
SETTINGS: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 20}


@cache
def engine(draft: str | None = "embedded") -> Engine:
    return slipstream.load(draft=draft, dtype="float32", batch_size=2)


def test_texts_stand_side_by_side_with_the_scores_of_transformers() -> None:
    done = engine().generate(PROMPTS, length_penalty=0.5, early_stopping=True, **SETTINGS)
    assert len(done) == 9
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.float32)
    for place, prompt in enumerate(PROMPTS):
        ids = torch.tensor([engine().encode(prompt)])
        mask = torch.ones_like(ids)
        named = {**SETTINGS, "output_scores": True, "return_dict_in_generate": True, "attention_mask": mask}
        out = model.generate(ids, length_penalty=0.5, early_stopping=True, do_sample=False, **named)
        ours = done[3 * place : 3 * place + 3]
        assert [each.score for each in ours] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
        for each, line in zip(ours, out.sequences[:, ids.shape[1] :].tolist(), strict=True):
            assert list(each.tokens) == line[: len(each.tokens)]
            assert each.text == engine().decode(each.tokens)
    assert [bool(each.stats.target_calls) for each in done] == [True, False, False] * 3


@pytest.mark.parametrize("draft", [None, *rare("lookup", "int4")])
def test_a_draft_changes_only_the_number_of_calls(draft: str | None) -> None:
    done, plain = engine(draft).generate(PROMPTS, **SETTINGS), engine().generate(PROMPTS, plain=True, **SETTINGS)
    assert [(each.tokens, each.finish_reason) for each in done] == [(each.tokens, each.finish_reason) for each in plain]
    assert [each.score for each in done] == pytest.approx([each.score for each in plain], abs=1e-4)
    assert sum(each.stats.target_calls for each in plain) == sum(each.stats.emitted for each in plain)


def test_searches_run_together_as_memory_allows() -> None:
    """Two fit by the batch; with memory for the longest alone they run one by one, and below that they are refused."""
    job = engine().prepare(PROMPTS[:2], SETTINGS)
    requests, decoder = [each.request for each in job.generations], job.decoder
    searches = searches_of(decoder.target, requests)
    lengths = [most_tokens(search, decoder.controller.most) for search in searches]
    least = next(size for size in range(1 << 16, 1 << 30, 1 << 16) if MemoryLimit(size, decoder).holds([max(lengths)]))
    assert not MemoryLimit(least, decoder).holds(lengths)
    alone = BeamDecoder(decoder, searches, memory=MemoryLimit(least, decoder))
    assert {len(running) for running in alone.rounds()} == {1}
    together = searches_of(decoder.target, requests)
    assert max(len(running) for running in BeamDecoder(decoder, together).rounds()) == 2
    found = [[each.tokens for each in search.hypotheses()] for search in searches]
    assert found == [[each.tokens for each in search.hypotheses()] for search in together]
    with pytest.raises(
        ValueError, match=r"^num_beams=4 is not possible for prompt [01]: with 20 new tokens the caches"
    ):
        BeamTexts(job, memory=least // 2)


@pytest.mark.slow
def test_graphs_find_the_same() -> None:
    compiled = slipstream.load(draft="embedded", dtype="float32", batch_size=2, compile=True)
    for plain in (True, False):
        done, want = (each.generate(PROMPTS, plain=plain, **SETTINGS) for each in (compiled, engine()))
        assert [each.tokens for each in done] == [each.tokens for each in want]
        assert [each.score for each in done] == pytest.approx([each.score for each in want], abs=1e-4)


def test_an_interrupted_search_gives_what_there_is_and_leaves_the_engine_free() -> None:
    def stop(index: int, completion: Completion) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        engine().generate(PROMPTS, on_completion=stop, **SETTINGS)
    assert len(caught.value.completions) == 9
    reasons = [each.finish_reason for each in caught.value.completions]
    assert "interrupted" in reasons and "length" in reasons
    assert engine().generate(PROMPTS[0], max_new_tokens=4)[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"tree": (2, 2)}, *rare({})])
def test_a_draft_serves_samples_and_beams_in_turn(how: dict[str, Any]) -> None:
    mixed = slipstream.load(draft="embedded", dtype="float32", batch_size=2, **how)
    beams = [each.tokens for each in engine().generate(PROMPTS, **SETTINGS)]
    texts = [each.tokens for each in engine().generate(PROMPTS, max_new_tokens=12)]
    for _ in range(2):
        assert [each.tokens for each in mixed.generate(PROMPTS, max_new_tokens=12)] == texts
        assert [each.tokens for each in mixed.generate(PROMPTS, **SETTINGS)] == beams
        stream = mixed.stream(PROMPTS[0], max_new_tokens=12)
        next(stream)
        with pytest.raises(RuntimeError, match="one call at a time"):
            mixed.generate(PROMPTS, **SETTINGS)
        stream.close()  # type: ignore[attr-defined]


def test_fewer_texts_than_asked_for_say_so() -> None:
    only = engine().encode("def")[0]
    forced = {token: float("-inf") for token in range(engine().decoder.target.vocab) if token != only}
    done = engine().generate(PROMPTS[:1], logit_bias=forced, num_beams=3, num_return_sequences=2, max_new_tokens=2)
    assert done[0].tokens == (only, only) and done[0].error is None
    assert done[1].finish_reason == "error" and "1 only" in str(done[1].error)


def test_echo_and_ends() -> None:
    first = engine().generate(PROMPTS[:1], num_beams=3, max_new_tokens=12)[0]
    end = first.tokens[4]
    done = engine().generate(PROMPTS[:1], num_beams=3, max_new_tokens=12, stop_token_ids=[end], echo=True)[0]
    assert done.finish_reason in ("stop", "length") and done.text.startswith(PROMPTS[0])
    assert end not in done.tokens[:-1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 2}, "excludes n: beams are no samples"),
    "logprobs": ({"logprobs": 1}, "excludes logprobs"),
    "stop": ({"stop": "\n"}, "excludes stop: beams end at tokens"),
    "prediction": ({"prediction": "x"}, "excludes prediction"),
    "max_time": ({"max_time": 3.0}, "excludes max_time"),
    "verify": ({"verify": "token"}, "excludes verify"),
    "too many": ({"num_return_sequences": 5}, "above num_beams=4"),
    "early": ({"early_stopping": "soon"}, "early_stopping='soon' is not possible"),
    "penalty": ({"length_penalty": float("inf")}, "length_penalty=inf is not possible"),
    "early number": ({"early_stopping": 1}, "early_stopping=1 is not possible"),
    "none": ({"num_beams": 0}, "num_beams=0 is not possible"),
    "half": ({"num_beams": 2.5}, "num_beams=2.5 is not possible"),
    "rounds": ({"on_round": print}, "on_round is not called"),
    "alone": ({"num_beams": 1, "length_penalty": 2.0}, "length_penalty is for beam search"),
    "samples": ({"num_beams": None, "num_return_sequences": 2}, "for samples of a prompt, use n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_in_a_sentence(name: str) -> None:
    options, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        engine().generate(PROMPTS[:1], **{"num_beams": 4, **options})
    assert not engine().decoder.target.lengths


def test_nothing_streams_before_the_end() -> None:
    def first(pieces: Iterator[Any]) -> Any:
        return next(pieces)

    with pytest.raises(ValueError, match="cannot stream"):
        engine().stream(PROMPTS[0], num_beams=2)
    with pytest.raises(ValueError, match="cannot stream"):
        first(engine().stream_batch(PROMPTS, num_beams=2))


def test_exact_shape_is_refused() -> None:
    fixed = slipstream.load(dtype="float32", exact_shape=True)
    with pytest.raises(ValueError, match="exact_shape"):
        fixed.generate(PROMPTS[0], num_beams=2)


def test_a_choice_of_drafts_cannot_draft_for_beams() -> None:
    with pytest.raises(ValueError, match="cannot draft for beam search"):
        slipstream.load(draft="embedded|lookup", dtype="float32").generate(PROMPTS[0], num_beams=2)
