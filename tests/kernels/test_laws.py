"""Laws over whole vocabularies by our kernel: torch's arithmetic, position by position, and exact verification."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verifier
from slipstream.core.draws import inverse
from slipstream.core.law import Law
from slipstream.core.round import Context
from slipstream.decoding import acceptance
from slipstream.decoding.acceptance import beta, block, token
from slipstream.kernels import laws
from slipstream.kernels.laws import block_tests, following, greatest, laws_fit, overlap
from toys import Script, enumerate_outcomes, row
from toys.kernels import needs_kernel

pytestmark = needs_kernel

SIZES = [1, 7, 16, 17, 77, 1024, 1025, 5000]


def chances(seed: int, *shape: int) -> Tensor:
    """Random laws in float32, some tokens without weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(shape, generator=generator) ** 3 * (torch.rand(shape, generator=generator) < 0.8)
    weights[..., 0] += 0.01
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab", SIZES)
def test_sums_over_a_vocabulary_are_those_of_float64(vocab: int) -> None:
    p, q = chances(1, 2, 4, vocab), chances(2, 2, 3, vocab)
    want = torch.minimum(p[:, :3].double(), q.double()).sum(-1)
    torch.testing.assert_close(overlap(p, q).double(), want, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("vocab", SIZES)
def test_the_tests_of_a_block_are_those_of_its_formulas(vocab: int) -> None:
    """Rows that draft three tokens, two and none; torch's operations take the laws in float64."""
    p, q = chances(3, 3, 4, vocab), chances(4, 3, 3, vocab)
    tokens = torch.stack([law.multinomial(1, generator=torch.Generator().manual_seed(5))[:, 0] for law in q])
    lengths = (3, 2, 0)
    exact = acceptance.block_tests(Law(probs=p.double()), Draft(tokens, Law(probs=q.double()), lengths))
    for found, want in zip(block_tests(p, q, tokens, torch.tensor(lengths)), exact, strict=True):
        torch.testing.assert_close(found.double(), want.double(), rtol=0, atol=2e-6)


def test_a_drafted_block_that_surely_stands_or_falls() -> None:
    """p = q stands for certain; what p never says falls; behind it nothing stands, whatever the ratios."""
    even, first, second = [0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    p, q = torch.tensor([[even, even, even], [second, first, first]]), torch.tensor([[even, even], [first, first]])
    survival, coins, shared = block_tests(p, q, torch.tensor([[0, 1], [0, 0]]), torch.tensor([2, 2]))
    assert survival.tolist() == [[1, 1, 1], [1, 0, 0]] and shared.tolist() == [[1, 1], [0, 1]]
    heads = coins[..., 0] / coins.sum(-1)
    assert heads.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", SIZES)
def test_draws_invert_summed_weights(vocab: int, dtype: torch.dtype) -> None:
    """The token of a chance is the one whose summed weights pass it, whatever the total; the least is token 0."""
    weights = 3 * chances(12, 2, 50, vocab).to(dtype)
    numbers = torch.rand(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(13))
    numbers[0, :2] = torch.tensor([0.0, 1 - 2.0**-53])
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    aim = torch.minimum(numbers[..., None] * total, torch.nextafter(total, torch.zeros(1, dtype=torch.float64)))
    found = inverse(weights, numbers)
    assert torch.equal(found, (sums <= aim).sum(-1))
    assert found[0, 0] == 0 and bool((weights.gather(-1, found[..., None]) > 0).all())


def test_a_token_without_weight_is_never_drawn() -> None:
    for vocab in SIZES[1:]:
        weights = torch.zeros(1, 3, vocab)
        weights[0, 0, 0] = weights[0, 1, vocab // 2] = weights[0, 2, -1] = 1e-30
        for chance in (0.0, 0.5, 1 - 2.0**-53):
            numbers = torch.full((1, 3), chance, dtype=torch.float64)
            assert inverse(weights, numbers).tolist() == [[0, vocab // 2, vocab - 1]]


def test_draws_over_evenly_spaced_chances_have_the_law() -> None:
    law = chances(14, 1, 1, 2000)
    grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    counts = inverse(law.expand(100_000, 1, -1)[:, 0, None], grid[:, None]).flatten().bincount(minlength=2000)
    assert (counts / 100_000 - law[0, 0]).abs().max() < 2e-5
    wrong = law.flip(-1)[0, 0]
    assert (counts / 100_000 - wrong).abs().max() > 2e-4, "control: another law"


def test_numbers_of_a_position_do_not_depend_on_what_stands_beside_it() -> None:
    p, q, weights = chances(5, 5, 7, 3001), chances(6, 5, 7, 3001), torch.rand(5, 7, dtype=torch.float64)
    accepted, refused = torch.randint(0, 7, (5,)), torch.ones(5, dtype=torch.bool)
    shared = overlap(p, q)
    after, (most, where) = following(p, q, accepted, refused, weights[:, 0]), greatest(p)
    tokens, ends = torch.randint(0, 3001, (5, 7)), torch.randint(0, 8, (5,))
    tests, numbers = block_tests(p, q, tokens, ends), torch.rand(5, 7, dtype=torch.float64)
    drawn = inverse(p, numbers)
    for r in range(5):
        own = block_tests(p[r : r + 1], q[r : r + 1], tokens[r : r + 1], ends[r : r + 1])
        assert all(torch.equal(alone[0], together[r]) for alone, together in zip(own, tests, strict=True))
    for r, i in product(range(5), range(7)):
        part = (slice(r, r + 1), slice(i, i + 1))
        assert torch.equal(overlap(p[part], q[part]), shared[part])
        assert (greatest(p[part])[0], greatest(p[part])[1]) == (most[part], where[part])
        assert inverse(p[part], numbers[part]) == drawn[part]
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
    p, q = chances(8, 2, 6, 99), chances(9, 2, 6, 99)
    tokens, ends = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1])
    apart = p[:, 1:3], q[:, 3:5]
    joined = tuple(law.contiguous() for law in apart)
    assert torch.equal(overlap(*apart), overlap(*joined))
    for found, right in zip(block_tests(*apart, tokens, ends), block_tests(*joined, tokens, ends), strict=True):
        assert torch.equal(found, right)
    assert torch.equal(inverse(apart[0], numbers := torch.rand(2, 2).double()), inverse(joined[0], numbers))
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
