"""Heads from checkpoints: laws as defined, exact, in step with the target whatever its cache is, in every format."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, MuseGlimmerAssistantConfig, PreTrainedModel
from transformers.cache_utils import DFlashCache, MtpCache

from recipes.ahead import AheadSettings, AheadTrainer, new_eagle3, save_eagle3
from scripted import Unfused, repeat
from slipstream.cache.prefixes import PrefixCache
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.scheduler import Scheduler
from slipstream.drafters import specification as drafting
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.heads import DFlashDrafter, HeadDrafter
from slipstream.execution import backends, cuda_graphs, graphs
from slipstream.execution.backends import Native
from slipstream.execution.cuda_graphs import Captured
from slipstream.execution.names import with_cache
from slipstream.execution.passes import PassMasks
from slipstream.models.causal import CausalScorer
from slipstream.models.heads.eagle3 import load_eagle3
from slipstream.models.heads.hidden_states import LAST
from slipstream.models.heads.mtp import load_mtp
from slipstream.models.heads.scorer import Behind
from slipstream.models.loading.load import load_scorer
from slipstream.models.tiny import tiny_config
from slipstream.training.trainer import Checkpoint
from toys.drafts import Checked, company_changes_nothing, propose, same_texts
from toys.families import FAMILIES, HF_VOCAB, tiny
from toys.texts import GREEDY, SAMPLE, Cycle, request
from toys.texts import row as row_of

FLOAT = 2e-5  # the laws are softmaxes in float32, of passes of other shapes
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 2], [7, 1, 8, 2, 8])
TEXT = np.tile([5, 3, 9, 3, 7, 7, 1, 2, 8, 40, 3, 11, 9], 40)  # tokens whose successors depend on those before


def requests(sampler: Any = GREEDY, count: int = 12, **more: Any) -> list[Any]:
    return [request(prompt, count, sampler, key=number, **more) for number, prompt in enumerate(PROMPTS)]


# ---- checkpoints --------------------------------------------------------------------------------------------------


@cache
def llama(layers: int = 4, vocab: int = HF_VOCAB) -> PreTrainedModel:
    return tiny(FAMILIES["llama"], num_hidden_layers=layers, vocab_size=vocab).requires_grad_(False)


def eagle(model: PreTrainedModel, vocab: int = 60) -> Any:
    """An untrained EAGLE-3 draft, whose layers are large enough to matter."""
    net = new_eagle3(model, TEXT % model.config.vocab_size, vocab, seed=2).eval()
    for name, weight in net.named_parameters():
        if weight.dim() > 1 and not name.startswith(("embed", "lm_head")):
            torch.nn.init.normal_(weight, std=0.25)
    return net


MTP = {"deepseek": ("DeepseekV3Config", 1), "glm": ("Glm4MoeConfig", 2), "qwen": ("Qwen3_5TextConfig", 1)}
"""Families whose checkpoints have heads: configuration, and how many."""


def learn(model: PreTrainedModel, steps: int) -> PreTrainedModel:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.tensor(TEXT[:480].reshape(10, 48))
    for _ in range(steps):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@cache
def mtp_model(family: str, folder: Path, steps: int = 0) -> PreTrainedModel:
    """A tiny model that was loaded from a checkpoint with heads, written as those on the hub are."""
    import transformers

    name, heads = MTP[family]
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if family == "qwen" else {"num_mtp_layers": heads}
    config = tiny_config(getattr(transformers, name), num_hidden_layers=2, **kinds)
    torch.manual_seed(0)
    folder = folder / f"{family}{steps}"
    learn(AutoModelForCausalLM.from_config(config), steps).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    add_heads(weights, family, heads, config.hidden_size)
    save_file(weights, file, {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def add_heads(weights: dict[str, Tensor], family: str, heads: int, width: int) -> None:
    """Heads with random weights: Qwen's beside the layers, the others as layers behind the last one."""
    block = {name.split("layers.1.")[1]: weight for name, weight in weights.items() if "layers.1." in name}
    gain = 0.0 if family == "qwen" else 1.0  # Qwen's norms multiply by one more than their weight
    for head in range(heads):
        place = f"mtp.layers.{head}." if family == "qwen" else f"model.layers.{2 + head}."
        for name, weight in block.items():
            weights[place + name] = torch.randn_like(weight) * 0.2 if weight.dim() > 1 else weight.clone()
        outer = "mtp." if family == "qwen" else place
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        names = names if family == "qwen" else ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        weights |= {f"{outer}{name}.weight": torch.full((width,), gain) for name in names[:3]}
        weights[f"{outer}{names[3]}.weight"] = torch.randn(width, 2 * width) * 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def made(kind: str, folder: Path) -> tuple[Any, HeadDrafter]:
    if kind == "eagle3":
        target: Any = CausalScorer(llama())
        return target, HeadDrafter(target, eagle(target.model), "eagle3")
    target = load_scorer(mtp_model(kind, folder))
    drafter = drafting.drafter("mtp", BuildContext(target))
    assert isinstance(drafter, HeadDrafter)
    return target, drafter


