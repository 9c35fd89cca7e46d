"""Methods that need training: exits that copy states, thresholds that keep a risk, sources as drafts; their copies."""

import ast
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from reproduction import lab, plane
from reproduction.baselines.calibration import calibrated, p_value
from reproduction.baselines.exits import ExitClock, ExitRule, Exits, saturation, softmax_gap
from reproduction.baselines.heads import FILE, HeadsDrafter, ParallelHeads, Sizes
from reproduction.baselines.sources import SourceDrafter, continuation
from reproduction.published import EDITING
from reproduction.runs import methods
from reproduction.runs.audit import Laws
from reproduction.runs.quality import unlike
from reproduction.standins import edits, tuning
from reproduction.standins import python_prompts as writing
from reproduction.standins.copies import Lessons
from reproduction.standins.edits import Editing
from reproduction.standins.heads import HeadTrainer, TrainingSettings
from reproduction.standins.tuning import Blockwise, Lesson, Teaching
from slipstream.core.request import Request
from slipstream.decoding import acceptance, rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.sampling import Sampling
from slipstream.execution.names import CACHE, with_cache
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.training.trainer import Progress
from toys import EXACT, FAMILIES, GREEDY, HF_VOCAB, PAIRS, WRONG, first_tokens, plain_law, request, scorer, tiny
from toys import total_variation as tv
from toys.drafts import Altered, Checked, flat, law_error
from toys.texts import SAMPLE, Cycle, ragged

FLOAT = 1e-5
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def target_of(layers: int = 4, seed: int = 0) -> CausalScorer:
    return CausalScorer(tiny(FAMILIES["llama"], seed, num_hidden_layers=layers))


def alone(target: CausalScorer, **changes: Any) -> Decoder:
    return replace(Decoder(target, NoDraft(), acceptance.token, Fixed(0), rng=rules.TOKEN.rng), batch_size=1, **changes)


def exiting(exits: Exits, rule: ExitRule | None) -> Decoder:
    return alone(exits.target, drafter=ExitClock(exits, rule))  # type: ignore[arg-type]


def asked(count: int = 12, temperature: float = 0.0) -> Request:
    return request(PROMPT, count, Sampling(temperature=temperature))


# ---- exits -------------------------------------------------------------------------------------------------------


def test_without_a_rule_all_layers_run_and_nothing_changes() -> None:
    want = generate(alone(target_of()), [asked()])[0].output
    exits = Exits(target_of())
    assert generate(exiting(exits, None), [asked()])[0].output == want
    assert exits.layers_run == 4 * exits.passes


def reference(model: Any, leaves: dict[int, int], count: int) -> list[int]:
    """Greedy tokens of a model that leaves, at output place t, after `leaves[t]` layers: every further layer reads the
    copied state, which writes its keys and values, and what it says is dropped."""
    cache, core = DynamicCache(config=model.config), model.model
    with_cache(model)(cache, input_ids=torch.tensor([PROMPT[:-1]]))
    text = list(PROMPT)
    for place in range(count):
        states, position = core.embed_tokens(torch.tensor([text[-1:]])), torch.tensor([[len(text) - 1]])
        rotation, kept = core.rotary_emb(states, position), None
        for number, layer in enumerate(core.layers):
            out = layer(states, position_embeddings=rotation, use_cache=True, **{CACHE: cache})
            kept = out if number + 1 == leaves[place] else kept
            states = out if kept is None else kept
        text.append(int(model.lm_head(core.norm(states))[0, -1].argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("pattern", [(1, 4), (4, 2, 1, 3)])
@torch.no_grad()
def test_states_are_copied_to_the_layers_that_are_skipped(pattern: tuple[int, ...]) -> None:
    leaves = {place: pattern[place % len(pattern)] for place in range(12)}
    exits, ran = Exits(target_of()), [0]

    def planned(before: Tensor, behind: Tensor, head: Any) -> float:
        ran[0] = exits.layers_run - sum(leaves[place] for place in range(exits.place))
        return float(ran[0] == leaves[exits.place]) * 2

    got = generate(exiting(exits, ExitRule(planned, 1.0, 12)), [asked()])[0].output
    assert got == reference(tiny(FAMILIES["llama"], num_hidden_layers=4), leaves, 12)
    assert exits.layers_run == sum(leaves.values())
    assert got != generate(alone(target_of()), [asked()])[0].output  # a control: it is another law


def test_confidences_are_the_gap_and_the_cosine() -> None:
    before, behind = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[4.0, 3.0]]])
    assert softmax_gap(before, behind, lambda states: states) == pytest.approx((math.e - 1) / (math.e + 1))
    assert saturation(before, behind, lambda states: states) == pytest.approx(24 / 25)


