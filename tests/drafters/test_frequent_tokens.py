"""Drafts whose head knows the frequent tokens only: what is counted, the law that is left, and that texts are exact."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.decoding import rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.frequent_tokens import FrequentTokens, TokenCounts, kept_counts
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.specification import drafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.models.causal import CausalScorer
from slipstream.models.families import vocabulary_of
from slipstream.models.loading.load import load_scorer
from slipstream.models.loading.twins import with_kept_tokens
from terminal import run
from toys.drafts import Altered, law_error, propose, text_law
from toys.enumeration import WRONG, total_variation
from toys.families import FAMILIES, HF_VOCAB, PROBED, SEQ2SEQ, tiny
from toys.kernels import needs_kernel
from toys.tables import TableScorer, dirichlet_table
from toys.texts import GREEDY, SAMPLE, Cycle, rare, request, row

FLOAT = 1e-5  # the laws are softmaxes in float32
KEPT = torch.arange(0, HF_VOCAB, 3)


# ---- counts -------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_and_the_most_frequent_kept(tmp_path: Path) -> None:
    counts = TokenCounts.of([(5, 3, 5), (3, 5, 0)], 8, "toy")
    assert (counts.total, counts.different, counts.texts) == (6, 3, 2)
    assert counts.most_frequent(2).tolist() == [3, 5]
    assert counts.most_frequent(4).tolist() == [0, 1, 3, 5]  # of those that were never written, the lowest
    assert counts.share(counts.most_frequent(2)) == 5 / 6
    counts.save(tmp_path / "toy.counts")
    again = TokenCounts.load(tmp_path / "toy.counts")
    assert torch.equal(again.counts, counts.counts) and (again.target, again.texts) == ("toy", 2)
    with pytest.raises(FileNotFoundError, match="there is no table of token counts at"):
        TokenCounts.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2048", FrequentTokens(2048)),
        ("mine.counts", FrequentTokens(None, "mine.counts")),
        ("2048:mine.counts", FrequentTokens(2048, "mine.counts")),
        (r"C:\mine.counts", FrequentTokens(None, r"C:\mine.counts")),
    ],
)
def test_what_is_wanted_is_read(text: str, wanted: FrequentTokens) -> None:
    assert FrequentTokens.parse(text) == wanted


def test_counts_are_kept_for_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = kept_counts("toy", 8, None)
    place.parent.mkdir(parents=True)
    TokenCounts.of([(5, 3, 5)], 8, "toy").save(place)
    kept, about = FrequentTokens(2).choose("toy", 8, None)
    assert kept.tolist() == [3, 5] and "2 of 8 tokens, which make up 100.0% of 3 tokens" in about
    assert FrequentTokens(None, str(place)).choose("toy", 8, None)[0].tolist() == [3, 5]
    with pytest.raises(ValueError, match="was not counted yet: run `slipstream draft build vocabulary"):
        FrequentTokens(2).choose("other", 8, None)
    with pytest.raises(ValueError, match="counts the tokens of toy, and other has others"):
        FrequentTokens(2, str(place)).choose("other", 9, None)
    with pytest.raises(ValueError, match="cuts nothing: toy has 8 tokens"):
        FrequentTokens(8).choose("toy", 8, None)


# ---- the head -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        *(FAMILIES[name] for name in ("llama", "gemma2", "gpt2")),
        *(PROBED["cohere"], SEQ2SEQ["bart"]),
        *rare(
            PROBED["granite"],
            SEQ2SEQ["t5"],
            SEQ2SEQ["whisper"],
            SEQ2SEQ["marian"],
            FAMILIES["opt"],
            FAMILIES["mixtral"],
        ),
    ],
    ids=lambda family: family.config,
)
def test_a_cut_head_gives_the_logits_of_the_whole_one(family: Any) -> None:
    """Gemma 2 caps its logits behind the head; there, impossible tokens would become possible again."""
    model = tiny(family)
    target, cut = load_scorer(model), load_scorer(with_kept_tokens(model, "toy", KEPT))
    found = []
    for scorer in (target, cut):
        form = scorer.source_form
        scorer.add(1, [form.example(4) if form else None])
        found.append(scorer.extend(torch.tensor([[5, 6, 7]]), [3]))
    torch.testing.assert_close(found[1][..., KEPT], found[0][..., KEPT], rtol=0, atol=1e-5)
    others = torch.ones(found[0].shape[-1]).scatter_(0, KEPT, 0).bool()
    assert found[1].shape == found[0].shape and bool((found[1][..., others] == -torch.inf).all())
    assert vocabulary_of(cut.model) == vocabulary_of(model)


def test_a_head_that_cannot_be_cut_is_refused() -> None:
    model: Any = tiny(FAMILIES["llama"])
    usual = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = out.logits.clamp(min=-30)
        return out

    model.forward = capped
    with pytest.raises(ValueError, match="toy"):
        with_kept_tokens(model, "toy", KEPT)


# ---- laws ---------------------------------------------------------------------------------------------------------

PAIR = torch.tensor([0, 2])


def cut_draft() -> ModelDrafter:
    """A draft of another seed that knows two of the three tokens."""
    return ModelDrafter(load_scorer(tiny(FAMILIES["llama"], 1, vocab_size=3, initializer_range=0.4), kept=PAIR))


def trio() -> CausalScorer:
    return CausalScorer(tiny(FAMILIES["llama"], vocab_size=3, initializer_range=0.4))


def test_the_law_is_the_target_s() -> None:
    assert law_error(Decoder(trio(), cut_draft(), rules.TOKEN.verify, Cycle((2, 0, 1)))) < FLOAT


def test_the_law_is_the_target_s_with_other_settings() -> None:
    decoder, sampler = Decoder(trio(), cut_draft(), rules.BLOCK.verify, Cycle((2, 0, 1))), Sampling(0.7, top_k=2)
    want = text_law(replace(decoder, controller=Fixed(0)), sampler=sampler)
    assert total_variation(text_law(decoder, sampler=sampler), want) < FLOAT


def test_the_law_behind_a_tree_is_the_target_s() -> None:
    assert law_error(Decoder(trio(), TreeDrafter(cut_draft().scorer, (2, 1)), rules.TOKEN.verify, Fixed(2))) < FLOAT


def test_control_a_law_that_forgets_the_cut_is_caught() -> None:
    """The law of the whole head, while tokens were drawn from the part of it."""

    def forget(draft: Draft) -> Draft:
        law = draft.law and (draft.law.dense + 0.3 * (draft.law.dense == 0))
        return draft if law is None else replace(draft, law=Law(probs=law / law.sum(-1, keepdim=True)))

    assert law_error(Decoder(trio(), Altered(cut_draft(), forget), rules.TOKEN.verify, Fixed(2))) > WRONG


def test_processors_see_the_cut_law_and_may_forbid_all_of_it() -> None:
    """Where nothing is left that a draft knows, it drafts something, and the text goes on as the target's."""
    target = CausalScorer(tiny(FAMILIES["llama"]))
    forbidden = Sampling(temperature=1.0, logit_bias=dict.fromkeys(KEPT.tolist(), float("-inf")))
    draft = ModelDrafter(load_scorer(tiny(FAMILIES["llama"], 1), kept=KEPT))
    decoder = Decoder(target, draft, controller=Fixed(2))
    found = generate(decoder, [request((3, 4), 6, forbidden), request((3, 4), 6, SAMPLE)])
    assert all(len(each.output) == 6 and each.error is None for each in found)
    assert not set(found[0].output) & set(KEPT.tolist())


