"""The custom_generate hook against transformers' own generate, on tiny random models whose draft is often wrong."""

import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from slipstream.core.request import Prefixes, Row
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.rules import BLOCK, COUPLED
from slipstream.engine.transformers_hook import custom_generate as custom_generation
from slipstream.engine.transformers_hook.batch import Batch, Prompt
from slipstream.engine.transformers_hook.custom_generate import CustomGenerate, custom_generate
from slipstream.execution.names import CACHE, state_in
from slipstream.models.loading.load import load_model
from toys import FAMILIES, HF_VOCAB, tiny
from toys.hooked import BATCH, PAD, padded, pair, tokenizer

SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def hook(gamma: int = 4, family: str = "llama", **options: Any) -> CustomGenerate:
    return custom_generate(pair(family)[1], gamma, **options)


def both(model: PreTrainedModel, speculate: CustomGenerate, **kwargs: Any) -> tuple[Any, Any]:
    return model.generate(**kwargs), model.generate(**kwargs, custom_generate=speculate)


# ---- greedy: equal to generate, token by token ------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padded_batch(family: str, gamma: int) -> None:
    model, speculate = pair(family)[0], hook(gamma, family)
    expected, ours = both(model, speculate, **padded(), **SETTINGS)
    assert torch.equal(expected, ours) and ours.dtype == expected.dtype
    stats = speculate.stats
    assert stats.emitted == 4 * 16 and 0 < stats.accepted < stats.drafted  # right and wrong drafts were met
    assert stats.target_calls == stats.emitted - stats.accepted
    for row, mask in zip(BATCH, BATCH != PAD, strict=True):
        alone = model.generate(row[mask][None], **SETTINGS)
        assert torch.equal(alone[0, int(mask.sum()) :], ours[int((row == BATCH).all(1).nonzero()), 5:])


@pytest.mark.parametrize("draft", [None, "lookup", "lookup|lookup?min_matching_ngram_size=2"])
def test_a_mask_inferred_from_padding_is_honoured(draft: str | None) -> None:
    expected, ours = both(pair()[0], custom_generate(draft or pair()[1], 4), inputs=BATCH, pad_token_id=PAD, **SETTINGS)
    assert torch.equal(expected, ours)
    assert not torch.equal(ours, pair()[0].generate(BATCH, attention_mask=torch.ones_like(BATCH), **SETTINGS))


@pytest.mark.parametrize("verifier", [BLOCK, COUPLED, BLOCK.verify])
def test_other_verifiers(verifier: Any) -> None:
    speculate = hook(verifier=verifier)
    expected, ours = both(pair()[0], speculate, **padded(), **SETTINGS)
    assert torch.equal(expected, ours)
    sampled = {**padded(), **SAMPLED, "max_new_tokens": 16}
    once = pair()[0].generate(**sampled, custom_generate=hook(verifier=verifier, seed=3))
    other = pair()[0].generate(**sampled, custom_generate=custom_generate(pair()[0], 2, verifier=verifier, seed=3))
    assert torch.equal(once, other) == (verifier is COUPLED)  # its rng makes the text depend on no draft


def test_gamma_may_be_a_controller() -> None:
    speculate = custom_generate(pair()[1], Fixed(0))
    expected, ours = both(pair()[0], speculate, **padded(), **SETTINGS)
    assert torch.equal(expected, ours) and speculate.stats.drafted == 0


# ---- the end of rows --------------------------------------------------------------------------------------------


def test_eos_in_the_middle_of_a_round() -> None:
    """The draft is the target, so every round would emit nine tokens: rows end inside one, at different places."""
    model = pair()[0]
    plain = model.generate(**padded(), **SETTINGS)[:, 5:]
    ends = [int(plain[0, 4]), int(plain[1, 11])]
    speculate = custom_generate(model, 8)
    expected, ours = both(model, speculate, **padded(), **SETTINGS, eos_token_id=ends)
    assert torch.equal(expected, ours)
    counts = (ours[:, 5:] != PAD).sum(1)
    assert len(set(counts.tolist())) > 1 and int(counts.min()) < 8
    assert speculate.stats.emitted == int(counts.sum())


