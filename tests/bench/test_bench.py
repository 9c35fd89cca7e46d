"""The benchmark: every contender does and counts the same, nobody is favoured, nothing of the user's is changed."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import GenerationConfig, PreTrainedModel
from typer.testing import Result

from slipstream import Engine, load
from slipstream.bench import contenders, race, records
from slipstream.bench.contenders import Side
from slipstream.bench.records import (
    ASSISTED,
    ASSISTED_AUTO,
    COMPILED,
    GENERATE,
    LOOKUP,
    PLAIN,
    SPECULATIVE,
    BenchSettings,
    BenchTask,
    Contender,
    Output,
)
from slipstream.cli import bench as command_room
from slipstream.core.draws import Key, draw
from slipstream.core.law import Law
from slipstream.core.model_options import ModelOptions
from slipstream.core.stats import Stats
from slipstream.decoding import acceptance
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.rules import Rule
from slipstream.drafters.model import ModelDrafter
from slipstream.engine import load as engine_room
from slipstream.execution.passes import Mode
from slipstream.kernels.packing import PackedLinear
from slipstream.measure import environment as machine
from slipstream.measure import timing
from slipstream.models.loading.load import load_scorer
from terminal import run
from toys import FAMILIES, HF_VOCAB, PAIRS, SEQ2SEQ, Clock, scorer, tiny

PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 8], [3, 3], [60, 2, 11, 30]]
SMALL = BenchSettings(gammas=(2, 3), batches=(1, 3), temperatures=(0.0, 1.0), max_new_tokens=6, repetitions=2)
ONE_GAMMA = replace(SMALL, gammas=(3,))


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever garbage would be collected, which takes most of the time of runs as short as these."""
    calls: list[int] = []
    monkeypatch.setattr(timing.gc, "collect", lambda: calls.append(1))
    return calls


def pair(draft_seed: int = 1, **changes: Any) -> Engine:
    """An engine of two tiny random Llamas; with `draft_seed` 0 the draft is a copy of the target."""
    return load(tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=draft_seed, **changes))


def models(engine: Engine) -> tuple[PreTrainedModel, PreTrainedModel]:
    target, draft = machine.scorers(engine.decoder)
    return target.model, draft.model  # type: ignore[attr-defined]


def task(**changes: Any) -> BenchTask:
    usual = BenchTask(tuple(map(tuple, PROMPTS)), 1, 0.0, 6, frozenset(), 0)
    return replace(usual, **changes)


# ---- real contenders --------------------------------------------------------------------------------------------


def test_rows_are_complete() -> None:
    report = race.measure(pair(), PROMPTS, replace(SMALL, max_new_tokens=3))
    single = [(PLAIN, None), (SPECULATIVE, 2), (SPECULATIVE, 3), (GENERATE, None), (ASSISTED, 2), (ASSISTED, 3)]
    names = {1: [*single, (ASSISTED_AUTO, None), (LOOKUP, 2), (LOOKUP, 3)], 3: single[:4]}
    expected = [(*name, batch, heat) for batch in (1, 3) for heat in (0.0, 1.0) for name in names[batch]]
    assert [(row.contender, row.gamma, row.batch, row.temperature) for row in report.rows] == expected
    assert not report.interrupted
    for row in report.rows:
        assert row.tokens == len(PROMPTS) * 3 * 2
        assert len(row.speeds) == 2
        assert row.tokens_per_second["min"] <= row.tokens_per_second["median"] <= row.tokens_per_second["max"]
        assert row.ratio_to_plain and row.ratio_to_transformers
        assert (row.matches_plain is None) == (row.temperature > 0) == (row.matches_transformers is None)
        assert (row.milliseconds is None) == (not row.contender.startswith("slipstream"))
        assert (row.alpha is None) == (row.contender != SPECULATIVE)


