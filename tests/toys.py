"""Toys of the tests: an enumerator of all outcomes, table models on three tokens, tiny random Hugging Face models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.core.draft import Draft
from slipstream.core.draws import Key, Rng, draw
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request, Row, Sampler
from slipstream.core.round import Context, Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain, rounds
from slipstream.decoding.rules import Rule
from slipstream.decoding.sampling import Sampling
from slipstream.models.tables import Table, TableScorer

# ---- enumeration ------------------------------------------------------------------------------------------------

Outcome = Any
Distribution = dict[Outcome, float]


@dataclass
class Script:
    """A seam that replays choices and then goes on with the first possible one. Point laws give no choice."""

    choices: list[int]
    weights: list[list[tuple[int, float]]] = field(default_factory=list)  # of every choice met so far
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    coupled = False

    def chances(self, key: Key, positions: int) -> None:
        """Choices are no inversions."""

    def select(self, places: Sequence[int]) -> Script:
        """All rows are in one script."""
        return self

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        assert law.probs.dtype in {torch.float32, torch.float64}
        rows = [
            [self._choose(weights, (*names, start + j, key.name)) for j, weights in enumerate(row)]
            for *names, start, row in zip(
                key.seeds, key.requests, key.origins, key.positions, law.probs.tolist(), strict=True
            )
        ]
        return torch.tensor(rows, dtype=torch.long).view(law.probs.shape[:2])

    def _choose(self, weights: Sequence[float], name: tuple[Any, ...]) -> int:
        # Two draws under one name would be one and the same number: not the independent draws that we count.
        assert name not in self.seen, f"the key {name} is used twice"
        self.seen.add(name)
        assert all(weight >= 0 for weight in weights), f"negative or NaN weights: {weights}"
        possible = [(token, weight) for token, weight in enumerate(weights) if weight > 0]
        if not possible:  # a coin that nobody looks at (padding); inversion falls off its end
            return len(weights)
        if len(self.weights) == len(self.choices):
            self.choices.append(0)
        choice = self.choices[len(self.weights)]
        self.weights.append(possible)
        return possible[choice][0]

    @property
    def probability(self) -> float:
        """The chance of the choices made."""
        chances = [
            options[choice][1] / math.fsum(weight for _, weight in options)
            for options, choice in zip(self.weights, self.choices, strict=True)
        ]
        return math.prod(chances)

    def following(self) -> list[int] | None:
        """The choices of the next branch, depth first; None after the last."""
        choices = list(self.choices)
        while choices and choices[-1] + 1 == len(self.weights[len(choices) - 1]):
            choices.pop()
        return [*choices[:-1], choices[-1] + 1] if choices else None


@dataclass
class SharedScript(Script):
    """A script of coupled draws: all that look at one position invert one number, known as far as they have told it.

    A draw chooses among the tokens that the number may still give, and the number then lies in that token's part.
    """

    known: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)
    coupled = True

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        rows = [
            [self._shared(weights, (seed, request, start + j)) for j, weights in enumerate(row)]
            for seed, request, start, row in zip(
                key.seeds, key.requests, key.positions, law.probs.tolist(), strict=True
            )
        ]
        return torch.tensor(rows, dtype=torch.long)

    def _shared(self, weights: Sequence[float], place: tuple[Any, ...]) -> int:
        low, high = self.known.get(place, (0.0, 1.0))
        total = math.fsum(weights)
        if not total:  # see `_choose`
            return len(weights)
        ends = [math.fsum(weights[:count]) / total for count in range(len(weights) + 1)]
        parts = [(max(low, begin), min(high, end)) for begin, end in pairwise(ends)]
        sizes = [end - begin if end - begin > ROUNDING else 0.0 for begin, end in parts]
        token = self._choose(sizes, (*place, len(self.weights)))
        self.known[place] = parts[token]
        return token


@dataclass
class NumberedScript(SharedScript):
    """A script of draws by inversion, in which all draws under one name invert one number, as those of a draft do that
    is thrown away and made again for another text."""

    coupled = False

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        rows = [
            [self._shared(weights, (*names, start + j, key.name)) for j, weights in enumerate(row)]
            for *names, start, row in zip(
                key.seeds, key.requests, key.origins, key.positions, law.probs.tolist(), strict=True
            )
        ]
        return torch.tensor(rows, dtype=torch.long).view(law.probs.shape[:2])


ROUNDING = 1e-15
"""A part of the numbers from 0 to 1 that is no larger is there by rounding alone."""


def enumerate_outcomes(
    run: Callable[[Rng], Outcome], limit: int = 20_000, script_of: type[Script] = Script
) -> Distribution:
    """The exact law of `run(rng)`: it is run once for every sequence of draws that has a positive chance."""
    law: Distribution = {}
    choices: list[int] | None = []
    for _ in range(limit):
        script = script_of(choices or [])
        outcome = run(script)
        law[outcome] = law.get(outcome, 0.0) + script.probability
        choices = script.following()
        if choices is None:
            return law
    raise AssertionError(f"more than {limit} branches")


def total_variation(left: Distribution, right: Distribution) -> float:
    """Half the L1 distance; also notices mass that is missing on one side."""
    return 0.5 * math.fsum(abs(left.get(x, 0.0) - right.get(x, 0.0)) for x in {*left, *right})


EXACT = 1e-12
WRONG = 1e-3  # a control that is off by less would be a weak one


# ---- table models -----------------------------------------------------------------------------------------------

VOCAB = 3


def dirichlet_table(seed: int, support: Callable[[random.Random], Sequence[int]] | None = None) -> Table:
    """Reproducible random laws, one per prefix, on the tokens that `support` picks for the prefix."""

    @cache
    def table(prefix: tuple[int, ...]) -> tuple[float, ...]:
        rng = random.Random(f"{seed} {prefix}")
        tokens = set(range(VOCAB)) if support is None else set(support(rng))
        weights = [rng.gammavariate(0.7, 1.0) + 1e-3 if token in tokens else 0.0 for token in range(VOCAB)]
        return tuple(weight / math.fsum(weights) for weight in weights)

    return table


def some(rng: random.Random) -> list[int]:
    """One to three tokens."""
    return rng.sample(range(VOCAB), rng.choice([1, 2, 2, 3]))


def one(rng: random.Random) -> list[int]:
    """One token: a point mass in dense form."""
    return [rng.randrange(VOCAB)]


def one_or_all(rng: random.Random) -> list[int]:
    """A point mass for half of the prefixes."""
    return one(rng) if rng.random() < 0.5 else list(range(VOCAB))


def _disjoint(seed: int) -> tuple[Table, Table]:
    @cache
    def left(prefix: tuple[int, ...]) -> tuple[int, ...]:
        rng = random.Random(f"side {seed} {prefix}")
        return tuple(rng.sample(range(VOCAB), rng.choice([1, 2])))

    first, second = dirichlet_table(7), dirichlet_table(8)

    def cut(table: Table, inside: bool) -> Table:
        def law(prefix: tuple[int, ...]) -> tuple[float, ...]:
            weights = [x if (i in left(prefix)) == inside else 0.0 for i, x in enumerate(table(prefix))]
            return tuple(weight / math.fsum(weights) for weight in weights)

        return cache(law)

    return cut(first, True), cut(second, False)


PAIRS: dict[str, tuple[Table, Table]] = {
    "generic": (dirichlet_table(1), dirichlet_table(2)),
    "zeros": (dirichlet_table(13, some), dirichlet_table(35, some)),
    "disjoint": _disjoint(5),
    "same": (dirichlet_table(5), dirichlet_table(5)),
    "points": (dirichlet_table(36, one_or_all), dirichlet_table(26, one_or_all)),
}
"""name -> (target, draft)."""


def scorer(table: Table, name: str = "table", vocab: int = VOCAB, context: int | None = None) -> TableScorer:
    """A fresh scorer of a table."""
    return TableScorer(table, vocab, name, context)


Step = Callable[[tuple[int, ...]], Sequence[float]]


def plain_law(step: Step, prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> Distribution:
    """The oracle: the law of the first `count` tokens (fewer after one of `ends`), one step after the other."""
    law: Distribution = {(): 1.0}
    for _ in range(count):
        longer: Distribution = {}
        for text, chance in law.items():
            if text and text[-1] in ends:
                longer[text] = chance
                continue
            for token, weight in enumerate(step((*prompt, *text))):
                if weight > 0:
                    longer[(*text, token)] = chance * weight
        law = longer
    return law


# ---- requests and controllers -----------------------------------------------------------------------------------

SAMPLE = Sampling(temperature=1.0)
GREEDY = Sampling()


def request(prompt: Sequence[int], count: int, sampler: Sampler = SAMPLE, **kwargs: Any) -> Request:
    """A request in one line."""
    return Request(tuple(prompt), sampler, count, **kwargs)


RAGGED = ([3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8, 2, 8])
"""Three prompts of different lengths."""


def rare(*values: Any) -> list[Any]:
    """Values of a parameter that only the slow tests try: the behaviour is that of the values beside them."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def ragged(sampler: Any = GREEDY, count: int = 12) -> list[Any]:
    """Requests for these prompts, each with a key of its own."""
    return [request(prompt, count, sampler, key=number) for number, prompt in enumerate(RAGGED)]


