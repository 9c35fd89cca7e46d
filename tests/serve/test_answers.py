"""The JSON text of answers, and the log probabilities in them."""

import json
import math

from slipstream.engine.generation import TokenLogprobs
from slipstream.serve.answers import AnswerMetrics, CompletionAnswer, TextChoice
from slipstream.serve.logprobs import LEAST, for_chat
from slipstream.serve.output import answered, with_choices
from slipstream.text.spelling import Spelling
from tongues import tongue


def completion(text: str, **fields: float) -> CompletionAnswer:
    choice = TextChoice(index=0, text=text, finish_reason=None)
    metrics = AnswerMetrics(**fields) if fields else None
    return CompletionAnswer(id="1", created=0, model="m", system_fingerprint="f", choices=[choice], metrics=metrics)


def test_a_text_never_ends_the_line_of_an_event() -> None:
    """Some clients split events at everything that `str.splitlines` takes for the end of a line."""
    text = "a\u2028b\u2029c\x85d\re\nf\x1cgé😀"
    found = completion(text).json_text()
    assert found.splitlines() == [found] and found.isascii()
    assert json.loads(found)["choices"][0]["text"] == text


def test_choices_that_become_text_one_by_one_make_the_same_text() -> None:
    update = {"model": '"choices":[]', "choices": completion("x").choices * 3}
    whole = completion('"choices":[]').model_copy(update=update)
    bare = whole.model_copy(update={"choices": []})
    assert with_choices(bare, whole.choices).body == answered(whole).body != answered(bare).body


def test_what_is_empty_is_left_out_unless_clients_expect_null() -> None:
    found = json.loads(completion("a").json_text())
    assert found["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    assert not {"usage", "metrics", "timings"} & set(found)


def test_numbers_that_are_not_finite_are_null() -> None:
    found = json.loads(completion("a", tokens_per_second=math.inf, mean_itl_ms=1.0).json_text())
    assert found["metrics"] == {"tokens_per_second": None, "mean_itl_ms": 1.0}


def test_a_chat_gets_the_bytes_of_every_token() -> None:
    tokenizer = tongue("prepended")
    ids = tokenizer.encode(" 😀 is", add_special_tokens=False)[-5:]
    tops = ((ids[0], -0.1), (ids[1], -2.0), (0, -math.inf))
    found = for_chat([TokenLogprobs(token, -0.1, tops) for token in ids], Spelling(tokenizer)).content or []
    assert [each.bytes for each in found] == [[240], [159], [152], [128], list(b" is")]
    assert found[-1].token == " is"
    assert [top.bytes for top in found[0].top_logprobs] == [[240], [159], list(b"<unk>")]
    assert [top.logprob for top in found[0].top_logprobs] == [-0.1, -2.0, LEAST]
    assert bytes(byte for each in found for byte in each.bytes or ()).decode() == "😀 is"
