"""Models and a `generate` that call the cache as transformers does, or did: ours run with every naming."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from scripted import ONE, drafts, drive
from slipstream.engine.transformers_hook import cache as generate_cache
from slipstream.engine.transformers_hook import call as generate_call
from slipstream.engine.transformers_hook.custom_generate import custom_generate
from slipstream.execution.backends import Native
from slipstream.execution.names import CACHE, STATE_NAMES, state_in, with_cache
from slipstream.models.causal import CausalScorer
from slipstream.models.recurrent.calls import CausalCalls
from toys import FAMILIES, GREEDY, HF_VOCAB, rare, tiny


@dataclass
class NewOutput:
    """An output as of transformers 5.24."""

    logits: Tensor
    cache: Any


@dataclass
class OldOutput:
    """An output as of transformers before 5.24, or of a model with code of its own."""

    logits: Tensor
    past_key_values: Any


def run(model: LlamaForCausalLM, cache: Any, *inputs: Any) -> Any:
    """Llama's own forward, by the names that it has here."""
    names = ("input_ids", "attention_mask", "position_ids", "use_cache")
    return LlamaForCausalLM.forward(model, **dict(zip(names, inputs, strict=True)), **{CACHE: cache})


class New(LlamaForCausalLM):
    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        use_cache: Any = None,
    ) -> NewOutput:
        out = run(self, cache, input_ids, attention_mask, position_ids, use_cache)
        return NewOutput(out.logits, getattr(out, CACHE))


class Old(LlamaForCausalLM):
    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
    ) -> OldOutput:
        out = run(self, past_key_values, input_ids, attention_mask, position_ids, use_cache)
        return OldOutput(out.logits, getattr(out, CACHE))


class Unknown(LlamaForCausalLM):
    """A Llama that calls its cache what no model does."""

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        memory: Any = None,
        use_cache: Any = None,
    ) -> NewOutput:
        out = run(self, memory, input_ids, attention_mask, position_ids, use_cache)
        return NewOutput(out.logits, getattr(out, CACHE))


def named(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = kind(tiny(FAMILIES["llama"]).config)
    model.load_state_dict(tiny(FAMILIES["llama"]).state_dict())
    return model.eval()


@pytest.mark.parametrize("kind", [New, Old])
def test_passes_and_drafts(kind: type[LlamaForCausalLM]) -> None:
    expected, ours = CausalScorer(tiny(FAMILIES["llama"])), CausalScorer(named(kind))
    for left, right in zip(drive(expected, 3), drive(ours, 3), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", [New, *rare(Old)])
def test_recorded_passes_and_drafts(kind: type[LlamaForCausalLM]) -> None:
    expected, model = CausalScorer(tiny(FAMILIES["llama"])), named(kind)
    ours = CausalScorer(model, execution=Native(model, "toy"))
    ours.make_draft_graphs(())
    for left, right in zip(drive(expected, 2), drive(ours, 2), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
    for left, right in zip(drafts(expected, [GREEDY], ONE), drafts(ours, [GREEDY], ONE), strict=True):
        assert torch.equal(left.tokens, right.tokens)
    assert ours.draft_graphs is not None and ours.draft_graphs.made


@pytest.mark.parametrize("kind", [New, Old])
@torch.no_grad()
def test_states_go_from_call_to_call(kind: type[LlamaForCausalLM]) -> None:
    tokens, calls = torch.arange(12)[None], CausalCalls(named(kind))
    state = calls.state(calls(tokens[:, :8], None, None))
    out = calls(tokens[:, 8:], state, None)
    torch.testing.assert_close(out.logits, calls.alone(tokens[0].tolist(), None)[:, 8:])


def test_a_model_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"does not run with our cache: .*unexpected keyword argument '{CACHE}'"):
        CausalScorer(named(Unknown))


@pytest.mark.parametrize("name", STATE_NAMES)
def test_every_name_is_found(name: str) -> None:
    made: Any = {}
    exec(f"def forward({name}=None, **others): return {name}", made)  # a function whose argument has this name

    class Model:
        forward = staticmethod(made["forward"])

        def __call__(self, **inputs: Any) -> Any:
            return SimpleNamespace(logits=None, **{name: self.forward(**inputs)})

    assert state_in(with_cache(Model())("held")) == "held"
    assert state_in(SimpleNamespace(logits=None)) is None


# ---- generate ---------------------------------------------------------------------------------------------------


def renamed(inputs: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The inputs with another name for one."""
    return {new if name == old else name: value for name, value in inputs.items()}


def speaking(name: str, speculate: Any, ours: str) -> Callable[..., Any]:
    """Our hook in a transformers that calls the cache by a name, and which we believe to call it `ours`."""

    def call(model: Any, *handed: Any, **inputs: Any) -> Any:
        prefill, prepare = model._prefill, model.prepare_inputs_for_generation
        update = model._update_model_kwargs_for_generation

        def renaming_prefill(ids: Any, config: Any, given: Any) -> Any:
            out = prefill(ids, config, renamed(given, name, CACHE))
            return SimpleNamespace(logits=out.logits, **{name: state_in(out)})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generate_call, "CACHE", ours)
            patch.setattr(generate_call, "HARMLESS", {*generate_call.HARMLESS} - {CACHE} | {ours})
            patch.setattr(generate_cache, "CACHE", ours)
            patch.setattr(model, "_prefill", renaming_prefill)
            patch.setattr(
                model,
                "_update_model_kwargs_for_generation",
                lambda out, given, **how: renamed(update(out, renamed(given, name, CACHE), **how), CACHE, name),
            )
            patch.setattr(
                model, "prepare_inputs_for_generation", lambda ids, **how: prepare(ids, **renamed(how, name, CACHE))
            )
            return speculate(model, *handed, **renamed(inputs, CACHE, name))

    return call


def filled(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        with_cache(model)(cache, input_ids=ids, use_cache=True)
    return cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_filled_cache_goes_on_by_any_name(name: str) -> None:
    model, rng = tiny(FAMILIES["llama"]), random.Random(0)
    ids = torch.tensor([[rng.randrange(1, HF_VOCAB) for _ in range(9)]])
    speculate = custom_generate(tiny(FAMILIES["llama"]), 3)
    expected, ours = filled(model, ids[:, :6]), filled(model, ids[:, :6])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(ids, **settings, **{CACHE: expected})
    again = model.generate(ids, **settings, **{CACHE: ours}, custom_generate=speaking(name, speculate, name))
    assert torch.equal(text, again) and expected.get_seq_length() == ours.get_seq_length() == 16
    other = {"cache": "past_key_values", "past_key_values": "cache"}[name]
    with pytest.raises(ValueError, match=f"^{name} cannot be honoured"):
        model.generate(ids, **settings, **{CACHE: ours}, custom_generate=speaking(name, speculate, other))
