"""Documents from files, folders and datasets; and datastores of them as drafts."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import Datastore
from slipstream.drafters.specification import drafter
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.text.documents import read, token_ids
from toys import FAMILIES, HF_VOCAB, scorer, tiny


def documents(*sources: Path, field: str | None = None) -> list[object]:
    found = (document for _, document in read([str(source) for source in sources], field))
    return [document.tolist() if isinstance(document, np.ndarray) else document for document in found]


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\ntext")
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty").write_text("")
    (tmp_path / "picture").write_bytes(b"\x89\0\0")
    lines = [{"text": "t"}, {"tokens": [1, 2]}, {"messages": [{"role": "user", "content": "u"}, talk("a"), talk("b")]}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress('{"answer": "z\u2028"}'.encode()))
    np.save(tmp_path / "one.npy", np.array([5, 6]))
    np.save(tmp_path / "two.npy", np.array([[7, 8], [9, 0]]))
    assert documents(tmp_path / "b.txt", tmp_path / "a.py") == ["one\ntext", "x = 1"]
    assert documents(tmp_path / "d.jsonl.gz", field="answer") == ["z\u2028"]
    (tmp_path / "d.jsonl.gz").unlink()
    assert documents(tmp_path) == ["x = 1", "one\ntext", "t", [1, 2], "a", "b", [5, 6], [7, 8], [9, 0]]


def test_a_chat_without_an_answer_is_written_by_the_template(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "why?"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, [{"messages": chat}, {"messages": [*chat, talk("so")]}])))
    assert documents(file) == [chat, "so"]
    tokenizer = load_tokenizer(EMBEDDED / "target")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: the messages have no answer"):
        list(token_ids([str(file)], tokenizer))
    tokenizer.chat_template = (
        "{% for m in messages %}# {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    assert [tokenizer.decode(ids) for ids in token_ids([str(file)], tokenizer)] == ["# why?\nA:", "so"]


def talk(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


WRONG = [
    ("x.txt", b"\xff", "not UTF-8"),
    ("x.gz", b"\x1f\x8b\0", "cannot read"),
    ("x.jsonl", b"{", "not JSON"),
    ("x.jsonl", b"[1]", '"text" or "tokens" or "messages"; --field'),
    ("x.jsonl", b'{"text": 5}', "must be a text"),
    ("x.jsonl", b'{"tokens": [1, "a"]}', "must be a text"),
    ("x.npy", b"\x93NUMPY", "no array of numbers"),
]


@pytest.mark.parametrize(("name", "data", "words"), WRONG, ids=str)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        documents(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_files_of_a_folder_that_are_no_text_are_skipped_and_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "c").write_bytes(b"\x89\0\0")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    skipped = list[Path]()
    assert [found for _, found in read([str(tmp_path)], skipped=skipped)] == ["one"]
    assert skipped == [tmp_path / "b.txt", tmp_path / "c"] and documents(tmp_path) == ["one"]


def test_arrays_of_objects_are_never_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"pickled": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="no array of numbers"):
        documents(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.array([0.5]))
    with pytest.raises(ValueError, match="token ids have one or two dimensions"):
        documents(tmp_path / "y.npy")
    with pytest.raises(ValueError, match="no such file or folder"):
        documents(tmp_path / "absent")


def test_a_specification_opens_what_is_there(tmp_path: Path) -> None:
    context = BuildContext(CausalScorer(tiny(FAMILIES["llama"])))
    with pytest.raises(ValueError, match=r"holds no datastore: build one .*learn=true"):
        drafter(f"datastore:{tmp_path}", context)
    Corpus.build([[1, 2, 3]], HF_VOCAB).save(tmp_path / "corpus.safetensors")
    store = drafter(f"datastore:{tmp_path}", context)
    assert isinstance(store, Datastore) and store.corpus is not None and store.memory is None
    store = drafter(f"datastore:{tmp_path}?learn=true&namespace=alice&nearest=3&entries=9", context)
    assert isinstance(store, Datastore) and store.memory is not None and store.learn
    assert (store.settings.nearest, store.memory.limits.entries) == (3, 9)
    store.memory.add("alice", [1, 2], [5, 6])
    store.memory.close()
    again = drafter(f"datastore:{tmp_path}", context)
    assert isinstance(again, Datastore) and again.memory is not None and not again.learn
    assert len(again.memory.nearest("alice", [1, 2], 3)) == 1
    again.memory.close()


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path: Path) -> None:
    target = CausalScorer(tiny(FAMILIES["llama"]))
    Corpus.build([[1, 2, 3]], HF_VOCAB, "another").save(tmp_path / "corpus.safetensors")
    assert drafter(f"datastore:{tmp_path}", BuildContext(target))  # no tokenizer to compare with
    with pytest.raises(ValueError, match=r"built with another tokenizer .*build it again with --target\.$"):
        drafter(f"datastore:{tmp_path}", BuildContext(target, load_tokenizer(EMBEDDED / "target")))
    Corpus.build([[1, 2, 3]], HF_VOCAB + 1).save(tmp_path / "corpus.safetensors")
    with pytest.raises(ValueError, match=r"has 102 token ids, the target 101"):
        drafter(f"datastore:{tmp_path}", BuildContext(target))


def test_a_target_without_embeddings_has_no_memory(tmp_path: Path) -> None:
    context = BuildContext(scorer(lambda prefix: [1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="lie elsewhere, so requests cannot be compared"):
        drafter(f"datastore:{tmp_path}?learn=true", context)


def test_datasets_are_streamed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: Any, **settings: Any) -> Any:
        asked.append((names, settings))
        if names[0] == "missing":
            raise FileNotFoundError("no such dataset\nand a long story")
        return iter([{"text": "one"}, {"text": "two", "id": 3}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [found for _, found in read(["dataset:tiny"])] == ["one", "two"]
    places = [where for where, _ in read(["dataset:wiki:raw:test"])]
    assert places == ["dataset:wiki:raw:test:1", "dataset:wiki:raw:test:2"]
    assert len(list(read(["dataset:tiny:validation"]))) == 2
    streaming = {"streaming": True}
    assert asked == [
        (("tiny", None), {"split": "train", **streaming}),
        (("wiki", "raw"), {"split": "test", **streaming}),
        (("tiny", None), {"split": "validation", **streaming}),
    ]
    with pytest.raises(ValueError, match=r"^cannot read dataset 'missing': no such dataset$"):
        list(read(["dataset:missing"]))
    with pytest.raises(ValueError, match="a JSON object with"):
        list(read(["dataset:tiny"], "body"))


def test_a_missing_datasets_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install slipstream\[datasets\]"):
        list(read(["dataset:tiny"]))
