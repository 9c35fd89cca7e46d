"""Distillation: objectives, lessons, sizes, what a draft gains, the same weights whatever interrupts, folders kept."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.decoding.decoder import Decoder
from slipstream.engine.engine import Engine
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_scorer
from slipstream.theory import distance
from slipstream.training.distill import (
    Distiller,
    DistillSettings,
    DraftCosts,
    Measurement,
    WhilePaying,
    stopped_growing,
)
from slipstream.training.lessons import OBJECTIVES, Lessons, objective_of, total_variation, windows
from slipstream.training.material import Amount, Material, WrittenTexts, divide, gather, openings
from slipstream.training.students import (
    REPORT,
    Distilled,
    Size,
    check_draft_folder,
    new_student,
    parameters,
    save_draft,
    size_for,
    student_config,
)
from slipstream.training.trainer import Progress, Steps
from tongues import tongue
from toys.families import FAMILIES, tiny

COSTS = DraftCosts(0.1, (1.0, 1.1, 1.2))


def laws(seed: int, count: int = 6) -> Tensor:
    """Logarithms of random laws over `count` tokens."""
    return torch.randn(3, count, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_smallest_where_the_laws_agree(name: str) -> None:
    log_p, used = laws(0), torch.tensor(0.5)
    same, other = (objective_of(name)(log_p, log_q, used) for log_q in (log_p, laws(1)))
    assert same.abs().max() < 1e-5 and other.min() > 1e-3


def test_total_variation_is_the_paper_s_also_where_tokens_are_not_listed() -> None:
    log_p, log_q = laws(0), laws(1)
    whole = [distance(p.tolist(), q.tolist()) for p, q in zip(log_p.exp(), log_q.exp(), strict=True)]
    assert total_variation(log_p, log_q, torch.tensor(0.0)).tolist() == pytest.approx(whole, abs=1e-4)
    some = total_variation(log_p[:, :4], log_q[:, :4], torch.tensor(0.0)).tolist()
    assert all(less <= more + 1e-6 for less, more in zip(some, whole, strict=True))  # the others count as one


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="objective 'x' is not known: use kl"):
        objective_of("x")
    with pytest.raises(ValueError, match="written=2 is not possible"):
        DistillSettings(written=2)


def test_a_target_is_asked_once_about_every_row() -> None:
    model, asked = tiny(FAMILIES["llama"]), list[int]()

    def ask(tokens: Tensor) -> Tensor:
        asked.append(len(tokens))
        with torch.inference_mode():
            return model(tokens).logits

    lessons = Lessons([[5, 6, 7, 8], [9, 3], [4]], 4, model.config.vocab_size, ask)
    assert len(lessons) == 2 and lessons.tokens == 6  # of one token nothing can be learnt
    batch = lessons.pick([0, 1, 0], torch.device("cpu"))
    lessons.pick([1, 0], torch.device("cpu"))
    assert sum(asked) == 2
    assert batch.real.tolist() == [[True] * 3, [True, False, False], [True] * 3]
    want = model(batch.tokens[:1]).logits[0, :-1].log_softmax(-1).gather(-1, batch.ids[0])
    torch.testing.assert_close(batch.log_p[0], want, atol=2e-3, rtol=2e-3)  # kept in half precision


def test_without_laws_the_texts_own_tokens_are_learnt() -> None:
    batch = Lessons([[5, 6, 7]], 3, 10, None).pick([0], torch.device("cpu"))
    assert batch.ids.tolist() == [[[6], [7]]] and not batch.log_p.any()


def test_windows_do_not_overlap() -> None:
    found = windows(np.arange(50), 8, 4)
    assert len(found) == 4 and len({token for window in found for token in window}) == 32


SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT2": {"bos_token_id": 1, "eos_token_id": 2},
    "OPT": {"word_embed_proj_dim": 64, "ffn_dim": 128},
    "Qwen3": {"head_dim": 16},
    "Mamba": {"num_attention_heads": None},
    "Mamba2": {"num_attention_heads": None, "num_heads": 16, "head_dim": 8, "n_groups": 1},
    "Lfm2": {"layer_types": [*["conv"] * 5, "full_attention"]},
    "Gemma4Text": {"head_dim": 16, "vocab_size_per_layer_input": 100},
}
CONFIGS = {kind: getattr(transformers, f"{kind}Config")(**{**SIZES, **own}) for kind, own in KINDS.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_student_of_any_family_is_smaller_and_runs_as_saved(family: str, tmp_path: Path) -> None:
    size = size_for(CONFIGS[family], 0.2)
    smaller = student_config(CONFIGS[family], size)
    assert type(smaller) is type(CONFIGS[family]) and size.layers == 2
    assert 0.05 < parameters(smaller) / parameters(CONFIGS[family]) < 0.5
    new_student(AutoModelForCausalLM.from_config(CONFIGS[family]), size).save_pretrained(tmp_path)
    assert load_scorer(tmp_path).vocab == 100


def test_sizes_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        size_for(CONFIGS["Llama"], 1.5)
    with pytest.raises(ValueError, match="with 4 heads: take a multiple of 8"):
        new_student(AutoModelForCausalLM.from_config(CONFIGS["GPT2"]), Size(1, 30))


def measured(*gains: float) -> list[Measurement]:
    """Measurements after 10, 20, ... steps."""
    return [Measurement(10 * place, (0.5,), ((0.5,),), (1,), (gain,)) for place, gain in enumerate(gains, 1)]


def test_a_training_ends_when_the_speed_up_has_stopped_growing() -> None:
    assert stopped_growing(measured(1.0, 1.1, 1.2, 1.3), 2) is None
    assert stopped_growing(measured(1.0, 1.2, 1.1, 1.2, 1.1), 2) == 40
    found = measured(1.0, 1.2, 1.1, 1.2)
    budget = WhilePaying(Steps(1000, 10), 2, found)
    assert budget.used(Progress(40)) == pytest.approx(0.6)  # what is left is the fall of the learning rate
    assert WhilePaying(Steps(1000, 10), 3, found).used(Progress(40)) == pytest.approx(0.04)


def test_gains_are_those_of_theorem_3_8() -> None:
    gamma, gain = COSTS.gain([0.8, 0.64])
    assert (gamma, gain) == (2, pytest.approx((1 + 0.8 + 0.64) / (1.2 + 0.2)))
    assert COSTS.gain([0.0, 0.0]) == (0, 1.0)


def test_costs_are_kept_for_the_draft_that_they_were_measured_with(tmp_path: Path) -> None:
    file = tmp_path / "work" / "costs.json"
    assert DraftCosts.read(file, "small") is None
    COSTS.save(file, "small")
    assert DraftCosts.read(file, "small") == COSTS
    with pytest.raises(ValueError, match=r"of another draft \(small\): give another --work"):
        DraftCosts.read(file, "large")


TEXT = np.tile([5, 3, 9, 3, 7, 7, 1, 2, 8, 40, 3, 11, 9], 60)


def engine() -> Engine:
    """A tiny target without a tokenizer."""
    return Engine(Decoder(CausalScorer(tiny(FAMILIES["llama"])), batch_size=8))


def distiller(folder: Path, steps: int = 6, **settings: Any) -> Distiller:
    """A training of a student of one layer."""
    one = engine()
    material = gather(one, divide([TEXT]), Amount(16, 320, 200), folder)
    student = new_student(one.decoder.target.model, Size(1, 32))  # type: ignore[attr-defined]
    few = DistillSettings(steps, 4, 16, **{"measure_every": 3, "gamma": 2, "new_tokens": 6, **settings})
    return Distiller(one, student, material, COSTS, few, folder)


def weights(one: Distiller) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in one.student.parameters()])


def test_an_interruption_changes_neither_weights_nor_measurements(tmp_path: Path) -> None:
    whole = distiller(tmp_path / "whole")
    whole.train()

    def stop(progress: Progress, loss: float) -> None:
        if progress.steps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distiller(tmp_path / "parts").train(stop)
    resumed = distiller(tmp_path / "parts")
    assert resumed.progress.steps == 4
    resumed.train()
    assert torch.equal(weights(resumed), weights(whole)) and resumed.found == whole.found
    assert [one.steps for one in whole.found] == [0, 3, 6]
    with pytest.raises(ValueError, match="another rate"):
        distiller(tmp_path / "parts", rate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [*OBJECTIVES, "sequence"])
def test_a_student_comes_to_say_what_its_target_says(objective: str, tmp_path: Path) -> None:
    one = distiller(tmp_path, 120, objective=objective, rate=0.01, measure_every=120)
    last = one.train()
    (_, before), (_, after) = one.found[0].alpha, last.alpha  # at temperature 1; greedily few prompts say little
    assert after > before + 0.1


def test_what_the_target_wrote_is_kept_and_belongs_to_it(tmp_path: Path) -> None:
    file, prompts = tmp_path / "written", openings([TEXT], 20)

    def until(count: int) -> WrittenTexts:
        texts = WrittenTexts(file, {"target": "toy"})
        texts.write(engine(), prompts, lambda found: found.tokens < count, 24, rows=2)
        return texts

    some, all_of_them = until(60).texts, until(150).texts
    assert all_of_them[: len(some)] == some and len(all_of_them) > len(some)
    file.unlink()
    assert until(150).texts == all_of_them  # in one go
    with pytest.raises(ValueError, match="texts of another target"):
        WrittenTexts(file, {"target": "other"})


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens of text are too few"):
        divide([range(10)])
    with pytest.raises(ValueError, match="length=129 is beyond the 128 tokens of"):
        gather(engine(), divide([TEXT]), Amount(129, 320, 200), Path("nowhere"))
    nothing = Lessons([], 8, 10, None)
    with pytest.raises(ValueError, match="no text to distil on"):
        Distiller(engine(), tiny(FAMILIES["llama"]), Material(nothing, nothing, ()), COSTS, DistillSettings(), Path())


def about() -> Distilled:
    facts = ("toy", ("texts",), "1 layer", "trained from scratch", 10, 6, 60, 1.0, 200, 16)
    last = Measurement(6, (0.5, 0.4), ((0.5, 0.2), (0.4, 0.1)), (1, 0), (1.2, 1.0))
    return Distilled(*facts, COSTS, DistillSettings(), (last,))


def test_a_draft_is_a_folder_of_hugging_face_with_a_card(tmp_path: Path) -> None:
    model, out = tiny(FAMILIES["llama"]), tmp_path / "deep" / "draft"
    for _ in range(2):  # a draft of ours may be replaced
        save_draft(model, tongue("bytes"), about(), out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert "temperature | alpha" in (out / "README.md").read_text()
    report = json.loads((out / REPORT).read_text())
    assert report["alpha"] == {"0.0": 0.5, "1.0": 0.4} and math.isclose(report["speed_up"]["0.0"], 1.2)
    assert [path.name for path in out.parent.iterdir()] == ["draft"]


def test_folders_of_others_are_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    check_draft_folder(folder)  # empty: nothing is lost
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds files and no draft"):
        save_draft(tiny(FAMILIES["llama"]), tongue("bytes"), about(), folder)
    with pytest.raises(ValueError, match="it is a file"):
        check_draft_folder(folder / "config.json")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
