"""/v1/completions of a real server process, through OpenAI's own client."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

import slipstream
from serve.conftest import ServerProcess

PROMPT = "def moving_average(values, window):"


def test_greedy_text_is_the_librarys(client: openai.OpenAI, engine: slipstream.Engine) -> None:
    answer = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=24, temperature=0)
    [expected] = engine.generate(PROMPT, max_new_tokens=24)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.prompt_tokens and answer.object == "text_completion"
    assert answer.usage.completion_tokens == len(expected.tokens) == 24


def test_a_stream_is_the_whole_text_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 24, "temperature": 1, "seed": 5}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_without_a_seed_texts_differ_and_with_one_they_do_not(client: openai.OpenAI) -> None:
    def text(**more: Any) -> str:
        answer = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=24, temperature=1.5, **more)
        return answer.choices[0].text

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text() != text()
    assert text(seed=-1) == text(seed=-1)


def test_several_prompts_and_samples_come_in_order(client: openai.OpenAI, engine: slipstream.Engine) -> None:
    prompts = [PROMPT, "import os\n"]
    answer = client.completions.create(
        model="embedded", prompt=prompts, n=2, max_tokens=8, temperature=1, seed=7, logit_bias={"11": -100}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = engine.generate(
        prompts, n=2, max_new_tokens=8, temperature=1.0, seed=7, verify="coupled", logit_bias={11: -math.inf}
    )
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert answer.usage.prompt_tokens == sum(one.prompt_tokens for one in expected[::2])
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected)


def test_token_ids_are_prompts(client: openai.OpenAI, engine: slipstream.Engine) -> None:
    ids = list(engine.encode(PROMPT))
    texts = [
        client.completions.create(model="embedded", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in (PROMPT, ids, [ids])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_echo_and_stop(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == PROMPT + plain
    stop = plain[9:12]
    ended = client.completions.create(**asked, stop=stop).choices[0]
    assert ended.text == plain[: plain.index(stop)] and ended.finish_reason == "stop"
    streamed = list(client.completions.create(**asked, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == ended.text


def test_logprobs_are_those_of_the_law_sampled(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 6, "seed": 1}
    free = client.completions.create(**asked, temperature=1, logprobs=3).choices[0].logprobs
    assert len(free.tokens) == len(free.token_logprobs) == len(free.top_logprobs) == 6
    assert all(-50 < logprob <= 0 for logprob in free.token_logprobs)
    assert free.text_offset[0] == 0 and free.text_offset == sorted(free.text_offset)
    only = client.completions.create(**asked, temperature=1, logprobs=1, extra_body={"top_k": 1}).choices[0].logprobs
    assert all(abs(logprob) < 1e-6 for logprob in only.token_logprobs)


def test_acceptance_is_told(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    extra = {"speculative": {"gamma": 3, "explain": True, "detailed": True}}
    answer = client.completions.create(**asked, extra_body=extra).model_dump()
    decoding = answer["metrics"]["speculative_decoding"]
    assert max(decoding["per_step_drafted"]) == 3
    assert sum(decoding["per_step_accepted"]) == decoding["num_accepted_draft_tokens"]
    assert sum(decoding["acceptance_histogram"]) == len(decoding["per_step_drafted"])
    assert sum(decoding["per_step_accepted"]) + len(decoding["per_step_accepted"]) >= 32
    sources = [token["source"] for token in answer["choices"][0]["explained"]]
    assert sources.count("draft") == decoding["num_accepted_draft_tokens"]
    assert answer["timings"]["draft_n"] == decoding["num_draft_tokens"]
    assert answer["timings"]["predicted_n"] == 32
    plain = client.completions.create(**asked, extra_body={"speculative": False}).model_dump()
    assert "speculative_decoding" not in plain["metrics"]
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]


def test_other_projects_names_are_served(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "temperature": 0}

    def post(**more: Any) -> Any:
        answer = http.post("/v1/completions", json={**asked, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(**more: Any) -> str:
        return post(**more)["choices"][0]["text"]

    penalized = text(max_tokens=24, repetition_penalty=1.5)
    assert text(n_predict=24, repeat_penalty=1.5) == penalized != text(max_tokens=24)
    forms = {"regex": "[0-9]{3}", "choice": ["yes", "no"], "grammar": 'start: "a"', "json": {"const": 7}}
    for form, value in forms.items():
        assert text(**{f"guided_{form}": value}) == text(structured_outputs={form: value})
    long = {"prompt": PROMPT * 20, "max_tokens": 2}
    counts = [post(**long, cache_prompt=use)["timings"]["cache_n"] for use in (True, True, False, None)]
    assert counts[1] == counts[3] > 0 == counts[2]
    with http.stream("POST", "/v1/completions", json={**asked, "stream": True, "timings_per_token": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert len(counts) > 2 and counts == sorted(counts) and counts[-1] == 16


BEAMS = {"use_beam_search": True, "n": 2}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model that does not fill in": ({"suffix": "end"}, "suffix"),
    "unknown nested field": ({"speculative": {"gama": 4}}, "speculative.gama"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "too hot": ({"temperature": 101}, "temperature"),
    "bias key": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias of a token that is not there": ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    "too many samples": ({"n": 1000}, "n"),
    "too many logprobs": ({"logprobs": 1000}, "logprobs"),
    "rule": ({"speculative": {"verify": "guess"}}, "speculative.verify"),
    "lossless": ({"speculative": {"verify": "lenient:0.5", "lossless": True}}, "speculative.verify"),
    "minimum above the maximum": ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    "best of fewer": ({"best_of": 2, "n": 3}, "best_of"),
    "best of too many": ({"best_of": 1000}, "best_of"),
    "best of a stream": ({"best_of": 2, "stream": True}, "best_of"),
    "one beam": ({"use_beam_search": True}, "use_beam_search"),
    "a stream of beams": ({**BEAMS, "stream": True}, "stream"),
    "logprobs of beams": ({**BEAMS, "logprobs": 1}, "use_beam_search"),
    "beams with a grammar": ({**BEAMS, "response_format": {"type": "json_object"}}, "response_format"),
    "beams' penalty without beams": ({"length_penalty": 1.0}, "length_penalty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_a_400_that_names_the_field(client: openai.OpenAI, case: str) -> None:
    more, field = WRONG[case]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="embedded", prompt=PROMPT, extra_body=more)
    assert caught.value.param == field, caught.value.message
    assert caught.value.type == "invalid_request_error" and "_new_tokens" not in caught.value.message


def test_another_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here") as caught:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(http: httpx.Client, path: str) -> None:
    chat = [{"role": "user", "content": PROMPT * 200}]
    fields = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}
    field, prompt = fields[path], chat if "chat" in path else PROMPT * 200
    for value, code in ((prompt, "context_length_exceeded"), (5, None)):
        answer = http.post(path, json={field: value, "stream": True})
        assert answer.status_code == 400
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, field)


def test_beam_search_is_the_librarys(client: openai.OpenAI, engine: slipstream.Engine) -> None:
    prompts = [PROMPT, "import os\n"]
    more = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "early_stopping": True}
    answer = client.completions.create(model="embedded", prompt=prompts, n=2, max_tokens=8, extra_body=more)
    beams: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True}
    expected = engine.generate(prompts, max_new_tokens=8, **beams)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [choice.model_extra["score"] for choice in answer.choices] == pytest.approx([one.score for one in expected])
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected)
    assert answer.usage.prompt_tokens == sum(one.prompt_tokens for one in expected[::2])


def test_a_search_is_counted_by_the_metrics(server: ServerProcess, http: httpx.Client) -> None:
    def count(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"slipstream:{name}"))

    totals = ("prompt_tokens", "generation_tokens", "request_success")
    names = [*(f"{name}_total" for name in totals), "e2e_request_latency_seconds_count"]
    before = {name: count(name) for name in names}
    answer = server.client().completions.create(model="embedded", prompt=PROMPT, max_tokens=6, extra_body=BEAMS)
    grown = {name: count(name) - before[name] for name in names}
    assert grown["prompt_tokens_total"] == answer.usage.prompt_tokens
    assert grown["generation_tokens_total"] == answer.usage.completion_tokens
    assert grown["request_success_total"] == 2
    assert grown["e2e_request_latency_seconds_count"] == 1


def test_a_search_waits_for_what_runs_and_others_wait_for_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    alone = client.completions.create(**asked).choices[0].text
    searched = {**asked, "extra_body": BEAMS}
    want = client.completions.create(**searched).choices
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(client.completions.create, **each) for each in [asked, searched] * 3]
        found = [call.result().choices for call in calls]
    assert [choices[0].text for choices in found[::2]] == [alone] * 3
    assert all([one.text for one in choices] == [one.text for one in want] for choices in found[1::2])


def test_the_best_of_several_samples_are_answered(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 8, "temperature": 1.5, "seed": 3}
    several = client.completions.create(**asked, n=5, logprobs=0)
    order = sorted(several.choices, key=lambda one: -sum(one.logprobs.token_logprobs) / len(one.logprobs.tokens))
    best = client.completions.create(**asked, n=2, extra_body={"best_of": 5})
    assert [choice.text for choice in best.choices] == [one.text for one in order[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == several.usage.completion_tokens
