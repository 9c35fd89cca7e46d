"""The trial of models with images and sounds: those that read them pass, and one that forgets them is seen."""

from typing import Any

import pytest

from audios import save_audio
from slipstream.core.media import Modality
from slipstream.models.loading.load import load_model, load_scorer
from slipstream.models.media.processor import MediaProcessor, proven_modalities, try_media


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of a class that nobody knows."""
    model = load_model(save_audio("qwen2.5-omni", tmp_path_factory.mktemp("omni")))
    model.__class__ = type("Unknown", (type(model),), {})
    assert not proven_modalities(model)
    return model


@pytest.fixture(scope="module")
def processor(model: Any) -> MediaProcessor:
    return MediaProcessor.of(model)


@pytest.mark.parametrize("modality", Modality)
def test_media_that_are_forgotten_are_seen(
    model: Any, processor: MediaProcessor, modality: Modality, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_media(load_scorer(model), processor, modality)
    forward = model.forward

    def forgetful(*args: Any, **inputs: Any) -> Any:
        out = forward(*args, **inputs)
        if inputs.get("pixel_values") is None and inputs.get("input_features") is None:
            out.logits = out.logits.roll(1, -1)
        return out

    monkeypatch.setattr(model, "forward", forgetful)
    with pytest.raises(ValueError, match=r"behind a (picture|sound) its logits are others"):
        try_media(load_scorer(model), processor, modality)


def test_what_was_tried_in_vain_is_left_out(processor: MediaProcessor) -> None:
    assert processor.modalities == set(Modality)
    left = processor.without(Modality.IMAGE)
    assert left.modalities == {Modality.AUDIO} and left.rate == processor.rate
    assert processor.without(Modality.AUDIO).rate == 0
