"""What a call may ask for: samples, seeds, ends, echo, time, chats with tools, and requests for shared batches."""

import time
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.round import Round
from slipstream.decoding.controllers import Planned
from slipstream.decoding.rules import COUPLED, TOKEN
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.requests import Chat, read_prompts
from toys import FAMILIES, tiny

PROMPTS = ["def add(a, b):\n", "x =", "import os"]
HOT: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}


def texts(done: list[slipstream.Completion]) -> list[str]:
    return [completion.text for completion in done]


# ---- samples and seeds ------------------------------------------------------------------------------------------


def test_samples_stand_side_by_side_and_differ(engine: slipstream.Engine) -> None:
    one = texts(engine.generate(PROMPTS, **HOT))
    three = texts(engine.generate(PROMPTS, n=3, **HOT))
    assert three[::3] == one
    assert len(set(three)) == 9
    assert texts(engine.generate(PROMPTS[0], n=2, **HOT)) == three[:2]


def test_samples_are_equal_prompts(engine: slipstream.Engine) -> None:
    assert texts(engine.generate(["x ="] * 3, **HOT)) == texts(engine.generate("x =", n=3, **HOT))


@pytest.mark.parametrize("verify", ["block", "coupled"])
def test_a_seed_for_each_prompt_is_the_seed_that_it_has_alone(engine: slipstream.Engine, verify: str) -> None:
    seeds = [5, 0, 7]
    together = texts(engine.generate(PROMPTS, seed=seeds, verify=verify, **HOT))
    alone = [
        engine.generate(prompt, seed=seed, verify=verify, **HOT)[0].text
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert together == alone
    assert together != texts(engine.generate(PROMPTS, seed=5, verify=verify, **HOT))


def test_equal_prompts_with_seeds_of_their_own_have_the_texts_of_their_seeds(engine: slipstream.Engine) -> None:
    first, second, again = texts(engine.generate(["x ="] * 3, seed=[1, 2, 1], **HOT))
    assert [first, second] == [engine.generate("x =", seed=seed, **HOT)[0].text for seed in (1, 2)]
    assert len({first, second, again}) == 3  # the same seed twice: two samples


# ---- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_tokens_end_a_text_as_eos_does(engine: slipstream.Engine, ignore_eos: bool) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": ignore_eos}
    whole = engine.generate(PROMPTS[0], **settings)[0]
    end = whole.tokens[9]
    place = whole.tokens.index(end)
    for plain in (True, False):
        cut = engine.generate(PROMPTS[0], stop_token_ids=[end], plain=plain, **settings)[0]
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[: place + 1], "stop")
        assert cut.text == engine.decode(whole.tokens[:place])
    *_, last = engine.stream(PROMPTS[0], stop_token_ids=[end], **settings)
    assert (last.token, last.completion and last.completion.text) == (end, cut.text)


def test_there_is_no_end_before_the_least_length(engine: slipstream.Engine) -> None:
    whole = engine.generate(PROMPTS[0], max_new_tokens=24, ignore_eos=True)[0]
    end = whole.tokens[2]
    for name in ("min_new_tokens", "min_tokens"):
        for plain in (True, False):
            ends: dict[str, Any] = {"stop_token_ids": [end], "ignore_eos": True, name: 12, "plain": plain}
            done = engine.generate(PROMPTS[0], max_tokens=24, **ends)[0]
            assert end not in done.tokens[:12] and len(done.tokens) >= 12
    assert len(engine.generate(PROMPTS[0], max_tokens=24, stop_token_ids=[end])[0].tokens) == 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ngrams_are_not_repeated_just_as_in_transformers(size: int) -> None:
    model, prompt = tiny(FAMILIES["llama"]), [1, 2, 3, 1, 2]
    engine = slipstream.load(model, tiny(FAMILIES["llama"], 1), gamma=3)
    how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "no_repeat_ngram_size": size, "pad_token_id": 0}
    want = model.generate(torch.tensor([prompt]), **how)[0, 5:].tolist()
    settings: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    for plain in (True, False):
        [done] = engine.generate(prompt, no_repeat_ngram_size=size, plain=plain, **settings)
        assert list(done.tokens) == want
    free = engine.generate(prompt, **settings)[0].tokens
    grams = [free[i : i + size] for i in range(30 - size + 1)]
    assert len(set(grams)) < len(grams) and list(free) != want  # there was something to forbid


def test_a_text_ends_after_the_round_in_which_its_time_is_over(engine: slipstream.Engine) -> None:
    whole = engine.generate(PROMPTS, max_new_tokens=48, ignore_eos=True)
    started: list[float] = []

    def slowly(round: Round) -> None:
        started.append(time.monotonic())
        time.sleep(0.06)

    done = engine.generate(PROMPTS, max_new_tokens=48, ignore_eos=True, max_time=0.15, on_round=slowly)
    for cut, full in zip(done, whole, strict=True):
        assert cut.finish_reason == "length" and not cut.context_full
        assert 0 < len(cut.tokens) < 48 and cut.tokens == full.tokens[: len(cut.tokens)]
        assert cut.text == engine.decode(cut.tokens)
    assert len(started) <= 4  # 0.06 s each, at most 6 tokens each
    unhurried = engine.generate(PROMPTS, max_new_tokens=48, ignore_eos=True, max_time=600)
    assert [one.tokens for one in unhurried] == [one.tokens for one in whole]
    *_, last = engine.stream(PROMPTS[0], max_new_tokens=500, max_time=1e-6)
    assert last.completion and last.completion.finish_reason == "length" and len(last.completion.tokens) < 10


