"""Token verification: what is kept with which chance, and the law of the token after it."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.law import Law
from slipstream.core.round import Context
from slipstream.decoding.acceptance import beta, residual, token
from toys.enumeration import Distribution, Script, enumerate_outcomes
from toys.texts import row

VOCAB = 4


def random_probs(seed: int, *shape: int, zeros: bool = False) -> Tensor:
    """Random laws in float64, some tokens without weight if `zeros`."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, VOCAB, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        weights *= torch.rand(weights.shape, generator=generator) < 0.6
        weights[..., seed % VOCAB] += 0.1
    return weights / weights.sum(-1, keepdim=True)


def one_hot(tokens: Tensor) -> Law:
    return Law(probs=torch.nn.functional.one_hot(tokens, VOCAB).float())


def verdicts(p: Law, draft: Draft) -> list[tuple[float, Verdict]]:
    rows = tuple(row([0], index=index) for index in range(len(draft.lengths)))
    found: list[Verdict] = []

    def run(rng: Script) -> int:
        found.append(token(p, draft, Context(rows, rng).draw))
        return len(found) - 1

    return [(chance, found[place]) for place, chance in enumerate_outcomes(run).items()]


def accepted_law(p: Law, draft: Draft) -> Distribution:
    law: Distribution = {}
    for chance, verdict in verdicts(p, draft):
        counts = tuple(verdict.accepted.tolist())
        law[counts] = law.get(counts, 0.0) + chance
    return law


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("copied", [False, True], ids=["dense q", "point q"])
def test_a_token_is_kept_with_chance_min_1_p_over_q(zeros: bool, copied: bool) -> None:
    p, q = random_probs(1, 1, 3, zeros=zeros), random_probs(2, 1, 2, zeros=zeros)
    for drafted in product(range(VOCAB), repeat=2):
        tokens = torch.tensor([drafted])
        if not copied and any(q[0, i, x] == 0 for i, x in enumerate(drafted)):
            continue  # never sampled
        law = Law(tokens=tokens) if copied else Law(probs=q)
        keep = [min(1.0, float(p[0, i, x]) / (1.0 if copied else float(q[0, i, x]))) for i, x in enumerate(drafted)]
        want = [1 - keep[0], keep[0] * (1 - keep[1]), keep[0] * keep[1]]
        got = accepted_law(Law(probs=p), Draft(tokens, law, (2,)))
        assert [got.get((count,), 0.0) for count in range(3)] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("zeros", [False, True])
def test_the_next_law_is_the_residual_or_the_bonus(zeros: bool) -> None:
    p, q = random_probs(3, 1, 3, zeros=zeros), random_probs(4, 1, 2, zeros=zeros)
    seen = set()
    for tokens in ([[x, y]] for x, y in product(range(VOCAB), repeat=2) if q[0, 0, x] * q[0, 1, y] > 0):
        for _, verdict in verdicts(Law(probs=p), Draft(torch.tensor(tokens), Law(probs=q), (2,))):
            count = int(verdict.accepted)
            seen.add(count)
            want = p[:, count]
            if count < 2:
                rest = (p[:, count] - q[:, count]).clamp(min=0)
                want = rest / rest.sum()
            torch.testing.assert_close(verdict.law.dense[:, 0], want, rtol=0, atol=1e-12)
    assert seen == {0, 1, 2}


def test_a_surely_accepted_draft_ends_with_the_bonus_and_a_surely_rejected_one_with_the_first_residual() -> None:
    p = torch.tensor([[[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0.1, 0.2, 0.3, 0.4]]], dtype=torch.float64)
    for first, count, law in ((1, 2, p[0, 2]), (3, 0, p[0, 0])):
        tokens = torch.tensor([[first, 2]])
        q = one_hot(tokens)
        ((chance, verdict),) = verdicts(Law(probs=p), Draft(tokens, Law(probs=q.dense * 0.5), (2,)))
        assert (chance, int(verdict.accepted)) == (pytest.approx(1), count)
        torch.testing.assert_close(verdict.law.dense[0, 0], law)


