"""The law that is sampled from, against transformers; and the seam that draws, against the law.

Statistical tests use fixed seeds, so they pass or fail for good; their thresholds are such that a correct `draw`
with other seeds would fail one of them with the odds stated.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TopPLogitsWarper,
)

from slipstream.core import draws as sampling
from slipstream.core.draws import Key, draw, request_key, uniforms
from slipstream.core.law import Law
from slipstream.core.request import Prefixes, Row
from slipstream.core.round import Context
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from toys.families import FAMILIES, tiny
from toys.tables import PAIRS, scorer
from toys.texts import request, row

VOCAB = 11
EOS = (3, 5)
NOTHING = Prefixes.chain(torch.empty(1, 0, dtype=torch.long), 1)


# ---- the law against transformers -------------------------------------------------------------------------------


def logits_like(seed: int, *shape: int, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, VOCAB, generator=generator)
    return logits.round() if ties else logits


def texts_like(seed: int, rows: int, gamma: int) -> tuple[list[Row], Tensor]:
    """Rows of different prompt and output lengths, and drafted tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    made = [row(tokens(3 + 2 * r + seed % 4), 1 + 2 * r + seed % 3, index=r) for r in range(rows)]
    return made, torch.tensor([tokens(gamma) for _ in range(rows)], dtype=torch.long).view(rows, gamma)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(FAMILIES["llama"])


def transformers_chain(model: PreTrainedModel, settings: Sampling, prompt_length: int) -> LogitsProcessorList:
    """The processors that `generate` would apply, built and ordered by transformers itself."""
    config = GenerationConfig(
        do_sample=not settings.greedy,
        temperature=settings.temperature or None,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p or None,
        typical_p=settings.typical_p,
        repetition_penalty=settings.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in settings.logit_bias.items()] or None,
        bad_words_ids=[list(word) for word in settings.bad_words] or None,
        min_new_tokens=settings.min_new_tokens or None,
        no_repeat_ngram_size=settings.no_repeat_ngram_size or None,
        eos_token_id=list(EOS),
    )
    model._prepare_special_tokens(config, device="cpu")
    own = LogitsProcessorList(settings.processors)
    return model._get_logits_processor(config, input_ids_seq_length=prompt_length, logits_processor=own, device="cpu")


def after_seven(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor of the user's own that looks at the prefix, and works in place as some do."""
    assert input_ids.shape[0] == scores.shape[0] == 1
    if int(input_ids[0, -1]) >= 7:
        scores[:, ::2] -= 2.5
    return scores


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 4, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
    typical_p=st.sampled_from([1.0, 1.0, 0.8, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5).filter(bool), max_size=2),
    bad_words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2), max_size=3),
    min_new_tokens=st.integers(0, 6),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3]),
    eos=st.just(frozenset(EOS)),
    processors=st.sampled_from(
        [
            (),
            (after_seven,),
            LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]),
            LogitsProcessorList([after_seven, SuppressTokensLogitsProcessor([1, 4])]),
        ]
    ),
)


@given(SETTINGS, st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_laws_are_those_of_transformers(
    model: PreTrainedModel, settings: Sampling, seed: int, rows: int, gamma: int, drafting: bool, ties: bool
) -> None:
    """As the target calls it (gamma + 1 positions) and as the drafter does (the last one): row by row and position by
    position, each with its real prefix; and processors that work in place do not reach the logits."""
    texts, drafted = texts_like(seed, rows, gamma)
    logits = logits_like(seed, rows, 1 if drafting else gamma + 1, ties=ties)
    before = logits.clone()
    law = settings.law(logits, texts, Prefixes.chain(drafted, logits.shape[1]), "toy")
    assert law.point == settings.greedy
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
    first = gamma - logits.shape[1] + 1
    for r, text in enumerate(texts):
        for j in range(logits.shape[1]):
            chain = transformers_chain(model, settings, len(text.request.prompt))
            prefix = torch.tensor([[*text.tokens, *drafted[r, : first + j].tolist()]])
            scores = chain(prefix, before[r, j][None].float())[0]
            if law.tokens is not None:
                assert int(law.tokens[r, j]) == int(scores.argmax())
            else:
                torch.testing.assert_close(law.dense[r, j], scores.softmax(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 1, 30])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 0.9999])