kinds = pytest.mark.parametrize("kind", ["eagle3", *MTP])


# ---- laws, as defined ---------------------------------------------------------------------------------------------


def states_of(model: PreTrainedModel, texts: Tensor, places: Sequence[int]) -> Tensor:
    """The hidden states (rows, n, width) of texts (rows, n), side by side."""
    out = model(texts, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[-1 if place == LAST else place] for place in places], -1)


def run(head: Any, step: int, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """A layer on a whole text at once, without a cache."""
    slots = torch.arange(len(tokens))[None]
    return head(step, torch.tensor([tokens]), hidden, Behind(slots, None, PassMasks.chain(slots, len(tokens))))


def defined(head: Any, model: PreTrainedModel, text: list[int], drafted: list[int]) -> list[Tensor]:
    """The laws (vocab,) of the tokens after a text and after each of the drafted ones but the last."""
    hidden = head.combine(states_of(model, torch.tensor([text[:-1]]), head.places))
    all_tokens, laws = text + drafted, []
    for count in range(len(drafted)):
        if count < head.depth:  # the next layer, on what the one before made of the same places
            before, tokens = hidden, all_tokens[1 + count : len(text) + count]
        else:  # the last one again, behind what it has read
            before, tokens = torch.cat([before, hidden[:, -1:]], 1), [*tokens, drafted[count - 1]]
        hidden = run(head, min(count, head.depth - 1), tokens, before)
        laws.append(head.logits(hidden)[0, -1].softmax(-1))
    return laws


def checked(drafter: HeadDrafter, model: PreTrainedModel, head: Any = None) -> Checked:
    """The drafter, its laws compared with their definition, by fresh passes over the whole text."""
    return Checked(drafter, lambda text, drafted: defined(head or drafter.head, model, text, drafted))


@kinds
def test_every_law_is_the_defined_one(kind: str, folder: Path) -> None:
    """While rows come, go and accept different numbers of tokens, beyond the number of heads."""
    target, drafter = made(kind, folder)
    watched = checked(drafter, target.model)
    rows = generate(Decoder(target, watched, controller=Cycle((4, 2, 0)), batch_size=2), requests(SAMPLE))
    assert watched.positions > 30
    assert 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)


class Late:
    """A head that reads the target's states one token late."""

    def __init__(self, head: Any) -> None:
        self.head, self.depth, self.places, self.vocab, self.logits = head, 1, head.places, head.vocab, head.logits

    def combine(self, states: Tensor) -> Tensor:
        return self.head.combine(states.roll(1, 1))

    def __call__(self, step: int, tokens: Tensor, hidden: Tensor, behind: Behind) -> Tensor:
        return self.head(step, tokens, hidden, behind)


def test_control_states_of_another_token_are_caught() -> None:
    target, head = CausalScorer(llama()), eagle(llama())
    watched = checked(HeadDrafter(target, Late(head), "late"), target.model, head)
    with pytest.raises(AssertionError, match="not close"):
        generate(Decoder(target, watched, controller=Fixed(3)), requests(SAMPLE))