def test_padding_is_never_accepted_and_each_row_continues_from_its_own_end() -> None:
    tokens = torch.tensor([[1, 2], [1, 2], [1, 2]])
    p = random_probs(5, 3, 3)
    p[:, 0], p[:, 1] = torch.eye(VOCAB)[1], torch.eye(VOCAB)[2]  # every padding token would pass its test
    ((_, verdict),) = verdicts(Law(probs=p), Draft(tokens, one_hot(tokens), (2, 1, 0)))
    assert verdict.accepted.tolist() == [2, 1, 0]
    for place, count in enumerate((2, 1, 0)):  # the bonus, although q has a law at positions 0 and 1
        torch.testing.assert_close(verdict.law.dense[place, 0], p[place, count])


def test_rows_are_verified_independently() -> None:
    p, q = random_probs(6, 2, 2), random_probs(7, 2, 1)
    tokens = (q / p[:, :1]).argmax(-1)  # the token most likely to be rejected
    both = accepted_law(Law(probs=p), Draft(tokens, Law(probs=q), (1, 1)))
    alone = [
        accepted_law(Law(probs=p[r : r + 1]), Draft(tokens[r : r + 1], Law(probs=q[r : r + 1]), (1,))) for r in range(2)
    ]
    assert all(0 < law[(0,)] < 1 for law in alone)
    for left, right in product(range(2), repeat=2):
        assert both[(left, right)] == pytest.approx(alone[0][(left,)] * alone[1][(right,)], abs=1e-12)


