"""Self-speculation: a part of the target drafts on the target's own cache, and the law stays the target's."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from slipstream.core.draws import draw
from slipstream.core.protocols import Shape
from slipstream.core.request import Row
from slipstream.core.round import Context
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, rounds
from slipstream.drafters import specification as drafting
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.execution.backends import Native
from slipstream.models.causal import CausalScorer
from slipstream.models.layers import find_layers, part_of
from slipstream.models.loading.load import load_model
from toys.drafts import law_error, same_texts
from toys.families import FAMILIES, LLAMA, PROBED, Family, tiny
from toys.tables import dirichlet_table, scorer
from toys.texts import SAMPLE, ragged

EVERY = {**FAMILIES, **PROBED}
DEEP = {"num_hidden_layers": 4, "layer_types": None, "no_rope_layers": None}
FLOAT = 1e-5  # the laws are softmaxes in float32

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE.*")


def deep(family: str, layers: int = 4, **changes: Any) -> PreTrainedModel:
    known = EVERY[family].changes
    count = {"n_layer" if "n_layer" in EVERY[family].base else "num_hidden_layers": layers}
    lists = {name: known[name] * (layers // 2) for name in ("layer_types", "no_rope_layers") if name in known}
    return tiny(EVERY[family], **{**count, **lists, **changes})


def leaving(target: CausalScorer, layers: int) -> SameRowsDrafter:
    return SameRowsDrafter(part_of(target, layers))


@torch.inference_mode()
def shortened(model: PreTrainedModel, count: int, text: Sequence[int]) -> torch.Tensor:
    """Logits (tokens, vocab) of a text by the model whose other layers were really taken out: the reference."""
    path, layers = find_layers(model, "reference")
    keep, config = layers[:count], model.config
    parent = model.get_submodule(".".join(path[:-1]))
    types = getattr(config, "layer_types", None)
    try:
        setattr(parent, path[-1], keep)
        if types:
            config.layer_types = types[:count]
        config.num_hidden_layers = count
        return model(torch.tensor([text]), use_cache=False).logits[0]
    finally:
        setattr(parent, path[-1], layers)
        config.num_hidden_layers = len(layers)
        if types:
            config.layer_types = types


@pytest.mark.parametrize("family", EVERY)
def test_the_first_layers_share_the_cache_and_leave_the_target_as_it_is(family: str) -> None:
    """Ragged rows that the target has read; the exit goes on, is rolled back, and the target goes on."""
    model = deep(family)
    target = CausalScorer(model)
    part = part_of(target, 2)
    texts, more = [[5, 3, 8, 13, 2, 1, 7, 11, 4], [9, 2]], [[1, 6], [4, 4]]
    target.add(2)
    target.prefill(texts)
    ours = part.extend(torch.tensor(more), [2, 2])
    for row, (text, new) in enumerate(zip(texts, more, strict=True)):
        torch.testing.assert_close(ours[row], shortened(model, 2, [*text, *new])[-2:], rtol=0, atol=1e-3)
    part.rollback([len(text) for text in texts])
    assert target.lengths == [9, 2]
    target_logits = target.extend(torch.tensor(more), [2, 2])
    for row, (text, new) in enumerate(zip(texts, more, strict=True)):
        with torch.inference_mode():
            want = model(torch.tensor([[*text, *new]]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(target_logits[row], want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3", "gemma3", "gpt2"])
def test_greedy_texts_are_the_target_s(family: str, layers: int) -> None:
    target = CausalScorer(deep(family))
    decoder = Decoder(target, leaving(target, layers), controller=Fixed(3), batch_size=2)
    ours = same_texts(decoder, ragged())
    assert sum(row.stats.drafted for row in ours) > 0
    again = generate(decoder, ragged())  # the drafter serves the next call
    assert [row.stats.accepted for row in again] == [row.stats.accepted for row in ours]


def test_weights_are_shared_not_copied() -> None:
    model = deep("llama")
    part = part_of(CausalScorer(model), 2)
    owned = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in part.model.parameters()} < owned
    assert len(model.model.layers) == 4 and model.config.num_hidden_layers == 4


def test_a_compiled_pass_of_all_layers_is_not_the_draft_s() -> None:
    model = deep("llama")
    target = CausalScorer(model, execution=Native(model, "whole"))
    part = part_of(target, 2)
    assert isinstance(part.execution, Native) and part.execution.model is part.model is not model


def test_an_exit_that_is_the_target_but_for_nothing_is_always_right() -> None:
    """Layers that add nothing may be left out: every draft is kept."""
    model = deep("llama")
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = CausalScorer(model)
    decoder = Decoder(target, leaving(target, 2), controller=Fixed(3))
    rows = generate(decoder, ragged(SAMPLE))
    assert all(row.stats.alpha == pytest.approx(1, abs=1e-4) for row in rows)
    assert all(row.stats.accepted == row.stats.drafted for row in rows)


# ---- the contract of a drafter: see also `test_self_drafts` ---------------------------------------------------------


@pytest.mark.slow
def test_control_without_the_rollback_the_target_goes_astray() -> None:
    target = CausalScorer(deep("llama", 3, vocab_size=3, initializer_range=0.4))
    drafter = leaving(target, 1)
    drafter.scorer.rollback = lambda lengths: None  # type: ignore[method-assign]
    with pytest.raises((AssertionError, ValueError)):
        assert law_error(Decoder(target, drafter, controller=Fixed(2))) < FLOAT


def test_prompts_may_be_read_behind_the_rows_that_draft() -> None:
    drafts = []
    for behind in ([], [[5, 6, 7]]):
        target = CausalScorer(deep("llama"))
        drafter, rows = leaving(target, 1), [Row(one, one.key, list(one.prompt)) for one in ragged()]
        target.add(len(rows) + len(behind))
        target.prefill([*(row.tokens[:-1] for row in rows), *behind])
        drafts.append(drafter.propose(Context(tuple(rows), draw), [2] * len(rows)))
        assert target.lengths == [*(len(row.tokens) - 1 for row in rows), *map(len, behind)]
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)


def test_a_text_may_fill_the_context() -> None:
    target = CausalScorer(deep("llama", max_position_embeddings=16))
    decoder = Decoder(target, leaving(target, 2), controller=Fixed(5))
    assert [len(row.tokens) for row in same_texts(decoder, ragged(count=40))] == [16, 16, 16]


def test_a_fixed_shape_sees_the_same_bits() -> None:
    """The verifying pass writes over every slot that the draft wrote to."""
    target = CausalScorer(deep("llama"))
    target.fix_shape(Shape(3, 4, 64))
    decoder = Decoder(target, leaving(target, 2), controller=Fixed(3), batch_size=3)
    ours, expected = record(target, decoder), record(target, replace(decoder, controller=Fixed(0)))
    common = ours.keys() & expected.keys()
    assert len(common) > 10
    assert all(torch.equal(ours[text], expected[text]) for text in common)


def record(target: CausalScorer, decoder: Decoder) -> dict[tuple[int, ...], torch.Tensor]:
    """The logits behind every prefix of the greedy texts, as the loop sees them."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    extend = CausalScorer.extend

    def watched(tokens: torch.Tensor, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        logits = extend(target, tokens, counts, **kwargs)
        passes.append(logits.clone())
        return logits

    passes: list[torch.Tensor] = []
    target.extend = watched  # type: ignore[method-assign]
    try:
        for round in rounds(decoder, ragged()):
            logits = passes[-1]
            for place, row in enumerate(round.rows):
                new = round.tokens[place]
                start = len(row.tokens) - len(new)
                for position in range(len(new)):
                    found[tuple(row.tokens[: start + position])] = logits[place, position]
    finally:
        del target.extend
    return found


def test_the_drafter_of_another_target_is_refused() -> None:
    target, other = CausalScorer(deep("llama")), CausalScorer(deep("llama"))
    with pytest.raises(ValueError, match="only for the target it was made of"):
        generate(Decoder(target, leaving(other, 1)), ragged())


# ---- layers and models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["0", "4", "9", "-1", "", "a", "1-2", "0,2", "2.5"])
def test_impossible_layers_are_refused(layers: str) -> None:
    with pytest.raises(ValueError, match="possible"):
        drafting.drafter(f"exit:{layers}", BuildContext(CausalScorer(deep("llama"))))


def test_a_model_whose_forward_was_replaced_or_that_keeps_its_layers_otherwise_is_refused() -> None:
    """Replaced as accelerate does it to spread a model over devices; a copy would still run all layers."""
    target = CausalScorer(deep("llama"))
    target.model.model.forward = target.model.model.forward
    with pytest.raises(ValueError, match="load it whole"):
        part_of(target, 1)
    target.model.model.layers = torch.nn.Sequential(*target.model.model.layers)
    with pytest.raises(ValueError, match="in one list, as Llama does"):
        part_of(target, 1)


def test_a_layerskip_checkpoint_is_a_llama_with_more_to_say(tmp_path: Path) -> None:
    """Such checkpoints are plain Llama models; a configuration may carry the recipe's own keys."""
    tiny(Family("LlamaConfig", LLAMA, {"num_hidden_layers": 4})).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    extra = {"layer_dropout": 0.1, "early_exit_loss_scale": 1.0, "early_exit_curriculum": "rotational"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **extra}))
    model = load_model(tmp_path, "float32")
    assert isinstance(model, transformers.LlamaForCausalLM)
    target = CausalScorer(model)
    decoder = Decoder(target, leaving(target, 2), controller=Fixed(3))
    same_texts(decoder, ragged())


def test_it_is_reached_by_name() -> None:
    target = CausalScorer(deep("llama"))
    drafter = drafting.drafter("exit:3", BuildContext(target))
    assert drafter.scorer.name.endswith("with its first 3 layers")
    with pytest.raises(ValueError, match="the target has 4, leave some out"):
        drafting.drafter("exit:4", BuildContext(target))
    with pytest.raises(ValueError, match="cannot draft for itself"):
        drafting.drafter("exit:1", BuildContext(scorer(dirichlet_table(1))))