def test_only_kept_tokens_are_drafted() -> None:
    draft = ModelDrafter(load_scorer(tiny(FAMILIES["llama"], 1), kept=KEPT))
    for sampler in (GREEDY, SAMPLE, Sampling(temperature=1.0, top_k=50)):
        tokens: Tensor = propose(draft, [row((3, 4, 5), sampler=sampler)], [20]).tokens
        assert set(tokens.flatten().tolist()) <= set(KEPT.tolist())


# ---- texts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of counts of the embedded target, made by the command."""
    out = tmp_path_factory.mktemp("counts") / "mine.counts"
    prompts = out.with_name("prompts.txt")
    prompts.write_text("def add(a, b):\nimport os\nclass A:\n")
    made = run("draft", "build", f"vocabulary:{out}", str(prompts), "--max-new-tokens", "24", "--json")
    assert made.exit_code == 0, made.output
    report = json.loads(made.stdout)
    assert (report["texts"], report["vocab"]) == (3, 4096) and 24 < report["tokens"] <= 72
    assert report["different"] == TokenCounts.load(out).different and report["shares"]["2048"] == 1
    return out


@needs_kernel
@pytest.mark.parametrize(
    "draft",
    [
        "embedded?draft_vocab={}",
        *rare(
            "lookup|int4?draft_vocab=64:{}",
            "int4?draft_vocab={}",
            "int8?draft_vocab={}",
            "lookup>int8?draft_vocab=64:{}",
        ),
    ],
)
def test_drafts_are_cut_as_they_are_named(draft: str, counts: Path) -> None:
    engine, plainly = slipstream.load(draft=draft.format(counts)), slipstream.load()
    prompts = ["def add(a, b):", "import os"]
    found = engine.generate(prompts, max_new_tokens=12, temperature=0)
    want = plainly.generate(prompts, max_new_tokens=12, temperature=0)
    assert [each.text for each in found] == [each.text for each in want]
    assert sum(each.stats.accepted for each in found) > 0
    assert any("tokens, which make up" in note for note in engine.notes)


def test_counts_are_kept_where_drafts_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("import os")
    made = run("draft", "build", "vocabulary", str(tmp_path / "prompts.txt"), "--max-new-tokens", "8")
    assert made.exit_code == 0 and "draft_vocab=2048" in made.stdout
    offered = run("draft", "list", "embedded?draft_vocab=256", "--json")
    assert "the draft knows 256 of 4096 tokens" in json.loads(offered.stdout)[0]["says"]


def test_what_cannot_be_cut_is_refused_in_a_sentence(tmp_path: Path) -> None:
    target = TableScorer(dirichlet_table(1), 3, "table")
    file = tmp_path / "toy.counts"
    TokenCounts.of([(1, 1, 2)], 3, "table").save(file)
    with pytest.raises(ValueError, match="the draft has only 2 tokens"):
        drafter(f"embedded?draft_vocab=2:{file}", BuildContext(target, tree=(3,)))
    with pytest.raises(ValueError, match="write a number of tokens, a file of counts, or NUMBER:FILE"):
        drafter("embedded?draft_vocab=0", BuildContext(target))
    file.write_bytes(b"no counts")
    with pytest.raises(ValueError, match="is damaged or no table of token counts"):
        drafter(f"embedded?draft_vocab={file}", BuildContext(target))
