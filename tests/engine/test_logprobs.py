"""Logprobs of emitted tokens: those of the law that each was really sampled from, whatever happened in its round."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

import slipstream
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.generation import Completion, Piece, TokenLogprobs
from toys import FAMILIES, HF_VOCAB, tiny

PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
SHAPED: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.4}


def near(seed: int) -> Any:
    """A tiny model whose laws are far from even, so that drafts are kept and refused."""
    model = tiny(FAMILIES["llama"], seed)
    model.lm_head.weight.data *= 12
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    return near(0)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    """A draft that often agrees."""
    model = near(0)
    torch.manual_seed(3)
    model.lm_head.weight.data += 0.25 * torch.randn_like(model.lm_head.weight)
    return model


@pytest.fixture(scope="module", params=["chain", "tree", "plain"])
def engine(request: Any, target: Any, draft: Any) -> slipstream.Engine:
    how: dict[str, Any] = {"chain": {"gamma": 4}, "tree": {"tree": (3, 2, 1)}, "plain": {}}[request.param]
    return slipstream.load(target, None if request.param == "plain" else draft, **how)


def processed(target: Any, prompt: Sequence[int], output: Sequence[int], chain: Sequence[Any]) -> Tensor:
    """log p (tokens, vocab) of a teacher-forced text by transformers' own model and processors."""
    text = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = target(text).logits[0, len(prompt) - 1 : -1].float()
    rows = []
    for place, scores in enumerate(logits):
        row = scores[None]
        for processor in chain:
            row = processor(text[:, : len(prompt) + place], row)
        rows.append(row[0])
    return torch.stack(rows).log_softmax(-1)


def chain_of(settings: dict[str, Any]) -> list[Any]:
    if not settings.get("temperature"):
        return [RepetitionPenaltyLogitsProcessor(settings.get("repetition_penalty", 1.0))]
    return [
        RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]),
        TemperatureLogitsWarper(settings["temperature"]),
        TopKLogitsWarper(settings["top_k"]),
    ]


def assert_logprobs(found: Sequence[TokenLogprobs] | None, tokens: Sequence[int], want: Tensor, top: int) -> None:
    assert found is not None and [each.token for each in found] == list(tokens)
    own = torch.tensor([each.logprob for each in found])
    torch.testing.assert_close(own, want[range(len(tokens)), list(tokens)], rtol=0, atol=2e-4)
    for each, logs in zip(found, want, strict=True):
        assert [value for _, value in each.top] == sorted((value for _, value in each.top), reverse=True)
        assert len(dict(each.top)) == top
        ids, values = map(list, zip(*each.top, strict=True))
        torch.testing.assert_close(torch.tensor(values), logs.topk(top).values, rtol=0, atol=2e-4)
        torch.testing.assert_close(torch.tensor(values), logs[ids], rtol=0, atol=2e-4)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.4}, SHAPED], ids=["greedy", "penalized", "sampled"])
def test_logprobs_are_those_of_transformers(engine: slipstream.Engine, target: Any, settings: dict[str, Any]) -> None:
    done = engine.generate(PROMPTS, max_new_tokens=14, logprobs=4, ignore_eos=True, **settings)
    for prompt, each in zip(PROMPTS, done, strict=True):
        want = processed(target, prompt, each.tokens, chain_of(settings))
        assert_logprobs(each.logprobs, each.tokens, want, 4)
        bare = processed(target, prompt, each.tokens, [])  # the control: another law would be noticed
        if settings:
            with pytest.raises(AssertionError):
                assert_logprobs(each.logprobs, each.tokens, bare, 4)
    if engine.decoder.controller.most:  # rounds with kept and with refused drafts were among them
        assert any(0 < each.stats.accepted < each.stats.drafted for each in done)


