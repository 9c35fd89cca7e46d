"""The generation config of a model: texts are those of transformers' `generate`, unless a call says otherwise."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import slipstream
from slipstream.core.request import Prefixes, Request, Row
from slipstream.engine.defaults import NONE, Defaults
from toys import FAMILIES, HF_VOCAB, SEQ2SEQ, tiny

PROMPT, END, LENGTH = [5, 9, 17, 4], 3, 24
PROMPTS = (PROMPT, [11], PROMPT * 5)
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(4, HF_VOCAB - 2))},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(10, 50)]},
    "min_new_tokens": {"min_new_tokens": 20},
    "min_length": {"min_length": 20},
    "forced_eos_token_id": {"forced_eos_token_id": END},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [2, 1.8]},
    "sequence_bias": {"sequence_bias": [[[7], 9.0], [[7, 8], 9.0]]},
    "remove_invalid_values": {"remove_invalid_values": True, "repetition_penalty": 1.3},
    "sampling that is off": {"do_sample": False, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.2},
}
"""What a config may set, so that the greedy text is another than without it."""


def model(settings: dict[str, Any], family: str = "llama") -> PreTrainedModel:
    """A tiny model whose texts repeat themselves, with a generation config."""
    made = tiny((FAMILIES | SEQ2SEQ)[family])
    made.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END, **settings)
    if made.config.is_encoder_decoder:
        made.generation_config.decoder_start_token_id = 2
    return made


def generated(made: PreTrainedModel, prompt: list[int], **settings: Any) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return made.generate(ids, **settings)[0, len(prompt) :].tolist()


@cache
def without_settings() -> list[list[int]]:
    return [generated(model({}), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_are_those_of_generate(name: str) -> None:
    made = model(SETTINGS[name])
    wanted = [generated(made, prompt) for prompt in PROMPTS]
    for draft in (None, "lookup"):
        engine = slipstream.load(made, draft)
        assert [list(done.tokens) for done in engine.generate(PROMPTS, max_new_tokens=LENGTH)] == wanted
    free = slipstream.load(made, generation_config=NONE)
    texts = [list(done.tokens) for done in free.generate(PROMPTS, max_new_tokens=LENGTH)]
    assert texts == without_settings() and free.notes == ()
    assert texts != wanted, "the setting changes nothing"
    assert any(setting in engine.notes[-1] for setting in SETTINGS[name])


def test_a_forced_beginning_is_for_prompts_of_one_token() -> None:
    made = model({"forced_bos_token_id": 8, "begin_suppress_tokens": [8]})
    engine = slipstream.load(made)
    for prompt in ([11], PROMPT):
        assert list(engine.generate([prompt], max_new_tokens=LENGTH)[0].tokens) == generated(made, prompt)
    assert engine.generate([[11]], max_new_tokens=1)[0].tokens == (8,)


def test_encoder_decoders_have_what_bart_sets() -> None:
    settings = {"forced_bos_token_id": 6, "forced_eos_token_id": END, "min_length": 9, "no_repeat_ngram_size": 3}
    made = model(settings, "bart")
    [done] = slipstream.load(made).generate([PROMPT], max_new_tokens=LENGTH)
    ids = torch.tensor([PROMPT])
    want = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH + 1)[0].tolist()
    assert [2, 6, *done.tokens] == want and done.tokens[-1] == END
    made.generation_config.update(length_penalty=-2.0, early_stopping=True)
    engine, how = slipstream.load(made), {"attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH + 1}
    [done] = engine.generate([PROMPT], max_new_tokens=LENGTH, num_beams=3)
    assert [2, 6, *done.tokens] == made.generate(ids, num_beams=3, **how)[0].tolist() != want
    assert [2, 6, *engine.generate([PROMPT], max_new_tokens=LENGTH)[0].tokens] == want


def test_settings_of_a_call_come_first() -> None:
    made = model({"repetition_penalty": 1.6, "min_new_tokens": 20, "max_new_tokens": 22, "no_repeat_ngram_size": 2})
    engine = slipstream.load(made)
    assert len(engine.generate([PROMPT])[0].tokens) in (21, 22)
    own = {"repetition_penalty": 1.0, "min_new_tokens": 0, "no_repeat_ngram_size": 3}
    want = generated(made, PROMPT, max_new_tokens=9, **own)
    assert list(engine.generate([PROMPT], max_new_tokens=9, **own)[0].tokens) == want
    assert len(engine.generate([PROMPT], max_tokens=5)[0].tokens) == 5, "fewer than the least that the model wants"
    free = slipstream.load(made, generation_config=NONE).generate([PROMPT], max_new_tokens=9)
    assert engine.generate([PROMPT], max_new_tokens=9)[0].tokens != free[0].tokens


def test_sampling_is_that_of_the_config_if_it_asks_for_it() -> None:
    """The law of the first token is that of transformers' own processors: laws, not samples."""
    shape = {"temperature": 0.7, "top_k": 11, "top_p": 0.8, "min_p": 0.02, "epsilon_cutoff": 3e-3, "eta_cutoff": 3e-3}
    made = model({"do_sample": True, "repetition_penalty": 1.3, **shape})
    engine = slipstream.load(made)
    [generation] = engine.prepare([tuple(PROMPT)], {}).generations
    logits = made(torch.tensor([PROMPT])).logits[:, -1].detach().float()
    request: Request = generation.request
    law = request.sampler.law(
        logits[:, None], [Row(request, 0, PROMPT)], Prefixes.chain(torch.empty(1, 0, dtype=torch.long), 1), "it"
    )
    ids = torch.tensor([PROMPT])
    how = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    want = made.generate(ids, attention_mask=torch.ones_like(ids), **how).scores[0].softmax(-1)
    torch.testing.assert_close(law.dense[:, 0], want)
    assert 0 < int((want > 0).sum()) < HF_VOCAB
    assert engine.prepare([tuple(PROMPT)], {"temperature": 0}).generations[0].request.sampler.greedy
    assert "temperature=0.7" in engine.notes[-1] and "top_p=0.8" in engine.notes[-1]
    engine = slipstream.load(model({"top_p": 0.9, "temperature": 0.5}))
    assert engine.prepare([tuple(PROMPT)], {}).generations[0].request.sampler.greedy
    assert "temperature" not in engine.defaults.settings