def test_a_nucleus_is_that_of_transformers(top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, drafted = texts_like(0, 2, 1)
    logits = spread * torch.randn(2, 2, 5000, generator=torch.Generator().manual_seed(0))
    expected = TopPLogitsWarper(top_p)(drafted, logits.flatten(0, 1)).softmax(-1)
    monkeypatch.setattr(TopPLogitsWarper, "__call__", None)  # it is not asked, since it sorts the whole vocabulary
    law = Sampling(temperature=1.0, top_p=top_p).law(logits, texts, Prefixes.chain(drafted, 2), "toy")
    torch.testing.assert_close(law.dense.flatten(0, 1), expected, rtol=0, atol=1e-6)


MANY: dict[str, Any] = {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "repetition_penalty": 1.4, "min_new_tokens": 5}


def test_laws_are_those_that_generate_samples_from(model: PreTrainedModel) -> None:
    """The scores of a real `generate` call against the law at each step of the text it produced."""
    settings = Sampling(**MANY, logit_bias={4: 2.0}, bad_words=[[8], [4, 4]], eos=frozenset(range(50)))
    prompt = [5, 17, 33]
    torch.manual_seed(1)
    ends = {"max_new_tokens": 10, "eos_token_id": list(range(50)), "pad_token_id": 0}
    words = {"sequence_bias": [[[4], 2.0]], "bad_words_ids": [[8], [4, 4]]}
    told = {"do_sample": True, "output_scores": True, "return_dict_in_generate": True}
    mask = torch.ones(1, 3, dtype=torch.long)
    out = model.generate(torch.tensor([prompt]), attention_mask=mask, **ends, **MANY, **words, **told)
    text = out.sequences[0].tolist()
    assert len(text) >= 8
    for step, scores in enumerate(out.scores):
        prefix = text[: len(prompt) + step]
        logits = model(torch.tensor([prefix])).logits[:, -1:].detach()
        law = settings.law(logits, [row(prefix, len(prompt))], NOTHING, "toy")
        torch.testing.assert_close(law.dense[0, 0], scores[0].softmax(-1), rtol=0, atol=1e-5)


def test_a_chain_is_not_shared_between_prompts_of_different_length() -> None:
    """Where min_new_tokens ends and penalties begin depends on the prompt; the settings object is the same."""
    settings = Sampling(temperature=1.0, min_new_tokens=2, eos=frozenset({3}), presence_penalty=5.0)
    rows = [row([1, 2, 2], 1), row([1, 2, 2], 3)]  # two tokens were emitted, none
    logits = torch.zeros(2, 1, VOCAB)
    law = settings.law(logits, rows, Prefixes.chain(torch.empty(2, 0, dtype=torch.long), 1), "toy").dense[:, 0]
    assert float(law[0, 3]) > 0 and float(law[1, 3]) == 0
    assert float(law[0, 2]) < 0.1 * float(law[0, 1]) and float(law[1, 2]) == float(law[1, 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_presence_and_frequency_penalties_count_the_output_at_each_position(temperature: float) -> None:
    settings = Sampling(temperature=temperature, presence_penalty=0.7, frequency_penalty=0.4)
    text, drafted = [2, 2, 9, 4, 9], torch.tensor([[9, 2, 0]])  # the prompt is 2 2
    logits = logits_like(3, 1, 4)
    law = settings.law(logits, [row(text, 2)], Prefixes.chain(drafted, 4), "toy")
    for j in range(4):
        output = [9, 4, 9, *drafted[0, :j].tolist()]
        want = [float(x) - 0.4 * output.count(token) - 0.7 * (token in output) for token, x in enumerate(logits[0, j])]
        if law.tokens is not None:
            assert int(law.tokens[0, j]) == max(range(VOCAB), key=want.__getitem__)
        else:
            torch.testing.assert_close(law.dense[0, j], torch.tensor(want).softmax(-1))
    assert not torch.equal(logits.argmax(-1), logits_like(4, 1, 4).argmax(-1))


def test_penalties_come_before_the_warpers() -> None:
    """The penalty moves what top-k keeps; after top-k it could not."""
    settings = Sampling(temperature=1.0, top_k=1, presence_penalty=3.0)
    law = settings.law(torch.tensor([[[2.0, 1.0, 0.0]]]), [row([1, 0], 1)], NOTHING, "toy")
    assert law.dense[0, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("vocab", [3, 1000, 40_000])
@pytest.mark.parametrize("processed", [False, True])
def test_greedy_ties_go_to_the_lowest_index(vocab: int, processed: bool) -> None:
    settings = Sampling(repetition_penalty=1.5) if processed else Sampling()
    logits = torch.zeros(1, 2, vocab)
    logits[0, 0, [1, vocab // 2, vocab - 1]] = 7.0
    logits[0, 1, vocab - 1] = logits[0, 1, vocab // 2 + 1] = 7.0
    law = settings.law(logits, [row([0])], Prefixes.chain(torch.zeros(1, 1, dtype=torch.long), 2), "toy")
    assert law.tokens is not None and law.tokens.tolist() == [[1, vocab // 2 + 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_laws_are_float32_or_wider(dtype: torch.dtype) -> None:
    logits = logits_like(5, 1, 2).to(dtype)
    rows, texts = [row([1, 2])], Prefixes.chain(torch.tensor([[4]]), 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for settings in (Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2)):
        law = settings.law(logits, rows, texts, "toy")
        assert law.dense.dtype == wide
        torch.testing.assert_close(law.dense, settings.law(logits.to(wide), rows, texts, "toy").dense)
        torch.testing.assert_close(law.dense.sum(-1), torch.ones(1, 2, dtype=wide))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_reported_with_model_text_and_position(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 3, VOCAB)
    logits[1, 2, 4] = bad
    rows, drafted = [row([1, 2, 3], index=6), row([1, 2, 3, 4, 5], index=9)], torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(FloatingPointError, match=r"^toy gives non-finite logits for position 7 of text 9:"):
        Sampling(temperature=temperature).law(logits, rows, Prefixes.chain(drafted, 3), "toy")
    with pytest.raises(FloatingPointError, match=r"^draft gives non-finite logits for position 7 of text 9:"):
        Sampling(temperature=temperature).law(logits[:, 2:], rows, Prefixes.chain(drafted, 1), "draft")
    nothing = torch.full((1, 1, VOCAB), -math.inf)
    with pytest.raises(FloatingPointError, match="position 3 of text 6"):
        Sampling(temperature=temperature).law(nothing, rows[:1], NOTHING, "toy")


def test_forbidden_tokens_are_no_error() -> None:
    logits = torch.zeros(1, 1, VOCAB)
    logits[..., 1:] = -math.inf
    law = Sampling(temperature=1.0).law(logits, [row([1])], NOTHING, "toy")
    assert law.dense[0, 0].tolist() == [1.0] + [0.0] * (VOCAB - 1)


@pytest.mark.parametrize("drafted", [False, True])
def test_settings_that_forbid_every_token_are_an_error_and_no_token_beyond_the_vocabulary(drafted: bool) -> None:
    p, q = PAIRS["generic"]
    decoder = Decoder(scorer(p, "target"), ModelDrafter(scorer(q, "draft")))
    settings = Sampling(temperature=1.0, bad_words=[[0], [1], [2]])
    (done,) = (generate if drafted else plain)(decoder, [request([1], 2, settings)])
    assert done.error is not None and done.error.startswith("no token is possible for text 0 after 1 tokens")


def test_rows_with_settings_of_their_own_are_processed_apart() -> None:
    """The laws come back in the order of the rows, whatever groups their settings form."""
    hot, cold = Sampling(temperature=2.0), Sampling(temperature=0.5, repetition_penalty=1.3)
    rows = tuple(row([1, 2 + r], 1, sampler, index=r) for r, sampler in enumerate((hot, cold, hot, cold, hot)))
    logits, drafted = logits_like(7, 5, 3), torch.randint(VOCAB, (5, 2), generator=torch.Generator().manual_seed(0))
    law = Context(rows, draw).law(logits, Prefixes.chain(drafted, 3), "toy")
    for r, text in enumerate(rows):
        alone = text.request.sampler.law(logits[r : r + 1], [text], Prefixes.chain(drafted[r : r + 1], 3), "toy")
        torch.testing.assert_close(law.dense[r : r + 1], alone.dense)


# ---- draw -------------------------------------------------------------------------------------------------------

COUNT = 30_000
WEIGHTS = torch.tensor([0.03, 0.0, 0.4, 0.17, 0.0, 0.15, 0.25], dtype=torch.float64)
KEY = Key((7,), (11,), (100,), (100,), "next")
# Odds at which a correct `draw` would be called wrong, per comparison; there are about 30 of them in this file.
FALSE_ALARM = 1e-6


def keys(count: int, **changes: Callable[[int], int]) -> Key:
    """One row for each i < count: KEY with some fields given by a function of i."""
    fields = {name: tuple(change(i) for i in range(count)) for name, change in changes.items()}
    same = {name: getattr(KEY, name) * count for name in ("seeds", "requests", "origins", "positions")}
    return Key(**{**same, **fields}, purpose="next")


def draws(key: Key, positions: int = 1, weights: Tensor = WEIGHTS) -> Tensor:
    return draw(Law(probs=weights.expand(len(key.seeds), positions, len(weights))), key)


STREAMS: dict[str, Callable[[], Tensor]] = {
    "positions": lambda: draws(KEY, COUNT)[0],
    "requests": lambda: draws(keys(COUNT, requests=lambda i: i))[:, 0],
    "real requests": lambda: draws(keys(COUNT, requests=lambda i: request_key((i, 5))))[:, 0],
    "seeds": lambda: draws(keys(COUNT, seeds=lambda i: i))[:, 0],
    "origins": lambda: draws(keys(COUNT, origins=lambda i: i))[:, 0],
    "rounds": lambda: draws(keys(COUNT, origins=lambda i: 3 * i, positions=lambda i: 3 * i + i % 2))[:, 0],
}


def p_value(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit(tokens: Tensor, weights: Tensor) -> float:
    """Pearson's chi-squared test that the tokens come from the weights -> p-value."""
    seen = torch.bincount(tokens, minlength=len(weights)).double()
    assert int(seen[weights == 0].sum()) == 0, "a token of weight zero was drawn"
    want = (weights / weights.sum() * len(tokens))[weights > 0]
    return p_value(float(((seen[weights > 0] - want) ** 2 / want).sum()), len(want) - 1)


def independence(left: Tensor, right: Tensor) -> float:
    """Pearson's chi-squared test that two streams are independent -> p-value."""
    table = torch.zeros(len(WEIGHTS), len(WEIGHTS), dtype=torch.float64)
    table.index_put_((left, right), torch.ones(len(left), dtype=torch.float64), accumulate=True)
    table = table[WEIGHTS > 0][:, WEIGHTS > 0]
    want = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    return p_value(float(((table - want) ** 2 / want).sum()), (len(table) - 1) ** 2)


@pytest.mark.parametrize("stream", STREAMS)
def test_draws_follow_their_law(stream: str) -> None:
    tokens = STREAMS[stream]()
    assert fit(tokens, WEIGHTS) > FALSE_ALARM
    # Control: the test has the power to see three percent of mass that moved.
    moved = WEIGHTS + torch.tensor([0.03, 0, -0.03, 0, 0, 0, 0])
    assert fit(tokens, moved) < FALSE_ALARM


def test_neighbours_and_purposes_are_independent() -> None:
    base = draws(KEY, COUNT)[0]
    others = {
        **{purpose: draws(replace(KEY, purpose=purpose), COUNT)[0] for purpose in ("draft", "accept")},
        **{f"{lag} positions on": base.roll(-lag) for lag in (1, 2, 5, 64)},
        "next request": draws(replace(KEY, requests=(12,)), COUNT)[0],
        "next seed": draws(replace(KEY, seeds=(8,)), COUNT)[0],
        "next round": draws(replace(KEY, origins=(101,)), COUNT)[0],
        "next round, shifted": draws(replace(KEY, origins=(101,), positions=(101,)), COUNT)[0],
    }
    for name, other in others.items():
        assert independence(base, other) > FALSE_ALARM, name
    assert independence(base, torch.where(torch.arange(COUNT) % 20 == 0, base, others["draft"])) < FALSE_ALARM


def test_uniforms_are_uniform_and_uncorrelated_at_every_scale() -> None:
    """Bits of the 53: their frequencies and the correlations of neighbours. Odds of a false alarm: 1e-6 in all."""
    numbers = torch.tensor(uniforms(KEY, COUNT)[0], dtype=torch.float64)
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    bits = (numbers[:, None] * 2.0 ** torch.arange(1, 41)).floor() % 2 * 2 - 1
    limit = 6.2 / math.sqrt(COUNT)  # 6.2 standard deviations for 40 * 41 figures
    assert float(bits.mean(0).abs().max()) < limit
    assert float((bits[1:] * bits[:-1]).mean(0).abs().max()) < limit
    cross = bits.T @ bits / COUNT
    assert float((cross - torch.eye(40, dtype=torch.float64)).abs().max()) < limit


def test_a_draw_depends_on_its_key_and_its_law_only() -> None:
    """Not on the neighbours in the batch, their order, or how positions are grouped into calls."""
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(5, 4, 7, generator=generator, dtype=torch.float64)
    key = Key((1, 1, 2, 2, 3), (9, 8, 9, 8, 7), (4, 4, 4, 5, 6), (4, 5, 4, 5, 6), "draft")
    together = draw(Law(probs=probs), key)
    for r in range(5):
        for j in range(4):
            alone = Key(*((x[r],) for x in (key.seeds, key.requests, key.origins)), (key.positions[r] + j,), "draft")
            assert int(draw(Law(probs=probs[r : r + 1, j : j + 1]), alone)) == int(together[r, j])
    torch.testing.assert_close(draw(Law(probs=probs), key), together)


@pytest.mark.parametrize("field", ["seeds", "requests", "origins", "positions", "purpose"])
def test_every_part_of_the_key_matters(field: str) -> None:
    other = replace(KEY, **{field: "accept" if field == "purpose" else (getattr(KEY, field)[0] + 1,)})
    assert not torch.equal(draws(other, 200), draws(KEY, 200))


@pytest.mark.parametrize("total", [1e-30, 0.37, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_need_not_add_up_to_one(total: float, dtype: torch.dtype) -> None:
    torch.testing.assert_close(draws(KEY, 500, (WEIGHTS * total).to(dtype)), draws(KEY, 500))


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_no_number_draws_a_token_without_weight(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "uniforms", lambda key, positions: [[number] * positions for _ in key.seeds])
    weights = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float32)
    for total in (1e-38, 1.0, 3.0, 1e38):
        token = int(draws(KEY, 1, weights * total))
        assert token == (2 if number < 0.3 else 4)
    smallest = torch.tensor([0.0, 0.0, 5e-324, 0.0], dtype=torch.float64)  # number * total rounds up to the total
    assert int(draws(KEY, 1, smallest)) == 2
    many = torch.zeros(50_000)
    many[10:40_000] = torch.rand(39_990, generator=torch.Generator().manual_seed(0))
    assert 10 <= int(draws(KEY, 1, many)) < 40_000


def test_a_point_mass_is_drawn_as_it_is() -> None:
    tokens = torch.tensor([[3, 1, 4]])
    torch.testing.assert_close(draw(Law(tokens=tokens), KEY), tokens)


def test_request_keys_tell_prompts_and_copies_apart() -> None:
    prompts = [(), (0,), (0, 0), (1,), (256,), (1, 0), (0, 1), tuple(range(50))]
    found = {request_key(prompt, copy) for prompt in prompts for copy in range(5)}
    assert len(found) == 5 * len(prompts)
    assert request_key([1, 2]) == request_key((1, 2), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_laws_and_draws_are_the_same_on_a_gpu() -> None:
    more = {"presence_penalty": 0.5, "logit_bias": {2: 1.0}, "bad_words": [[4], [1, 6]], "eos": frozenset(EOS)}
    settings = Sampling(**MANY, **more)
    rows, drafted = texts_like(1, 3, 2)
    logits = logits_like(1, 3, 3)
    here, there = (settings.law(logits.to(x), rows, Prefixes.chain(drafted.to(x), 3), "toy") for x in ("cpu", "cuda"))
    torch.testing.assert_close(there.dense.cpu(), here.dense)
    key = Key((1, 1, 1), (0, 1, 2), (5, 5, 5), (5, 5, 5), "next")
    torch.testing.assert_close(draw(there, key).cpu(), draw(here, key))