@pytest.mark.parametrize("point", [False, True])
def test_gamma_0_gives_the_law_of_the_first_position(point: bool) -> None:
    p = Law(tokens=torch.tensor([[2], [1]])) if point else Law(probs=random_probs(8, 2, 1))
    ((_, verdict),) = verdicts(p, Draft.empty(2, torch.device("cpu")))
    assert verdict.accepted.tolist() == [0, 0] and verdict.beta.shape == (2, 0)
    assert verdict.law.point == point
    got, want = (verdict.law.tokens, p.tokens) if point else (verdict.law.probs, p.probs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_probabilities_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    tiny = 1e-36  # near the end of float32; p / q and 1 / q would overflow
    for p_x, q_x, keep in ((0.5, tiny, 1.0), (tiny, 0.5, 2e-36), (tiny, 4 * tiny, 0.25), (tiny, tiny, 1.0)):
        p = torch.tensor([[[p_x, 1 - p_x, 0, 0], [0, 0, 0, 1]]], dtype=dtype)
        q = torch.tensor([[[q_x, 0, 1 - q_x, 0]]], dtype=dtype)
        law = accepted_law(Law(probs=p), Draft(torch.tensor([[0]]), Law(probs=q), (1,)))
        assert law[(1,)] == pytest.approx(keep, rel=1e-5)
        for _, verdict in verdicts(Law(probs=p), Draft(torch.tensor([[0]]), Law(probs=q), (1,))):
            assert torch.isfinite(verdict.law.dense).all()
            assert float(verdict.law.dense.sum()) == pytest.approx(1, abs=1e-6)


def test_p_and_q_may_differ_in_precision() -> None:
    p, q = random_probs(9, 1, 2), random_probs(10, 1, 1).float()
    tokens = (q / p[:, :1]).argmax(-1)
    law = accepted_law(Law(probs=p), Draft(tokens, Law(probs=q), (1,)))
    want = min(1.0, float(p[0, 0, tokens[0, 0]] / q[0, 0, tokens[0, 0]]))
    assert want < 1 and law[(1,)] == pytest.approx(want, rel=1e-6)


# ---- greedy -----------------------------------------------------------------------------------------------------


def test_the_greedy_path_equals_the_general_path_on_one_hot_laws() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randint(2, (200, 4), generator=generator)
    tokens = torch.randint(2, (200, 3), generator=generator)
    lengths = tuple(torch.randint(4, (200,), generator=generator).tolist())
    results = []
    for p_law, q_law in product((Law(tokens=p), one_hot(p)), (Law(tokens=tokens), one_hot(tokens))):
        ((chance, verdict),) = verdicts(p_law, Draft(tokens, q_law, lengths))
        assert chance == 1
        following = verdict.law.tokens if verdict.law.point else verdict.law.dense.argmax(-1)
        assert verdict.law.point or float(verdict.law.dense.max(-1).values.min()) == 1
        results.append((verdict.accepted, following, verdict.beta))
    want = [next((i for i in range(n) if x[i] != y[i]), n) for x, y, n in zip(tokens, p, lengths, strict=True)]
    assert len(set(want)) == 4
    for accepted, following, kept in results:
        assert accepted.tolist() == want
        assert following[:, 0].tolist() == [int(p[r, count]) for r, count in enumerate(want)]
        torch.testing.assert_close(kept, (tokens == p[:, :3]).float(), check_dtype=False)


def test_a_greedy_target_corrects_a_sampled_draft_with_its_own_token() -> None:
    p, tokens = Law(tokens=torch.tensor([[3, 1, 2]])), torch.tensor([[3, 0]])
    ((_, verdict),) = verdicts(p, Draft(tokens, Law(probs=random_probs(11, 1, 2)), (2,)))
    assert int(verdict.accepted) == 1
    assert verdict.law.tokens is not None and verdict.law.tokens.tolist() == [[1]]


# ---- residual and beta ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
def test_the_residual_is_the_normalized_positive_part(zeros: bool) -> None:
    p, q = random_probs(12, 3, 5, zeros=zeros), random_probs(13, 3, 5, zeros=zeros)
    rest = residual(Law(probs=p), Law(probs=q)).dense
    for place in product(range(3), range(5)):
        positive = [max(0.0, x - y) for x, y in zip(p[place].tolist(), q[place].tolist(), strict=True)]
        assert rest[place].tolist() == pytest.approx([x / math.fsum(positive) for x in positive], abs=1e-12)


def test_the_residual_of_a_copied_token_is_p_without_it() -> None:
    p, copied = random_probs(14, 1, 2), torch.tensor([[2, 0]])
    rest = residual(Law(probs=p), Law(tokens=copied)).dense
    for i, x in enumerate(copied[0].tolist()):
        want = p[0, i].clone()
        want[x] = 0
        torch.testing.assert_close(rest[0, i], want / want.sum())


@pytest.mark.parametrize("scale", [1.0, 1 - 1e-6], ids=["p = q", "p below q by rounding"])
def test_where_no_residual_is_left_it_is_p(scale: float) -> None:
    q = random_probs(15, 2, 3).float()
    p = q * scale
    torch.testing.assert_close(residual(Law(probs=p), Law(probs=q)).dense, p, rtol=0, atol=0)
    certain = Law(probs=torch.eye(VOCAB)[None, :1])  # p one-hot on the very token that was copied
    torch.testing.assert_close(residual(certain, Law(tokens=torch.zeros(1, 1, dtype=torch.long))).dense, certain.dense)


def test_a_point_mass_is_its_own_residual_and_the_inputs_stay_untouched() -> None:
    p, q = random_probs(16, 1, 2), random_probs(17, 1, 2)
    point = Law(tokens=torch.tensor([[1, 1]]))
    assert residual(point, Law(probs=q)) is point
    before = p.clone(), q.clone()
    residual(Law(probs=p), Law(probs=q))
    residual(Law(probs=p), point)
    torch.testing.assert_close((p, q), before, rtol=0, atol=0)


def test_beta_is_the_sum_of_the_minima() -> None:
    p, q = random_probs(18, 2, 4, zeros=True), random_probs(19, 2, 3, zeros=True)
    tokens_p, tokens_q = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]), torch.tensor([[0, 2, 2], [1, 2, 0]])
    laws_p = (Law(probs=p), Law(tokens=tokens_p))
    laws_q = (Law(probs=q), Law(tokens=tokens_q))
    dense_p = (p, one_hot(tokens_p).dense)
    dense_q = (q, one_hot(tokens_q).dense)
    for i, j in product(range(2), range(2)):
        want = torch.minimum(dense_p[i][:, :3].double(), dense_q[j].double()).sum(-1)
        torch.testing.assert_close(beta(laws_p[i], laws_q[j]), want, check_dtype=False)
    assert float(beta(laws_p[0], laws_q[0]).std()) > 0