def test_the_threshold_falls_along_a_text() -> None:
    rule = ExitRule(saturation, 0.5, 10)
    assert rule.bar(0) == pytest.approx(0.55) and rule.bar(10) == pytest.approx(0.45 + 0.1 * math.exp(-4))
    assert ExitRule(saturation, 2.0, 10).bar(10) == 1.0


def test_only_llamas_get_exits() -> None:
    with pytest.raises(ValueError, match="no Llama"):
        Exits(CausalScorer(tiny(FAMILIES["gpt2"])))


# ---- thresholds --------------------------------------------------------------------------------------------------


def false_alarms(count: int, chance: float, failure: float, test: Any) -> float:
    """The chance that a test passes a threshold whose loss is 1 with this chance and else 0, all outcomes counted."""
    counted = ((k, math.comb(count, k) * chance**k * (1 - chance) ** (count - k)) for k in range(count + 1))
    return sum(weight for k, weight in counted if test([1.0] * k + [0.0] * (count - k), chance) <= failure)


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5])
def test_a_threshold_that_misses_its_risk_rarely_passes(chance: float) -> None:
    for failure in (0.05, 0.2):
        assert 0 < false_alarms(30, chance, failure, p_value) <= failure
    naive = false_alarms(30, chance, 0.05, lambda losses, most: float(sum(losses) / len(losses) > most))
    assert naive > 0.05  # a control: the mean alone is no test


def test_thresholds_are_tried_from_the_safest_on() -> None:
    tried = list[float]()

    def losses(threshold: float) -> list[float]:
        tried.append(threshold)
        return [0.0 if threshold > 0.5 else 1.0] * 40

    assert calibrated((0.9, 0.7, 0.5, 0.3), losses, 0.1) == 0.7
    assert tried == [0.9, 0.7, 0.5]
    assert calibrated((0.5, 0.9), losses, 0.1) is None


def test_losses_are_what_chrf_leaves() -> None:
    pytest.importorskip("sacrebleu")
    assert unlike("def f(x):", "def f(x):") == 0 and unlike("", "") == 0
    assert 0 < unlike("def f(x):", "def f(y):") < unlike("import os", "def f(y):") <= 1


# ---- sources -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ((), 0),
        ((5, 6), 2),
        ((5, 9), None),  # it has left the source
        ((5, 9, 8), 4),  # 8 stands once
        ((5, 9, 7), None),  # 7 stands twice
        ((9, 9, 6, 7), 3),  # 6, 7 stands once
        ((4, 1), None),  # 1 is the end of the source
        ((5, 6, 7, 8, 7, 1), None),
    ],
)
def test_a_copy_goes_on_where_the_last_tokens_occur_once(output: tuple[int, ...], place: int | None) -> None:
    assert continuation((5, 6, 7, 8, 7, 1), output) == place


