"""`slipstream draft list`: what can be used says what it is, what cannot says why."""

import json
import re
from pathlib import Path

import pytest

from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.kinds import KINDS
from slipstream.drafters.ngram import NgramModel
from slipstream.drafters.specification import Offer, offers, tried
from slipstream.models.loading.pairings import EMBEDDED
from terminal import run
from toys.tables import dirichlet_table, scorer

SITE = BuildContext(scorer(dirichlet_table(1), "three"))


def test_a_draft_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    NgramModel.fit([[0, 1, 2, 3]], 2, 4).save(tmp_path / "four.ngram")
    NgramModel.fit([[0, 1, 2, 1]], 2, 3).save(tmp_path / "three.ngram")
    found = {offer.draft: offer for offer in offers(SITE, folder=tmp_path)}
    assert found[f"ngram:{tmp_path}/three.ngram"].usable
    assert "knows 4 token ids, the target 3" in found[f"ngram:{tmp_path}/four.ngram"].says
    assert found["lookup"] == Offer("lookup", True, KINDS["lookup"].about)
    assert "three" in found["embedded"].says and not found["embedded"].usable
    assert {kind.form for kind in KINDS.values()} - {"plain"} <= found.keys()
    assert tried("nonsense?x", SITE) == Offer("nonsense?x", False, tried("nonsense?x", SITE).says)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_lists_them(as_json: bool) -> None:
    shown = run("draft", "list", "lookup", "embedded", "lookup|embedded", "exit:99", *(["--json"] if as_json else []))
    assert shown.exit_code == 0, shown.output
    if as_json:
        assert [offer["usable"] for offer in json.loads(shown.stdout)] == [True, True, True, False]
    else:
        assert [line.split()[0] for line in shown.stdout.splitlines()] == ["yes", "yes", "yes", "no"]
        assert "exit after 99 layers is not possible" in shown.stdout


def test_nothing_that_works_is_exit_code_1() -> None:
    shown = run("draft", "list", "exit:99", "ngram:nowhere")
    assert shown.exit_code == 1 and [line.split()[0] for line in shown.stdout.splitlines()] == ["no", "no"]


def test_words_are_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    drafts = ["lookup|embedded", "lookup|embedded||plain", "lookup>embedded", str(EMBEDDED / "draft")]
    shown = run("draft", "list", *drafts).stdout.splitlines()
    for line, words in zip(
        shown, ("the first that can", "the fastest so far", "a chain: each", "a smaller"), strict=True
    ):
        assert line.startswith("yes") and words in line
        assert not re.search("Drafter|Choice|Bandit|Chain", line)
    tried, others = run("draft", "list").stdout.split("with a name of yours:\n")
    assert all(line.split()[0] in ("yes", "no") for line in tried.splitlines())
    forms = {kind.form for kind in KINDS.values() if ":" in kind.form}
    assert {line.split()[0] for line in others.splitlines()} == forms