def test_figures_inside_a_round_leave_the_prefill_out() -> None:
    seconds = {"prefill": 1.0, "draft": 1.0, "target": 2.0, "accept": 0.5, "rest": 0.1}
    run = Output([[1] * 12], Stats(emitted=12, target_calls=4, seconds=seconds), calls=4, seconds=5.0)
    figures = race.inside([run, run])
    assert figures["milliseconds"] == {"draft": 250, "target": 500, "accept": 125, "rest": 125, "round": 1000}
    assert figures["overhead"] == pytest.approx(1 / 3)
    assert figures["mean_acceptance_length"] == 3


@pytest.mark.parametrize("batch", [1, 3])
def test_all_contenders_emit_the_same_greedy_tokens(batch: int) -> None:
    engine, rows = pair(), set[int]()
    able = [each for each in contenders.line_up(engine, ONE_GAMMA) if batch <= each.largest_batch]
    expected = race.timed(able[0], task()).tokens
    models(engine)[0].register_forward_hook(lambda *args: rows.add(args[-1].logits.shape[0]))
    assert len(able) == (6 if batch == 1 else 3)
    for each in able:
        assert race.timed(each, task(batch=batch)).tokens == expected
        assert max(rows) == batch
        rows.clear()


def test_generate_runs_a_decoder_that_is_deeper_than_its_encoder() -> None:
    """The cache that transformers itself makes has the encoder's number of layers."""
    engine = load(tiny(SEQ2SEQ["t5"], num_layers=1, num_decoder_layers=3))
    settings = replace(SMALL, batches=(1, 3), temperatures=(0.0,))
    rows = race.measure(engine, PROMPTS, settings).rows
    assert [(row.contender, row.matches_transformers) for row in rows] == [(PLAIN, 4), (GENERATE, 4)] * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_all_contenders_end_at_eos(batch: int) -> None:
    engine = pair()
    able = [each for each in contenders.line_up(engine, ONE_GAMMA) if batch <= each.largest_batch]
    whole = race.timed(able[0], task(batch=batch)).tokens
    eos = frozenset({whole[0][2], whole[1][1]})
    cut = [race.until_eos(new, eos) for new in whole]
    assert len(cut[0]) <= 3 and len(cut[1]) <= 2
    calls: list[int] = []
    models(engine)[0].register_forward_hook(lambda *_: calls.append(1))
    for each in able:
        race.timed(each, task(batch=batch))
        all_calls, calls[:] = len(calls), []
        assert race.timed(each, task(batch=batch, eos=eos)).tokens == cut, each.name
        assert len(calls) < all_calls  # nobody goes on after EOS
        calls.clear()


def test_eos_is_ignored_by_all_or_by_none() -> None:
    engine = pair()
    settings = replace(SMALL, batches=(1,), temperatures=(0.0,), gammas=(2,), repetitions=1)
    greedy = race.timed(contenders.line_up(engine, settings)[0], task()).tokens
    engine.eos = frozenset({greedy[0][2]})
    models(engine)[0].generation_config.eos_token_id = greedy[0][2]
    ignoring = race.measure(engine, PROMPTS, settings).rows
    obeying = race.measure(engine, PROMPTS, replace(settings, ignore_eos=False)).rows
    assert {row.tokens for row in ignoring} == {len(PROMPTS) * 6}
    assert len({row.tokens for row in obeying}) == 1
    assert obeying[0].tokens < ignoring[0].tokens


def test_matches_count_prompts_that_are_the_same_in_every_repetition() -> None:
    engine, runs = pair(), []
    right = contenders.line_up(engine, SMALL)[0]

    def wrong(task: BenchTask) -> Output:
        tokens = right.run(task).tokens
        runs.append(1)
        for prompt in range(len(runs) - 1):  # one more in every run: the warm-up, then 1, then 2
            tokens[prompt][-1] = (tokens[prompt][-1] + 1) % HF_VOCAB
        return Output(tokens)

    settings = replace(SMALL, batches=(1,), temperatures=(0.0,))
    rows = race.measure(engine, PROMPTS, settings, [right, Contender("peer", wrong)]).rows
    assert [row.matches_plain for row in rows] == [4, 2]
    assert [row.matches_transformers for row in rows] == [None, None]


