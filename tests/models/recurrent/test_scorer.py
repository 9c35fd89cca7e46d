"""Models with states: the contract of all Scorers, the exact law by enumeration, and controls that have to fail."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from reference import Reference, contract, drafts_change_nothing, families, text
from slipstream.check import check
from slipstream.check.families import architectures
from slipstream.core.draft import Tree
from slipstream.core.draws import Rng
from slipstream.core.protocols import Shape
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.execution.passes import Mode
from slipstream.kernels.packing import PackedLinear, can_pack
from slipstream.models.causal import CausalScorer
from slipstream.models.layers import part_of
from slipstream.models.loading.load import load_scorer
from slipstream.models.recurrent import recurrences, rewinding
from slipstream.models.recurrent import scorer as recurrent
from slipstream.models.recurrent.recurrences import Observed, Recorded, recording
from slipstream.models.recurrent.rewinding import Rewind
from slipstream.models.recurrent.scorer import StateScorer
from slipstream.models.tiny import tiny_config, tiny_model
from toys import (
    FAMILIES,
    GREEDY,
    WRONG,
    Cycle,
    Distribution,
    first_tokens,
    plain_law,
    rare,
    request,
    tiny,
    total_variation,
)

SEVERAL = {  # several tokens at a time
    "qwen3_5": "Qwen3_5",
    "qwen3_next": "Qwen3Next",
    "lfm2": "Lfm2",
    "mamba2": "Mamba2",
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "bloom": "Bloom",
    "gpt_neo": "GPTNeo",
}
EVERY = {**SEVERAL, "mamba": "Mamba", "jamba": "Jamba"}  # these two one by one

SHOWN = ("qwen3_next", "lfm2", "mamba2", "jamba")
SOME = [*SHOWN, *rare(*(family for family in EVERY if family not in SHOWN))]
"""A kind of state each; the others are tried by the trial, and here when there is time."""

LOOSE = 3e-3
"""Standard deviations of the logits: recurrences add up in another order in chunks and token by token."""


Change = Callable[[Any], object]


@cache
def model(family: str, seed: int = 0, **sizes: int) -> PreTrainedModel:
    kind = getattr(transformers, f"{EVERY[family]}ForCausalLM")
    return tiny_model(kind, tiny_config(kind.config_class, **sizes), seed)


@cache
def scorer(family: str, seed: int = 0, **sizes: int) -> StateScorer:
    return StateScorer(model(family, seed, **sizes), family)


def fresh(scorer: StateScorer) -> StateScorer:
    """The same one without rows: making another would try the model again."""
    scorer.clear()
    return scorer


@pytest.mark.parametrize("family", SOME)
def test_logits_are_those_of_a_fresh_forward(family: str) -> None:
    assert contract(fresh(scorer(family))) < LOOSE


@pytest.mark.parametrize("family", [SHOWN[1], *rare(*(each for each in EVERY if each != SHOWN[1]))])
def test_forked_rows_go_on_by_themselves(family: str) -> None:
    assert families(fresh(scorer(family))) < LOOSE


@pytest.mark.parametrize("family", SOME)
def test_the_trial_finds_who_has_to_be_fed_token_by_token(family: str) -> None:
    assert scorer(family).way.width == (None if family in SEVERAL else 1)
    assert str(scorer(family).way) == ("state, one pass" if family in SEVERAL else "state, token by token")


def test_the_trial_finds_rows_that_cannot_share_a_pass() -> None:
    found = StateScorer(tiny_model(transformers.RwkvForCausalLM, tiny_config(transformers.RwkvConfig)))
    assert not found.way.together and contract(found) < LOOSE


def test_control_several_tokens_at_a_time_are_wrong_for_mamba(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = fresh(scorer("mamba"))
    monkeypatch.setattr(wrong, "way", replace(wrong.way, width=None))
    assert contract(wrong) > 30 * LOOSE


def _leaking(layer: int) -> Callable[[Sequence[Any]], Any]:
    """Joins states, and forgets that a pass may not write to those of one layer."""
    proper = recurrent.joined

    def joined(states: Sequence[Any]) -> Any:
        made = proper(states)
        if len(states) == 1:
            made.layers = [*made.layers]
            made.layers[layer] = states[0].layers[layer]
        return made

    return joined


def _forgetting(layer: int) -> Callable[[Rewind, int, int], Any]:
    """Goes back within a pass, but for one layer."""
    proper = Rewind.state_after

    def state_after(rewind: Rewind, row: int, count: int) -> Any:
        made = proper(rewind, row, count)
        made.layers[layer] = proper(rewind, row, rewind.count).layers[layer]
        return made

    return state_after


@pytest.mark.parametrize("family", [*rare("qwen3_5", "mamba2"), "lfm2"])
def test_control_a_layer_whose_state_is_not_restored_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scorer(family)  # made before, since its trial would find another way
    monkeypatch.setattr(Rewind, "state_after", _forgetting(0))
    assert contract(fresh(target)) > 30 * LOOSE
    assert str(StateScorer(model(family), "forgetting").way) == "state, two passes"  # the trial sees it too
    monkeypatch.setattr(recurrent, "joined", _leaking(0))
    with pytest.raises(ValueError, match="other logits"):
        StateScorer(model(family), "leaking")


@pytest.mark.parametrize("family", ["lfm2", *rare("qwen3_5")])
def test_two_passes_lead_to_the_same_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh(scorer(family))
    monkeypatch.setattr(target, "way", replace(target.way, rewinds=False))
    assert contract(target) < LOOSE


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "lfm2"])
def test_the_state_behind_any_token_of_a_pass_is_that_of_reading_so_many(family: str) -> None:
    rows = Reference(fresh(scorer(family))).add(11)
    for kept in range(1, 6):
        rows.verify(kept).step(2).step(1)
    assert rows.gap() < LOOSE


def test_a_recurrence_of_no_known_kind_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewinding, "recording", lambda: nullcontext([]))
    target = StateScorer(model("mamba2"))
    assert str(target.way) == "state, two passes" and contract(target) < LOOSE


def test_only_a_recorded_pass_is_computed_by_other_functions() -> None:
    calls = list[str]()
    recorded = Recorded(lambda function, named: calls.append(f"ours, {','.join(named)}"), ("query",))
    observed = Observed(lambda query: calls.append("its own"), recorded)
    observed(torch.zeros(1, 6, 2, 4))  # a user's own pass is as it was
    with recording():
        observed(torch.zeros(1, 6, 2, 4))
    assert calls == ["its own", "ours, query"]


@pytest.mark.parametrize("family", ["qwen3_5", *rare("mamba2")])
def test_without_our_kernel_recurrences_are_transformers_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrences, "kernel_missing", lambda: "there is none")
    monkeypatch.setattr(recurrent, "kernel_missing", lambda: "there is none")
    target = StateScorer(model(family))
    assert str(target.way) == "state, one pass" and contract(target) < LOOSE


@pytest.mark.parametrize("family", ["qwen3_5", "bloom"])
def test_prompts_are_read_behind_rows_that_run(family: str) -> None:
    rows = Reference(fresh(scorer(family))).add(17, 3, 1).step(1, 3).read(7, first=2).step(4, 2)
    assert rows.free(0).step(2, 1).gap() < LOOSE


def test_a_row_can_go_back_to_any_length() -> None:
    rows = Reference(fresh(scorer("qwen3_5"))).add(20, 5).step(3, 2)
    rows.gap()
    for lengths in ([22, 6], [9, 6], [9, 0]):
        rows.scorer.rollback(lengths)
        rows.texts = [text[:length] for text, length in zip(rows.texts, lengths, strict=True)]
        assert rows.step(1, 2).gap() < LOOSE
    assert rows.scorer.lengths == [12, 2] or max(rows.scorer.lengths) < 20


@pytest.mark.parametrize("family", SOME)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    ours = model(family)
    ours.generation_config.eos_token_id = None
    prompts = [text(1, 14), text(2, 2), text(3, 7)]
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    want = [ours.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    requests = [request(prompt, 8, GREEDY) for prompt in prompts]
    drafts_change_nothing(fresh(scorer(family)), StateScorer(ours), requests, want, gamma=4)


def test_rows_that_join_and_leave_change_nothing() -> None:
    prompts = [text(number, 1 + 4 * number % 11) for number in range(5)]
    requests = [request(prompt, 4 + 2 * place, GREEDY, eos=frozenset({7, 50})) for place, prompt in enumerate(prompts)]
    drafter = ModelDrafter(fresh(scorer("lfm2", 1)))
    decoder = Decoder(fresh(scorer("qwen3_5")), drafter, controller=Fixed(3), batch_size=1)
    single = [row.output for row in generate(decoder, requests)]
    assert [row.output for row in generate(replace(decoder, batch_size=3), requests)] == single


THREE = 3
PROMPT = (0, 2, 1)
COUNT = 3
SLACK = 1e-5
"""Models compute in float32, and a text read in other pieces is rounded otherwise."""


def oracle(target: StateScorer) -> Distribution:
    """The law of plain decoding, by fresh forwards of every text."""

    @cache
    def step(prefix: tuple[int, ...]) -> list[float]:
        return target.alone(prefix)[0, -1].double().softmax(-1).tolist()

    return plain_law(step, PROMPT, COUNT)


def law(target: StateScorer | CausalScorer, draft: StateScorer | CausalScorer) -> Distribution:
    """The law of what is generated, over every outcome of every draw."""

    def decoder(rng: Rng) -> Decoder:
        for each in (target, draft):
            each.free(range(len(each.lengths)))
        return Decoder(target, ModelDrafter(draft), controller=Cycle((2, 1)), rng=rng)

    return first_tokens(decoder, PROMPT, COUNT, COUNT)


def small(family: str, seed: int) -> StateScorer:
    return fresh(scorer(family, seed, vocab_size=THREE, pad_token_id=0, bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("lfm2", "mamba"),
        *(
            pytest.param(one, *rest, marks=pytest.mark.slow)
            for one, *rest in (("qwen3_5", "lfm2"), ("mamba2", "qwen3_5"), ("qwen3_5", "llama"))
        ),
    ],
)
def test_the_law_of_a_recurrent_target_with_any_draft(target: str, draft: str) -> None:
    """Recurrent ones, and one of keys and values."""
    drafting = small(draft, 1) if draft in EVERY else CausalScorer(tiny(FAMILIES[draft], vocab_size=THREE))
    assert total_variation(law(small(target, 0), drafting), oracle(small(target, 0))) < SLACK


@pytest.mark.slow
def test_control_the_law_is_another_if_one_layer_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = small("qwen3_5", 0), small("lfm2", 1)
    want = oracle(target)
    monkeypatch.setattr(Rewind, "state_after", _forgetting(1))
    assert total_variation(law(target, draft), want) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_the_certificate_passes_on_recurrent_pairs(family: str) -> None:
    engine = load(copy.deepcopy(model(family)), copy.deepcopy(model(family, 1)), gamma=3)
    report = check(engine, [text(1, 9), text(2, 4)], samples=256, max_new_tokens=12)
    assert report.verdict == "pass", report.text()


@pytest.mark.slow
def test_the_certificate_fails_if_one_layer_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ModelDrafter(fresh(scorer("qwen3_5", 1)))
    engine = Engine(Decoder(fresh(scorer("qwen3_5")), drafter, controller=Fixed(3)), eos=frozenset())
    monkeypatch.setattr(Rewind, "state_after", _forgetting(0))
    assert check(engine, [text(1, 9), text(2, 4)], samples=256, max_new_tokens=12).verdict == "fail"


@pytest.mark.parametrize(
    ("family", "says"),
    [
        pytest.param("fsmt", "cannot score several at once", marks=pytest.mark.slow),
        ("moshi", "looks beyond its window within a pass"),
        ("paligemma", "looks at the later tokens of a pass too"),
    ],
)
def test_models_unlike_others_are_refused_with_the_reason(family: str, says: str) -> None:
    [architecture] = architectures([family])
    model = tiny_model(architecture.kind, tiny_config(architecture.config))
    with pytest.raises(ValueError, match=rf"^\w+ \({family}\) .*{says}.*; use another model\.$"):
        load_scorer(model)


@pytest.mark.parametrize(("mode", "refused"), [("per_loop", False), ("last_loop", True)])
def test_loops_that_see_other_keys_within_a_pass_are_refused(mode: str, refused: bool) -> None:
    """Whatever the trial says, which finds less than rounding in a random model of the kind (Dory's)."""
    looped = tiny(FAMILIES["llama"])
    looped.config.recurrent_kv_cache_mode = mode
    for make in (load_scorer, StateScorer):
        with pytest.raises(ValueError, match="depend on how a text is divided") if refused else nullcontext():
            make(looped)


def test_trees_and_what_needs_keys_and_values_are_refused_in_one_sentence() -> None:
    target, other = fresh(scorer("qwen3_5")), CausalScorer(tiny(FAMILIES["llama"]))
    with pytest.raises(ValueError, match=r"^qwen3_5 keeps a state, .* draft chains, not trees\.$"):
        fresh(target).extend(torch.tensor([[3, 4]]), [2], tree=Tree.of((-1, -1), 2))
    for one, another in ((target, other), (other, target)):
        with pytest.raises(ValueError, match="line of tokens: a tree of candidates, as of gbv, needs"):
            BuildContext(one, tree=(2, 1)).drafting(another)
    with pytest.raises(ValueError, match="keeps a state, which its own layers cannot draft on"):
        part_of(scorer("mamba2"), 1)
    with pytest.raises(ValueError, match="keeps a state per row, which has no form in int8: leave kv_dtype out"):
        load_scorer(model("qwen3_5"), mode=Mode(kv_dtype="int8"))


def test_loading_finds_the_way_by_itself() -> None:
    assert isinstance(load_scorer(tiny(FAMILIES["llama"])), CausalScorer)
    assert isinstance(load_scorer(model("qwen3_5")), StateScorer)
    assert isinstance(load_scorer(model("bloom")), StateScorer)
    dense = tiny_config(transformers.GraniteMoeHybridConfig, layer_types=["attention"] * 4)
    attends = tiny_model(transformers.GraniteMoeHybridForCausalLM, dense)
    assert isinstance(load_scorer(attends), CausalScorer)  # judged by its layers, which keep nothing else


@pytest.mark.parametrize("family", ["qwen3_5", "mamba"])
def test_weights_of_a_loaded_model_are_packed_if_it_runs_with_them(family: str, tmp_path: Path) -> None:
    model(family).save_pretrained(tmp_path)
    loaded = load_scorer(tmp_path)
    assert isinstance(loaded, StateScorer)
    packs = any(isinstance(part, PackedLinear) for part in loaded.model.modules())
    assert packs == (family == "qwen3_5" and can_pack(model(family)))
    assert contract(fresh(loaded)) < LOOSE


def test_one_shape_gives_bits_that_do_not_depend_on_company() -> None:
    target = fresh(scorer("qwen3_5"))
    target.fix_shape(Shape(2, 4, 64))
    try:
        target.add(2)
        target.prefill([text(1, 6), text(2, 6)])
        new = torch.tensor([text(3, 3), text(4, 3)])
        together = target.extend(new, [3, 3])
        target.rollback([6, 6])
        singly = [target.extend(new[:, place : place + 1], [1, 1]) for place in range(3)]
        assert torch.equal(together, torch.cat(singly, 1))
    finally:
        target.fix_shape(None)


def test_memory_is_that_of_states_and_of_what_attends() -> None:
    pure, hybrid = fresh(scorer("mamba2")), fresh(scorer("qwen3_5"))
    assert pure.bytes_for([1000]) == pure.bytes_for([1]) > 0
    assert hybrid.bytes_for([1000]) - hybrid.bytes_for([1]) == 2 * 999 * hybrid.bytes_per_token > 0
