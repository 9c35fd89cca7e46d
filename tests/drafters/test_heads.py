"""Parallel heads: one call, independent laws, the target's law; taught, stopped, resumed, saved whole or not at all."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.protocols import Shape
from slipstream.core.round import Context, Round
from slipstream.decoding import rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, rounds
from slipstream.drafters import specification as drafting
from slipstream.drafters.heads import FILE, HeadsDrafter, ParallelHeads, Sizes
from slipstream.drafters.kinds import BuildContext
from slipstream.drafters.tree import TreeDrafter
from slipstream.execution.backends import Native
from slipstream.models.causal import CausalScorer
from slipstream.training.heads import STATE, HeadTrainer, TrainingSettings
from slipstream.training.trainer import Progress
from toys.drafts import Checked, same_texts
from toys.families import FAMILIES, tiny
from toys.texts import GREEDY, SAMPLE, Cycle, ragged, request

FLOAT = 1e-5  # the laws are softmaxes in float32
WIDTH = 32


def target_of(family: str = "llama", **changes: Any) -> CausalScorer:
    return CausalScorer(tiny(FAMILIES[family], **changes))


def some_heads(heads: int = 3, pending: bool = True, width: int = WIDTH, seed: int = 1) -> ParallelHeads:
    torch.manual_seed(seed)
    made = ParallelHeads(Sizes(heads, width, 16, pending))
    torch.nn.init.normal_(made.down, std=0.5)
    return made.eval()


# ---- what the heads see -------------------------------------------------------------------------------------------


def checked(drafter: HeadsDrafter) -> Checked:
    """The drafter, its laws compared with those made from a fresh forward of the whole text."""
    model, heads = drafter.scorer.model, drafter.heads

    def laws(text: list[int], drafted: list[int]) -> Tensor:
        states = model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[:, -1]
        pending = model.get_input_embeddings()(torch.tensor(text[-1:]))
        return model.lm_head(heads(states, pending)[0, : len(drafted)]).softmax(-1)

    return Checked(drafter, laws)


@pytest.mark.parametrize("pending", [True, False])
def test_the_state_is_the_one_behind_the_last_token_that_stands(pending: bool) -> None:
    """While rows come, go and accept different numbers of tokens."""
    target = target_of()
    drafter = checked(HeadsDrafter(target, some_heads(pending=pending)))
    rows = generate(Decoder(target, drafter, controller=Cycle((3, 2, 0)), batch_size=2), ragged(SAMPLE))
    assert drafter.positions > 20
    assert 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)


def test_in_a_fixed_shape_too() -> None:
    target = target_of()
    target.fix_shape(Shape(3, 4, 64))
    drafter = checked(HeadsDrafter(target, some_heads()))
    generate(Decoder(target, drafter, controller=Fixed(3), batch_size=3), ragged(SAMPLE))
    assert drafter.positions > 20


def test_after_a_tree_the_state_is_that_of_the_accepted_path() -> None:
    """Another drafter may have drafted the round that is observed."""
    target = target_of()
    drafter = checked(HeadsDrafter(target, some_heads()))
    tree = TreeDrafter(CausalScorer(target.model), (2, 2))

    class Turns:
        """A tree and the heads in turn."""

        numbers = itertools.count()

        def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
            return (drafter if next(self.numbers) % 2 else tree).propose(context, gammas)

        def observe(self, round: Round) -> None:
            drafter.observe(round)
            tree.observe(round)

    rows = generate(Decoder(target, Turns(), rules.TOKEN.verify, Fixed(3)), ragged(SAMPLE, 24))
    assert drafter.positions > 10
    assert sum(row.stats.accepted for row in rows) > 5


def test_untrained_heads_repeat_the_target() -> None:
    heads = ParallelHeads(Sizes(2, WIDTH, 8))
    states = torch.randn(5, WIDTH)
    assert torch.equal(heads(states, torch.randn(5, WIDTH)), states[:, None].expand(5, 2, WIDTH))


# ---- the contract of a drafter: see also `test_self_drafts` ---------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "opt", "falcon_new"])
def test_greedy_texts_are_the_target_s(family: str) -> None:
    target = target_of(family)
    decoder = Decoder(target, HeadsDrafter(target, some_heads()), controller=Fixed(5), batch_size=2)
    ours = same_texts(decoder, ragged())
    assert max(len(row.stats.drafted_by_position) for row in ours) == 3  # a token per head
    again = generate(decoder, ragged())  # the drafter serves the next call, and knows its rows are new
    assert [row.stats.drafted for row in again] == [row.stats.drafted for row in ours]


def test_the_first_round_drafts_but_for_a_prompt_of_one_token() -> None:
    """Before a text's first token there is no state."""
    target = target_of()
    decoder = Decoder(target, HeadsDrafter(target, some_heads()), controller=Fixed(3))
    lengths = [round.draft.lengths for round in rounds(decoder, [request([5], 8), request([5, 6], 8)])]
    assert lengths[0] == (0, 3) and lengths[1] == (3, 3)


def test_heads_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden size 8, but"):
        HeadsDrafter(target_of(), some_heads(width=8))