# ---- echo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ["\n"]])
def test_echo_begins_texts_with_their_prompts(engine: slipstream.Engine, stop: Any) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 16, "stop": stop}
    bare, echoed = (engine.generate(PROMPTS, echo=echo, **settings) for echo in (False, True))
    assert texts(echoed) == [prompt + done.text for prompt, done in zip(PROMPTS, bare, strict=True)]
    assert [done.tokens for done in echoed] == [done.tokens for done in bare]
    assert "".join(piece.text for piece in engine.stream(PROMPTS[0], echo=True, **settings)) == echoed[0].text
    ids = list(engine.encode(PROMPTS[0]))
    assert engine.generate(ids, echo=True, **settings)[0].text == echoed[0].text


def test_echo_needs_a_text() -> None:
    bare = slipstream.load(tiny(FAMILIES["llama"]))
    with pytest.raises(ValueError, match="there is no tokenizer"):
        bare.generate([1, 2], echo=True)


# ---- requests for batches that others share ---------------------------------------------------------------------


def test_a_shared_request_brings_its_rule_and_its_gamma(engine: slipstream.Engine) -> None:
    asked: list[tuple[dict[str, Any], Any, Any]] = [
        ({}, None, None),
        ({"gamma": 3}, None, 3),
        ({"gamma": 3, "plain": True}, None, 0),
        ({"verify": "coupled"}, COUPLED, None),
        ({"verify": TOKEN, "gamma": 0}, TOKEN, 0),
    ]
    for options, rule, gamma in asked:
        job = engine.prepare(["x"], options, shared=True)
        request = job.generations[0].request
        assert (request.rule, request.gamma) == (rule, gamma)
        assert job.decoder is engine.decoder
        own = engine.prepare(["x"], options).generations[0].request
        assert (own.rule, own.gamma) == (None, None)  # a call of its own has a decoder of its own


@pytest.mark.parametrize("gamma", ["auto", Planned({1: 2})])
def test_what_chooses_gamma_for_a_whole_batch_is_refused(engine: slipstream.Engine, gamma: Any) -> None:
    with pytest.raises(ValueError, match="is not possible in a batch that is shared with other calls: give a whole"):
        engine.prepare(["x"], {"gamma": gamma}, shared=True)
    assert engine.prepare(["x"], {"gamma": gamma})


def test_what_the_scheduler_is_told(engine: slipstream.Engine) -> None:
    options = {"priority": -3, "cache_salt": "alice", "prediction": "return a", "max_time": 3}
    for generation in engine.prepare(PROMPTS, {**options, "n": 2}).generations:
        request = generation.request
        assert (request.priority, request.cache_salt, request.max_time) == (-3, "alice", 3)
        assert engine.decode(request.prediction) == "return a"
    first = engine.prepare(["x"], {}).generations[0].request
    assert (first.priority, first.cache_salt, first.prediction) == (0, "", ())


@pytest.mark.parametrize("pieces", [True, False])
def test_steps_tell_what_was_drafted_in_each_round(engine: slipstream.Engine, pieces: bool) -> None:
    [generation] = engine.prepare(["x ="], {"max_new_tokens": 24}).generations
    with Scheduler(engine.decoder) as scheduler:
        generation.row = scheduler.add(generation.request)
        while (round := scheduler.step()) is not None:
            list(generation.follow(round, 0)) if pieces else generation.record(round, 0)
    stats = generation.completion.stats
    assert len(generation.steps) == stats.target_calls
    assert [sum(column) for column in zip(*generation.steps, strict=True)] == [stats.drafted, stats.accepted]


# ---- chats ------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% endfor %}{% if loud %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture
def chatty(engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch) -> slipstream.Engine:
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATE)
    return engine


def test_a_chat_brings_tools_and_variables(chatty: slipstream.Engine) -> None:
    tools = [{"name": "add"}, {"name": "sub"}]
    cases: list[tuple[Any, str]] = [
        (MESSAGES, "[user] hi[assistant]"),
        (Chat(MESSAGES), "[user] hi[assistant]"),
        (Chat(MESSAGES, tools), "<add><sub>[user] hi[assistant]"),
        (Chat(MESSAGES, tools, {"loud": True}), "<add><sub>[user] hi![assistant]"),
        (Chat(MESSAGES, None, {"loud": True, "add_generation_prompt": False}), "[user] hi!"),
    ]
    for chat, text in cases:
        assert chatty.decode(chatty.encode(chat)) == text
        assert chatty.generate(chat, max_new_tokens=3)[0].tokens == chatty.generate(text, max_new_tokens=3)[0].tokens
    many = [chat for chat, _ in cases]
    assert [done.text for done in chatty.generate(many, max_new_tokens=1, echo=True)] == [
        text + chatty.generate(text, max_new_tokens=1)[0].text for _, text in cases
    ]


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        (Chat("hi"), "messages of prompt 0 is 'hi'"),
        (Chat(["hi"]), "messages of prompt 0 holds 'hi'"),  # type: ignore[list-item]
        (Chat([{"role": "user"}]), "a message of a chat has a"),
        (Chat(MESSAGES, 5), r"tools of prompt 0 is 5 \(int\)"),  # type: ignore[arg-type]
        (Chat(MESSAGES, None, {1: 2}), "template_kwargs of prompt 0 is a dict"),  # type: ignore[dict-item]
        (Chat(MESSAGES, None, {"chat_template": "x"}), "sets chat_template, which is not for the template"),
        (Chat(MESSAGES, None, {"tokenize": False}), "sets tokenize, which is not for the template"),
    ],
)
def test_chats_that_are_refused(chatty: slipstream.Engine, chat: Chat, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_prompts([chat])
    with pytest.raises(ValueError, match=says.replace("prompt 0", "the prompt")):
        chatty.prepare([chat], {})  # also where nobody has read it before
