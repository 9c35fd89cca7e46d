"""Beam search beside transformers' own: the same hypotheses, in the same order, with the same scores, whatever drafts.

A difference is excused as a near-tie only where all scores agree to 1e-4, and excused ones are counted.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from reference import source, text
from slipstream.core.beams import Beams, Prefix
from slipstream.core.draft import Draft
from slipstream.core.protocols import Drafter, Traits
from slipstream.core.request import Request
from slipstream.core.round import Context, Round
from slipstream.decoding.beam import BeamDecoder, beam_search, searches_of
from slipstream.decoding.beam_search import BeamSearch
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.copying import sure
from slipstream.drafters.heads import DFlashDrafter
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import Ngram, NgramModel
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.kernels.quantization import Precision
from slipstream.models.causal import CausalScorer
from slipstream.models.layers import part_of
from slipstream.models.loading.twins import quantized_part
from slipstream.models.recurrent.scorer import StateScorer
from slipstream.models.tiny import tiny_config, tiny_model
from toys.families import FAMILIES, HF_VOCAB, SEQ2SEQ, embedded, tiny
from toys.tables import dirichlet_table, scorer
from toys.texts import rare

TIE = 1e-4
Found = list[tuple[tuple[int, ...], float]]


def by_transformers(model: PreTrainedModel, request: Request) -> Found:
    beams, eos, sampler = request.beams, sorted(request.eos), request.sampler
    assert beams is not None and isinstance(sampler, Sampling)
    begin = torch.tensor([request.prompt])
    inputs: dict[str, Any] = {"input_ids": begin, "attention_mask": torch.ones_like(begin)}
    if request.source is not None:
        ids = torch.tensor([request.source])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": begin}
    names = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping")
    search = {name: getattr(beams, name) for name in names}
    length = {"max_new_tokens": request.max_new_tokens, "min_new_tokens": int(sampler.min_new_tokens) or None}
    ends = {"eos_token_id": eos or None, "pad_token_id": eos[0] if eos else 0}
    shape = {name: getattr(sampler, name) for name in ("repetition_penalty", "no_repeat_ngram_size")}
    told = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    out = GenerationMixin.generate(model, **inputs, **search, **length, **ends, **shape, **told)
    texts = [ended(line, request.eos) for line in out.sequences[:, len(request.prompt) :].tolist()]
    return list(zip(texts, out.sequences_scores.tolist(), strict=True))


def ended(line: Sequence[int], eos: frozenset[int]) -> tuple[int, ...]:
    stop = next((place for place, token in enumerate(line, 1) if token in eos), len(line))
    return tuple(line[:stop])


def found(search: BeamSearch) -> Found:
    return [(each.tokens, each.score) for each in search.hypotheses()]


def near_ties(searches: Sequence[BeamSearch], wanted: Sequence[Found]) -> int:
    """How many searches differ by near-ties alone. Raises AssertionError for any other difference."""
    ties = 0
    for search, want in zip(searches, wanted, strict=True):
        ours = found(search)
        assert [score for _, score in ours] == pytest.approx([score for _, score in want], abs=TIE, rel=1e-6)
        ties += [tokens for tokens, _ in ours] != [tokens for tokens, _ in want]
    return ties


TEXTS = [text(seed, length) for seed, length in enumerate([9, 1, 4, 17, 30])]
PAIR_EOS = frozenset({0})


def requests(beams: Beams, count: int = 16, prompts: Sequence[Sequence[int]] = TEXTS, **settings: Any) -> list[Request]:
    eos = settings.pop("eos", PAIR_EOS)
    sampler = Sampling(eos=eos, **settings)
    return [Request(tuple(prompt), sampler, count, eos, beams=beams) for prompt in prompts]


@cache
def reference(name: str, beams: Beams, count: int = 16, **settings: Any) -> list[Found]:
    return [by_transformers(embedded(name), request) for request in requests(beams, count, **settings)]


class Wrong:
    traits = Traits(by_text=True)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        pairs = zip(context.rows, gammas, strict=True)
        return sure([[(len(row.tokens) * 7 + i) % 90 + 2 for i in range(gamma)] for row, gamma in pairs])

    def observe(self, round: Round) -> None:
        pass


def drafter(kind: str, target: CausalScorer) -> Drafter:
    if kind == "plain":
        return NoDraft()
    if kind == "lookup":
        return Lookup(vocab=target.vocab)
    if kind == "ngram":
        return Ngram(NgramModel.fit([TEXTS[4] * 3], 3, target.vocab), target.vocab)
    if kind == "wrong":
        return Wrong()
    if kind == "exit":
        return SameRowsDrafter(part_of(target, 2))
    if kind == "int4":
        return SameRowsDrafter(quantized_part(target, Precision.named("int4", None)))
    if kind == "window":
        return SameRowsDrafter(target.seeing(6, 2))
    model = CausalScorer(embedded("draft"))
    return TreeDrafter(model, (2, 2), target.vocab) if kind == "tree" else ModelDrafter(model, target.vocab)


KINDS = ("plain", "model", "tree", "lookup", "wrong", "int4", "exit", "window", "ngram")


def decoder(kind: str, gamma: int = 4, batch_size: int = 5) -> Decoder:
    target = CausalScorer(embedded("target"))
    return Decoder(target, drafter(kind, target), controller=Fixed(gamma), batch_size=batch_size)


@pytest.mark.parametrize("kind", ["plain", "tree", *rare("model", *KINDS[3:])])
def test_hypotheses_order_and_scores_are_those_of_transformers(kind: str) -> None:
    beams = Beams(4, num_return_sequences=4)
    searches = beam_search(decoder(kind), requests(beams))
    assert near_ties(searches, reference("target", beams)) == 0
    calls = sum(search.stats.target_calls for search in searches)
    steps = sum(search.stats.emitted for search in searches)
    assert calls == steps if kind == "plain" else calls <= steps
    if kind in ("model", "tree", "int4", "window"):
        assert calls < steps


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 8])
def test_other_widths(width: int) -> None:
    beams = Beams(width, num_return_sequences=2)
    searches = beam_search(decoder("model", 3), requests(beams, 12, TEXTS[:4]))
    wanted = [by_transformers(embedded("target"), each) for each in requests(beams, 12, TEXTS[:4])]
    assert near_ties(searches, wanted) == 0


def frequent_tokens() -> frozenset[int]:
    """Tokens that end texts in the middle of the search: those that the beams of most prompts use."""
    beams = Beams(4, num_return_sequences=4)
    used = [{token for line, _ in some for token in line[:12]} for some in reference("target", beams)[:5]]
    tokens = sorted({token for some in used for token in some})
    return frozenset(sorted(tokens, key=lambda token: (-sum(token in some for some in used), token))[:32])


def reasons_of_equal_searches(early: bool | str, penalty: float) -> set[str | None]:
    """Why texts ended, after their search was compared with transformers'."""
    beams = Beams(3, penalty, early, num_return_sequences=3)
    asked = requests(beams, 12, TEXTS[:3], eos=frequent_tokens())
    searches = beam_search(decoder("model", 3, 3), asked)
    assert near_ties(searches, [by_transformers(embedded("target"), request) for request in asked]) == 0
    return {each.finish_reason for search in searches for each in search.finished}