def test_a_compiled_target_shows_its_states() -> None:
    """The states that its graphs give are those of eager passes, and so are the texts."""
    eager, model = target_of(), target_of().model
    fast = CausalScorer(model, execution=Native(model, "toy"))
    heads = some_heads()
    for settings in (GREEDY, SAMPLE):
        some = ragged(settings)
        texts = [
            [row.tokens for row in generate(Decoder(each, HeadsDrafter(each, heads), controller=Fixed(3)), some)]
            for each in (eager, fast)
        ]
        assert texts[0] == texts[1]


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pending", [True, False])
def test_heads_are_saved_and_loaded(tmp_path: Path, pending: bool) -> None:
    heads = some_heads(pending=pending)
    heads.save(tmp_path)
    loaded = ParallelHeads.load(tmp_path)
    assert loaded.sizes == heads.sizes
    both = zip(heads.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(ours, reloaded) for ours, reloaded in both)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_they_are_reached_by_name(tmp_path: Path) -> None:
    some_heads(2).save(tmp_path)
    drafter = drafting.drafter(f"heads:{tmp_path}", BuildContext(target_of()))
    assert isinstance(drafter, HeadsDrafter) and drafter.heads.sizes.heads == 2
    with pytest.raises(ValueError, match="there is no"):
        drafting.drafter(f"heads:{tmp_path}/nowhere", BuildContext(target_of()))


def test_a_missing_a_damaged_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no"):
        ParallelHeads.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"\x10\0\0\0\0\0\0\0nothing of use")
    with pytest.raises(ValueError, match="damaged"):
        ParallelHeads.load(tmp_path)
    save_file({"up": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(ValueError, match="unknown format, this release reads slipstream heads version 2: train heads"):
        ParallelHeads.load(tmp_path)


# ---- training -----------------------------------------------------------------------------------------------------

TEXT = np.tile(np.arange(11), 60)  # every token foretells all that follow
SETTINGS = TrainingSettings(heads=2, inner=24, steps=12, rows=4, length=24, rate=0.01, save_every=5)


def test_heads_learn_what_the_target_says_later(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    before = HeadTrainer(model, "tiny", TEXT, tmp_path / "a", SETTINGS).report()["alpha"]
    trainer = HeadTrainer(model, "tiny", TEXT, tmp_path / "a", replace(SETTINGS, steps=60, rate=0.03))
    trainer.train()
    after = trainer.report()["alpha"]
    assert all(new > old + 0.15 for old, new in zip(before, after, strict=True))
    assert ParallelHeads.load(tmp_path / "a").sizes.target == "tiny"


def test_the_target_is_frozen(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    before = [weight.clone() for weight in model.parameters()]
    HeadTrainer(model, "tiny", TEXT, tmp_path, SETTINGS).train()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_an_interrupted_training_ends_as_if_it_had_not_been(tmp_path: Path, stop: int) -> None:
    model = tiny(FAMILIES["llama"])
    whole = HeadTrainer(model, "tiny", TEXT, tmp_path / "whole", SETTINGS).train()

    def interrupt(progress: Progress, loss: float) -> None:
        if progress.steps == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HeadTrainer(model, "tiny", TEXT, tmp_path / "parts", SETTINGS).train(interrupt)
    assert not (tmp_path / "parts" / FILE).exists()
    resumed = HeadTrainer(model, "tiny", TEXT, tmp_path / "parts", SETTINGS)
    assert resumed.step == stop
    steps: list[int] = []
    parts = resumed.train(lambda progress, loss: steps.append(progress.steps))
    assert steps == list(range(stop + 1, SETTINGS.steps + 1))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), parts.parameters(), strict=True))


def test_another_training_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    HeadTrainer(model, "tiny", TEXT, tmp_path, SETTINGS).train()
    assert (tmp_path / STATE).exists()
    with pytest.raises(ValueError, match="another inner"):
        HeadTrainer(model, "tiny", TEXT, tmp_path, replace(SETTINGS, inner=8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"heads": 0}, "heads=0"), ({"steps": 0}, "steps=0"), ({"length": 3}, "too short"), ({"rate": 0.0}, "rate=0")],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize("weight", ["model.norm.weight", "lm_head.weight"])
def test_a_target_that_is_not_finite_teaches_nothing_and_leaves_no_file(tmp_path: Path, weight: str) -> None:
    model = tiny(FAMILIES["llama"])
    model.get_parameter(weight).data[3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"^tiny gives non-finite logits: the weights are damaged"):
        HeadTrainer(model, "tiny", TEXT, tmp_path / "heads", SETTINGS).train()
    assert not (tmp_path / "heads").exists()
    with pytest.raises(FloatingPointError, match="tiny gives non-finite logits"):
        HeadTrainer(model, "tiny", TEXT, tmp_path / "heads", SETTINGS).report()


def test_heads_that_diverge_are_not_saved(tmp_path: Path) -> None:
    trainer = HeadTrainer(tiny(FAMILIES["llama"]), "tiny", TEXT, tmp_path / "heads", SETTINGS)

    def disturb(progress: Progress, loss: float) -> None:
        if progress.steps == 2:
            trainer.heads.down.data.fill_(torch.inf)

    with pytest.raises(FloatingPointError, match=r"^the heads diverged after 2 steps: give a rate below 0.01, and "):
        trainer.train(disturb)
    assert not (tmp_path / "heads").exists()


def test_windows_beyond_the_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^length=129 is too long: tiny holds 128 tokens, so give 128 or less\.$"):
        HeadTrainer(tiny(FAMILIES["llama"]), "tiny", TEXT, tmp_path, replace(SETTINGS, length=129))
    assert HeadTrainer(tiny(FAMILIES["llama"]), "tiny", TEXT, tmp_path, replace(SETTINGS, length=128)).step == 0


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few"):
        HeadTrainer(tiny(FAMILIES["llama"]), "tiny", TEXT[:60], tmp_path, SETTINGS)
