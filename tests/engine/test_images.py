"""Images from what users pass to the tokens of `generate`: processors made of the embedded tokenizer, in folders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import slipstream
from slipstream.engine.engine import Engine
from slipstream.engine.media import PIXELS, open_image
from slipstream.engine.requests import Chat, read_prompts
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from visions import data_url, picture, png, save_llava, tiny_vision_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return slipstream.load(folder, "lookup", gamma=4)


def expected(engine: Engine, text: str, images: list[Image.Image]) -> list[int]:
    model, processor = engine.decoder.target.model, engine.media.processor  # type: ignore[attr-defined, union-attr]
    read = processor(text=text, images=images or None, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    return model.generate(**read, **options)[0, read["input_ids"].shape[1] :].tolist()


ASKED = "user: <image>What is this?\nassistant: "


def test_all_ways_to_pass_an_image_are_one(engine: Engine, tmp_path: Path) -> None:
    image = picture(1)
    file = tmp_path / "picture.png"
    file.write_bytes(png(image))
    forms = [image, file, str(file), data_url(image), png(image), np.asarray(image), torch.from_numpy(np.array(image))]
    chats: list[Any] = [
        [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]
        for part in (
            {"type": "image_url", "image_url": {"url": data_url(image)}},
            {"type": "image", "image": image},
            {"type": "image", "path": str(file)},
        )
    ]
    prompts = [*({"text": ASKED, "images": [form]} for form in forms), *chats, Chat(chats[0])]
    wanted = expected(engine, ASKED, [image])
    for completion in engine.generate(prompts, max_new_tokens=12):
        assert list(completion.tokens) == wanted
    assert expected(engine, ASKED, [picture(2)]) != wanted


def test_texts_and_several_images_share_a_batch(engine: Engine) -> None:
    pair = "user: <image> and <image>: which is larger?\nassistant: "
    prompts = [{"text": pair, "images": [picture(1), picture(2)]}, "def f(x):", {"text": ASKED, "images": [picture(3)]}]
    completions = engine.generate(prompts, max_new_tokens=12)
    wanted = [
        expected(engine, pair, [picture(1), picture(2)]),
        expected(engine, "def f(x):", []),
        expected(engine, ASKED, [picture(3)]),
    ]
    assert [list(completion.tokens) for completion in completions] == wanted
    again = engine.generate(prompts, max_new_tokens=12, plain=True)
    assert [completion.text for completion in again] == [completion.text for completion in completions]


def test_samples_of_different_images_have_draws_of_their_own(engine: Engine) -> None:
    one = [{"text": ASKED, "images": [picture(1)]}]
    coupled = {"temperature": 1.0, "verify": "coupled", "max_new_tokens": 12}
    both = engine.generate(one * 2, **coupled)
    assert both[0].tokens != both[1].tokens
    alone = [engine.generate(one, plain=plain, **coupled)[0].tokens for plain in (False, True)]
    assert alone == [both[0].tokens] * 2


def test_placeholders_that_nobody_wrote_stand_in_front(engine: Engine) -> None:
    [completion] = engine.generate({"text": "What is this?", "images": [picture(1)]}, max_new_tokens=12)
    assert list(completion.tokens) == expected(engine, "<image>What is this?", [picture(1)])


def test_a_draft_without_vision_says_so(folder: Path) -> None:
    engine = slipstream.load(folder, EMBEDDED / "draft", dtype="float32")
    assert engine.notes[-1].endswith("reads no images and sounds, but the texts around them.")
    [completion] = engine.generate({"text": ASKED, "images": [picture(1)]}, max_new_tokens=12)
    assert list(completion.tokens) == expected(engine, ASKED, [picture(1)])
    assert completion.stats.drafted


def test_without_a_processor_texts_remain(tmp_path: Path) -> None:
    tiny_vision_of("llava", 90, 80).save_pretrained(tmp_path)
    load_tokenizer(EMBEDDED / "target").save_pretrained(tmp_path)
    engine = slipstream.load(tmp_path, "lookup")
    assert "reads text only here" in engine.notes[0]
    with pytest.raises(ValueError, match=r"has images, but .* reads text only here"):
        engine.generate({"text": "x", "images": [picture(1)]})


REFUSED = [
    (b"no image", "none that can be opened: take one of PNG"),
    (png(picture(1))[:90], "is damaged"),
    ("data:image/png;base64,%%%", "no base64"),
    ("data:image/png", "no data: URL"),
    ("https://example.org/a.png", "is a web address"),
    ("/there/is/none.png", "cannot be read: No such file"),
    (np.zeros((2, 2)), "an array of shape"),
    (5, "is of type int"),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_image_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_image(value)


def test_small_files_with_very_many_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {PIXELS} are taken"):
        open_image(png(Image.new("1", (8200, 8200))))


def test_prompts_that_say_nothing_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="has 1 images, but <image> stands in it 2 times"):
        engine.generate({"text": "<image><image>x", "images": [picture(1)]})
    with pytest.raises(ValueError, match="has a part without its image"):
        read_prompts([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(ValueError, match="has images or sounds with None"):
        read_prompts({"text": None, "images": []})
    with pytest.raises(ValueError, match="reads text only, so it has no use for a processor"):
        slipstream.load(processor=engine.media)