def test_logprobs_in_a_batch_of_every_kind(engine: slipstream.Engine, target: Any) -> None:
    """Greedy rows beside sampled ones, of different calls, rules and lengths; some want no logprobs."""
    calls: list[dict[str, Any]] = [{"logprobs": 2}, {"logprobs": 3, **SHAPED, "verify": "token"}, {"temperature": 1.0}]
    prompts = [*map(tuple, PROMPTS)]
    options = [{"max_new_tokens": 9 + 3 * i, "ignore_eos": True, **call} for i, call in enumerate(calls)]
    jobs = [(engine.prepare(prompts, each, shared=True), call) for each, call in zip(options, calls, strict=True)]
    pieces: dict[int, list[Piece]] = {}
    with Scheduler(engine.decoder) as scheduler:
        generations = [one for job, _ in jobs for one in job.generations]
        for number, generation in enumerate(generations):
            generation.row = scheduler.add(generation.request, number)
        while (round := scheduler.step()) is not None:
            for place, row in enumerate(round.rows):
                pieces.setdefault(row.index, []).extend(generations[row.index].follow(round, place))
    settings = [call for job, call in jobs for _ in job.generations]
    for number, call in enumerate(settings):
        last = pieces[number][-1].completion
        assert last is not None
        if "logprobs" not in call:
            assert last.logprobs is None and all(piece.logprobs is None for piece in pieces[number])
            continue
        found = tuple(piece.logprobs for piece in pieces[number])
        assert found == last.logprobs
        want = processed(target, PROMPTS[number % 3], last.tokens, chain_of(call))
        assert_logprobs(last.logprobs, last.tokens, want, call["logprobs"])


@pytest.mark.parametrize("settings", [{}, SHAPED], ids=["greedy", "sampled"])
def test_a_text_cut_inside_a_round_has_the_logprobs_of_its_tokens(
    engine: slipstream.Engine, settings: dict[str, Any]
) -> None:
    whole = engine.generate(PROMPTS[0], max_new_tokens=14, logprobs=1, ignore_eos=True, **settings)[0]
    for end in set(whole.tokens):
        cut = engine.generate(
            PROMPTS[0], max_new_tokens=14, logprobs=1, ignore_eos=True, stop_token_ids=[end], **settings
        )[0]
        assert cut.tokens == whole.tokens[: whole.tokens.index(end) + 1] and cut.finish_reason == "stop"
        assert_close(cut, whole)
    short = engine.generate(PROMPTS[0], max_new_tokens=5, logprobs=1, ignore_eos=True, **settings)[0]
    assert len(short.tokens) == 5


def assert_close(cut: Completion, whole: Completion) -> None:
    """The logprobs of a text are those of the beginning of another."""
    assert cut.logprobs is not None and whole.logprobs is not None and len(cut.logprobs) == len(cut.tokens)
    for ours, expected in zip(cut.logprobs, whole.logprobs, strict=False):
        assert ours.token == expected.token and math.isclose(ours.logprob, expected.logprob, abs_tol=2e-4)


def test_they_are_of_the_law_after_all_processors(engine: slipstream.Engine) -> None:
    done = engine.generate(PROMPTS, max_new_tokens=6, temperature=1.0, top_k=1, logprobs=2, ignore_eos=True)
    for each in done:
        assert each.logprobs and all(one.logprob == 0.0 for one in each.logprobs)
        assert all(one.top[0] == (one.token, 0.0) and one.top[1][1] == -math.inf for one in each.logprobs)
    none = engine.generate(PROMPTS, max_new_tokens=6, temperature=1.0, top_k=1, ignore_eos=True)
    assert [each.logprobs for each in none] == [None] * 3


def test_zero_is_the_token_alone_and_many_are_all(engine: slipstream.Engine) -> None:
    [one] = engine.generate(PROMPTS[0], max_new_tokens=3, logprobs=0)
    assert one.logprobs and [each.top for each in one.logprobs] == [()] * len(one.tokens)
    [all_] = engine.generate(PROMPTS[0], max_new_tokens=3, logprobs=10 * HF_VOCAB)
    assert all_.logprobs and all(len(each.top) == HF_VOCAB for each in all_.logprobs)
    assert math.isclose(sum(math.exp(value) for _, value in all_.logprobs[0].top), 1, rel_tol=1e-5)


class Forcing(LogitsProcessor):
    """Makes one token certain, by infinity."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 5] = math.inf
        return scores


def test_a_token_that_a_processor_forces_is_certain(engine: slipstream.Engine) -> None:
    [done] = engine.generate(PROMPTS[0], max_new_tokens=2, logprobs=2, processors=[Forcing()], ignore_eos=True)
    assert done.tokens == (5, 5) and done.logprobs
    assert [(each.logprob, each.top[0], each.top[1][1]) for each in done.logprobs] == [(0.0, (5, 0.0), -math.inf)] * 2