@pytest.mark.parametrize("early", [True, "never", *rare(False)])
@pytest.mark.parametrize("penalty", [-1.5, 1.0, *rare(0.0, 1.1)])
def test_ends_in_the_middle_of_the_search(early: bool | str, penalty: float) -> None:
    assert "stop" in reasons_of_equal_searches(early, penalty)


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False, "never"])
def test_a_penalty_for_long_texts_outlasts_ends_only_where_the_search_never_stops_early(early: bool | str) -> None:
    assert ("stop" in reasons_of_equal_searches(early, 2.5)) == (early != "never")


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.7}, *rare({"no_repeat_ngram_size": 2}, {"min_new_tokens": 6})], ids=str
)
@pytest.mark.parametrize("kind", ["model", *rare("plain")])
def test_processors_see_the_beams_own_text(settings: dict[str, Any], kind: str) -> None:
    eos, beams = frequent_tokens() if "min_new_tokens" in settings else PAIR_EOS, Beams(3, num_return_sequences=3)
    asked = requests(beams, 12, TEXTS[:3], eos=eos, **settings)
    searches = beam_search(decoder(kind, 3), asked)
    assert near_ties(searches, [by_transformers(embedded("target"), request) for request in asked]) == 0
    others = beam_search(decoder(kind, 3), requests(beams, 12, TEXTS[:3], eos=eos))
    assert any(found(one)[0][0] != found(other)[0][0] for one, other in zip(searches, others, strict=True))