@pytest.mark.parametrize("place", [1, 4])  # ours, theirs
def test_both_draft_exactly_gamma_tokens(place: int) -> None:
    engine = pair(draft_seed=0)  # everything is accepted: 12 tokens in rounds of 1 + 3
    target, _ = models(engine)
    widths: list[int] = []
    target.register_forward_hook(lambda *args: widths.append(args[-1].logits.shape[1]))
    contender = contenders.line_up(engine, ONE_GAMMA)[place - (place > 1)]
    assert contender.gamma == 3
    race.timed(contender, task(prompts=((5, 9, 2),), max_new_tokens=12))
    assert [width for width in widths if width > 1] == [4, 4, 4]


def test_a_run_leaves_no_warm_draft_cache() -> None:
    engine = pair()
    fed: list[int] = []
    models(engine)[1].get_input_embeddings().register_forward_hook(lambda *args: fed.append(args[1][0].numel()))
    speculative = contenders.line_up(engine, SMALL)[1]
    race.timed(speculative, task())
    first, fed[:] = list(fed), []
    race.timed(speculative, task())
    assert fed == first != []


def test_settings_of_the_user_neither_leak_in_nor_change() -> None:
    engine = pair()
    seen: list[dict[str, Any]] = []
    own = [GenerationConfig(top_k=1, repetition_penalty=9.0, eos_token_id=list(range(HF_VOCAB))) for _ in range(2)]
    before = [config.to_dict() for config in own]
    for model, config in zip(models(engine), own, strict=True):
        model.generation_config = config
        model.register_forward_hook(lambda module, *_: seen.append(module.generation_config.to_dict()))
    transformers_contenders = [each for each in contenders.line_up(engine, SMALL) if each.name in (GENERATE, ASSISTED)]
    outputs = [race.timed(each, task(temperature=1.0)).tokens for each in transformers_contenders]
    assert len(outputs) == 3  # generate, and assisted with two gammas
    assert {(config["temperature"], config["top_k"], config["top_p"]) for config in seen[:3]} == {(1.0, 0, 1.0)}
    assert not any(config.get("repetition_penalty") == 9 or config.get("top_k") == 1 for config in seen)
    assert [model.generation_config for model in models(engine)] == own
    assert all(model.generation_config is config for model, config in zip(models(engine), own, strict=True))
    assert [config.to_dict() for config in own] == before


def test_settings_of_the_user_come_back_after_an_error() -> None:
    engine = pair()
    kept = [model.generation_config for model in models(engine)]
    models(engine)[0].register_forward_hook(lambda *_: 1 / 0)
    assisted = next(each for each in contenders.line_up(engine, SMALL) if each.name == ASSISTED)
    with pytest.raises(ZeroDivisionError):
        assisted.run(task())
    assert all(model.generation_config is config for model, config in zip(models(engine), kept, strict=True))


def test_sampling_changes_with_the_repetition_and_leaves_the_users_random_state() -> None:
    engine = pair()
    outputs: dict[str, list[list[list[int]]]] = {}

    def spied(contender: Contender) -> Contender:
        def run(task: BenchTask) -> Output:
            output = contender.run(task)
            outputs.setdefault(contender.name, []).append(output.tokens)
            return output

        return replace(contender, run=run)

    settings = replace(SMALL, gammas=(2,), batches=(4,), temperatures=(1.0,))
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    race.measure(engine, PROMPTS, settings, [spied(each) for each in contenders.line_up(engine, settings)])
    assert torch.equal(torch.rand(3), expected)
    assert set(outputs) == {PLAIN, SPECULATIVE, GENERATE}
    for tokens in outputs.values():
        assert tokens[1] != tokens[2]


