"""`slipstream heads train` and `slipstream exits`: files in, files out, one sentence for what is wrong, Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from slipstream.cli import heads as _heads
from slipstream.cli.app import INTERRUPTED, WRONG, app
from slipstream.drafters.heads import FILE, ParallelHeads
from slipstream.models.loading import load as models
from slipstream.training.heads import STATE, HeadTrainer
from slipstream.training.trainer import Progress, Watch
from toys import FAMILIES, tiny


def run(*arguments: str) -> Result:
    """`slipstream ARGUMENTS`, with nobody watching."""
    clean = {"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "100", "TERM": "xterm"}
    result = CliRunner().invoke(app, list(arguments), env=clean)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of texts, with a file that is none."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n" * 30)
    (folder / "deep" / "b.txt").write_text("words and words " * 100)
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded target is trained for real elsewhere; here a tiny model stands in for it."""
    model = tiny(FAMILIES["llama"], vocab_size=4096)
    monkeypatch.setattr(models, "load_model", lambda *_, **__: model)


FEW = ("--steps", "3", "--length", "16", "--rows", "2", "--heads", "2", "--inner", "8")


def test_heads_are_trained_and_reported(small: None, text: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "heads")
    result = run("heads", "train", "--text", str(text), "--out", out, *FEW, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["steps"] == 3 and len(report["alpha"]) == 2 and all(0 < alpha <= 1 for alpha in report["alpha"])
    assert ParallelHeads.load(out).sizes.heads == 2
    again = run("heads", "train", "--text", str(text), "--out", out, *FEW)
    assert "going on from step 3 of 3" in again.stderr and "1: 0." in again.stdout


def test_ctrl_c_saves_and_the_same_command_goes_on(
    small: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = HeadTrainer.train

    def interrupted(trainer: HeadTrainer, watch: Watch) -> ParallelHeads:
        def interrupt(progress: Progress, loss: float) -> None:
            if progress.steps == 2:
                raise KeyboardInterrupt

        return train(trainer, interrupt)

    command = ("heads", "train", "--text", str(text / "a.py"), "--out", str(tmp_path / "heads"), *FEW)
    monkeypatch.setattr(HeadTrainer, "train", interrupted)
    result = run(*command)
    assert result.exit_code == INTERRUPTED and "saved at step 2 of 3" in result.stderr
    assert (tmp_path / "heads" / STATE).exists() and not (tmp_path / "heads" / FILE).exists()
    monkeypatch.setattr(HeadTrainer, "train", train)
    assert "going on from step 2 of 3" in run(*command).stderr
    assert (tmp_path / "heads" / FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--text", "{}/c.bin"), "is no text in UTF-8"),
        (("--text", "{}/gone.txt"), "no such file"),
        (("--text", "{}/a.py", "--rate", "2"), "rate=2.0 is not possible"),
        (("--text", "{}/a.py", "--heads", "20", "--length", "8"), "too short for 20 heads"),
        (("--text", "{}/deep/b.txt", "--length", "128"), "tokens of text are too few"),
        (("--text", "{}/a.py", "--length", "5000"), "length=5000 is too long: the embedded target holds 128 tokens"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    small: None, text: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    result = run("heads", "train", "--out", str(tmp_path / "h"), *(word.format(text) for word in arguments))
    assert result.exit_code == WRONG and sentence in result.stderr and result.stderr.count("\n") == 1


def test_a_damaged_target_is_one_sentence_and_no_file(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(FAMILIES["llama"], vocab_size=4096)
    model.get_parameter("model.norm.weight").data.fill_(torch.nan)
    monkeypatch.setattr(models, "load_model", lambda *_, **__: model)
    result = run("heads", "train", "--text", str(text), "--out", str(tmp_path / "heads"), *FEW, "--json")
    assert result.exit_code == WRONG and not result.stdout
    assert (
        "the embedded target gives non-finite logits" in result.stderr and result.stderr.count("\n") == 2
    )  # and a note of what was skipped
    assert not (tmp_path / "heads").exists()


def test_texts_are_kept_apart_by_the_end_of_text(text: Path) -> None:
    class Letters:
        eos_token_id: Any = 0

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(sign) for sign in text] for text in texts]}

    assert _heads.tokens_of(["ab", "c"], Letters()) == [0, 97, 98, 0, 99]
    assert len(_heads.read_texts([text], [])) == 2


@pytest.mark.slow
def test_the_search_says_what_to_use_or_not(small: None) -> None:
    words = ("def f(a):", "--max-new-tokens", "4", "--gamma", "2")
    result = run("exits", *words)
    assert result.exit_code == 0, result.output
    assert "plain decoding:" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(("use --draft exit:", "do not draft"))
    found = json.loads(run("exits", *words, "--first", "--json").stdout)
    assert [trial["layers"] for trial in found["trials"]] == ["1"]


@pytest.mark.parametrize("command", [("heads",), ("heads", "train"), ("exits",)])
def test_help_has_an_example(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0 and "Example: slipstream" in result.stdout
