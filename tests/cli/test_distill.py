"""`slipstream distill`: a target and texts in, a draft that `generate` uses out; one sentence for what is wrong."""

import json
from pathlib import Path

import pytest
from click.testing import Result

from slipstream.cli.app import INTERRUPTED, WRONG
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.training.distill import Distiller
from terminal import run
from toys import FAMILIES, tiny

FEW = ("--steps", "2", "--rows", "2", "--length", "16", "--write", "200", "--measure-every", "2", "--gamma", "2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and a text."""
    folder = tmp_path_factory.mktemp("distill")
    tokenizer = load_tokenizer(EMBEDDED / "target")
    tiny(FAMILIES["llama"], vocab_size=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.py").write_text("def add(a, b):\n    return a + b\n\n\n" * 80)
    return folder


def distill(place: Path, *arguments: str) -> Result:
    return run("distill", str(place / "target"), "--data", str(place / "text.py"), *FEW, *arguments)


def test_a_draft_is_made_and_used(place: Path) -> None:
    out = place / "draft"
    result = distill(place, "--out", str(out), "--layers", "1", "--width", "16", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["steps"] == 2 and report["size"] == "1 layer of width 16" and set(report["alpha"]) == {"0.0", "1.0"}
    assert "step 0/2: T=0 alpha" in result.stderr and "step 2/2: T=0 alpha" in result.stderr
    used = run("generate", "def add", "--target", str(place / "target"), "--draft", str(out), "--max-new-tokens", "4")
    assert used.exit_code == 0


@pytest.mark.slow
def test_a_draft_is_improved(place: Path) -> None:
    out = place / "first"
    assert distill(place, "--out", str(out), "--layers", "1", "--width", "16").exit_code == 0
    better = distill(place, "--out", str(place / "better"), "--draft", str(out))
    assert better.exit_code == 0 and "use: slipstream generate" in better.stdout
    assert "improved from" in (place / "better" / "README.md").read_text()


@pytest.mark.slow
def test_ctrl_c_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Distiller.train

    def interrupted(self: Distiller, watch: object, measured: object) -> None:
        def stop(progress: object, loss: float) -> None:
            raise KeyboardInterrupt

        train(self, stop, lambda found: None)

    arguments = ("--out", str(place / "stopped"), "--layers", "1", "--width", "16")
    with monkeypatch.context() as patch:
        patch.setattr(Distiller, "train", interrupted)
        result = distill(place, *arguments)
    assert result.exit_code == INTERRUPTED and not (place / "stopped").exists()
    [costs] = [line for line in result.stderr.splitlines() if "a drafting step costs" in line]
    again = distill(place, *arguments).stderr
    assert costs in again and "going on from step 1 of 2" in again, "measured anew"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--out", "."), "holds files and no draft"),
        (("--out", "new", "--size", "2"), "--size"),
        (("--out", "new", "--size", "0"), "between 0 and 1"),
        (("--out", "new", "--layers", "2"), "by both --layers and --width"),
        (("--out", "new", "--layers", "2", "--width", "8", "--draft", "embedded"), "leave --layers and --width out"),
        (("--out", "new", "--data", "missing.txt"), "there is no such file or folder"),
        (("--out", "new", "--draft", "missing"), "missing"),
        (("--out", "new", "--layers", "1", "--width", "30"), "take a multiple of 8"),
    ],
)
def test_one_sentence_for_what_is_wrong(
    arguments: tuple[str, ...], fault: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    result = distill(place, *arguments)
    assert result.exit_code == WRONG and fault in result.stderr
    assert result.stderr.count("slipstream: ") == 1 and not (place / "new").exists()
