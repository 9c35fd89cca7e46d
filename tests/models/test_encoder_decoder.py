"""Encoder-decoders under the contract of every model: with ragged rows and sources, wrong drafts, rollbacks and rows
that end early, the logits are those of a fresh forward of each text alone; greedy text is that of transformers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel

from reference import TOLERANCE, Reference, contract, drafts_change_nothing, families, rounding, source, text
from slipstream.core.draws import draw
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request, Row
from slipstream.core.round import Context
from slipstream.core.source import Source
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.rules import BLOCK, TOKEN, Rule
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import Datastore
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.drafters.specification import drafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.execution.backends import Native
from slipstream.execution.names import state_in, with_cache
from slipstream.kernels.packing import WHOLE, PackedLinear, can_pack, lowest_bits, packed
from slipstream.models import encoder_decoder as seq2seq
from slipstream.models.causal import CausalScorer
from toys import BART, FAMILIES, GREEDY, HF_VOCAB, SAMPLE, SEQ2SEQ, Family, enumerate_rows, tiny, total_variation
from toys.drafts import same_texts
from toys.enumeration import Script, Scripts
from toys.kernels import needs_kernel
from toys.tables import plain_law

START = 2


def requests(model: PreTrainedModel, count: int = 12) -> list[Request]:
    """Sources of different lengths, and a decoder that has begun with one to three tokens."""
    scorer, begins = CausalScorer(model), {(START,): 9, (START, 7, 9): 2, (START, 5): 17}
    read = [source(scorer, name, length) for name, length in enumerate(begins.values())]
    return [Request(begin, GREEDY, count, source=one) for begin, one in zip(begins, read, strict=True)]


def by_transformers(model: PreTrainedModel, request: Request, **settings: object) -> list[int]:
    """Greedy decoding by transformers, of one source alone."""
    begin = torch.tensor([request.prompt])
    arguments = {"decoder_input_ids": begin, "do_sample": False, "max_new_tokens": request.max_new_tokens}
    if isinstance(request.source, torch.Tensor):
        arguments["input_features"] = request.source[None]
    else:
        arguments["input_ids"] = torch.tensor([request.source])
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    return GenerationMixin.generate(model, **arguments, **settings)[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_logits_are_those_of_a_fresh_forward(family: str) -> None:
    assert contract(tiny(SEQ2SEQ[family])) < TOLERANCE


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_forked_rows_share_what_the_encoder_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, states = list[int](), seq2seq.SourceDecoder.states
    monkeypatch.setattr(
        seq2seq.SourceDecoder, "states", lambda decoder, read: (reads.append(len(read)), states(decoder, read))[1]
    )
    assert families(tiny(SEQ2SEQ[family])) < TOLERANCE
    assert reads == [2, 1]  # those that were added


@needs_kernel
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_own_weights_draft_with_what_the_target_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are read once for both; another model's weights are seldom right, and change no text either."""
    reads, states = list[int](), seq2seq.SourceDecoder.states
    monkeypatch.setattr(
        seq2seq.SourceDecoder, "states", lambda decoder, read: (reads.append(len(read)), states(decoder, read))[1]
    )
    model, shares = tiny(SEQ2SEQ[family]), list[float]()
    target = CausalScorer(packed(model))
    other = SameRowsDrafter(target.sharing_rows(tiny(SEQ2SEQ[family], 1), "other"))
    own: Any = drafter("int8", BuildContext(target))
    for made in (own, other):
        rows = same_texts(Decoder(target, made, controller=Fixed(3)), requests(model))
        shares.append(sum(row.stats.accepted for row in rows) / sum(row.stats.drafted for row in rows))
    assert shares[0] > 0.8 > 0.5 > shares[1]
    assert sum(reads) == 4 * len(requests(model))
    twin, keys = own.scorer.model, ("EncDecAttention.k", "encoder_attn.k_proj")  # the target alone makes these
    assert [lowest_bits(part) for part in (twin, twin.get_encoder())] == [8, None]
    assert {lowest_bits(part) for name, part in twin.named_modules() if name.endswith(keys)} == {None}


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_prompts_are_read_behind_rows_that_run(family: str) -> None:
    rows = Reference(tiny(SEQ2SEQ[family])).add(9, 3, 2).step(1, 3).read(4, first=2)
    assert rows.step(2).step(3, 1, 2).gap() < TOLERANCE