@pytest.mark.parametrize("pair", PAIRS)
def test_sources_as_drafts_are_exact(pair: str) -> None:
    table = PAIRS[pair][0]

    def decoder(rng: Any, verify: Any = acceptance.token) -> Decoder:
        return Decoder(scorer(table, "target"), SourceDrafter(lambda prompt: (1, 1, 2)), verify, Fixed(2), rng=rng)

    assert tv(first_tokens(decoder, (0, 2), 2, 3), plain_law(table, (0, 2), 2)) < EXACT
    if pair == "generic":  # a control: who believes the source has another law
        lossy = first_tokens(lambda rng: decoder(rng, acceptance.lenient(0.1)), (0, 2), 2, 3)
        assert tv(lossy, plain_law(table, (0, 2), 2)) > WRONG
    made = decoder(rules.TOKEN.rng)
    texts = [request((0, place), 6, GREEDY, key=place) for place in range(3)]
    assert [row.output for row in generate(made, texts)] == [row.output for row in plain(made, texts)]


# ---- copies ------------------------------------------------------------------------------------------------------


def teaching(layers: int = 3) -> Teaching:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    text = torch.tensor([n * n % HF_VOCAB for n in range(400)])
    return Teaching(tiny(FAMILIES["llama"], num_hidden_layers=layers), Tokenizer(), text, lambda line: None)


@torch.no_grad()
def test_every_layer_can_be_the_last() -> None:
    model, tokens = tiny(FAMILIES["llama"], num_hidden_layers=3), torch.tensor([PROMPT])
    logits = tuning.logits_by_layer(model, tokens)
    for count, each in enumerate(logits, 1):
        fewer = tiny(FAMILIES["llama"], num_hidden_layers=count)
        fewer.load_state_dict(model.state_dict(), strict=False)
        assert torch.allclose(each, fewer(tokens).logits, atol=FLOAT)
    p = logits[-1].softmax(-1)
    losses = [-(p * each.log_softmax(-1)).sum(-1).mean() for each in logits]
    want = (losses[0] + 2 * losses[1] + 3 * losses[2]) / 6
    assert tuning.weighted_loss(p, logits) == pytest.approx(float(want), rel=1e-5)


def test_exits_are_taught_and_taught_once(tmp_path: Path) -> None:
    inputs = teaching()
    folder = tuning.exits(tmp_path, inputs, Lesson(30, 4, 16, 2e-3))
    made = type(inputs.model).from_pretrained(folder)
    tokens = inputs.text[None, :64]
    with torch.no_grad():
        p = inputs.model(tokens).logits.softmax(-1)
        before, after = (tuning.weighted_loss(p, tuning.logits_by_layer(each, tokens)) for each in (inputs.model, made))
    assert after < before
    stamp = (folder / "config.json").stat().st_mtime_ns
    tuning.exits(tmp_path, inputs, Lesson(9, 2, 16))  # it lies there: nothing is trained
    assert (folder / "config.json").stat().st_mtime_ns == stamp


@torch.no_grad()
def test_a_base_and_its_heads_speak_of_the_tokens_ahead() -> None:
    model, tokens = tiny(FAMILIES["llama"]), torch.tensor([PROMPT])
    logits = Blockwise(model, 2, "x")(tokens)
    assert logits.shape == (1, len(PROMPT), 3, HF_VOCAB)
    own = model(tokens).logits
    assert all(torch.allclose(logits[:, :, head], own, atol=FLOAT) for head in range(3))  # untrained: the base's own


def test_a_block_is_exact_for_the_base_that_was_tuned(tmp_path: Path) -> None:
    inputs = teaching()
    folder = tuning.blockwise(tmp_path, inputs, Lesson(4, 2, 16, 1e-3), 3)
    model = type(inputs.model).from_pretrained(folder / tuning.TARGET)
    target, heads = CausalScorer(model), ParallelHeads.load(folder / tuning.HEADS)
    assert heads.sizes.heads == 3
    decoder = alone(target, drafter=HeadsDrafter(target, heads), controller=Fixed(2))
    assert generate(decoder, [asked()])[0].output == plain(decoder, [asked()])[0].output


def some_heads() -> ParallelHeads:
    torch.manual_seed(1)
    heads = ParallelHeads(Sizes(3, 32, 16))
    torch.nn.init.normal_(heads.down, std=0.5)
    return heads.eval()