def test_ours_decode_by_the_rule_of_the_engine() -> None:
    engine, drawn = pair(), list[str]()

    def rng(law: Law, key: Key) -> torch.Tensor:
        drawn.append(key.purpose)
        return draw(law, key)

    engine.rule = Rule("ours", acceptance.match, rng)
    plain, speculative, *_ = contenders.line_up(engine, SMALL)
    for each in (plain, speculative):
        drawn.clear()
        race.timed(each, task(temperature=1.0))
        assert "next" in drawn and "accept" not in drawn  # `match` tosses no coins
    assert machine.environment(engine)["rule"] == "ours"


@pytest.mark.slow
def test_other_drafts_rules_and_executions_are_rows_of_their_own() -> None:
    engine = pair()
    shared = models(engine)[0]
    others = [Side(load(shared, tiny(FAMILIES["llama"], seed=2)), "second"), Side(pair(), "first", COMPILED)]
    settings = replace(SMALL, gammas=(2,), batches=(1,), temperatures=(0.0,), rules=("token", "match"))
    rivals = contenders.line_up(engine, settings, others)
    kinds = [(each.name, each.draft, each.rule, each.execution) for each in rivals if each.execution]
    own = engine.decoder.drafter.scorer.name  # type: ignore[attr-defined]
    assert kinds == [
        (PLAIN, None, None, "eager"),
        (PLAIN, None, None, "compiled"),
        *[(SPECULATIVE, own, rule, "eager") for rule in ("token", "match")],
        *[(SPECULATIVE, "second", rule, "eager") for rule in ("token", "match")],
        *[(SPECULATIVE, "first", rule, "compiled") for rule in ("token", "match")],
    ]
    rows = race.measure(engine, PROMPTS, settings, rivals).rows
    assert [(row.contender, row.draft, row.rule, row.execution) for row in rows[2:4]] == kinds[2:4]
    assert {row.matches_plain for row in rows} == {4}
    names = list(map(command_room.row_names(rows), rows))
    assert len(set(names)) == len(names) and names[4] == "slipstream speculative 2 second token eager"
    assert command_room.row_names(rows[:1])(rows[0]) == PLAIN


def test_theirs_count_the_passes_of_the_target() -> None:
    engine = pair(draft_seed=0)
    rivals = {each.name: each for each in contenders.line_up(engine, ONE_GAMMA)}
    one = task(prompts=((5, 9, 2),), max_new_tokens=12)
    calls = {name: race.timed(each, one).calls for name, each in rivals.items()}
    assert calls[GENERATE] == calls[PLAIN] == 12
    assert calls[ASSISTED] == calls[SPECULATIVE] == 3  # everything is accepted: rounds of 1 + 3
    assert calls[ASSISTED_AUTO] == 1 or calls[ASSISTED_AUTO] < 12
    row = race.measure(engine, PROMPTS[:1], replace(SMALL, gammas=(3,), batches=(1,), max_new_tokens=12)).rows[3]
    assert row.contender == ASSISTED and row.mean_acceptance_length == 4
    assert row.milliseconds_per_call and row.milliseconds_per_call["min"] > 0


def test_who_can_take_part() -> None:
    def names(engine: Engine) -> list[str]:
        return [each.name for each in contenders.line_up(engine, ONE_GAMMA)]

    target, draft = PAIRS["generic"]
    tables = Engine(Decoder(scorer(target), ModelDrafter(scorer(draft))))
    assert names(pair()) == [PLAIN, SPECULATIVE, GENERATE, ASSISTED, ASSISTED_AUTO, LOOKUP]
    assert names(load(tiny(FAMILIES["llama"]))) == [PLAIN, GENERATE, LOOKUP]
    assert names(pair(vocab_size=HF_VOCAB + 3)) == [PLAIN, SPECULATIVE, GENERATE, LOOKUP]
    assert names(tables) == [PLAIN, SPECULATIVE]
    rows = race.measure(tables, [[0], [1, 2]], replace(SMALL, batches=(2,))).rows
    assert {row.ratio_to_transformers for row in rows} == {None}


