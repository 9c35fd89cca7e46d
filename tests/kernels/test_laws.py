"""Laws over whole vocabularies by our kernel: torch's arithmetic, position by position, and exact verification."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verifier
from slipstream.core.law import Law
from slipstream.core.round import Context
from slipstream.decoding.acceptance import beta, block, token
from slipstream.kernels import laws
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.laws import following, greatest, laws_fit, overlap
from toys import Script, enumerate_outcomes, row

pytestmark = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")

SIZES = [1, 7, 16, 17, 77, 1024, 1025, 5000]


def chances(seed: int, *shape: int) -> Tensor:
    """Random laws in float32, some tokens without weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(shape, generator=generator) ** 3 * (torch.rand(shape, generator=generator) < 0.8)
    weights[..., 0] += 0.01
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab", SIZES)
def test_sums_over_a_vocabulary_are_those_of_float64(vocab: int) -> None:
    p, q, weights = chances(1, 2, 4, vocab), chances(2, 2, 3, vocab), torch.rand(2, 3, dtype=torch.float64)
    shared, excess = overlap(p, q, weights)
    ours = p[:, :3].double()
    torch.testing.assert_close(shared.double(), torch.minimum(ours, q.double()).sum(-1), rtol=0, atol=1e-6)
    want = (ours * weights.float().double()[..., None] - q.double()).clamp(min=0).sum(-1)
    torch.testing.assert_close(excess, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab", SIZES)
def test_the_law_that_follows_is_the_residual_or_p(vocab: int) -> None:
    p, q = chances(3, 3, 3, vocab), chances(4, 3, 2, vocab)
    q[1, 0] = p[1, 0]  # nothing is left of it
    accepted, refused = torch.tensor([1, 0, 2]), torch.tensor([True, True, False])
    weights = torch.tensor([0.9, 1.0, 0.3], dtype=torch.float64)
    found = following(p, q, accepted, refused, weights)
    rest = (0.9 * p[0, 1] - q[0, 1]).clamp(min=0)
    want = rest / rest.sum() if rest.sum() > 0 else p[0, 1]
    torch.testing.assert_close(found[0, 0], want, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[1, 0], p[1, 0]) and torch.equal(found[2, 0], p[2, 2])


def test_numbers_of_a_position_do_not_depend_on_what_stands_beside_it() -> None:
    p, q, weights = chances(5, 5, 7, 3001), chances(6, 5, 7, 3001), torch.rand(5, 7, dtype=torch.float64)
    accepted, refused = torch.randint(0, 7, (5,)), torch.ones(5, dtype=torch.bool)
    shared, excess = overlap(p, q, weights)
    after, (most, where) = following(p, q, accepted, refused, weights[:, 0]), greatest(p)
    for r, i in product(range(5), range(7)):
        part = (slice(r, r + 1), slice(i, i + 1))
        alone, rest = overlap(p[part], q[part], weights[part])
        assert torch.equal(alone, shared[part]) and torch.equal(rest, excess[part])
        assert (greatest(p[part])[0], greatest(p[part])[1]) == (most[part], where[part])
        one = following(p[r : r + 1], q[r : r + 1], accepted[r : r + 1], refused[:1], weights[r : r + 1, 0])
        assert torch.equal(one, after[r : r + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", SIZES)
def test_the_greatest_is_torchs_and_the_first_of_equals(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5, vocab, generator=torch.Generator().manual_seed(7)).mul(3).round().to(dtype)
    logits[0, 0] = -math.inf
    logits[0, 1, vocab // 2] = math.inf
    values, indices = greatest(logits)
    assert torch.equal(values, logits.float().amax(-1))
    first = (logits == logits.amax(-1, keepdim=True)).float().argmax(-1)
    assert torch.equal(indices, first)


@pytest.mark.parametrize("place", [0, 20, 76])
def test_what_is_not_a_number_is_seen(place: int) -> None:
    logits = torch.randn(1, 2, 77)
    logits[0, 1, place] = math.nan
    logits[0, 1, (place + 3) % 77] = math.inf
    values, indices = greatest(logits)
    assert values[0, 0].isfinite() and values[0, 1].isnan() and indices[0, 1] == place


def test_laws_may_lie_apart_in_memory() -> None:
    p, q, weights = chances(8, 2, 6, 99), chances(9, 2, 6, 99), torch.rand(2, 2, dtype=torch.float64)
    for found, right in zip(
        overlap(p[:, 1:3], q[:, 3:5], weights),
        overlap(p[:, 1:3].contiguous(), q[:, 3:5].contiguous(), weights),
        strict=True,
    ):
        assert torch.equal(found, right)
    assert torch.equal(greatest(p[:, ::2])[1], p.argmax(-1)[:, ::2])
    assert laws_fit(p, q[:, ::2]) and not laws_fit(p.mT) and not laws_fit(p.double())


@pytest.mark.parametrize("wrong", ["vocabulary", "weights", "count", "dtype"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    p, q, one, yes = chances(1, 1, 3, 8), chances(2, 1, 2, 8), torch.tensor([1]), torch.tensor([True])
    weight = torch.ones(1, dtype=torch.float64)
    arguments = {
        "vocabulary": (p, q[..., :7], one, yes, weight),
        "weights": (p, q, one, yes, torch.ones(1)),
        "count": (p, q, torch.tensor([2]), yes, weight),
        "dtype": (p.double(), q.double(), one, yes, weight),
    }
    with pytest.raises(RuntimeError, match="slipstream"):
        following(*arguments[wrong])


def law_of_two(p: Tensor, q: Tensor, verifier: Verifier) -> Tensor:
    """The law (vocab, vocab) of the first two tokens of a text whose positions have laws p and are drafted by q."""
    vocab, found = p.shape[-1], torch.zeros(p.shape[-1], p.shape[-1], dtype=torch.float64)
    for x, y in product(range(vocab), repeat=2):
        drafted = float(q[0, 0, x]) * float(q[0, 1, y])
        if not drafted:
            continue  # never sampled
        draft = Draft(torch.tensor([[x, y]]), Law(probs=q), (2,))
        verdicts = []

        def run(rng: Script, draft: Draft = draft, verdicts: list[object] = verdicts) -> int:
            verdicts.append(verifier(Law(probs=p), draft, Context((row([0]),), rng).draw))
            return len(verdicts) - 1

        for place, chance in enumerate_outcomes(run).items():
            chance *= drafted
            accepted, after = int(verdicts[place].accepted), verdicts[place].law.dense[0, 0].double()
            if accepted == 0:
                found += chance * after[:, None] * p[0, 1].double()
            elif accepted == 1:
                found[x] += chance * after
            else:
                found[x, y] += chance
    return found


@pytest.mark.parametrize("verifier", [token, block])
@pytest.mark.parametrize("seed", range(4))
def test_verification_by_the_kernel_has_the_targets_law(verifier: Verifier, seed: int) -> None:
    """The same enumeration in float32, where the kernel serves, up to rounding."""
    p, q = chances(seed, 1, 3, 5), chances(seed + 10, 1, 2, 5)
    assert laws_fit(p, q)
    want = p[0, 0].double()[:, None] * p[0, 1].double()
    torch.testing.assert_close(law_of_two(p, q, verifier), want, rtol=0, atol=2e-6)
    assert float(beta(Law(probs=p), Law(probs=q))[0, 0]) == pytest.approx(
        float(torch.minimum(p, q[:, [0, 1, 1]])[0, 0].sum())
    )


def test_a_residual_without_its_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(p: Tensor, q: Tensor, accepted: Tensor, refused: Tensor, weights: Tensor) -> Tensor:
        return following(p, q, accepted, refused, torch.ones_like(weights))

    monkeypatch.setattr(laws, "following", unweighted)
    p, q = chances(1, 1, 3, 5), chances(11, 1, 2, 5)
    assert (law_of_two(p, q, block) - p[0, 0].double()[:, None] * p[0, 1].double()).abs().max() > 1e-3