def test_heads_read_the_state_behind_the_last_token_that_stands() -> None:
    """While rows come, go and accept different numbers of tokens."""
    target, heads = target_of(), some_heads()

    def laws(text: list[int], drafted: list[int]) -> torch.Tensor:
        states = target.model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[:, -1]
        return target.model.lm_head(heads(states)[0, : len(drafted)]).softmax(-1)

    drafter = Checked(HeadsDrafter(target, heads), laws)
    rows = generate(Decoder(target, drafter, controller=Cycle((3, 2, 0)), batch_size=2), ragged(SAMPLE))
    assert drafter.positions > 20
    assert 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK], ids=lambda rule: rule.name)
def test_the_law_with_heads_is_the_target_s(rule: rules.Rule) -> None:
    target = CausalScorer(tiny(FAMILIES["llama"], vocab_size=3, num_hidden_layers=3, initializer_range=0.4))
    decoder = Decoder(target, HeadsDrafter(target, some_heads()), rule.verify, Cycle((2,)))
    assert law_error(decoder, 4) < FLOAT
    if rule is rules.TOKEN:
        assert law_error(replace(decoder, drafter=Altered(decoder.drafter, flat)), 4) > WRONG


SETTINGS = TrainingSettings(heads=2, inner=24, steps=12, rows=4, length=24, rate=0.01, save_every=5)
TEXT = np.tile(np.arange(11), 60)  # every token foretells all that follow


def test_heads_learn_what_the_target_says_later(tmp_path: Path) -> None:
    trainer = HeadTrainer(tiny(FAMILIES["llama"]), "tiny", TEXT, tmp_path, replace(SETTINGS, steps=60, rate=0.03))
    before = trainer.report()["alpha"]
    trainer.train()
    assert all(new > old + 0.1 for old, new in zip(before, trainer.report()["alpha"], strict=True))
    loaded = ParallelHeads.load(tmp_path)
    assert loaded.sizes.target == "tiny" and torch.equal(loaded.down, trainer.heads.down)


def test_an_interrupted_training_of_heads_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    whole = HeadTrainer(model, "tiny", TEXT, tmp_path / "whole", SETTINGS).train()

    def interrupt(progress: Progress, loss: float) -> None:
        if progress.steps == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HeadTrainer(model, "tiny", TEXT, tmp_path / "parts", SETTINGS).train(interrupt)
    assert not (tmp_path / "parts" / FILE).exists()
    parts = HeadTrainer(model, "tiny", TEXT, tmp_path / "parts", SETTINGS).train()
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), parts.parameters(), strict=True))


@torch.no_grad()
def test_the_first_heads_cost_no_others() -> None:
    torch.manual_seed(0)
    heads = ParallelHeads(Sizes(4, 8, 6))
    torch.nn.init.normal_(heads.down)
    hidden = torch.randn(2, 8)
    assert torch.allclose(heads(hidden, 2), heads(hidden)[:, :2], atol=FLOAT)


# ---- how far a model of one's own is from the target --------------------------------------------------------------


class Measured:
    """What an audit needs of a subject."""

    def __init__(self, target: CausalScorer) -> None:
        self.engine = type("Engine", (), {"decoder": alone(target)})()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_audit_reads_the_texts_with_the_target(temperature: float) -> None:
    for seed, same in ((0, True), (1, False)):
        laws, writer = Laws(), target_of(2, seed)
        (row,) = {id(r.rows[0]): r.rows[0] for r in laws.play(alone(writer), [asked(8, temperature)])}.values()
        found = laws.distances(Measured(target_of(2)), temperature)  # type: ignore[arg-type]
        assert len(found) == 8
        p, q = (each.alone(row.tokens)[0, len(PROMPT) - 1 : -1].softmax(-1) for each in (target_of(2), writer))
        far = (p - q).abs().sum(-1) / 2 if temperature else (p.argmax(-1) != q.argmax(-1)).float()
        assert torch.allclose(found, far, atol=FLOAT)
        assert (float(found.max()) < FLOAT) == same


