"""Trees through real models: what a node sees is its own path, and greedy text stays what the target says."""

import pytest
import torch

from slipstream.core.draft import Draft, ancestors
from slipstream.core.request import Request
from slipstream.decoding import rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.tree import TreeDrafter, tree_parents
from slipstream.models.causal import CausalScorer
from toys.families import FAMILIES, tiny

NAMES = ["llama", "mistral", "gemma2", "gpt2", "opt"]
TEXTS = [[5, 9, 2, 33, 7, 60, 41, 3, 8], [11, 4], [17, 23, 42, 8, 1]]


@pytest.mark.parametrize("family", NAMES)
@torch.inference_mode()
def test_a_node_sees_its_own_path(family: str) -> None:
    model = tiny(FAMILIES[family])
    scorer = CausalScorer(model)
    parents, _ = tree_parents((2, 3, 1))
    tokens = (torch.arange(3 * len(parents)).view(3, -1) * 7 + 3) % 90
    draft = Draft(tokens, None, (len(parents),) * 3, parents=parents)
    scorer.add(3)
    scorer.prefill([text[:-1] for text in TEXTS])
    pending = torch.tensor([text[-1:] for text in TEXTS])
    logits = scorer.extend(torch.cat([pending, tokens], 1), [1 + len(parents)] * 3, tree=draft.tree)
    for row, text in enumerate(TEXTS):
        for node, line in enumerate(ancestors(parents)):
            path = [*text, *tokens[row, list(line)].tolist()]
            fresh = model(torch.tensor([path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row, node + 1], fresh, rtol=1e-3, atol=1e-3)
    line = ancestors(parents)[-1]
    scorer.keep([len(text) for text in TEXTS], [list(line)] * 3)
    scorer.rollback([len(text) + len(line) for text in TEXTS])
    after = scorer.extend(torch.tensor([[1], [2], [3]]), [1, 1, 1])
    for row, text in enumerate(TEXTS):
        path = [*text, *tokens[row, list(line)].tolist(), row + 1]
        fresh = model(torch.tensor([path]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(after[row, 0], fresh, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rule", [rules.TOKEN, rules.BLOCK, rules.MATCH, rules.COUPLED], ids=lambda rule: rule.name)
@pytest.mark.parametrize("shape", [(3, 2, 1), (1, 1, 1), (4,)], ids=str)
def test_greedy_trees_say_what_the_target_says(shape: tuple[int, ...], rule: rules.Rule) -> None:
    model = tiny(FAMILIES["llama"])
    target, draft = CausalScorer(model), CausalScorer(noisy(model))
    drafter = TreeDrafter(draft, shape)
    decoder = Decoder(target, drafter, rule.verify, Fixed(len(shape)), batch_size=2, rng=rule.rng)
    rows = generate(decoder, [Request(tuple(text), Sampling(), 20 + 3 * i) for i, text in enumerate(TEXTS)])
    for i, (row, text) in enumerate(zip(rows, TEXTS, strict=True)):
        want = model.generate(torch.tensor([text]), max_new_tokens=20 + 3 * i, do_sample=False, eos_token_id=None)
        assert row.tokens == want[0].tolist()
    assert sum(row.stats.accepted for row in rows) > 0
    assert sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)


def test_more_candidates_are_accepted_more_often() -> None:
    model = tiny(FAMILIES["llama"])
    lengths = {}
    for shape in ((1, 1), (3, 2)):
        drafter = TreeDrafter(CausalScorer(noisy(model)), shape)
        decoder = Decoder(CausalScorer(model), drafter, controller=Fixed(2))
        rows = generate(decoder, [Request(tuple(text), Sampling(temperature=1.0), 60, seed=3) for text in TEXTS])
        lengths[shape] = sum(row.stats.emitted for row in rows) / sum(row.stats.target_calls for row in rows)
    assert lengths[3, 2] > lengths[1, 1]


def noisy(model: torch.nn.Module) -> torch.nn.Module:
    """A draft that often, but not always, agrees."""
    other = tiny(FAMILIES["llama"])
    torch.manual_seed(1)
    for weight in other.parameters():
        weight.data += 0.1 * weight.data.std() * torch.randn_like(weight)
    return other
