"""Log probabilities as clients read them: the bytes of every token, and names that tell tokens apart."""

import math

from slipstream.engine.generation import TokenLogprobs
from slipstream.serve.logprobs import LEAST, for_chat
from slipstream.text.spelling import Spelling
from tongues import tongue


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
