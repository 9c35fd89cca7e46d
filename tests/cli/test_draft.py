"""`slipstream draft build | list | forget`: texts to drafts, nothing half-written, what is wrong in one sentence."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import slipstream
from drafters.datastore.test_memory import Spelled
from slipstream.cli.app import INTERRUPTED, WRONG
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import CORPUS, MEMORY
from slipstream.drafters.datastore.memory import ResponseMemory
from slipstream.drafters.ngram import NgramModel
from slipstream.models.loading import load as models
from terminal import run

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text(CODE * 15)
    (folder / "inner" / "b.txt.gz").write_bytes(gzip.compress(CODE.encode()))
    (folder / "c.jsonl").write_text("\n".join([json.dumps({"text": CODE}), json.dumps({"text": "x = 1\n"}), ""]))
    (folder / "d.bin").write_bytes(b"\xff\xfe\0")
    (folder / ".hidden").write_text("no")
    return folder


def test_an_ngram_model_is_built_and_drafts(texts: Path, tmp_path: Path) -> None:
    name = f"ngram:{tmp_path}/mine.ngram"
    built = run("draft", "build", name, str(texts), str(texts / "inner" / "b.txt.gz"), "--order", "2", "--json")
    assert built.exit_code == 0, built.output
    facts = json.loads(built.stdout)
    assert (facts["order"], facts["vocab"], facts["documents"]) == (2, 4096, 4) and facts["tokens"] > 50
    grams = f"order 2, 4096 token ids; n-grams: 4096 of order 1, {facts['ngrams'][1]} of order 2"
    assert grams in run("draft", "list", name).stdout
    engine = slipstream.load(draft=name)
    fast, slow = (engine.generate("def add(", max_new_tokens=12, plain=plain)[0] for plain in (False, True))
    assert fast.tokens == slow.tokens and fast.stats.drafted


def test_an_interrupted_build_leaves_nothing(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NgramModel:
        raise KeyboardInterrupt

    monkeypatch.setattr(NgramModel, "fit", interrupt)
    ended = run("draft", "build", f"ngram:{tmp_path}/mine.ngram", str(texts))
    assert ended.exit_code == INTERRUPTED and "interrupted" in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["texts"]


def test_token_ids_alone_are_enough(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[1, 2, 3], [1, 2, 4]]))
    ended = run("draft", "build", f"ngram:{tmp_path}/ids.ngram", str(tmp_path / "ids.npy"))
    assert ended.exit_code == 0 and "built from 6 tokens of 2 documents" in ended.stdout


def test_a_datastore_is_built_and_listed(texts: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    built = run("draft", "build", f"datastore:{store}", str(texts / "a.py"), "--json")
    assert built.exit_code == 0, built.output
    report = json.loads(built.stdout)
    assert report["documents"] == 1
    assert f"corpus: 1 documents, {report['tokens']} tokens" in run("draft", "list", f"datastore:{store}").stdout
    ids = models.load_tokenizer("embedded")("def add(a")["input_ids"]
    assert Corpus.load(store / CORPUS).match(ids, 2).length == len(ids)


def test_responses_are_forgotten(tmp_path: Path) -> None:
    memory = ResponseMemory(tmp_path / MEMORY, Spelled())
    memory.add("alice", [1], [2])
    memory.add("bob", [1], [3])
    assert run("draft", "forget", str(tmp_path), "--namespace", "alice").exit_code == 0
    assert memory.nearest("alice", [1], 3) == [] and len(memory.nearest("bob", [1], 3)) == 1
    memory.close()
    for wrong in ("carol", "alice'"):
        result = run("draft", "forget", str(tmp_path), "--namespace", wrong)
        assert result.exit_code == WRONG and "has no namespace" in result.stderr and "alice, bob" in result.stderr


def test_what_a_memory_holds_is_listed(tmp_path: Path) -> None:
    store = f"datastore:{tmp_path}"
    engine = slipstream.load(draft=f"{store}?learn=true&namespace=alice")
    engine.generate("def add(", max_new_tokens=4)
    assert "memory of alice: 1 responses" in run("draft", "list", store).stdout
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MEMORY).write_text("no database " * 99)
    assert "damaged or no memory" in run("draft", "list", f"{store}/damaged").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("ngram:x nowhere.txt", "cannot read nowhere.txt: there is no such file"),
        ("ngram:x {}/d.bin", "is not UTF-8"),
        ("ngram:nowhere/x {}/a.py", "cannot write nowhere/x: there is no folder nowhere; make it first."),
        ("ngram:x {}/a.py --target ./nowhere", "cannot load the tokenizer"),
        ("ngram:x {}/a.py --vocab 999999999999", "it must be between 1 and 16777216"),
        ("ngram:x {}/a.py --target=", "the name of its model is empty"),
        ("ngram:x {}/bad.jsonl", ":2: the line must be a JSON object"),
        ("ngram:x {}/a.py --temperature 3", "ngram is built without them, so --temperature cannot be used with it"),
        ("ngram: {}/a.py", "'ngram:' cannot be built: give ngram:FILE"),
        ("exit {}/a.py", "'exit' cannot be built"),
        ("lookup {}/a.py", "'lookup' cannot be built"),
        ("ngram:x", "ngram:x is made of texts: give a SOURCE"),
        ("datastore:s {}/absent", "no such file"),
        ("datastore:s {}/empty", "no tokens to index"),
    ],
)
def test_what_is_wrong_is_one_sentence(texts: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, says: str) -> None:
    monkeypatch.chdir(texts.parent)
    (texts / "empty").write_text("")
    (texts / "bad.jsonl").write_text('{"text": "x"}\n{"other": 1}\n')
    ended = run("draft", "build", *arguments.format(texts).split())
    assert ended.exit_code == WRONG and says in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert [file.name for file in texts.parent.iterdir()] == ["texts"]
