"""The recipe of the demo pair: its attention, its texts, and gradients of several processes."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

RECIPES = Path(__file__).parents[2] / "recipes"

WORK = """
import torch
from pair import ranks

def gradient():
    weight = torch.ones(3, requires_grad=True)
    loss = ((ranks.number() + 1) * weight).sum() ** 2
    mean = ranks.averaged(loss, [weight])
    mean.backward()
    return mean.item(), weight.grad.tolist(), ranks.total(10 + ranks.number())
"""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The parts of the recipe, by their names."""
    monkeypatch.syspath_prepend(RECIPES)
    names = ("corpus", "measure", "models", "packages", "ranks")
    return SimpleNamespace(**{name: import_module(f"pair.{name}") for name in names})


def text_of(pair: SimpleNamespace, name: str, lines: list[str]) -> object:
    return pair.corpus.Source(name, "\n".join(lines) + "\n")


def test_folded_attention_is_causal_attention(pair: SimpleNamespace) -> None:
    """With fewer heads of keys than of queries; values and gradients. The control: attention that sees the future."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2))
    found, _ = pair.models.folded_attention(None, query, key, value, None, 0.25)
    found.square().sum().backward()
    ours = [tensor.grad for tensor in (query, key, value)]
    for causal in (True, False):
        query.grad = key.grad = value.grad = None
        want = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.25, enable_gqa=True)
        want.square().sum().backward()
        theirs = [tensor.grad for tensor in (query, key, value)]
        near = [torch.allclose(one, other, atol=1e-4) for one, other in zip(ours, theirs, strict=True)]
        assert torch.allclose(found, want.transpose(1, 2), atol=1e-5) == all(near) == causal


def test_copies_of_held_out_modules_are_left_out(pair: SimpleNamespace) -> None:
    """Also where other lines stand around them; files that share a line are no copies."""
    held_out = text_of(pair, "heapq.py", [f"    this is the long line of a module, number {at}" for at in range(20)])
    lines = held_out.text.splitlines()
    other = [f"        and this is another file's own line, number {at}" for at in range(60)]
    copy, mixed, own = (
        text_of(pair, name, some) for name, some in (("a", lines), ("b", lines + other), ("c", lines[:1] + other))
    )
    assert pair.corpus.without_copies([copy, mixed, own], [held_out]) == [own]


def test_windows_are_of_both_texts_in_their_shares(pair: SimpleNamespace, tmp_path: Path) -> None:
    """A tokenized text is read back from its file, without reading the sources again."""
    sources = [text_of(pair, "one.py", ["import os", "def add(a, b):", "    return a + b"] * 20)]
    tokenizer = pair.corpus.train_tokenizer(sources)
    stream = pair.corpus.Stream.stored(tmp_path / "text.npz", lambda: sources, tokenizer)
    again = pair.corpus.Stream.stored(tmp_path / "text.npz", lambda: pytest.fail("read again"), tokenizer)
    assert np.array_equal(stream.tokens, again.tokens) and len(again.line_starts) == 40
    nothing = pair.corpus.Stream(np.zeros(64, np.uint16), np.array([0]), np.array([0]))
    mixed = pair.corpus.Mixture(stream, nothing, 0.25).windows(np.random.default_rng(0), 4000, 8)
    share = float(mixed.any(1).float().mean())
    assert mixed.shape == (4000, 8) and abs(share - 0.25) < 0.035  # five standard deviations


def test_every_package_has_a_version(pair: SimpleNamespace) -> None:
    lines = pair.packages.LIST.read_text(encoding="utf-8").split()
    assert len(lines) > 50 and all(line.count("==") == 1 and line == line.lower() for line in lines)
    assert lines == sorted(lines)


@pytest.mark.slow
def test_processes_share_their_gradients(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 9 and 36 with gradients 6 and 24: each process goes on with the means. Alone, one has its own."""
    (tmp_path / "shared_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    work: ModuleType = import_module("shared_work")
    try:
        assert pair.ranks.together(2, work.gradient) == (22.5, [15.0] * 3, 21)
        assert pair.ranks.together(1, work.gradient) == (9.0, [6.0] * 3, 10)
    finally:
        sys.modules.pop("shared_work")
