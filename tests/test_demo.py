"""The embedded pair: small enough to ship, good enough to show, exact on the tasks it is shown with."""

import pytest
import torch

import slipstream
from slipstream.core.stats import Stats
from slipstream.models.loading.load import load_model, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED

PROMPTS = [
    "def mean(values):\n",
    'def is_prime(n):\n    """Return True if n is a prime number."""\n',
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "from collections import",
    'def read_lines(path, encoding="utf-8"):\n    """Yield the lines of a file."""\n    with',
    "for",
    "    try:\n        value = self._cache[key]\n    except KeyError:\n",
]
"""Eight prompts of different lengths."""

NEAR_TIE = 1e-3  # logits; float32 rounding of this model stays far below


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """What transformers' own greedy generate says, for each prompt alone."""
    model, tokenizer = load_model(EMBEDDED / "target", "float32", "cpu"), load_tokenizer(EMBEDDED / "target")
    outputs = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        done = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        outputs.append(done[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


@pytest.mark.parametrize("gamma", [4, *(pytest.param(gamma, marks=pytest.mark.slow) for gamma in (1, 8))])
def test_a_ragged_greedy_batch_is_what_transformers_says(gamma: int, reference: list[list[int]]) -> None:
    engine = slipstream.load(device="cpu", gamma=gamma, batch_size=8)
    for prompt, done, want in zip(PROMPTS, engine.generate(PROMPTS, max_new_tokens=12), reference, strict=True):
        got = list(done.tokens)
        if got != want:
            at = next(i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1])
            assert gap(engine, prompt, want[:at], got[at], want[at]) < NEAR_TIE, f"{prompt!r} differs at {at}"


@torch.inference_mode()
def gap(engine: slipstream.Engine, prompt: str, before: list[int], one: int, other: int) -> float:
    """Difference of two tokens' logits after a text."""
    text = torch.tensor([[*engine.encode(prompt), *before]])
    logits = engine.decoder.target.model(text).logits[0, -1]  # type: ignore[attr-defined]
    return abs(float(logits[one] - logits[other]))


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.5), (1.0, 0.5)])
def test_the_draft_is_a_good_one(temperature: float, least: float) -> None:
    """Eight short texts, fixed seed: well below the card's alpha, which is measured on many more."""
    done = slipstream.load(device="cpu").generate(PROMPTS, max_new_tokens=48, temperature=temperature)
    stats = sum((one.stats for one in done), Stats())
    assert (stats.alpha or 0) > least
    assert (stats.mean_acceptance_length or 0) > 1.7


def test_the_pair_is_small_and_has_a_card() -> None:
    files = [path for part in ("target", "draft") for path in (EMBEDDED / part).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24 * 1024 * 1024
    card = (EMBEDDED / "README.md").read_text(encoding="utf-8")
    for word in ("PSF", "bits per byte", "alpha", "demo_pair.py", "held-out"):
        assert word.lower() in card.lower(), word


def test_target_and_draft_share_one_tokenizer() -> None:
    target, draft = (load_tokenizer(EMBEDDED / name).get_vocab() for name in ("target", "draft"))
    assert target == draft and 4096 <= len(target) <= 8192