def test_heads_draft_as_transformers_own(folder: Path) -> None:
    """Two heads on a text that nothing was cached of."""
    model = mtp_model("glm", folder)
    ours, text = load_mtp(model, "glm"), [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.inference_mode():
        states, places = states_of(model, torch.tensor([text[:-1]]), [LAST]), torch.arange(1, len(text))[None]
        mtp_cache = MtpCache(config=ours.network.config)
        tokens, logits, _ = ours.network(torch.tensor([text[1:]]), states, None, places, mtp_cache)
        laws = defined(ours, model, text, tokens[0].tolist())
    torch.testing.assert_close(torch.stack(laws), logits[0].softmax(-1), rtol=0, atol=FLOAT)


@pytest.mark.parametrize("kind", ["eagle3", "glm"])
def test_states_of_known_beginnings_come_from_the_prefix_cache(kind: str, folder: Path) -> None:
    """With the target's keys; and prompts are read in pieces, two equal ones once."""
    target, drafter = made(kind, folder)
    prompt = (PROMPTS[0] * 8)[:60]
    watched, prefixes = checked(drafter, target.model), PrefixCache(10**8)
    decoder = Decoder(target, watched, controller=Fixed(3), batch_size=2)
    scheduler = Scheduler(decoder, prefill_chunk=7, prefix_cache=prefixes)
    texts = [request(prompt, 4, key=0), request([*prompt[:40], 5, 6], 5, key=1), request(prompt, 3, key=2)]
    rows = []
    for group in ([texts[0]], texts[1:]):
        rows += [scheduler.add(one) for one in (*group, replace(group[-1], key=9))]
        while scheduler.busy:
            scheduler.step()
    assert [row.stats.cached for row in rows] == [0, 59, 32, 48, 48]
    assert watched.positions > 10


def test_texts_longer_than_a_prefill_pass() -> None:
    model = tiny(FAMILIES["llama"], num_hidden_layers=4, max_position_embeddings=1024).requires_grad_(False)
    target = CausalScorer(model)
    watched = checked(HeadDrafter(target, eagle(model), "eagle3"), model)
    generate(Decoder(target, watched, controller=Fixed(2)), [request((PROMPTS[0] * 80)[:570], 4), request([4, 5], 4)])
    assert watched.positions > 4


def test_tokens_that_the_draft_does_not_know_have_no_chance() -> None:
    target = CausalScorer(llama())
    head = eagle(target.model, 20)
    logits = head.logits(torch.randn(2, 3, 32))
    assert logits.shape == (2, 3, HF_VOCAB)
    assert logits.isfinite().sum(-1).unique().tolist() == [20]
    assert set(logits[0, 0].isfinite().nonzero()[:, 0].tolist()) >= set(TEXT.tolist())


# ---- the contract of a drafter ------------------------------------------------------------------------------------


@kinds
def test_greedy_texts_are_the_target_s(kind: str, folder: Path) -> None:
    target, drafter = made(kind, folder)
    decoder = Decoder(target, drafter, controller=Cycle((5, 0, 2)), batch_size=2)
    ends = {"eos": frozenset(range(0, HF_VOCAB, 9))}
    for more in ({}, ends):
        ours = same_texts(decoder, requests(**more))
    assert sum(row.stats.drafted for row in ours) > 0


@kinds
def test_stop_in_mid_round_and_company_change_nothing(kind: str, folder: Path) -> None:
    target, drafter = made(kind, folder)
    company_changes_nothing(Decoder(target, drafter, controller=Fixed(3), batch_size=1))


def test_rows_that_the_target_has_not_read_get_no_draft() -> None:
    drafter = HeadDrafter(CausalScorer(llama()), eagle(llama()), "eagle3")
    assert propose(drafter, [row_of([1, 2, 3], 3)], [3]).lengths == (0,)


@pytest.mark.parametrize("execution", [Native, Captured])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLE])
def test_texts_of_a_compiled_target_and_a_compiled_draft_are_those_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch, settings: Any, execution: Any
) -> None:
    """Batches and a single text; the graphs that draft were really used, and read the states that graphs gave."""
    if execution is Captured:
        monkeypatch.setattr(graphs, "record", repeat)
        monkeypatch.setattr(cuda_graphs, "Fused", Unfused)
        monkeypatch.setattr(backends, "CAPTURED", {"cpu"})
    model = llama()
    eager, fast = CausalScorer(model), CausalScorer(model, execution=execution(model, "toy"))
    ours, eager_drafter = (HeadDrafter(target, eagle(model), "eagle3") for target in (fast, eager))
    ours.scorer.make_draft_graphs((3,))
    for some in (requests(settings)[:1], requests(settings)):
        texts = [
            [row.tokens for row in generate(Decoder(target, drafter, controller=Fixed(3)), some)]
            for target, drafter in ((fast, ours), (eager, eager_drafter))
        ]
        assert texts[0] == texts[1]
    assert ours.scorer.draft_graphs is not None and ours.scorer.draft_graphs.made