class Recording(StoppingCriteria):
    def __init__(self, ends: list[int]) -> None:
        self.ends = torch.tensor(ends)
        self.shown: list[tuple[list[int], list[Tensor] | None]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert input_ids.shape[0] == len(self.ends)
        self.shown.append((input_ids[0].tolist(), None if scores is None else list(scores)))
        return self.ends == input_ids.shape[1]


@pytest.mark.parametrize("eos", [None, 100])
def test_criteria_that_look_at_their_row(eos: int | None) -> None:
    criteria = StoppingCriteriaList([Recording([7, 17, 9, 12])])
    expected, ours = both(pair()[0], hook(), **padded(), **SETTINGS, stopping_criteria=criteria, eos_token_id=eos)
    assert torch.equal(expected, ours) and ours.shape == (4, 17)


@pytest.mark.parametrize("scores", [False, True])
def test_criteria_are_asked_after_every_token(scores: bool) -> None:
    ids = {"input_ids": BATCH[1:2], "attention_mask": (BATCH[1:2] != PAD).long(), "pad_token_id": PAD}
    shown = []
    for speculate in (None, hook(8)):
        criterion = Recording([13])
        pair()[0].generate(
            **ids,
            **SETTINGS,
            stopping_criteria=StoppingCriteriaList([criterion]),
            return_dict_in_generate=True,
            output_scores=scores,
            custom_generate=speculate,
        )
        shown.append(criterion.shown)
    assert [text for text, _ in shown[0]] == [text for text, _ in shown[1]]
    assert [len(text) for text, _ in shown[1]] == list(range(6, 14))
    for (_, expected), (_, ours) in zip(*shown, strict=True):
        assert (expected is None) == (ours is None) == (not scores)
        for one, other in zip(expected or [], ours or [], strict=True):
            torch.testing.assert_close(one, other)


def test_the_context_ends_the_text_with_a_warning() -> None:
    model = tiny(FAMILIES["gpt2"], n_positions=16)
    with pytest.warns(UserWarning, match="ends at the 16 tokens"):
        ours = model.generate(**padded(), max_new_tokens=30, custom_generate=custom_generate(model, 4))
    assert ours.shape == (4, 20)  # the row with four padding tokens goes furthest
    for row, mask in zip(ours, BATCH != PAD, strict=True):
        alone = model.generate(row[:5][mask][None], max_length=16)[0]
        assert row[int((~mask).sum()) :][:16].equal(alone)
        assert row[int((~mask).sum()) :][16:].eq(PAD).all()


# ---- processors of one's own ------------------------------------------------------------------------------------


class RowBias(LogitsProcessor):
    """Adds its own row of a table, in place, and depends on the text."""

    def __init__(self, rows: int) -> None:
        self.table = 3 * torch.randn(rows, HF_VOCAB, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores += self.table * (1 + input_ids.shape[1] % 3)
        scores[torch.arange(scores.shape[0]), input_ids[:, -1]] = -50.0
        return scores


def test_own_processor_finds_its_row() -> None:
    model, chain = pair()[0], LogitsProcessorList([RowBias(4)])
    expected, ours = both(model, hook(), **padded(), **SETTINGS, logits_processor=chain)
    assert torch.equal(expected, ours)
    same = torch.tensor([[5, 6, 7]] * 4)
    assert len({tuple(row) for row in model.generate(same, **SETTINGS, logits_processor=chain).tolist()}) == 4


def test_constraints_are_asked_with_their_row_and_never_after_the_end() -> None:
    eos, calls = 2, set()

    def allowed(row: int, text: Tensor) -> list[int]:
        assert text.shape == (text.shape[0],) and text.shape[0] < 5 + 16
        assert eos not in text[5:].tolist()
        assert text[:5].tolist() == BATCH[row].tolist()
        calls.add(row)
        return [10 * (row + 1) + i for i in range(8)] + [eos] * (text.shape[0] > 8 + row)

    model = pair()[0]
    expected = model.generate(**padded(), **SETTINGS, eos_token_id=eos, prefix_allowed_tokens_fn=allowed)
    calls.clear()
    for draft in pair():
        speculate = custom_generate(draft, 8)
        ours = model.generate(
            **padded(), **SETTINGS, eos_token_id=eos, prefix_allowed_tokens_fn=allowed, custom_generate=speculate
        )
        assert torch.equal(expected, ours)
    assert calls == {0, 1, 2, 3}
    assert (ours == eos).any()


def test_models_on_other_devices_see_the_same_laws() -> None:
    """`away` wraps every processor; it must change nothing (there is one device here, so it is asked for)."""
    config = SimpleNamespace(
        do_sample=True, return_dict_in_generate=False, output_scores=False, output_logits=False, _pad_token_tensor=None
    )
    chain = pair()[0]._get_logits_processor  # what generate calls
    settings = deepcopy(pair()[0].generation_config)
    settings.update(do_sample=True, repetition_penalty=1.4, top_k=9, temperature=0.7)
    chain = chain(settings, 5, BATCH, logits_processor=LogitsProcessorList([RowBias(4)]))
    batch = Batch(BATCH, Prompt.of(BATCH, [2, 1, 0, 4]), chain, [], config)
    logits, texts = torch.randn(1, 3, HF_VOCAB), Prefixes.chain(torch.tensor([[8, 9]]), 3)
    for near, away in zip(batch.requests(0, False), batch.requests(0, True), strict=True):
        laws = [each.sampler.law(logits, [Row(each, 0, list(each.prompt))], texts, "") for each in (near, away)]
        assert torch.equal(*(law.probs for law in laws if law.probs is not None))
    pairs = zip(near.sampler.processors, away.sampler.processors, strict=True)  # type: ignore[attr-defined]
    assert any(type(one) is not type(two) for one, two in pairs)


# ---- streamers and records --------------------------------------------------------------------------------------


class Puts(BaseStreamer):
    def __init__(self, fails_after: int = 99) -> None:
        self.puts: list[Any] = []
        self.fails_after = fails_after

    def put(self, value: Tensor) -> None:
        self.puts.append((value.tolist(), value.dtype, value.device))
        if len(self.puts) > self.fails_after:
            raise KeyError("the listener has left")

    def end(self) -> None:
        self.puts.append("end")


def test_streamer_gets_every_token_on_its_own() -> None:
    puts = []
    for speculate in (None, hook()):
        streamer = Puts()
        pair()[0].generate(BATCH[2:3], **SETTINGS, streamer=streamer, custom_generate=speculate)
        puts.append(streamer.puts)
    assert puts[0] == puts[1]
    assert len(puts[1]) == 1 + 16 + 1


def test_streamer_that_arrives_as_an_argument() -> None:
    """Should generate pass it on one day, or a wrapper do it today."""
    streamer, speculate = Puts(), hook()

    def wrapper(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
        return speculate(model, input_ids, streamer=streamer, **kwargs)

    pair()[0].generate(BATCH[2:3], **SETTINGS, custom_generate=wrapper)
    assert len(streamer.puts) == 16 + 1


def test_text_streamer_in_a_thread() -> None:
    model, speculate = pair()[0], hook()
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    arguments = {"inputs": BATCH[2:3], **SETTINGS, "streamer": streamer, "custom_generate": speculate}
    thread = threading.Thread(target=model.generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer().decode(model.generate(BATCH[2:3], **SETTINGS)[0, 5:])


def test_a_failing_streamer_leaves_the_callable_usable() -> None:
    model, speculate = pair()[0], hook()
    with pytest.raises(KeyError, match="left") as failure:
        model.generate(BATCH[2:3], **SETTINGS, streamer=Puts(fails_after=3), custom_generate=speculate)
    expected, ours = both(model, speculate, **padded(), **SETTINGS)
    assert torch.equal(expected, ours)
    assert failure.tb is not None  # kept until here: it would keep the rows of an unfinished round in the cache


def test_scores_of_rows_that_have_ended() -> None:
    model = pair()[0]
    eos = int(model.generate(**padded(), **SETTINGS)[0, 7])
    wanted = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": eos}
    expected, ours = both(model, hook(), **padded(), **SETTINGS, **wanted)
    assert torch.equal(expected.sequences, ours.sequences)
    assert ours.sequences[0, 8:].eq(PAD).all() and ours.sequences.shape[1] > 8
    torch.testing.assert_close(ours.scores[2][0], expected.scores[2][0], atol=2e-5, rtol=1e-4)
    assert ours.scores[3][0].softmax(-1)[PAD] == 1
    transition = model.compute_transition_scores(ours.sequences, ours.scores)  # not inference tensors
    assert transition.shape == (4, len(ours.scores))


# ---- sampling ---------------------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 6, "repetition_penalty": 1.3}


def test_return_sequences_differ_and_can_be_repeated() -> None:
    model, speculate = pair()[0], hook()

    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        options = {**SAMPLED, "num_return_sequences": 5, "max_new_tokens": 8}
        return model.generate(BATCH[2:3], **options, custom_generate=speculate).tolist()

    first, again, other = sample(3), sample(3), sample(4)
    assert first == again != other
    assert len({tuple(row) for row in first}) == 5


def test_a_seed_of_its_own() -> None:
    """One seed, one result, whatever the global generator, the other rows and the padding."""
    model, speculate = pair()[0], hook(seed=7)
    options = {"do_sample": True, "top_k": 6, "max_new_tokens": 8, "custom_generate": speculate}
    batch = model.generate(**padded(), **options)
    assert torch.equal(batch, model.generate(**padded(), **options))
    assert torch.equal(batch[0, 2:], model.generate(BATCH[:1, 2:], **options)[0])
    other = model.generate(**padded(), **{**options, "custom_generate": hook(seed=8)})
    assert not torch.equal(batch, other)
    with pytest.raises(ValueError, match="seed=-1 is not possible: it must be at least 0"):
        hook(seed=-1)


def test_greedy_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    pair()[0].generate(BATCH[2:3], **SETTINGS, custom_generate=hook())
    assert torch.equal(before, torch.get_rng_state())
    pair()[0].generate(BATCH[2:3], do_sample=True, max_new_tokens=2, custom_generate=hook())
    assert not torch.equal(before, torch.get_rng_state())


def pair_law(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The exact law of the next two tokens under SAMPLED, (vocab, vocab), from generate's own scores."""
    wanted = {**SAMPLED, "return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
    first = model.generate(**padded(ids), **wanted).scores[0].softmax(-1)[0]
    likely = first.nonzero()
    longer = torch.cat([ids.expand(len(likely), -1), likely], 1)
    second = model.generate(**padded(longer), **wanted).scores[0].softmax(-1)
    law = torch.zeros(HF_VOCAB, HF_VOCAB)
    law[likely[:, 0]] = first[likely] * second
    return law


def chi_squared_odds(counts: Tensor, law: Tensor) -> float:
    """The chance of counts at least as far from the law; cells that expect fewer than five are taken together."""
    expected = law.double() * counts.sum()
    big = expected >= 5
    assert int(big.sum()) > 10
    expected = torch.cat([expected[big], expected[~big].sum()[None]])
    seen = torch.cat([counts[big], counts[~big].sum()[None]]).double()
    statistic = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return float(torch.special.gammaincc((len(seen) - 1) / torch.tensor(2.0, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("pads", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_sampled_law(pads: int) -> None:
    """400 samples of two tokens; the seed is fixed, and another one would fail by chance with odds of 1e-4."""
    model, draft = pair()
    ids = torch.tensor([[PAD] * pads + [11, 12, 13]])
    companion = torch.tensor([list(range(1, 4 + pads))])  # no padding: the rows get different samplers
    speculate = hook(seed=0)
    batch = padded(torch.cat([ids, companion][: 1 + (pads > 0)]))
    options = {**SAMPLED, "max_new_tokens": 2, "num_return_sequences": 400}
    pairs = model.generate(**batch, **options, custom_generate=speculate)[:400, -2:]
    counts = torch.zeros(HF_VOCAB, HF_VOCAB)
    counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)), accumulate=True)
    assert 0.1 < (speculate.stats.alpha or 0) < 0.95  # drafts were kept, and rejected
    assert chi_squared_odds(counts, pair_law(model, ids)) > 1e-4
    assert chi_squared_odds(counts, pair_law(draft, ids)) < 1e-9  # the check can fail


# ---- models -----------------------------------------------------------------------------------------------------


def test_draft_from_a_folder_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    draft.save_pretrained(tmp_path)
    model = deepcopy(target).to(torch.bfloat16)
    speculate = custom_generate(tmp_path)
    loaded = list[Any]()

    def load_draft(*words: Any, **named: Any) -> Any:
        loaded.append(load_model(*words, **named))
        return loaded[-1]

    monkeypatch.setattr(custom_generation, "load_model", load_draft)
    model.generate(BATCH[2:3], **SETTINGS, custom_generate=speculate)
    assert [each.dtype for each in loaded] == [torch.bfloat16]
    monkeypatch.setattr(custom_generation, "CausalScorer", None)
    model.generate(BATCH[2:3], **SETTINGS, custom_generate=speculate)
    assert len(loaded) == 1


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    for draft, fault in ((tmp_path / "nothing", "cannot load"), ("exit:1", "loaded alone"), ("ngram:none", "none")):
        speculate = custom_generate(draft)
        for _ in range(2):  # and the callable is not left busy
            with pytest.raises((ValueError, FileNotFoundError), match=fault):
                pair()[0].generate(BATCH[2:3], **SETTINGS, custom_generate=speculate)


def test_the_model_is_left_as_it_was() -> None:
    model, draft = deepcopy(pair("gpt2")[0]), deepcopy(pair("gpt2")[1])
    expected = model.generate(BATCH[2:3], **SETTINGS)
    speculate = custom_generate(draft)
    model.generate(BATCH[2:3], **SETTINGS, custom_generate=speculate)
    model.train()
    model.transformer.h[0].eval()
    draft.train()
    modes = [module.training for module in [*model.modules(), *draft.modules()]]
    names, config = set(vars(model)), model.config.to_dict()
    ours = model.generate(BATCH[2:3], **SETTINGS, custom_generate=speculate)
    assert torch.equal(expected, ours)  # dropout is off
    assert [module.training for module in [*model.modules(), *draft.modules()]] == modes
    assert set(vars(model)) == names and model.config.to_dict() == config


def test_one_call_at_a_time() -> None:
    model, speculate = pair()[0], hook()

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            model.generate(input_ids, **SETTINGS, custom_generate=speculate)
            return scores

    with pytest.raises(RuntimeError, match="already decoding"):
        model.generate(BATCH[2:3], **SETTINGS, logits_processor=[Nested()], custom_generate=speculate)
    model.generate(BATCH[2:3], **SETTINGS, custom_generate=speculate)


# ---- refusals ---------------------------------------------------------------------------------------------------


def filled_cache(tokens: int = 4, rows: int = 1) -> DynamicCache:
    return state_in(pair()[0](BATCH[2:3, :tokens].repeat(rows, 1), use_cache=True))


def own_cache() -> Cache:
    """A cache whose layers do more than keep keys and values."""

    class Own(DynamicLayer):
        pass

    return Cache(layers=[Own(), Own()])


class Ends(StoppingCriteria):
    """Says that texts end, but not what pads those that have."""

    eos_token_id = 5

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == 5


REFUSED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "groups": ("ask for group_beam_search", lambda: {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    "beams and embeddings": (f"inputs_embeds and {CACHE} cannot", lambda: {"num_beams": 2, CACHE: filled_cache()}),
    "logits of beams": (
        "output_logits cannot be honoured with num_beams",
        lambda: {"num_beams": 3, "output_logits": True, "return_dict_in_generate": True},
    ),
    "contrastive": ("ask for contrastive_search", lambda: {"penalty_alpha": 0.6, "top_k": 4}),
    "prompt lookup": ("ask for assisted_generation", lambda: {"prompt_lookup_num_tokens": 3}),
    "assistant": ("leave out assistant_model", lambda: {"assistant_model": pair()[1]}),
    "whole prompt in cache": ("holds 5 tokens, but the prompt has 5", lambda: {CACHE: filled_cache(5)}),
    "cache of other rows": ("holds 2 rows, but there are 1", lambda: {CACHE: filled_cache(3, 2)}),
    "own cache": (f"{CACHE} of Own cannot", lambda: {CACHE: own_cache()}),
    "cache that is not used": ("use_cache=False", lambda: {CACHE: filled_cache(), "use_cache": False}),
    "offloaded cache": ("cache_implementation='offloaded'", lambda: {"cache_implementation": "offloaded"}),
    "gpus": ("synced_gpus=True", lambda: {"synced_gpus": True}),
    "attentions": ("output_attentions cannot", lambda: {"output_attentions": True, "return_dict_in_generate": True}),
    "hidden": ("output_hidden_states cannot", lambda: {"output_hidden_states": True, "return_dict_in_generate": True}),
    "a mask too wide": (
        "5 columns for a prompt of 4 tokens and 0 in",
        lambda: {"input_ids": BATCH[2:3, :4], "inputs": None, "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
    ),
    "positions": ("position_ids must count", lambda: {"position_ids": torch.tensor([[0, 1, 2, 3, 9]])}),
    "holes": ("pad on the left", lambda: {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]]), "pad_token_id": 0}),
    "nothing": ("prompt 0 is empty", lambda: {"attention_mask": torch.tensor([[0, 0, 0, 0, 0]]), "pad_token_id": 0}),
    "padding": ("pad_token_id is not set", lambda: {"inputs": BATCH[2:, :2], "stopping_criteria": [Ends()]}),
    "stream of a batch": ("a streamer needs a single row", lambda: {"inputs": BATCH[1:3], "streamer": Puts()}),
    "guidance": ("ClassifierFreeGuidance", lambda: {"guidance_scale": 1.5}),
    "watermark": (
        "SynthIDText",
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 1], ngram_len=2), "do_sample": True},
    ),
}


def test_compiled_models_are_refused() -> None:
    (model := deepcopy(pair()[0])).compile(backend="eager")
    with pytest.raises(ValueError, match=r"compiled by torch\.compile"):
        model.generate(BATCH[2:3], **SETTINGS, custom_generate=hook())


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", object)  # generate makes one to offload; torch for GPUs has none without a GPU
    message, arguments = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refusal:
        pair()[0].generate(**{"inputs": BATCH[2:3], **SETTINGS, **arguments()}, custom_generate=hook())
    assert "slipstream" in refusal.traceback[-1].path.parts  # ours, not generate's
    assert str(refusal.value).count(". ") == 0  # one sentence


def test_token_types_are_refused() -> None:
    with pytest.raises(ValueError, match="token_type_ids cannot be honoured"):
        pair("gpt2")[0].generate(
            BATCH[2:3], **SETTINGS, token_type_ids=torch.ones(1, 5).long(), custom_generate=hook(family="gpt2")
        )


def test_encoder_decoders_are_refused() -> None:
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(ValueError, match="this one is an encoder-decoder"):
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=3, custom_generate=hook())