def test_a_single_token() -> None:
    beams = Beams(4, num_return_sequences=4)
    asked = requests(beams, 1, TEXTS[:4])
    searches = beam_search(decoder("model"), asked)
    assert near_ties(searches, [by_transformers(embedded("target"), request) for request in asked]) == 0
    assert all(search.stats.target_calls == 1 and search.stats.drafted == 0 for search in searches)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", *rare("mistral", "qwen2")])
@pytest.mark.parametrize("gamma", [0, 4])
def test_positions_and_windows_hold_in_a_forest(family: str, gamma: int) -> None:
    """Long enough that dead prefixes are dropped and others moved, several times."""
    model, other = tiny(FAMILIES[family]), tiny(FAMILIES[family], seed=1)
    prompts = [text(3, 20), text(4, 1), text(5, 7)]
    asked = requests(Beams(3, num_return_sequences=3), 40, prompts, eos=frozenset({5}))
    drafts: Drafter = ModelDrafter(CausalScorer(other)) if gamma else NoDraft()
    target = CausalScorer(model)
    searches = beam_search(Decoder(target, drafts, controller=Fixed(gamma), batch_size=3), asked)
    assert near_ties(searches, [by_transformers(model, request) for request in asked]) == 0
    assert target.lengths == []


def test_a_text_that_is_too_long_for_the_draft_is_searched_without() -> None:
    model, small = tiny(FAMILIES["gpt2"]), tiny(FAMILIES["gpt2"], seed=1, n_positions=24)
    asked = requests(Beams(3, num_return_sequences=3), 12, [text(3, 40), text(4, 18), text(5, 3)])
    drafts = ModelDrafter(CausalScorer(small))
    searches = beam_search(Decoder(CausalScorer(model), drafts, controller=Fixed(3), batch_size=3), asked)
    assert near_ties(searches, [by_transformers(model, request) for request in asked]) == 0
    assert [bool(search.stats.drafted) for search in searches] == [False, True, True]


def test_a_text_that_fills_the_targets_context_ends_there() -> None:
    target = CausalScorer(tiny(FAMILIES["gpt2"], n_positions=24))
    asked = requests(Beams(3), 12, [text(3, 20), text(4, 3)], eos=frozenset())
    searches = beam_search(Decoder(target, NoDraft(), batch_size=2), asked)
    assert [len(search.hypotheses()[0].tokens) for search in searches] == [4, 12]


