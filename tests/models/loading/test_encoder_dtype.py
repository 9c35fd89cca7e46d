"""Encoders in a dtype of their own: the twin that becomes the target, its greedy text, and models that have none."""

import copy
from typing import Any

import pytest
import torch

import slipstream
from reference import TOLERANCE, contract, rounding, source
from slipstream.core.source import Source
from slipstream.kernels.packing import can_pack, packed
from slipstream.models.loading.load import load_model, load_scorer
from slipstream.models.loading.twins import encoder_dtype, with_encoder_dtype
from toys import FAMILIES, SEQ2SEQ, rare, tiny

SOURCES = [[5, 9, 4, 17, 3, 8, 11], [7, 3, 12]]
SHOWN = ("t5", "whisper")
families = pytest.mark.parametrize("family", [*SHOWN, *rare(*(name for name in SEQ2SEQ if name not in SHOWN))])


def states(model: Any, read: Source) -> torch.Tensor:
    """The encoder's states of one source, as the decoder gets them."""
    value = torch.tensor([read]) if isinstance(read, tuple) else read[None].to(model.dtype)
    with torch.inference_mode():
        return model.get_encoder()(value).last_hidden_state


def spread(model: Any) -> Any:
    """A model with the mark of one that was loaded with a device_map."""
    model.hf_device_map = {"": "cpu"}
    return model


@families
def test_the_encoder_alone_is_converted_and_the_given_model_stays_as_it_is(family: str) -> None:
    model = tiny(SEQ2SEQ[family])
    before = copy.deepcopy(model.state_dict())
    twin = with_encoder_dtype(model, torch.bfloat16)
    assert twin.dtype == model.dtype == torch.float32
    assert (encoder_dtype(model), encoder_dtype(twin)) == (None, torch.bfloat16)
    assert {weight.dtype for weight in twin.get_decoder().parameters()} == {torch.float32}
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())

    read = source(load_scorer(model), 3, 9)
    assert read is not None
    found, whole = states(twin, read), states(copy.deepcopy(model).to(torch.bfloat16), read)
    assert found.dtype == torch.float32
    assert torch.equal(found, whole.float())  # the states of a model that is in bfloat16 as a whole
    assert not torch.equal(found, states(model, read))


@families
def test_the_twin_keeps_the_contract_of_every_model(family: str) -> None:
    twin = with_encoder_dtype(tiny(SEQ2SEQ[family]), torch.float64)  # finer, so that the contract's tolerance holds
    assert contract(twin) < TOLERANCE


@pytest.mark.skipif(not can_pack(tiny(SEQ2SEQ["t5"])), reason="no kernel for packed weights here")
@pytest.mark.parametrize("family", [*SHOWN, *rare("bart")])
def test_packed_weights_keep_both_types(family: str) -> None:
    twin = with_encoder_dtype(tiny(SEQ2SEQ[family]), torch.bfloat16)
    fast = packed(twin)
    assert contract(fast) < rounding(tiny(SEQ2SEQ[family], dtype=torch.bfloat16))
    assert encoder_dtype(fast) == torch.bfloat16
    read = source(load_scorer(twin), 3, 9)
    assert read is not None
    assert (states(fast, read) - states(twin, read)).abs().max() < 0.05 * states(twin, read).std()


def test_speculation_with_an_encoder_of_its_own_dtype_writes_the_text_of_transformers() -> None:
    model, draft = tiny(SEQ2SEQ["t5"]), tiny(SEQ2SEQ["t5"], seed=1)
    engine = slipstream.load(model, draft, encoder_dtype="bfloat16", gamma=3)
    twin = with_encoder_dtype(model, torch.bfloat16)
    for read in SOURCES:
        expected = twin.generate(torch.tensor([read]), max_new_tokens=12, do_sample=False)[0, 1:].tolist()
        drafted, plain = (engine.generate([read], max_new_tokens=12, plain=plain)[0] for plain in (False, True))
        assert list(drafted.tokens) == list(plain.tokens) == expected
        assert drafted.stats.drafted > 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tiny(FAMILIES["llama"]), "LlamaForCausalLM is no encoder-decoder"),
        (lambda: packed(tiny(SEQ2SEQ["t5"])), "the weights of T5ForConditionalGeneration are quantized or packed"),
        (lambda: spread(tiny(SEQ2SEQ["t5"])), "T5ForConditionalGeneration is not in one piece: its layers are placed"),
    ],
)
def test_what_has_no_encoder_to_convert_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"encoder_dtype='bfloat16' is not possible: {says}"):
        slipstream.load(make(), encoder_dtype="bfloat16")


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="encoder_dtype='int3' is not known: use float32, bfloat16, float16, or leave"):
        load_model(tiny(SEQ2SEQ["t5"]), encoder_dtype="int3")