def test_programs_show_all_states() -> None:
    model = llama()
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Native(model, "toy"))
    last, found = len(model.model.layers), list[Tensor]()
    for scorer in (eager, fast):
        states = scorer.record([0, last, LAST])
        scorer.add(1)
        scorer.prefill([[1, 2, 3, 4]])
        scorer.extend(torch.tensor([[5, 6]]), [2])
        found.append(states.of(torch.arange(6)[None]))
    assert isinstance(fast.execution, Native) and fast.execution.fault is None
    torch.testing.assert_close(*found)


@torch.inference_mode()
def test_passes_are_seen_only_while_somebody_watches() -> None:
    target = CausalScorer(llama())
    HeadDrafter(target, eagle(target.model), "eagle3")
    states = target.record([1, LAST])
    with states.watching() as seen:
        target.model(torch.tensor([[1, 2, 3]]))
    assert set(seen) == {1, LAST}
    seen.clear()
    target.model(torch.tensor([[1, 2, 3]]))
    assert not seen


# ---- DFlash -------------------------------------------------------------------------------------------------------


def block_draft(model: PreTrainedModel, window: int = 9, spread: float = 0.3) -> Any:
    """A random DFlash network, whose window is smaller than the texts."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": spread}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": window}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "target_layer_ids": [0, 2]}
    block = {"block_size": 5, "mask_token_id": model.config.vocab_size - 1}
    torch.manual_seed(4)
    return AutoModel.from_config(MuseGlimmerAssistantConfig(**sizes, **heads, **layers, **block)).eval()


def block_laws(model: PreTrainedModel, net: Any, texts: Tensor) -> Tensor:
    """Laws (rows, 4, vocab) behind texts (rows, n), as in transformers' candidate generator."""
    rows, count = texts.shape
    states = states_of(model, texts[:, :-1], [layer + 1 for layer in net.config.target_layer_ids])
    cache = DFlashCache(config=net.config)
    cache.set_previous_accepted_tokens(count - 1)
    noise = torch.full((rows, 5), net.config.mask_token_id)
    noise[:, 0] = texts[:, -1]
    embeds, places = model.get_input_embeddings()(noise), torch.arange(count + 4)[None]
    inputs = {"noise_embeds": embeds, "context_hidden_states": states, "position_ids": places}
    out = with_cache(net)(cache, **inputs, attention_mask=None)
    return model.lm_head(out.last_hidden_state[:, 1:]).softmax(-1)


def test_a_block_is_drafted_as_by_transformers() -> None:
    """In ragged batches, behind any number of accepted tokens."""
    target, net = CausalScorer(llama()), block_draft(llama(), 40)
    drafter = Checked(
        DFlashDrafter(target, net, "dflash"),
        lambda text, drafted: block_laws(target.model, net, torch.tensor([text]))[0, : len(drafted)],
    )
    rows = generate(Decoder(target, drafter, controller=Cycle((4, 2, 0)), batch_size=2), requests(SAMPLE))
    assert drafter.positions > 30
    assert 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)


def test_texts_drafted_in_blocks_are_the_target_s() -> None:
    target = CausalScorer(llama())
    decoder = Decoder(target, DFlashDrafter(target, block_draft(llama()), "dflash"), controller=Fixed(9), batch_size=2)
    ends = frozenset(range(0, HF_VOCAB, 9))
    ours = same_texts(decoder, requests(eos=ends))
    assert max(len(row.stats.drafted_by_position) for row in ours) <= 4
    company_changes_nothing(replace(decoder, batch_size=1))