# ---- the race, on a clock of our own ----------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(race, "perf_counter", clock)
    return clock


def runner(name: str, clock: Clock, durations: Iterator[float], gamma: int | None = None) -> Contender:
    """A contender that takes the given seconds, one after the other, the warm-up first."""

    def run(task: BenchTask) -> Output:
        clock.now += next(durations)
        return Output([[1] * task.max_new_tokens for _ in task.prompts])

    return Contender(name, run, gamma)


def raced(rivals: list[Contender], **changes: Any) -> tuple[records.BenchReport, list[str]]:
    """Measure at one batch and temperature -> the report, and the names in the order they ran."""
    order: list[str] = []
    settings = replace(SMALL, batches=(1,), temperatures=(0.0,), **changes)
    engine = Engine(Decoder(scorer(PAIRS["generic"][0])))
    prompts = [[0], [1], [2], [0, 1]]
    report = race.measure(engine, prompts, settings, rivals, lambda done, count, name: order.append(name))
    return report, order


def test_the_order_rotates(clock: Clock, collected: list[int]) -> None:
    _, order = raced([runner(name, clock, iter([1.0] * 9)) for name in "abc"], repetitions=4)
    assert order == [*"abc", *"abc", *"bca", *"cab", *"abc"]
    assert len(collected) == len(order) - 3  # without the warm-up: nobody pays for the garbage of another


def test_speed_is_tokens_by_seconds_without_the_warm_up(clock: Clock) -> None:
    (row,) = raced([runner(PLAIN, clock, iter([1000.0, 2.0, 4.0, 3.0]))], repetitions=3)[0].rows
    assert row.speeds == [12.0, 6.0, 8.0]  # 4 prompts of 6 tokens
    assert row.tokens_per_second == {"median": 8.0, "min": 6.0, "max": 12.0}
    assert row.tokens == 72


@pytest.mark.parametrize(
    ("seconds", "durations", "prompts", "tokens", "laps"),
    [
        (None, [1.0, 3.0, 3.0, 3.0], 4, 24, 3),
        (100.0, [1.0, 3.0, 3.0, 3.0], 4, 24, 3),
        (10.0, [1.0, 3.0, 3.0, 3.0], 1, 24, 2),  # 4 times the 8 tokens of the warm-up are left, and the third is late
        (10.0, [20.0, 60.0], 1, 8, 1),
    ],
)
def test_a_race_keeps_to_its_time(
    clock: Clock, seconds: float | None, durations: list[float], prompts: int, tokens: int, laps: int
) -> None:
    rivals = [runner(name, clock, iter(durations)) for name in (PLAIN, GENERATE)]
    report, _ = raced(rivals, repetitions=3, max_new_tokens=24, seconds=seconds)
    for row in report.rows:
        assert (row.prompts, len(row.speeds), row.tokens) == (prompts, laps, prompts * laps * tokens)


def test_ratios_are_paired(clock: Clock) -> None:
    # The machine changes its pace; ratios to plain are 2, 2 and 8, but of the medians the ratio is 4.
    slow = [(PLAIN, [9.0, 2.0, 8.0, 4.0]), (GENERATE, [9.0, 1.0, 2.0, 4.0]), ("fast", [9.0, 1.0, 4.0, 0.5])]
    rows = raced([runner(name, clock, iter(seconds)) for name, seconds in slow], repetitions=3)[0].rows
    fast = rows[2]
    assert fast.ratio_to_plain == {"median": 2.0, "min": 2.0, "max": 8.0}
    assert fast.ratio_to_transformers == {"median": 1.0, "min": 0.5, "max": 8.0}
    assert rows[0].ratio_to_plain == {"median": 1.0, "min": 1.0, "max": 1.0}
    medians = [row.tokens_per_second["median"] for row in rows]
    assert medians[2] / medians[0] == 4.0


