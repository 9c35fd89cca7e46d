"""Specifications of drafts: what is read, what is built, and every wrong one in one sentence."""

from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.choice import Bandit, Choice
from slipstream.drafters.kinds import KINDS
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import Ngram, NgramModel
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.drafters.specification import Chain, DrafterTerm, OneOf, drafter, parse
from slipstream.drafters.tree import TreeDrafter
from slipstream.kernels.packing import lowest_bits
from slipstream.measure.environment import scorers
from slipstream.models.loading.pairings import EMBEDDED
from toys.kernels import needs_kernel
from toys.tables import dirichlet_table, scorer

TARGET = scorer(dirichlet_table(1), "target")


@pytest.fixture
def context() -> BuildContext:
    return BuildContext(TARGET)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("gpt2", DrafterTerm("model", "gpt2")),
        ("Qwen/Qwen2.5-0.5B", DrafterTerm("model", "Qwen/Qwen2.5-0.5B")),
        ("./lookup", DrafterTerm("model", "./lookup")),
        (r"C:\models\tiny", DrafterTerm("model", r"C:\models\tiny")),
        ("model:lookup", DrafterTerm("model", "lookup")),
        ("tiny?dtype=bfloat16", DrafterTerm("model", "tiny", (("dtype", "bfloat16"),))),
        (" lookup ", DrafterTerm("lookup")),
        ("ngram:C:/a.ngram", DrafterTerm("ngram", "C:/a.ngram")),
        ("lookup?factor=2&offset=0", DrafterTerm("lookup", "", (("factor", "2"), ("offset", "0")))),
        ("lookup?prompt_lookup_max=3", DrafterTerm("lookup", "", (("max_matching_ngram_size", "3"),))),
    ],
)
def test_a_prefix_is_a_kind_only_if_the_table_knows_it(text: str, part: DrafterTerm) -> None:
    assert parse(text) == part


A, B, C = DrafterTerm("model", "a"), DrafterTerm("model", "b"), DrafterTerm("lookup")


