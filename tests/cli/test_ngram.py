"""`slipstream ngram`: documents to a model that drafts; nothing half-written; what is wrong in one sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import slipstream
from slipstream.cli import app as cli
from slipstream.cli import ngram as command
from slipstream.drafters.ngram_model import NgramModel
from terminal import run

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text(CODE)
    (folder / "inner" / "b.txt.gz").write_bytes(gzip.compress(CODE.encode()))
    lines = [json.dumps({"text": CODE}), json.dumps({"text": "x = 1\n"}), ""]
    (folder / "c.jsonl").write_text("\n".join(lines))
    (folder / "d.bin").write_bytes(b"\xff\xfe\0")
    (folder / ".hidden").write_text("no")
    return folder


def test_a_model_is_built_and_drafts(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.ngram"
    built = run(
        "ngram", "build", str(corpus), str(corpus / "inner" / "b.txt.gz"), "--out", str(out), "--order", "2", "--json"
    )
    assert built.exit_code == 0, built.output
    facts = json.loads(built.stdout)
    assert (facts["order"], facts["vocab"], facts["documents"]) == (2, 4096, 4) and facts["tokens"] > 50
    shown = json.loads(run("ngram", "info", str(out), "--json").stdout)
    assert shown.items() <= facts.items() and shown["ngrams"][0] == 4096
    assert "order 2" in run("ngram", "info", str(out)).stdout
    engine = slipstream.load(draft=f"ngram:{out}")
    fast, slow = (engine.generate("def add(", max_new_tokens=12, plain=plain)[0] for plain in (False, True))
    assert fast.tokens == slow.tokens and fast.stats.drafted


def test_an_interrupted_build_leaves_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NgramModel:
        raise KeyboardInterrupt

    monkeypatch.setattr(NgramModel, "fit", interrupt)
    ended = run("ngram", "build", str(corpus), "--out", str(tmp_path / "mine.ngram"))
    assert ended.exit_code == cli.INTERRUPTED and "was not written" in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["corpus"]


def test_token_ids_alone_are_enough(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[1, 2, 3], [1, 2, 4]]))
    out = tmp_path / "ids.ngram"
    ended = run("ngram", "build", str(tmp_path / "ids.npy"), "--out", str(out))
    assert ended.exit_code == 0 and "built from 6 tokens of 2 documents (0.0 MB)" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.txt", "--out", "x"], "cannot read nowhere.txt: there is no such file"),
        (["{corpus}/d.bin", "--out", "x"], "is not UTF-8"),
        (["{corpus}/a.py", "--out", "nowhere/x"], "cannot write nowhere/x: there is no folder nowhere; make it first."),
        (["{corpus}/a.py", "--out", "x", "--tokenizer", "./nowhere"], "cannot load the tokenizer"),
        (["{corpus}/a.py", "--out", "x", "--vocab", "999999999999"], "it must be between 1 and 16777216"),
        (["{corpus}/a.py", "--out", "x", "--tokenizer", ""], "the name of its model is empty"),
        (["", "--out", "x"], "a source has no name"),
        (["{corpus}/bad.jsonl", "--out", "x"], ":2: the line must be a JSON object"),
    ],
)
def test_what_is_wrong_is_one_sentence(corpus: Path, arguments: list[str], says: str) -> None:
    (corpus / "bad.jsonl").write_text('{"text": "x"}\n{"other": 1}\n')
    ended = run("ngram", "build", *(word.format(corpus=corpus) for word in arguments))
    assert ended.exit_code == cli.WRONG and says in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert command.ngram.registered_commands