def test_contenders_of_one_name_are_told_apart_by_gamma(clock: Clock) -> None:
    seconds = {2: 3.0, 3: 6.0}
    rows = raced([runner(SPECULATIVE, clock, iter([s] * 3), gamma) for gamma, s in seconds.items()])[0].rows
    assert {row.gamma: row.speeds for row in rows} == {2: [8.0, 8.0], 3: [4.0, 4.0]}


def interrupted_after(runs: int, contender: Contender) -> Contender:
    """The same contender, until somebody presses Ctrl-C during its next run."""
    left = [runs]

    def run(task: BenchTask) -> Output:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return contender.run(task)

    return replace(contender, run=run)


@pytest.mark.parametrize(("runs", "kept"), [(0, None), (1, None), (2, 1), (3, 2)])
def test_an_interrupted_run_keeps_whole_repetitions(clock: Clock, runs: int, kept: int | None) -> None:
    steady, stopped = (runner(name, clock, iter([1.0] * 9)) for name in (PLAIN, "stopped"))
    report, _ = raced([steady, interrupted_after(runs, stopped)], repetitions=3)
    assert report.interrupted
    assert [len(row.speeds) for row in report.rows] == ([] if kept is None else [kept, kept])


@pytest.mark.parametrize(
    "change", [lambda new: [new[0][:-1]] * 4, lambda new: [[*new[0], 1]] * 4, lambda new: [[]] * 4, lambda new: new[1:]]
)
def test_who_does_less_or_more_is_refused(change: Callable[[list[list[int]]], list[list[int]]]) -> None:
    cheat = Contender("cheat", lambda task: Output(change([[1] * task.max_new_tokens for _ in task.prompts])))
    with pytest.raises(ValueError, match="cheat returned"):
        race.timed(cheat, task())


def test_what_follows_eos_does_not_count() -> None:
    assert race.until_eos([4, 7, 5, 9, 5], {9, 5}) == [4, 7, 5]
    assert race.until_eos([4, 7], {9}) == [4, 7]
    padding = Contender("padding", lambda task: Output([[3, 2, 0, 0, 0, 0] for _ in task.prompts]))
    assert race.timed(padding, task(eos=frozenset({2}))).tokens == [[3, 2]] * 4
    with pytest.raises(ValueError, match="padding returned"):
        race.timed(replace(padding, run=lambda task: Output([[3, 0]] * 4)), task(eos=frozenset({2})))


# ---- settings and report ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("gammas", each) for each in ((), (3, 0))),
        *(("batches", each) for each in ((), (0,))),
        *(("temperatures", each) for each in ((), (0.5, -1.0))),
        *((name, 0) for name in ("max_new_tokens", "repetitions")),
    ],
)
def test_impossible_settings_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=name):
        BenchSettings(**{name: wrong})


def test_prompts_must_fill_the_batch_and_fit_the_models() -> None:
    engine = pair(max_position_embeddings=16)
    with pytest.raises(ValueError, match="a batch of 5 needs as many prompts, but there are 4"):
        race.measure(engine, PROMPTS, replace(SMALL, batches=(1, 5)))
    with pytest.raises(ValueError, match="up to 17, but LlamaForCausalLM holds 16"):
        race.measure(engine, PROMPTS, replace(SMALL, max_new_tokens=12))
    assert race.measure(engine, PROMPTS, replace(SMALL, max_new_tokens=11, repetitions=1, batches=(4,))).rows


@pytest.mark.slow
def test_json_round_trip_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/" + "somewhere/models"
    command = f"{folder}/bin/slipstream bench --target {folder}/target --draft={folder}/draft --quick"
    monkeypatch.setattr(machine.sys, "argv", command.split())
    engine = pair()
    engine.decoder.target.name = f"{folder}/target"  # type: ignore[misc]
    report = race.measure(engine, PROMPTS, replace(SMALL, batches=(1,), repetitions=1)).as_dict()
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text) == report
    assert "somewhere" not in text
    assert report["environment"]["command"] == "slipstream bench --target target --draft=draft --quick"
    assert report["settings"]["gammas"] == [2, 3]
    assert report["rows"][0]["contender"] == PLAIN
    assert report["interrupted"] is False