@pytest.mark.parametrize(
    ("text", "syntax"),
    [
        ("a>b", Chain((A, B))),
        ("a > b > x/y", Chain((A, B, DrafterTerm("model", "x/y")))),
        ("lookup|a>b", OneOf((C, Chain((A, B))))),
        ("lookup|a||b", OneOf((OneOf((C, A)), B), measured=True)),
        ("lookup?gamma=2>a", Chain((DrafterTerm("lookup", "", (("gamma", "2"),)), A))),
    ],
)
def test_chains_bind_tighter_than_choices(text: str, syntax: Any) -> None:
    assert parse(text) == syntax


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("embedded>", "has no name: use model:NAME"),
        ("|embedded", "has no name"),
        ("embedded>lookup", "'lookup' cannot be drafted for: only a model"),
        ("lookup?gamma=0>embedded", "gamma=0 is not possible within a chain"),
        ("lookup?gamma=few>embedded", "gamma='few' is not possible: write a whole number"),
        ("lookup?gamma=3", "'lookup' has no option 'gamma'"),
    ],
)
def test_wrong_chains_are_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        slipstream.load(draft=text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no name: use model:NAME"),
        ("ngram", "write ngram:FILE"),
        ("ngram:", "write ngram:FILE"),
        ("lookup:3", "write lookup"),
        ("lookup?", "option without a value"),
        ("lookup?factor", "option without a value"),
        ("lookup?size=3", "'lookup' has no option 'size': it knows prompt_lookup_num_tokens"),
        ("lookup?factor=much", "factor='much' is not possible: write a number"),
        ("lookup?min_matching_ngram_size=0", "min_matching_ngram_size=0 is not possible"),
        ("datastore:x?own=maybe", "own='maybe' is not possible: write true or false"),
        ("./nowhere", "no such folder"),
        ("gbv:3", "there is no such folder, and the hub has no such names"),
        ("embedded?quantize=int3", "quantize='int3' is not possible: write int8, int4, or"),
        ("embedded?quantize=int4?group=7", "int4.group=7' is not possible: write int8, int4, or"),
        ("embedded?quantize=int4&group=64", "'embedded' has no option 'group'"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, says: str, context: BuildContext) -> None:
    with pytest.raises(ValueError, match=says) as error:
        drafter(text, context)
    assert len(str(error.value).splitlines()) == 1


def test_the_table_is_what_can_be_written(context: BuildContext) -> None:
    for name, kind in KINDS.items():
        assert kind.form.partition(":")[0] == name and kind.about


def test_kinds_are_built(context: BuildContext, tmp_path: Path) -> None:
    NgramModel.fit([[0, 1, 2, 0, 1, 1]], 2, 3).save(tmp_path / "three.ngram")
    built = drafter(f"ngram:{tmp_path}/three.ngram", context)
    assert isinstance(built, Ngram) and built.model.order == 2
    copying = drafter("lookup?prompt_lookup_num_tokens=4&factor=0.5", context)
    assert isinstance(copying, Lookup) and (copying.prompt_lookup_num_tokens, copying.factor) == (4, 0.5)
    assert drafter(copying, context) is copying
    with pytest.raises(ValueError, match="knows 3 token ids, the target 4"):
        drafter(f"ngram:{tmp_path}/three.ngram", BuildContext(scorer(dirichlet_table(1), vocab=4)))
    with pytest.raises(FileNotFoundError, match="no n-gram model"):
        drafter("ngram:nowhere.ngram", context)


def test_a_tree_needs_a_model() -> None:
    with pytest.raises(ValueError, match="a tree of candidates needs a model"):
        slipstream.load(draft="lookup", tree=(2, 1))
    with pytest.raises(ValueError, match="goes with a model"):
        slipstream.load(draft=Lookup(), tree=(2, 1))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((1000, 1000), "is too large: all levels together may hold 1024 candidates"),
        ((1000, 1000, 1000), "is too large"),
        ((10**30,), "is too large"),
        ((1,) * 65, r"\(1, 1, 1, 1, 1, 1, 1, 1, \.\.\.\) is too large: .* in at most 64 levels"),
        ((), "give 1 or more candidates per level"),
        ((2, 0), "give 1 or more candidates per level"),
        ((2.5, True), "give 1 or more candidates per level"),
        ("3,2", r"give candidates per level, such as \(3, 2, 1\)"),
        (3, r"give candidates per level, such as \(3, 2, 1\)"),
    ],
)
def test_trees_are_bounded_before_anything_is_loaded(shape: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        slipstream.load("no/such-model", "embedded", tree=shape)


def test_a_tree_has_no_more_candidates_than_tokens() -> None:
    with pytest.raises(ValueError, match=r"\(5,\) is not possible: the draft has only 4 tokens"):
        TreeDrafter(scorer(dirichlet_table(1), vocab=4), (5,))


def test_a_tree_needs_a_draft_and_no_gamma() -> None:
    with pytest.raises(ValueError, match="a tree of candidates needs a draft model"):
        slipstream.load(EMBEDDED / "target", tree=(2, 1))
    with pytest.raises(ValueError, match="tree and gamma=4 exclude each other"):
        slipstream.load(draft="embedded", tree=(3, 2), gamma=4)
    assert slipstream.load(draft="embedded", tree=(3, 2), gamma="auto").decoder.controller.most == 2


def test_a_draft_model_is_quantized_and_the_target_is_not() -> None:
    engine = slipstream.load(draft="embedded?quantize=int4")
    target, draft = (lowest_bits(each.model) for each in scorers(engine.decoder))
    assert (target, draft) == (None, 4)


@pytest.mark.parametrize(
    ("draft", "tree", "kind"),
    [
        (None, None, ModelDrafter),
        pytest.param(EMBEDDED / "draft", None, ModelDrafter, marks=pytest.mark.slow),
        (f"{EMBEDDED}/draft?dtype=bfloat16", (2, 1), TreeDrafter),
        pytest.param("embedded", (2, 1), TreeDrafter, marks=pytest.mark.slow),
        pytest.param(f"{EMBEDDED}/draft?quantize=int8", None, ModelDrafter, marks=pytest.mark.slow),
        ("embedded?quantize=int4?group=64", (2, 1), TreeDrafter),
        ("lookup", None, Lookup),
        ("lookup?gamma=2>embedded", None, ChainDrafter),
        ("lookup|embedded", None, Choice),
        ("lookup|embedded||plain", None, Bandit),
        (Lookup(), None, Lookup),
        *(pytest.param(name, None, SameRowsDrafter, marks=needs_kernel) for name in ("int4", "window:8")),
        pytest.param("window:8?weights=int4&sinks=2", None, SameRowsDrafter, marks=needs_kernel),
        pytest.param("int4?group=64", None, SameRowsDrafter, marks=[needs_kernel, pytest.mark.slow]),
        pytest.param("lookup|int4", None, Choice, marks=[needs_kernel, pytest.mark.slow]),
        pytest.param("lookup>int8", None, ChainDrafter, marks=needs_kernel),
    ],
)
def test_load_takes_them_all_and_text_stays_the_targets(draft: Any, tree: Any, kind: type, engine: Any) -> None:
    made = slipstream.load(draft=draft, tree=tree)
    assert isinstance(made.decoder.drafter, kind)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
    fast, slow = made.generate(prompt, max_new_tokens=12)[0], engine.generate(prompt, max_new_tokens=12, plain=True)[0]
    assert fast.tokens == slow.tokens and fast.stats.accepted