@pytest.mark.parametrize("family", ["t5", "bart", "m2m_100"])
def test_logits_in_half_precision(family: str) -> None:
    model = tiny(SEQ2SEQ[family], seed=1, dtype=torch.bfloat16)
    assert contract(model) < rounding(model)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    """Three ragged sources together against each alone. The draft is the target, wrong in every other round."""
    model = tiny(SEQ2SEQ[family])
    asked = requests(model)
    want = [by_transformers(model, one) for one in asked]
    assert len(set(map(tuple, want))) > 1  # the sources matter
    drafts_change_nothing(CausalScorer(model), CausalScorer(model), asked, want)


def test_the_encoder_counts_as_prefill() -> None:
    """It reads the source before the first round, so that no round's phases hold its time."""
    model = tiny(SEQ2SEQ["t5"])
    decoder = Decoder(CausalScorer(model), ModelDrafter(CausalScorer(tiny(SEQ2SEQ["t5"], 1))), controller=Fixed(2))
    for rows in (plain(decoder, requests(model, 4)), generate(decoder, requests(model, 4))):
        assert [row.stats.seconds["prefill"] > 0 for row in rows] == [True, True, True]


def test_the_given_model_stays_as_it_is() -> None:
    """Scorers run a twin over the same weights."""
    model = tiny(SEQ2SEQ["t5"])
    assert CausalScorer(model).model is model
    assert not any(isinstance(vars(module).get("compute_bias"), seq2seq.RowBias) for module in model.modules())
    twin = seq2seq.SourceDecoder(model).model
    assert twin.shared.weight is model.shared.weight
    assert isinstance(vars(twin.decoder.block[0].layer[0].SelfAttention)["compute_bias"], seq2seq.RowBias)
    bart = tiny(SEQ2SEQ["bart"])
    twin = seq2seq.SourceDecoder(bart).model
    assert isinstance(twin.get_decoder().embed_positions, seq2seq.RowPositions)
    assert not isinstance(bart.get_decoder().embed_positions, seq2seq.RowPositions)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows share one bias, or one position: T5 alone would take the distances of every row from the longest one."""
    monkeypatch.setattr(seq2seq.RowBias, "__call__", lambda own, *args, **how: own.shared(own.attention, *args, **how))
    monkeypatch.setattr(seq2seq.RowPositions, "forward", lambda places, *args, **rest: places.table(*args, **rest))


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("family", ["t5", "umt5", "bart", "m2m_100", "whisper"])
def test_control_what_all_rows_share_is_caught(family: str) -> None:
    assert contract(tiny(SEQ2SEQ[family])) > 100 * TOLERANCE


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("family", ["t5", "bart", "m2m_100"])
def test_control_the_same_is_caught_in_half_precision(family: str) -> None:
    """By the bound that the model's own rounding gives."""
    model = tiny(SEQ2SEQ[family], seed=1, dtype=torch.bfloat16)
    assert contract(model) > rounding(model)


