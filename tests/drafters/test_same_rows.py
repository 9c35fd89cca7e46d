"""The target's own weights, quantized, draft on the rows of its cache, and the law stays the target's."""

from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.drafters.specification import drafter
from slipstream.kernels.packing import packed
from slipstream.kernels.quantization import Precision
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.twins import quantized_part
from slipstream.models.recurrent.scorer import StateScorer
from slipstream.models.tiny import tiny_config, tiny_model
from toys.drafts import same_texts
from toys.families import FAMILIES, HF_VOCAB, tiny
from toys.kernels import needs_kernel
from toys.tables import scorer
from toys.texts import GREEDY, SAMPLE, ragged

pytestmark = needs_kernel
FLOAT = 1e-5  # the laws are softmaxes in float32
INT4 = Precision(4, 32)
KEPT = torch.arange(0, HF_VOCAB, 3)


def self_draft(target: Any, precision: Precision = INT4) -> SameRowsDrafter:
    return SameRowsDrafter(quantized_part(target, precision))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("precision", [INT4, Precision(8, 64)], ids=str)
def test_greedy_texts_are_the_target_s(family: str, precision: Precision) -> None:
    target = CausalScorer(packed(tiny(FAMILIES[family])))
    decoder = Decoder(target, self_draft(target, precision), controller=Fixed(3), batch_size=2)
    ours = same_texts(decoder, ragged())
    share = sum(row.stats.accepted for row in ours) / sum(row.stats.drafted for row in ours)
    assert share > (0.8 if precision.bits == 8 else 0.3)


def test_a_hybrid_target_drafts_for_itself_in_a_cache_of_its_own() -> None:
    model = tiny_model(transformers.Lfm2ForCausalLM, tiny_config(transformers.Lfm2Config))
    target = StateScorer(model, "lfm2")
    made = drafter("int8", BuildContext(target))
    decoder = Decoder(target, made, controller=Fixed(3))
    ours = same_texts(decoder, ragged())
    assert sum(row.stats.accepted for row in ours) > 0


@pytest.mark.parametrize(("family", "kept"), [("llama", None), ("llama", KEPT), ("gemma2", KEPT)])
@pytest.mark.parametrize("sampler", [GREEDY, SAMPLE], ids=["greedy", "sampled"])
def test_graphs_draft_what_is_drafted_token_by_token(
    sampler: Any, family: str, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows and single ones; the graphs write to the target's cache too, and are rolled back."""
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    runs = []
    for compiled in (False, True):
        target = CausalScorer(tiny(FAMILIES[family]))
        part = quantized_part(target, INT4 if kept is None else Precision(8, 64), kept)
        if compiled:
            assert isinstance(part, CausalScorer)
            part.make_draft_graphs((3,))
        decoder = Decoder(target, SameRowsDrafter(part), controller=Fixed(3))
        rows = [*generate(decoder, ragged(sampler)), *generate(decoder, ragged(sampler)[:1])]
        runs.append([(row.tokens, row.stats.drafted, row.stats.accepted) for row in rows])
        assert not compiled or (isinstance(part, CausalScorer) and part.draft_graphs and part.draft_graphs.made)
    assert runs[0] == runs[1]


# ---- a window of the text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_window_shows_the_end_and_the_sinks(family: str) -> None:
    """The logits are those of one pass whose last token sees just these."""
    model = tiny(FAMILIES[family])
    target, text = CausalScorer(model), [5, 3, 8, 13, 2, 1, 7, 11, 4]
    part = target.seeing(3, 1)
    target.add(2)
    target.prefill([text, text[:1]])
    found = part.extend(torch.tensor([[6], [6]]), [1, 1])
    part.rollback([len(text), 1])
    hidden = torch.full((10, 10), torch.finfo(torch.float32).min).triu(1)
    hidden[9, 1:7] = torch.finfo(torch.float32).min
    options: Any = dict.fromkeys(target.facts.kinds, hidden[None, None])
    mask = options if len(options) > 1 else hidden[None, None]
    with torch.inference_mode():
        want = model(torch.tensor([[*text, 6]]), attention_mask=mask, use_cache=False).logits[0, -1]
        short = model(torch.tensor([[text[0], 6]]), use_cache=False).logits[0, -1]
    if family != "gemma3":  # whose other layers have a window of their own, which this mask lacks
        torch.testing.assert_close(found[0, 0], want, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1, 0], short, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_greedy_texts_with_a_window_are_the_target_s(family: str) -> None:
    target = CausalScorer(tiny(FAMILIES[family]))
    decoder = Decoder(target, SameRowsDrafter(target.seeing(4, 2)), controller=Fixed(3))
    same_texts(decoder, ragged())
    wide = Decoder(target, SameRowsDrafter(target.seeing(400, 2)), controller=Fixed(3))
    assert all(row.stats.accepted == row.stats.drafted > 0 for row in generate(wide, ragged()))


# ---- as users write it --------------------------------------------------------------------------------------------


def test_a_tree_and_a_chain_keep_a_cache_of_their_own() -> None:
    target = CausalScorer(tiny(FAMILIES["llama"]))
    made = drafter("int4", BuildContext(target, drafted=True))
    assert isinstance(made, ModelDrafter) and made.scorer.lengths == []
    engine = slipstream.load(draft="int4", tree=(2, 1))
    assert engine.generate(["x = "], max_new_tokens=8)[0].stats.drafted > 0


def test_what_cannot_be_quantized_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="has no weights to quantize"):
        drafter("int4", BuildContext(scorer(lambda prefix: (0.5, 0.5), "table")))
    target = CausalScorer(tiny(FAMILIES["llama"]).half())
    with pytest.raises(ValueError, match=r"cannot be quantized to int4: that is for float32 and bfloat16"):
        drafter("int4", BuildContext(target))
    with pytest.raises(ValueError, match="window:0 with 4 sinks is not possible"):
        drafter("window:0", BuildContext(target))
    with pytest.raises(ValueError, match="use 16, 32, 64, 128, 256"):
        drafter("int4?group=7", BuildContext(target))


@pytest.mark.parametrize("quantize", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_quantized_target_is_the_target(quantize: str) -> None:
    """Plain and speculative texts of the quantized weights are equal; those of the weights as they were may differ."""
    prompts = ["def add(a, b):", "import os", "class A:"]
    plainly = slipstream.load(quantize=quantize).generate(prompts, max_new_tokens=16, temperature=0)
    engine = slipstream.load(draft="embedded", quantize=quantize)
    found = engine.generate(prompts, max_new_tokens=16, temperature=0)
    assert [each.text for each in found] == [each.text for each in plainly]
    with pytest.raises(ValueError, match="use int8 or int4"):
        slipstream.load(quantize="fp3")