@pytest.mark.parametrize("family", ["t5", "marian", "bart"])
@pytest.mark.parametrize("kind", ["plain", "model", "lookup"])
def test_encoder_decoders(family: str, kind: str) -> None:
    model, other = tiny(SEQ2SEQ[family]), tiny(SEQ2SEQ[family], seed=1)
    target = CausalScorer(model)
    drafts = {"plain": NoDraft(), "model": ModelDrafter(CausalScorer(other)), "lookup": Lookup(vocab=HF_VOCAB)}[kind]
    begins = [(2,), (2, 7, 9), (2, 5)]
    asked = [
        replace(request, source=source(target, length, length))
        for request, length in zip(
            requests(Beams(4, num_return_sequences=3), 18, begins, eos=frozenset({6})), (9, 2, 17), strict=True
        )
    ]
    searches = beam_search(Decoder(target, drafts, controller=Fixed(3), batch_size=3), asked)
    assert near_ties(searches, [by_transformers(model, request) for request in asked]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "marian"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_two_hundred_sources_of_encoder_decoders(family: str, width: int) -> None:
    model, other = deepcopy(tiny(SEQ2SEQ[family])).double(), tiny(SEQ2SEQ[family], seed=1)  # last bits of float32 prune
    target = CausalScorer(model)
    beams, ends = Beams(width, num_return_sequences=width), frozenset({6})
    asked = [
        replace(request, source=source(target, number, 1 + number % 30))
        for number, request in enumerate(requests(beams, 12, [(2,)] * 200, eos=ends))
    ]
    decoder = Decoder(target, ModelDrafter(CausalScorer(other)), controller=Fixed(3), batch_size=20)
    assert near_ties(beam_search(decoder, asked), [by_transformers(model, request) for request in asked]) == 0


# ---- controls: the comparison catches what is not exact -------------------------------------------------------------


@contextlib.contextmanager
def patched_logits(target: CausalScorer, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    honest = target.extend
    target.extend = lambda *args, **kwargs: change(honest(*args, **kwargs))  # type: ignore[method-assign]
    try:
        yield
    finally:
        target.extend = honest  # type: ignore[method-assign]


def test_control_a_corrupted_table_is_caught() -> None:
    beams = Beams(4, num_return_sequences=4)
    wrong = decoder("plain")
    with patched_logits(wrong.target, lambda logits: logits * 1.01):  # type: ignore[arg-type]
        searches = beam_search(wrong, requests(beams, prompts=TEXTS))
    with pytest.raises(AssertionError):
        near_ties(searches, reference("target", beams))


def test_control_a_draft_that_nobody_scored_is_caught() -> None:
    beams = Beams(4, num_return_sequences=4)

    class Believing(BeamSearch):
        """Takes the draft's guess for the target's word."""

        @property
        def missing(self) -> list[Prefix]:
            for beam in self.live:
                if beam.prefix.best is None and beam.prefix.guess is not None:
                    beam.prefix.best = beam.prefix.guess
            return super().missing

    trusting = decoder("model")
    asked = searches_of(trusting.target, requests(beams))
    searches = [Believing(each.request, each.settings, each.limit, each.index) for each in asked]
    for _ in BeamDecoder(trusting, searches).rounds():
        pass
    with pytest.raises(AssertionError):
        near_ties(searches, reference("target", beams))


# ---- counting, failures, refusals -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_counts_add_up() -> None:
    searches = beam_search(decoder("model"), requests(Beams(4)))
    for search in searches:
        stats = search.stats
        assert stats.emitted >= max(len(each.tokens) for each in search.hypotheses())
        assert stats.target_calls <= stats.emitted <= stats.target_calls + stats.accepted
        assert stats.accepted <= stats.tested <= stats.drafted
        assert sum(stats.accepted_by_position) == stats.accepted and sum(stats.drafted_by_position) == stats.drafted
    total = sum((search.stats for search in searches[1:]), searches[0].stats)
    assert (total.mean_acceptance_length or 0) > 1.3 and 0 < (total.alpha or 0) < 1


def test_too_many_beams_for_a_vocabulary() -> None:
    asked = [Request((1,), Sampling(), 9, beams=Beams(2))]
    with pytest.raises(ValueError, match="looks at 4 continuations, but table has 3 tokens"):
        beam_search(Decoder(scorer(dirichlet_table(5))), asked)


def test_a_prefix_that_cannot_be_scored_ends_the_search_where_it_is_asked_for() -> None:
    def upset(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 9:
            raise ArithmeticError("too long")
        return scores

    asked = requests(Beams(3, num_return_sequences=2), 12, [TEXTS[2]], processors=[upset])
    for kind in ("plain", "model"):
        (search,) = beam_search(decoder(kind), asked)
        assert search.finish_reason == "error" and "too long" in str(search.error)
        assert [len(each.tokens) for each in search.hypotheses()] == [5, 5]


def test_what_cannot_be_searched_is_refused_in_a_sentence() -> None:
    target = CausalScorer(embedded("target"))
    recurrent = StateScorer(tiny_model(Mamba2ForCausalLM, tiny_config(Mamba2Config)))
    for wrong in (Decoder(recurrent), Decoder(target, ModelDrafter(recurrent))):
        with pytest.raises(ValueError, match="keeps a state"):
            beam_search(wrong, requests(Beams(2), prompts=[[3]]))
    with pytest.raises(ValueError, match="cannot draft for beam search"):
        beam_search(Decoder(target, DFlashDrafter.__new__(DFlashDrafter)), requests(Beams(2)))
    bad = ({"num_beams": 1}, {"length_penalty": float("nan")}, {"early_stopping": "soon"}, {"length_penalty": 60})
    for settings in bad:
        with pytest.raises(ValueError, match="is not possible"):
            Beams(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above num_beams"):
        Beams(2, num_return_sequences=3)
    target.add(1)
    with pytest.raises(RuntimeError, match="one call at a time"):
        beam_search(Decoder(target), requests(Beams(2)))