def row(text: Sequence[int], prompt_length: int | None = None, sampler: Sampler = SAMPLE, index: int = 0) -> Row:
    """A row that has reached `text`."""
    prompt = text[: len(text) if prompt_length is None else prompt_length]
    return Row(request(prompt, 100, sampler, key=index), index, list(text))


@dataclass(frozen=True)
class Cycle:
    """A controller that runs through a list of gammas."""

    sequence: tuple[int, ...]

    @property
    def most(self) -> int:
        """The greatest of the list."""
        return max(self.sequence)

    def init(self) -> int:
        """The place in the list."""
        return 0

    def gammas(self, state: int, rows: Sequence[Row]) -> list[int]:
        """The gamma of that place, for every row."""
        return [self.sequence[state % len(self.sequence)]] * len(rows)

    def update(self, state: int, round: Round) -> int:
        """The next place."""
        return state + 1


# ---- drafters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Altered:
    """A drafter that changes the drafts of another one."""

    inner: Drafter
    change: Callable[[Draft], Draft]

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """The changed draft."""
        return self.change(self.inner.propose(context, gammas))

    def observe(self, round: Round) -> None:
        """Passed on."""
        self.inner.observe(round)


def propose(drafter: Drafter, rows: Sequence[Row], gammas: Sequence[int]) -> Draft:
    """One draft for some rows."""
    return drafter.propose(Context(tuple(rows), draw), gammas)