# ---- a task whose answers resemble their sources ------------------------------------------------------------------

SOURCES = [
    "class A:\n    def first(self, items):\n        return self.wrapped.first(items, default=None)\n",
    "def second(items, default):\n    for item in items:\n        return item\n    return default\n",
    "def broken(:\n",
    "@decorated\ndef third(items, default):\n    for item in items:\n        return item\n    return default\n",
]


def test_functions_are_whole_short_and_taken_once() -> None:
    found = list(edits.functions([*SOURCES, SOURCES[1]]))
    assert [text.split("(")[0] for text in found] == ["def first", "def second"]
    assert all(ast.parse(text) for text in found)


def test_slips_are_small_and_drawn_by_the_seed() -> None:
    text = SOURCES[1].strip()
    made = [edits.broken(text, random.Random(seed)) for seed in range(40)]
    assert made == [edits.broken(text, random.Random(seed)) for seed in range(40)]
    assert len(set(made)) > 30 and sum(each != text for each in made) > 35
    assert all(abs(len(each) - len(text)) < 40 for each in made)


class Letters:
    """A tokenizer of one token per letter."""

    eos_token_id = 0

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def test_only_answers_teach() -> None:
    known = [(edits.prompt(f"source {n}"), f"answer {n * 37}") for n in range(9)]
    tokens, labels = Editing.of(known, Letters()).batch(Lesson(rows=3), 5)
    assert tokens.shape == labels.shape and len(tokens) == 3
    for ids, taught in zip(tokens.tolist(), labels.tolist(), strict=True):
        said = [token for token in taught if token != -100]
        assert said[-1] == 0 and "".join(map(chr, said[:-1])).startswith("answer ")
        first = taught.index(said[0])
        assert ids[first : first + len(said)] == said
        assert "".join(map(chr, ids[:first])) in {asked for asked, _ in known}


def test_the_source_is_found_in_its_prompt() -> None:
    tokenizer = load_tokenizer(EMBEDDED / "target")

    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    texts = list(edits.functions(SOURCES))
    source = edits.source_of([edits.prompt(text) for text in texts], encode)
    for text in texts:
        assert source(encode(edits.prompt(text))) == encode(text)


# ---- the plane -----------------------------------------------------------------------------------------------------

BRIEF = Lessons(
    TrainingSettings(5, 16, 2, rows=2, length=16, rate=1e-3),
    *(Lesson(2, 2, 16), Lesson(2, 2, 16)),
    {"target": Lesson(2, 2), "draft": Lesson(2, 2)},
)
SMALL = lab.Scale(40, 8, 4, recipes={}, plane=(2, 1), plane_length=8, calibration=6, lessons=BRIEF, quick=True)


@pytest.mark.slow  # trains five copies for two steps each, and measures all methods
def test_the_plane_has_all_methods_and_exact_ones_at_distance_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "texts", lambda most=0: [SOURCES[0], SOURCES[1] * 20])
    monkeypatch.setattr(lab, "LENGTHS", {EDITING: 8})
    monkeypatch.setattr(plane, "TEMPERATURES", (0,))
    sheet = plane.baselines(lab.Lab(lab.Inputs(standins=tmp_path), SMALL, say=lambda line: None))
    heads = [column.name for column in sheet.columns]
    rows = [dict(zip(heads, row, strict=True)) for row in sheet.rows]
    assert {row["method"] for row in rows} >= {methods.EXACT, *plane.METHODS_TRAINED}
    exact = [
        row for row in rows if row["method"] in (methods.EXACT, methods.SOURCES) or "frozen base" in str(row["setting"])
    ]
    assert len(exact) == 2 + 2 + len(methods.PIECES) + len(methods.BLOCKS)
    assert all(row["total variation per token"] == 0 and row["greedy texts equal"] == "2 of 2" for row in exact)
    assert any("layers" in str(row["setting"]) for row in rows if row["method"] == methods.EXITS)