def test_what_is_not_applied_is_said() -> None:
    engine = slipstream.load(model({"num_beams": 4, "guidance_scale": 1.5, "repetition_penalty": 1.1, "top_k": -1}))
    assert "num_beams: ask for it by num_beams" in engine.notes[-1] and "guidance_scale" in engine.notes[-1]
    assert "top_k=-1 is not possible" in engine.notes[-1] and "repetition_penalty=1.1" in engine.notes[-2]
    assert len(engine.generate([PROMPT], max_new_tokens=4)[0].tokens) == 4


def test_a_grammar_decides_where_texts_end() -> None:
    defaults = Defaults({"min_new_tokens": 5, "top_p": 0.5}, {"min_length": 9, "suppress_tokens": [4]})
    assert defaults.complete({"grammar": object()}).keys() == {"grammar", "top_p"}
    made = defaults.processors(10, {"grammar": object()})
    assert made is not None and list(made.given) == ["suppress_tokens"]


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    made, own = model({"repetition_penalty": 1.6}), GenerationConfig(eos_token_id=END, no_repeat_ngram_size=2)
    own.save_pretrained(tmp_path)
    want = generated(made, PROMPT, generation_config=own)
    for source in (own, str(tmp_path), tmp_path):
        engine = slipstream.load(made, generation_config=source)
        assert list(engine.generate([PROMPT], max_new_tokens=LENGTH)[0].tokens) == want
    with pytest.raises(ValueError, match="generation_config='nowhere' is not possible"):
        slipstream.load(made, generation_config="nowhere")