@pytest.mark.slow
def test_a_trained_block_is_accepted_far_more_often_than_a_shuffled_one(tmp_path: Path) -> None:
    target, net = CausalScorer(learned()), block_draft(learned(), 64, 0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
    rng = np.random.default_rng(0)
    for _ in range(120):
        count = int(rng.integers(6, 36))
        texts = torch.tensor(np.stack([TEXT[start : start + count + 4] for start in range(13)]))
        likely = block_laws(learned(), net, texts[:, :count]).gather(-1, texts[:, count:, None])
        loss = -likely.clamp(min=1e-9).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.save_pretrained(tmp_path)
    by_name = drafting.drafter(f"dflash:{tmp_path}", BuildContext(target))
    good = acceptance(target, by_name)
    bad = acceptance(target, DFlashDrafter(target, shuffled(net), "shuffled"))
    assert good > 0.6 and bad < 0.3


def test_what_is_no_block_draft_of_the_target_is_refused(tmp_path: Path) -> None:
    for model, says in ((llama(), "is no DFlash draft"), (block_draft(llama()), "hidden size 32 and more")):
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=says):
            drafting.drafter(f"dflash:{tmp_path}", BuildContext(CausalScorer(llama(4, 3))))


# ---- acceptance ---------------------------------------------------------------------------------------------------


@cache
def learned() -> PreTrainedModel:
    """A target that knows a text by heart."""
    return learn(tiny(FAMILIES["llama"], num_hidden_layers=4, initializer_range=0.05), 70)


def acceptance(target: Any, drafter: Any) -> float:
    """Which share of drafted tokens stands, at temperature 1."""
    starts = [TEXT[start : start + 10].tolist() for start in (0, 5, 9)]
    texts = [request(start, 24, SAMPLE, key=key) for key, start in enumerate(starts)]
    rows = generate(Decoder(target, drafter, controller=Fixed(3)), texts)
    return sum(row.stats.accepted for row in rows) / sum(row.stats.drafted for row in rows)


def shuffled(module: Any) -> Any:
    """The same weights in another order."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.requires_grad:
                weight.copy_(weight.flatten()[torch.randperm(weight.numel())].view_as(weight))
    return module


@pytest.mark.slow
def test_a_trained_eagle3_draft_is_accepted_far_more_often_than_a_shuffled_one(tmp_path: Path) -> None:
    target = CausalScorer(learned())
    net = new_eagle3(learned(), TEXT, 40)
    settings = AheadSettings(steps=80, rows=4, length=32, rate=5e-3)
    AheadTrainer(net, net, learned(), TEXT, settings, Checkpoint(tmp_path / "state")).train()
    save_eagle3(net, tmp_path)
    good = acceptance(target, HeadDrafter(target, load_eagle3(tmp_path, learned()), "trained"))
    bad = acceptance(target, HeadDrafter(target, shuffled(net).eval(), "shuffled"))
    assert good > 0.75 and bad < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm", "qwen"])
def test_trained_heads_are_accepted_far_more_often_than_shuffled_ones(kind: str, folder: Path, tmp_path: Path) -> None:
    model = mtp_model(kind, folder, 40)
    heads, target = load_mtp(model, kind), load_scorer(model)
    layers = heads.network.layers.requires_grad_(True)
    settings, checkpoint = AheadSettings(60, 4, 32, rate=5e-3), Checkpoint(tmp_path / "state")
    AheadTrainer(heads, layers, model, TEXT, settings, checkpoint).train()
    good = acceptance(target, HeadDrafter(target, heads, "heads"))
    shuffled(layers)
    bad = acceptance(target, HeadDrafter(target, heads, "heads"))
    assert good > 0.7 and bad < 0.3


# ---- formats ------------------------------------------------------------------------------------------------------


def law_of(net: Any) -> Tensor:
    """A law on fixed states."""
    states = torch.randn(1, 6, 96, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return net.logits(run(net, 0, [1, 2, 3, 4, 5, 6], net.combine(states))).softmax(-1)


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Change the config.json and the weights of a checkpoint."""
    file = folder / "model.safetensors"
    record, weights = json.loads((folder / "config.json").read_text()), load_file(file)
    change(record, weights)
    (folder / "config.json").write_text(json.dumps(record))
    save_file(weights, file, {"format": "pt"})


def as_specforge(record: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """The layer's settings on top, with RoPE where it used to be, and the first layer under its old name."""
    layer, aux = record.pop("transformer_layer_config"), record.pop("eagle_aux_hidden_state_layer_ids")
    rope = layer.pop("rope_parameters")
    del record["speculators_model_type"]
    record |= {**layer, "rope_theta": rope["rope_theta"], "rope_scaling": None, "model_type": "llama"}
    record |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux}}
    for name in [name for name in weights if name.startswith("layers.0.")]:
        weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)