def drafted(drafter: Drafter, rows: Sequence[Row], gammas: Sequence[int]) -> list[list[int]]:
    """The drafted tokens of each row, without padding."""
    draft = propose(drafter, rows, gammas)
    return [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def same_texts(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """The rows of these requests, whose texts have to be those of plain decoding."""
    rows, expected = generate(decoder, requests), plain(decoder, requests)
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    return rows


def company_changes_nothing(alone: Decoder, requests: Sequence[Request] | None = None) -> None:
    """Texts are the same in batches of 2 and 3; some end at an EOS, also inside an accepted draft."""
    if requests is None:
        ends = frozenset(range(0, HF_VOCAB, 4))
        requests = [replace(one, eos=ends, max_new_tokens=5 + 6 * one.key) for one in ragged(SAMPLE)]
    single = [row.tokens for row in generate(alone, requests)]
    for size in (2, 3):
        together = generate(replace(alone, batch_size=size), requests)
        assert [row.tokens for row in together] == single
        assert any(row.finish_reason == "stop" for row in together)


def first_tokens(
    make: Callable[[Rng], Decoder],
    prompt: Sequence[int],
    count: int,
    limit: int,
    sampler: Sampler = SAMPLE,
    script_of: type[Script] = Script,
) -> Distribution:
    """The joint law of the first `count` tokens of a text of `limit`; every branch has a decoder of its own."""

    def run(rng: Rng) -> tuple[int, ...]:
        stream = rounds(make(rng), [request(prompt, limit, sampler)])
        row = next(round.rows[0] for round in stream if len(round.rows[0].output) >= count)
        return tuple(row.output[:count])

    return enumerate_outcomes(run, 300_000, script_of)


def law_distance(
    target: Table,
    make: Callable[[], Drafter],
    rule: Rule,
    gammas: tuple[int, ...],
    prompt: Sequence[int],
    count: int = 3,
    sampler: Sampling = SAMPLE,
) -> float:
    """The distance of the law of the first `count` tokens from the target's, at the sampler's temperature."""

    def decoder(rng: Rng) -> Decoder:
        return Decoder(scorer(target), make(), rule.verify, Cycle(gammas), rng=rng)

    def step(prefix: tuple[int, ...]) -> list[float]:
        weights = [chance ** (1 / sampler.temperature) for chance in target(prefix)]
        return [weight / sum(weights) for weight in weights]

    law = first_tokens(decoder, prompt, count, count + 1, sampler)
    return total_variation(law, plain_law(step, prompt, count))


def text_law(
    decoder: Decoder, count: int = 3, prompt: Sequence[int] = (0, 2), sampler: Sampler = SAMPLE
) -> Distribution:
    """All texts and their chances, by running the whole loop for every sequence of draws."""
    one = [request(prompt, count, sampler)]
    return enumerate_outcomes(lambda rng: tuple(generate(replace(decoder, rng=rng), one)[0].output))


def law_error(decoder: Decoder, count: int = 3, prompt: Sequence[int] = (0, 2)) -> float:
    """The distance between the law of whole texts and that of the target's model, by enumeration of all draws."""
    model = decoder.target.model  # type: ignore[attr-defined]

    @torch.inference_mode()
    def step(prefix: tuple[int, ...]) -> list[float]:
        found: list[float] = model(torch.tensor([prefix]), use_cache=False).logits[0, -1].softmax(-1).tolist()
        return found

    return total_variation(text_law(decoder, count, prompt), plain_law(step, prompt, count))


def flat(draft: Draft) -> Draft:
    """A fault of drafters on three tokens: the same draft, said to be drawn evenly."""
    even = torch.full((*draft.tokens.shape, VOCAB), 1 / VOCAB, dtype=torch.float64)
    return draft if draft.law is None else replace(draft, law=Law(probs=even))


class AtOnce(Executor):
    """An executor that has done everything when it is asked."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result is there."""
        done = Future[Any]()
        done.set_result(function(*args, **kwargs))
        return done


# ---- tiny Hugging Face models -----------------------------------------------------------------------------------

HF_VOCAB = 101
WINDOW = 7  # smaller than the texts of the tests, so that it matters

# The names under which families know their sizes.
LLAMA = {
    "vocab_size": HF_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT = {
    "vocab_size": HF_VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A configuration class of transformers and what to change in its sizes."""

    config: str
    base: dict[str, Any]
    changes: dict[str, Any]


def _llama(config: str, **changes: Any) -> Family:
    return Family(config, LLAMA, changes)


def _gpt(config: str, **changes: Any) -> Family:
    return Family(config, GPT, changes)


FAMILIES: dict[str, Family] = {
    "llama": _llama("LlamaConfig"),
    "mistral": _llama("MistralConfig", sliding_window=WINDOW),
    "qwen2": _llama("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "qwen3": _llama("Qwen3Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED, head_dim=8),
    "gemma2": _llama("Gemma2Config", sliding_window=WINDOW, layer_types=MIXED, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": _llama("Gemma3TextConfig", sliding_window=WINDOW, layer_types=MIXED, head_dim=8),
    "phi": _llama("PhiConfig"),
    "phi3": _llama("Phi3Config", sliding_window=WINDOW),
    "gpt2": _gpt("GPT2Config"),
    "gpt_neox": _llama("GPTNeoXConfig"),
    "opt": _llama("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "falcon_new": _llama("FalconConfig", new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "falcon_multi_query": _llama("FalconConfig", new_decoder_architecture=False, multi_query=True, alibi=False),
    "mixtral": _llama("MixtralConfig", sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _llama(
        "Qwen2MoeConfig",
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=MIXED,
        shared_expert_intermediate_size=24,
        **MOE,
    ),
}
"""The families that are accepted without a probe."""

PROBED: dict[str, Family] = {
    "stablelm": _llama("StableLmConfig"),
    "gemma": _llama("GemmaConfig", head_dim=8),
    "cohere": _llama("CohereConfig"),
    "cohere2": _llama("Cohere2Config", sliding_window=WINDOW, layer_types=MIXED),
    "olmo2": _llama("Olmo2Config"),
    "starcoder2": _llama("Starcoder2Config", sliding_window=WINDOW),
    "gptj": _gpt("GPTJConfig", rotary_dim=4),
    "gpt_bigcode": _gpt("GPTBigCodeConfig"),
    "codegen": _gpt("CodeGenConfig", rotary_dim=4),
    "granite": _llama("GraniteConfig"),
    "smollm3": _llama("SmolLM3Config", no_rope_layers=[1, 0]),
    "qwen3_moe": _llama("Qwen3MoeConfig", head_dim=8, **MOE),
    "olmoe": _llama("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "gpt_oss": _llama(
        "GptOssConfig",
        sliding_window=WINDOW,
        layer_types=MIXED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "llama4": _llama(
        "Llama4TextConfig",
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        no_rope_layers=[1, 0],
    ),
}
"""Families that `probe` decides about."""


T5 = {
    "vocab_size": HF_VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,  # smaller than the texts of the tests
    "initializer_factor": 1.5,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
BART = {
    "vocab_size": HF_VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "init_std": 0.5,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}
WHISPER = {
    **{name: size for name, size in BART.items() if name not in {"max_position_embeddings", "forced_eos_token_id"}},
    "max_target_positions": 128,
    "max_source_positions": 20,
    "num_mel_bins": 8,
}
SEQ2SEQ: dict[str, Family] = {
    "t5": Family("T5Config", T5, {"tie_word_embeddings": True}),
    "t5_gated": Family("T5Config", T5, {"feed_forward_proj": "gated-gelu"}),
    "mt5": Family("MT5Config", T5, {}),
    "umt5": Family("UMT5Config", T5, {}),
    "bart": Family("BartConfig", BART, {}),
    "mbart": Family("MBartConfig", BART, {}),
    "marian": Family("MarianConfig", BART, {"decoder_vocab_size": HF_VOCAB, "share_encoder_decoder_embeddings": False}),
    "m2m_100": Family("M2M100Config", BART, {}),
    "pegasus": Family("PegasusConfig", BART, {}),
    "whisper": Family("WhisperConfig", WHISPER, {}),
}
"""Encoder-decoders that are accepted without a probe."""


def tiny(family: Family, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model of a family with two layers."""
    config = getattr(transformers, family.config)(**{**family.base, **family.changes, **changes})
    torch.manual_seed(seed)
    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        speaks = config.model_type == "whisper"
        kind = transformers.AutoModelForSpeechSeq2Seq if speaks else transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(config, dtype=dtype)
    return model.eval()


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