def test_environment() -> None:
    facts = machine.environment(pair())
    assert facts["threads"] == torch.get_num_threads() == 1
    assert facts["torch"] == torch.__version__
    assert facts["target"]["dtype"] == "torch.float32" and "weights" not in facts["target"]
    assert facts["device"] == "cpu"
    assert facts["cpu"] and facts["cores"] >= 1 and facts["date"].endswith("+00:00")
    assert machine.environment(Engine(Decoder(scorer(PAIRS["generic"][0])))).get("draft") is None


def test_packed_weights_count_as_parameters(tmp_path: Path) -> None:
    for family in (FAMILIES["llama"], SEQ2SEQ["t5"]):  # the second has tied embeddings
        model = tiny(family)
        model.save_pretrained(tmp_path / "model")
        packed = load_scorer(tmp_path / "model", mode=Mode(packed=True))
        assert machine.parameters(packed.model) == machine.parameters(model) == model.num_parameters()
        assert packed.model.num_parameters() < model.num_parameters()


def test_built_in_prompts_fill_the_batches() -> None:
    assert len(set(records.PROMPTS)) == len(records.PROMPTS) >= max(records.FULL.batches)
    assert len(records.PROMPTS) >= 4 >= max(records.QUICK.batches)
    for prompt in records.PROMPTS:
        compile(prompt + ("        pass\n" if prompt.startswith("class") else ""), "prompt", "exec")


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl.gz"
    lines = [json.dumps({"task_id": f"task/{i}", "tokens": [5, 9, 2 + i], "entry_point": "f"}) for i in range(8)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return str(path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(engine_room, "load", lambda *args, **kwargs: pair())

    return partial(run, "bench", COLUMNS="80", NO_COLOR="1")


SHORT = ["--max-new-tokens", "5", "--repetitions", "2"]


@pytest.mark.slow
def test_command_prints_every_row_in_80_columns(command: Callable[..., Result], prompts_file: str) -> None:
    result = command("--quick", "--prompts", prompts_file, *SHORT)
    assert result.exit_code == 0
    assert "batch 1, temperature 0: 4 prompts x 5 new tokens x 2 repetitions" in result.stdout
    assert "batch 1, temperature 1: 4 prompts" in result.stdout
    names = [PLAIN, f"{SPECULATIVE} 5", GENERATE, f"{ASSISTED} 5", ASSISTED_AUTO, f"{LOOKUP} 5"]
    lines = result.stdout.splitlines()
    assert [sum(line.startswith(name) for line in lines) for name in names] == [4] * 6  # two tables
    assert result.stdout.count("4, 4") == 6
    assert "…" not in result.stdout
    assert max(map(len, lines)) <= 80


def test_command_prints_json_and_nothing_else(command: Callable[..., Result], prompts_file: str) -> None:
    result = command("--quick", "--prompts", prompts_file, *SHORT, "--temperature", "0", "--json")
    report = json.loads(result.stdout)
    names = [PLAIN, SPECULATIVE, GENERATE, ASSISTED, ASSISTED_AUTO, LOOKUP]
    assert [row["contender"] for row in report["rows"]] == names
    assert report["settings"]["max_new_tokens"] == 5
    assert {row["prompts"] for row in report["rows"]} == {4}


def test_options_of_the_command_arrive(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, prompts_file: str
) -> None:
    seen = list[tuple[list[Any], BenchSettings]]()

    def measure(engine: Engine, prompts: list[Any], settings: BenchSettings, *_: Any, **__: Any) -> None:
        seen.append((prompts, settings))
        raise typer.Exit

    def asked(*arguments: str) -> tuple[list[Any], BenchSettings]:
        command(*arguments)
        return seen.pop()

    monkeypatch.setattr(race, "measure", measure)
    assert asked() == (list(records.PROMPTS), records.FULL)
    assert asked("--quick") == (list(records.PROMPTS[:4]), records.QUICK)
    assert len(asked("--quick", "--batch", "6")[0]) == 6
    assert asked("--prompts", prompts_file)[0] == [[5, 9, 2 + i] for i in range(8)]
    many = ["--gamma", "2", "--gamma", "4", "--batch", "3", "--temperature", "0", "--temperature", "0.7"]
    assert asked(*many, *SHORT, "--stop-at-eos")[1] == BenchSettings((2, 4), (3,), (0.0, 0.7), 5, 2, False)
    assert asked("--quick", *SHORT)[1] == replace(records.QUICK, max_new_tokens=5, repetitions=2)


def test_ctrl_c_prints_the_rows_so_far(
    command: Callable[..., Result], prompts_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contenders.line_up

    def line_up(*args: Any) -> list[Contender]:
        first, *rest = whole(*args)
        return [interrupted_after(3, first), *rest]

    monkeypatch.setattr(contenders, "line_up", line_up)
    result = command("--quick", "--prompts", prompts_file, *SHORT)
    assert result.exit_code == 130
    assert "temperature 0:" in result.stdout and "temperature 1:" not in result.stdout
    assert "interrupted: 6 rows were measured" in result.stderr


@pytest.mark.slow
def test_several_drafts_on_the_command_line(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, prompts_file: str
) -> None:
    loaded: list[tuple[Any, ...]] = []
    engines = [pair(), pair(draft_seed=2)]

    def load_one(how: ModelOptions, **_: Any) -> Engine:
        loaded.append((how.target, how.draft))
        return engines[len(loaded) - 1]

    monkeypatch.setattr(engine_room, "load", load_one)
    drafts = ["--target", "T", "--draft", "a", "--draft", "b", "--verify", "token", "--temperature", "0"]
    result = command("--quick", "--prompts", prompts_file, *SHORT, *drafts, "--json")
    assert loaded == [("T", "a"), (models(engines[0])[0], "b")]  # one target for both
    rows = [row for row in json.loads(result.stdout)["rows"] if row["draft"]]
    assert [(row["draft"], row["rule"]) for row in rows] == [("LlamaForCausalLM", "token"), ("b", "token")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--verify", "nonsense"], "slipstream: "),
        (["--gamma", "0"], "slipstream: Invalid value for '--gamma'"),
        (["--prompts", "nowhere"], "slipstream: cannot read nowhere"),
        (["--quick", "--batch", "9"], "slipstream: a batch of 9 needs as many prompts, but there are 8."),
    ],
)
def test_errors_of_the_command_are_one_sentence(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setattr(records, "PROMPTS", [[1, 2, i] for i in range(8)])
    result = command(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence) and result.stderr.count("\n") == 1
    assert not result.stdout


def test_a_busy_machine_is_named(
    command: Callable[..., Result], prompts_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    arguments = ["--quick", "--prompts", prompts_file, "--max-new-tokens", "1", "--repetitions", "1"]
    for average, warned in ((1.9, True), (0.2, False)):
        monkeypatch.setattr(machine.os, "getloadavg", lambda average=average: (average, 0.0, 0.0))
        assert ("busy before" in command(*arguments).stdout) is warned


def test_transformers_contenders_run_without_our_packed_weights(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    packed = load_scorer(tmp_path, device="cpu", mode=Mode(packed=True))
    untouched = contenders.untouched(packed)
    assert not any(isinstance(part, PackedLinear) for part in untouched.modules())
    assert torch.equal(untouched.lm_head.weight, model.lm_head.weight)
    plain = load_scorer(model)
    assert contenders.untouched(plain) is model