def test_control_an_open_cross_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are padded to the longest, which nobody may see."""
    cross = seq2seq.Sources.cross
    monkeypatch.setattr(
        seq2seq.Sources, "cross", lambda *args: replace(made := cross(*args), mask=torch.zeros_like(made.mask))
    )
    assert contract(tiny(SEQ2SEQ["bart"])) > 100 * TOLERANCE


def test_padding_in_the_text_is_where_transformers_puts_it() -> None:
    """M2M100 gives the padding token no position, and does not count on it."""
    model = tiny(SEQ2SEQ["m2m_100"])
    source_ids = (5, 6, 7)
    scorer, ids = CausalScorer(model), torch.tensor([source_ids])
    scorer.add(1, [source_ids])
    cache = None
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for token in (START, 9, model.config.pad_token_id, 11):
        out = with_cache(model)(cache, **inputs, decoder_input_ids=torch.tensor([[token]]), use_cache=True)
        cache = state_in(out)
        ours = scorer.extend(torch.tensor([[token]]), [1])
        torch.testing.assert_close(ours, out.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["t5", "mbart", "whisper"])
def test_rows_that_end_early_and_rows_that_join(family: str) -> None:
    """Ends in mid-round, and more texts than places: rows move up with their sources."""
    model = tiny(SEQ2SEQ[family])
    asked = [*requests(model), *requests(model)[::-1]]
    want = [by_transformers(model, one) for one in asked]
    ends = frozenset({want[0][5], want[2][8]})
    asked = [replace(one, eos=ends) for one in asked]
    cut = [output[: next((i + 1 for i, new in enumerate(output) if new in ends), len(output))] for output in want]
    assert len({len(output) for output in cut}) > 1
    decoder = Decoder(CausalScorer(model), ModelDrafter(CausalScorer(model)), controller=Fixed(4), batch_size=2)
    assert [row.output for row in generate(decoder, asked)] == cut
    assert [row.output for row in plain(decoder, asked)] == cut


def drafters(model: PreTrainedModel) -> dict[str, Drafter]:
    """Drafts of every kind that an encoder-decoder can have."""
    return {
        "another size": ModelDrafter(CausalScorer(tiny(SEQ2SEQ["t5"], seed=1, num_layers=1))),
        "another family": ModelDrafter(CausalScorer(tiny(SEQ2SEQ["bart"], seed=1))),
        "decoder only": ModelDrafter(CausalScorer(tiny(FAMILIES["llama"]))),
        "lookup": Lookup(vocab=HF_VOCAB),
        "tree": TreeDrafter(CausalScorer(model), (3, 2, 1)),
    }


@pytest.mark.parametrize("kind", ["another size", "another family", "decoder only", "lookup", "tree"])
def test_any_draft_leaves_the_text_as_it_is(kind: str) -> None:
    model = tiny(SEQ2SEQ["t5"])
    asked = requests(model, 14)
    decoder = Decoder(CausalScorer(model), drafters(model)[kind], controller=Fixed(3), batch_size=2)
    rows = generate(decoder, asked)
    assert [row.output for row in rows] == [by_transformers(model, one) for one in asked]
    assert sum(row.stats.drafted for row in rows) > 0


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("t5", BLOCK),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("t5", TOKEN), ("bart", BLOCK), ("bart", TOKEN)]),
    ],
)
def test_sampling_is_exact_by_enumeration(family: str, rule: Rule) -> None:
    """The law of whole texts over all draws, of a source beside a shorter or longer one, is the model's own."""
    sizes = {"vocab_size": 3, "pad_token_id": 1 if family == "bart" else None, "decoder_start_token_id": 0}
    model, small = (tiny(SEQ2SEQ[family], seed=seed, dtype=torch.float64, **sizes) for seed in (0, 1))
    target, draft = CausalScorer(model), CausalScorer(small)
    laws = []
    for one, other in (((2, 0, 2), (1,)), ((1,), (2, 0, 2))):

        def run(scripts: Sequence[Script], one: Source = one, other: Source = other) -> list[tuple[int, ...]]:
            rng, size = Scripts([*scripts, Script({})]), len(scripts) + 1
            decoder = Decoder(target, ModelDrafter(draft), rule.verify, Fixed(1), batch_size=size, rng=rng)
            asked = [Request((0,), SAMPLE, 2, key=key, source=one) for key in range(size)]
            rows = generate(decoder, [*asked[:-1], replace(asked[-1], source=other)])
            return [tuple(row.output) for row in rows[:-1]]

        def step(text: tuple[int, ...], encoder_input: Source = one) -> list[float]:
            return target.alone(text, encoder_input)[0, -1].double().softmax(-1).tolist()

        laws.append(plain_law(step, (0,), 2))
        assert total_variation(enumerate_rows(run, 20_000, last=2), laws[-1]) < 1e-9
    assert total_variation(*laws) > 0.01  # the sources matter


