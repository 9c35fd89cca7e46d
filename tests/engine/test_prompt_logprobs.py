"""Prompts that are scored: the log-likelihoods of transformers, whatever else runs, and however they are read."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import slipstream
from slipstream.cache.prefixes import PrefixCache
from slipstream.core.request import Row
from slipstream.decoding.scheduler import Scheduler
from slipstream.models.tiny import tiny_config, tiny_model
from toys import FAMILIES, tiny

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7], [8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def expected(model: PreTrainedModel, prompt: list[int]) -> list[float]:
    """The log-softmax of transformers' own logits at each token of the prompt but the first."""
    with torch.inference_mode():
        logs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [float(logs[place, token]) for place, token in enumerate(prompt[1:])]


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny(FAMILIES["llama"]),
    "qwen2": lambda: tiny(FAMILIES["qwen2"]),  # with windows
    "lfm2": lambda: tiny_model(transformers.Lfm2ForCausalLM, tiny_config(transformers.Lfm2Config), 0),  # with a state
}


@pytest.mark.parametrize("family", MODELS)
def test_prompts_are_scored_as_by_the_model_itself(family: str) -> None:
    model = MODELS[family]()
    engine = slipstream.load(model, batch_size=3)
    for most, extra in ((0, {}), (4, {"logprobs": 1, "n": 2})):
        done = engine.generate(PROMPTS, max_new_tokens=most, prompt_logprobs=2, **extra)
        free = engine.generate(PROMPTS, max_new_tokens=most, **extra) if most else done
        for place, one in enumerate(done):
            prompt = PROMPTS[place // (2 if extra else 1)]
            assert one.prompt_logprobs is not None and (one.finish_reason, len(one.tokens)) == ("length", most)
            assert [each.token for each in one.prompt_logprobs] == prompt[1:]
            found = [each.logprob for each in one.prompt_logprobs]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected(model, prompt)), atol=1e-4, rtol=1e-4)
            assert all(len(each.top) == 2 and each.top[0][1] >= each.logprob for each in one.prompt_logprobs)
        assert [one.tokens for one in done] == [one.tokens for one in free]


def test_another_model_gives_other_scores() -> None:
    """The control of the comparison."""
    scored = slipstream.load(tiny(FAMILIES["llama"], 1)).generate(PROMPTS[:1], max_new_tokens=0, prompt_logprobs=0)
    found = [each.logprob for each in scored[0].prompt_logprobs or ()]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected(tiny(FAMILIES["llama"]), PROMPTS[0])), atol=1e-4, rtol=1e-4
        )


def test_scores_do_not_depend_on_company_pieces_and_caches() -> None:
    """Pieces of two tokens, rows that run meanwhile, prefixes that are known, and a prompt that comes twice."""
    model = tiny(FAMILIES["llama"])
    engine = slipstream.load(model, batch_size=2)
    scored: dict[str, Any] = {"max_new_tokens": 2, "prompt_logprobs": 1}
    with Scheduler(engine.decoder, prefill_chunk=2, prefix_cache=PrefixCache(1 << 20)) as scheduler:

        def add(prompt: list[int], **options: Any) -> Row:
            return scheduler.add(engine.prepare([tuple(prompt)], options, shared=True).generations[0].request)

        rows = [add(PROMPTS[0], max_new_tokens=30), add(PROMPTS[0], **scored)]
        for _ in range(4):
            scheduler.step()
        rows += [add(PROMPTS[0], **scored), add(PROMPTS[2], max_new_tokens=0, prompt_logprobs=0)]
        while scheduler.busy:
            scheduler.step()
    for row, prompt in zip(rows[1:], (PROMPTS[0], PROMPTS[0], PROMPTS[2]), strict=True):
        found = [each.logprob for each in row.prompt_logprobs]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected(model, prompt)), atol=1e-4, rtol=1e-4)
        assert not math.isnan(sum(found)) and row.finish_reason == "length"


def test_streams_of_scored_prompts_end() -> None:
    engine = slipstream.load(tiny(FAMILIES["llama"]))
    pieces = list(engine.stream_batch(PROMPTS[:2], max_new_tokens=0, prompt_logprobs=0))
    assert [(index, piece.token, piece.source) for index, piece in pieces] == [(0, None, "length"), (1, None, "length")]
    assert all(piece.completion and piece.completion.prompt_logprobs is not None for _, piece in pieces)


def test_what_cannot_be_scored_is_refused() -> None:
    engine = slipstream.load(tiny(FAMILIES["llama"]))
    with pytest.raises(ValueError, match="max_new_tokens=0 is not possible"):
        engine.generate([[1, 2]], max_new_tokens=0)
    with pytest.raises(ValueError, match="num_beams=2 excludes prompt_logprobs"):
        engine.generate([[1, 2]], num_beams=2, prompt_logprobs=1)
    exact = slipstream.load(tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], 1), exact_shape=True)
    with pytest.raises(ValueError, match="exact_shape fixes"):
        exact.generate([[1, 2]], prompt_logprobs=1)
