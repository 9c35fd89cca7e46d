"""Prompts with images: the tokens of every family are those that transformers' `generate` gives for the same images."""

from dataclasses import replace

import pytest

from reference import drafts_change_nothing
from slipstream.cache.prefixes import PrefixCache
from slipstream.check.families import EveryOther
from slipstream.core.request import Request
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.rules import rule
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.models.loading.load import load_scorer
from visions import KINDS, generated, illustrated, tiny_vision

TOKENS = 12


def ragged(kind: str, sampler: Sampling | None = None) -> list[Request]:
    """Prompts of different lengths with one image, with two, with none, and with another one."""
    cases = [illustrated(kind, 3, 5, 1, 1), illustrated(kind, 9, 2, 2, 2), illustrated(kind, 1, 12, 1, 3)]
    with_images = [Request(prompt, sampler or Sampling(), TOKENS, media=images) for prompt, images in cases]
    return [*with_images[:2], Request(tuple(range(5, 16)), sampler or Sampling(), TOKENS), with_images[2]]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate(kind: str) -> None:
    """In a ragged batch, plainly and with drafts of which some are accepted; the images matter."""
    model, asked = tiny_vision(kind), ragged(kind)
    wanted = [generated(model, each.prompt, each.media, TOKENS) for each in asked]
    drafts_change_nothing(load_scorer(model), load_scorer(model), asked, wanted, gamma=4)
    assert generated(model, asked[0].prompt, None, TOKENS) != wanted[0]


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3.5", "gemma3"])
def test_coupled_texts_are_those_without_a_draft(kind: str) -> None:
    """Sampled by draws that belong to positions, so that any draft gives the same text."""
    model, coupled = tiny_vision(kind), rule("coupled")
    asked = [replace(each, key=place) for place, each in enumerate(ragged(kind, Sampling(temperature=1.0)))]
    decoder = Decoder(load_scorer(model), EveryOther(ModelDrafter(load_scorer(model))), controller=Fixed(4))
    decoder = replace(decoder, verifier=coupled.verify, rng=coupled.rng)
    rows = generate(decoder, asked)
    assert [row.output for row in rows] == [row.output for row in plain(decoder, asked)]
    assert sum(row.stats.accepted for row in rows)


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3.5"])
def test_a_row_that_gave_way_reads_its_images_again(kind: str) -> None:
    model, asked = tiny_vision(kind), ragged(kind)[:2]
    target = load_scorer(model)
    wanted = [generated(model, each.prompt, each.media, TOKENS) for each in asked]
    with Scheduler(Decoder(target, ModelDrafter(load_scorer(model)), controller=Fixed(2))) as scheduler:
        rows = [scheduler.add(each) for each in asked]
        scheduler.step()
        scheduler.step()
        left = scheduler.running[1]
        target.free([1])
        scheduler.running.remove(left)
        scheduler.waiting.append(left)
        for _ in scheduler.rounds():
            pass
    assert [row.output for row in rows] == wanted


def test_images_are_not_mixed_up_by_stored_prefixes_or_equal_tokens() -> None:
    """Two prompts with the same tokens and different images, beside and behind each other."""
    kind = "llava"
    model = tiny_vision(kind)
    prompt, images = illustrated(kind, 20, 20, 1, 1)
    _, others = illustrated(kind, 20, 20, 1, 2)
    asked = [Request(prompt, Sampling(), TOKENS, media=each) for each in (images, others, images)]
    wanted = [generated(model, prompt, each.media, TOKENS) for each in asked]
    assert wanted[0] != wanted[1]
    decoder = Decoder(load_scorer(model), Lookup(), controller=Fixed(4))
    cache = PrefixCache(1 << 20)
    for several in ([asked[0]], [asked[1]], asked):
        with Scheduler(decoder, prefill_chunk=8, prefix_cache=cache) as scheduler:
            rows = [scheduler.add(each) for each in several]
            for _ in scheduler.rounds():
                pass
        assert [row.output for row in rows] == [wanted[asked.index(each)] for each in several]
    assert not len(cache)


def test_images_that_the_model_fails_on_end_their_row_alone() -> None:
    model, asked = tiny_vision("llava"), ragged("llava")
    wanted = [generated(model, each.prompt, each.media, TOKENS) for each in asked]
    asked[1] = replace(asked[1], media=asked[0].media)  # one image, and two in its prompt
    rows = generate(Decoder(load_scorer(model), Lookup(), controller=Fixed(4)), asked)
    assert [row.output for row in rows] == [wanted[0], [], *wanted[2:]]
    assert rows[1].error and "the model fails on the images or sounds: Image features and" in rows[1].error


def test_what_cannot_be_read_is_refused() -> None:
    prompt, images = illustrated("llava", 3, 5)
    target = Decoder(load_scorer(tiny_vision("llava")), Lookup(), controller=Fixed(0))
    with pytest.raises(ValueError, match="prompt 0 ends with an image or a sound"):
        plain(target, [Request(prompt[:6], Sampling(), 4, media=images)])