def test_lookup_copies_from_the_source() -> None:
    """Unless its ids are those of another vocabulary."""

    def copied(drafter: Drafter, *source_ids: int) -> list[int]:
        row = Row(Request((START,), GREEDY, 9, source=source_ids), 0, [START, 12, 13])
        draft = drafter.propose(Context((row,), draw), [3])
        return draft.tokens[0, : draft.lengths[0]].tolist()

    for make in (lambda: Lookup(vocab=HF_VOCAB), lambda: Datastore(HF_VOCAB, Corpus.build([[90]], HF_VOCAB))):
        assert copied(make(), 11, 12, 13, 14, 15) == [14, 15, START]
        assert copied(make(), 11, 12, 13, 14, HF_VOCAB) == []
    assert copied(Lookup(), 11, 12, 13, 14, 15) == []


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch")
@pytest.mark.parametrize("family", ["t5", "umt5", "bart", "whisper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_obey_the_contract(family: str, dtype: torch.dtype) -> None:
    """T5 with one matrix in float32, as transformers keeps it in half precision, and tied embeddings."""
    model = tiny(SEQ2SEQ[family], dtype=dtype)
    if not can_pack(model):
        pytest.skip(f"no packed weights in {dtype} on this processor")
    if family == "t5":
        model.decoder.block[0].layer[2].DenseReluDense.wo.float()
    twin = packed(model)
    layers = [name for name, part in twin.named_modules() if isinstance(part, PackedLinear)]
    assert len(layers) > 15
    assert any(map(WHOLE.search, layers)) == (family != "whisper")
    most = TOLERANCE if dtype == torch.float32 else rounding(model)
    assert contract(twin) < most
    plainly, faster = (Reference(each) for each in (model, twin))
    encoder_input = source(plainly.scorer, 1, 9)
    left, right = (each.scorer.alone(text(2, 7), encoder_input).float() for each in (plainly, faster))
    assert float((left - right).detach().abs().max() / left.detach().std()) < most


@pytest.mark.parametrize("family", ["t5", "bart", "umt5", "m2m_100", "whisper"])
def test_programs_obey_the_contract(family: str) -> None:
    model = tiny(SEQ2SEQ[family])
    native = Native(model, "toy")
    assert contract(model, native) < 10 * TOLERANCE
    assert native.fault is None


@pytest.mark.parametrize(
    ("encoder_input", "sentence"),
    [
        ((), r"prompt 0 is empty: its source needs at least one token\."),
        (None, r"prompt 0 has no source, but .* is an encoder-decoder and reads one\."),
        ((5, HF_VOCAB), r"prompt 0 has token ids outside 0\.\.100, which .* reads\."),
        ((5,) * 129, r"prompt 0 has 129 tokens, but the encoder of .* reads 128; shorten it to at most 128\."),
        (torch.zeros(8, 40), r"prompt 0 is audio, but .* reads text\."),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(encoder_input: Source | None, sentence: str) -> None:
    decoder = Decoder(CausalScorer(tiny(SEQ2SEQ["bart"])))
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        generate(decoder, [Request((START,), GREEDY, 4, source=encoder_input)])


@pytest.mark.parametrize("encoder_input", [(5, 6), torch.zeros(8, 41)])
def test_whisper_hears_features_of_one_size(encoder_input: Source) -> None:
    decoder = Decoder(CausalScorer(tiny(SEQ2SEQ["whisper"])))
    with pytest.raises(ValueError, match=r"^prompt 0 is .*, but .* takes features \(8, 40\) \(bins, frames\)\.$"):
        generate(decoder, [Request((START,), GREEDY, 4, source=encoder_input)])


def test_a_causal_model_reads_no_source() -> None:
    decoder = Decoder(CausalScorer(tiny(FAMILIES["llama"])))
    with pytest.raises(ValueError, match=r"^prompt 0 has a source, but .* has no encoder to read it\.$"):
        generate(decoder, [Request((START,), GREEDY, 4, source=(5,))])


def test_a_family_without_a_contract_is_probed() -> None:
    decoder = Decoder(CausalScorer(tiny(Family("BlenderbotConfig", BART, {}))))
    assert len(generate(decoder, [Request((START,), GREEDY, 4, source=(5, 6))])[0].output) == 4
    sizes = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "input_feat_per_channel": 8}
    config = transformers.Speech2TextConfig(vocab_size=HF_VOCAB, encoder_layers=1, decoder_layers=1, **sizes)
    with pytest.raises(ValueError, match=r"encoder-decoders of text and Whisper are supported\.$"):
        CausalScorer(transformers.Speech2TextForConditionalGeneration(config))


def test_cross_attention_of_another_kind_is_refused() -> None:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
    config = transformers.ProphetNetConfig(vocab_size=HF_VOCAB, hidden_size=16, **layers, **heads)
    with pytest.raises(ValueError, match=r"^ProphetNetDecoder has no cross-attention like T5's .* or BART's"):
        CausalScorer(transformers.ProphetNetForConditionalGeneration(config))