def without_mask(record: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Offsets say as much as the mask, and it as much as they; the usual hidden states need not be named."""
    del weights["t2d"]
    record["eagle_aux_hidden_state_layer_ids"] = None


@pytest.mark.parametrize("change", [as_specforge, without_mask, lambda _, weights: weights.pop("d2t")])
def test_the_same_draft_in_another_format_has_the_same_laws(change: Any, tmp_path: Path) -> None:
    save_eagle3(eagle(llama()), tmp_path)
    before = load_eagle3(tmp_path, llama())
    rewrite(tmp_path, change)
    after = load_eagle3(tmp_path, llama())
    assert torch.equal(law_of(after), law_of(before)) and after.places == before.places == (2, 2, 1)
    assert torch.equal(law_of(before), law_of(eagle(llama())))


def test_equal_vocabularies_need_no_mapping_and_the_target_lends_what_is_missing(tmp_path: Path) -> None:
    save_eagle3(eagle(llama(), HF_VOCAB), tmp_path)
    assert not {"d2t", "t2d", "embed_tokens.weight"} & set(load_file(tmp_path / "model.safetensors"))
    before = law_of(load_eagle3(tmp_path, llama()))
    rewrite(tmp_path, lambda record, weights: weights.pop("lm_head.weight"))
    torch.testing.assert_close(law_of(load_eagle3(tmp_path, llama())), before)  # the head was the target's


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"])
def test_every_norm_that_a_checkpoint_has_matters(flag: str, tmp_path: Path) -> None:
    save_eagle3(eagle(llama()), tmp_path)
    before = law_of(load_eagle3(tmp_path, llama()))

    def change(record: dict[str, Any], weights: dict[str, Tensor]) -> None:
        record[flag] = not record[flag]
        more = {"norm_before_fc": {"input_norm.weight": 96}, "fc_norm": {f"fc_norm.{i}.weight": 32 for i in range(3)}}
        weights |= {name: torch.linspace(0.2, 2, size) for name, size in more.get(flag, {}).items()}

    rewrite(tmp_path, change)
    net = load_eagle3(tmp_path, llama())
    assert getattr(net.settings, flag) != (flag == "norm_before_residual")
    if flag != "norm_output":  # that changes what is read at the next token alone
        assert not torch.allclose(law_of(net), before, atol=1e-3)
    else:
        torch.testing.assert_close(law_of(net), before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda record, weights: record.update(speculators_model_type="dflash"), "is no EAGLE-3 draft"),
        (lambda record, weights: record.update(draft_vocab_size=30), "does not name 30 of 101 tokens"),
        (lambda record, weights: record.update(target_hidden_size=64), "hidden size 64 and 101 tokens, but"),
        (lambda record, weights: [weights.pop(name) for name in ("d2t", "t2d")], "no d2t that says which"),
        (lambda record, weights: weights.update(fc=weights.pop("fc.weight")), "lacks the weights fc.weight"),
        (lambda record, weights: weights.update(gate=torch.zeros(1)), "nothing is known of: gate"),
        (lambda record, weights: weights.update({"norm.weight": torch.zeros(7)}), "do not fit its config.json"),
        (lambda record, weights: record["transformer_layer_config"].update(model_type="mamba"), "the kind 'mamba'"),
        (lambda record, weights: record.update(eagle_aux_hidden_state_layer_ids=[2, 9, 1]), "no hidden states .9."),
    ],
)
def test_what_is_wrong_with_a_draft_is_one_sentence(change: Any, says: str, tmp_path: Path) -> None:
    save_eagle3(eagle(llama()), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=says):
        drafting.drafter(f"eagle3:{tmp_path}", BuildContext(CausalScorer(llama())))


def test_there_has_to_be_a_checkpoint_with_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json: give a folder"):
        drafting.drafter(f"eagle3:{tmp_path}", BuildContext(CausalScorer(llama())))
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        drafting.drafter("mtp", BuildContext(CausalScorer(llama())))
    llama().save_pretrained(tmp_path)
    target = load_scorer(tmp_path)
    with pytest.raises(ValueError, match="has no heads for several tokens: there are no weights mtp"):
        drafting.drafter("mtp", BuildContext(target))
