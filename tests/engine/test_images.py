"""Images from what users pass to the tokens of `generate`: processors made of the embedded tokenizer, in folders."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

import slipstream
from slipstream.bench.race import measure
from slipstream.check import check
from slipstream.engine.engine import Engine
from slipstream.engine.media import PIXELS, open_image
from slipstream.engine.requests import Chat, read_prompts
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.models.media.processor import load_processor
from visions import TEMPLATE, data_url, picture, png, save_llava, tiny_vision_of


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


TEXTS = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}assistant: "
ASKED = "user: <image>What is this?\nassistant: "


def test_all_ways_to_pass_an_image_are_one(engine: Engine, tmp_path: Path) -> None:
    image, url, file = picture(1), data_url(picture(1)), tmp_path / "picture.png"
    file.write_bytes(png(image))
    arrays = [np.asarray(image), torch.from_numpy(np.array(image))]
    forms = [image, file, str(file), url, f"{url[:99]}\n{url[99:]}", png(image), *arrays]
    chats: list[Any] = [
        [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": image},
            {"type": "image", "path": str(file)},
        )
    ]
    prompts = [*({"text": ASKED, "images": [form]} for form in forms), *chats, Chat(chats[0])]
    wanted = expected(engine, ASKED, [image])
    for completion in engine.generate(prompts, max_new_tokens=12):
        assert list(completion.tokens) == wanted
    assert expected(engine, ASKED, [picture(2)]) != wanted


@pytest.mark.parametrize("owner", ["tokenizer", "processor"])
@pytest.mark.parametrize("template", [TEMPLATE, TEXTS, TEXTS.replace("+", "~")], ids=["parts", "joins", "prints"])
def test_a_chat_template_of_either_takes_images(engine: Engine, folder: Path, template: str, owner: str) -> None:
    """Also one that was written for texts: the placeholder stands in them."""
    owners: dict[str, Any] = {"processor": load_processor(folder), "tokenizer": load_tokenizer(folder)}
    for name, each in owners.items():
        each.chat_template = template if name == owner else None
    made, image = slipstream.load(folder, **owners), {"type": "image", "image": picture(1)}
    assert made.tokenizer.chat_template == template
    for content in ([image, {"type": "text", "text": "What is this?"}], "What is this?"):
        chat = read_prompts([{"role": "user", "content": content}])[0]
        (ids, media), (theirs, its) = (each.encoder.read(chat) for each in (made, engine))
        assert ids == theirs and (media and media.digest) == (its and its.digest)


def test_variables_of_a_chat_do_not_reach_the_processor(engine: Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "image", "image": picture(1, 40)}]}]
    variables = {"images": ["/there/is/none.png"], "do_resize": False, "processor_kwargs": {"do_resize": False}}
    (ids, media), (theirs, its) = map(engine.encoder.read, (Chat(messages, None, variables), messages))
    assert ids == theirs and media.digest == its.digest  # type: ignore[union-attr]


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


def test_photos_are_turned_as_transformers_turns_them(tmp_path: Path) -> None:
    file, exif = tmp_path / "photo.jpg", Image.Exif()
    exif[274] = 6  # the camera stood upright
    picture(1, 40).resize((40, 20)).save(file, exif=exif)
    assert np.array_equal(np.asarray(open_image(file)), np.asarray(load_image(str(file))))


def test_only_texts_are_measured_and_checked(folder: Path) -> None:
    for command in (measure, check):
        with pytest.raises(ValueError, match="has images or sounds, which only the other commands read"):
            command(slipstream.load(folder, "int8"), [{"text": ASKED, "images": [picture(1)]}])  # type: ignore[operator]


REFUSED = [
    (b"no image", "none that can be opened: take one of PNG"),
    (png(picture(1))[:90], "is damaged"),
    ("data:image/png;base64,%%%", "no base64"),
    ("data:image/png", "no data: URL"),
    ("https://example.org/a.png", "is a web address"),
    ("/there/is/none.png", "cannot be read: No such file"),
    (np.zeros((2, 2)), "an array of shape"),
    (np.zeros((0, 5, 3), np.uint8), "an array of shape"),
    (Image.open(io.BytesIO(png(picture(1))[:900])), "is damaged: image file is truncated"),
    (data_url(picture(1)).partition(",")[2], r"cannot be read: [\w ]+: .{256}\.$"),
    (5, "is of type int"),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_image_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_image(value)


@pytest.mark.parametrize(("side", "says"), [(8200, "8200 x 8200"), (40_000, "far too many")])
def test_small_files_with_very_many_pixels_are_refused(side: int, says: str) -> None:
    content = png(picture(1))
    head = content[12:16] + struct.pack(">II", side, side) + content[24:29]
    with pytest.raises(ValueError, match=f"{says} pixels, and at most {PIXELS} are taken"):
        open_image(content[:12] + head + zlib.crc32(head).to_bytes(4, "big") + content[33:])


def test_prompts_that_say_nothing_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="has 1 images, but <image> is there 2 times"):
        engine.generate({"text": "<image><image>x", "images": [picture(1)]})
    with pytest.raises(ValueError, match="its processor cannot read the prompt: Found 1 <image> tokens"):
        engine.generate([{"role": "user", "content": "<image>"}])
    with pytest.raises(ValueError, match="has a part without its image"):
        read_prompts([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(ValueError, match="has images or sounds with None"):
        read_prompts({"text": None, "images": []})
    with pytest.raises(ValueError, match=r"processor is not possible for .*: its processor reads no texts with"):
        slipstream.load(engine.decoder.target.model, processor="x")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="reads text only, so it has no use for a processor"):
        slipstream.load(processor=engine.media)
