"""Verifiers of chains: they decide how many drafted tokens stand, and return the law of the token after them.

They are functions from laws to laws, whose only randomness comes from the `draw` that they are called with. `p` covers
gamma + 1 positions, the draft and its law q gamma; rows may draft fewer (`draft.lengths`).
"""

import math

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Draw, Verdict, Verifier
from slipstream.core.draws import Purpose
from slipstream.core.law import Law, distance
from slipstream.kernels import laws as kernels
from slipstream.kernels.laws import laws_fit


def token(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify token by token: Algorithm 1 of arXiv 2211.17192.

    It keeps the drafted tokens up to the first that fails its test, each with chance min(1, p(x)/q(x)). The next
    token's law is the residual norm(max(0, p - q)) there, or p itself after a full acceptance (bonus).
    """
    if draft.law is None:
        return nothing_drafted(p)
    if p.tokens is not None:
        passed = draft.tokens == p.tokens[:, : draft.law.positions]  # p is one-hot: the ratio is 0 or at least 1
    else:
        q_x = draft.law.of(draft.tokens)
        keep = torch.minimum(p.first(draft.law.positions).of(draft.tokens), q_x)
        # A coin with weights (keep, q - keep): accepted iff u * q < min(p, q), the ratio test without a division.
        passed = draw(Law(probs=torch.stack([keep, q_x - keep], -1)), Purpose.ACCEPT) == 0
    accepted = leading(passed, draft)
    return Verdict(accepted, next_law(p, draft, accepted), beta(p, draft.law))


def block(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify the draft as a block (arXiv 2403.10444): keep the longest prefix that passes; no exact rule keeps more.

    b_i = min(1, b_{i-1} p(x_i)/q(x_i)) is the survival of the prefix x_1..x_i, R_i = sum_v max(b_i p_i(v) - q_i(v), 0).
    Prefix i passes with chance R_i / (R_i + 1 - b_i), the whole draft with b_gamma. ALL are tested, the longest that
    passes wins, and the residual there is norm(max(b p - q, 0)). For point masses p or q it is token verification: no
    ratio is above 1, so that as many tokens stand, and x alone loses its weight in the residual.
    """
    if draft.law is None or p.point or draft.law.tokens is not None:
        return token(p, draft, draw)
    if laws_fit(p.dense, draft.law.dense):
        b, coins, shared = kernels.block_tests(p.dense, draft.law.dense, draft.tokens, draft.counted(p.device))
    else:
        b, coins, shared = block_tests(p, draft)
    passed = draw(Law(probs=coins), Purpose.ACCEPT) == 0
    accepted = (passed * torch.arange(1, b.shape[1], device=p.device)).amax(-1)
    weight = b.gather(1, accepted[:, None])
    return Verdict(accepted, next_law(p, draft, accepted, weight), shared)


def block_tests(p: Law, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Return b_0..b_gamma, the weights (rows, gamma, 2) of the coins for "prefix i passes" and "it does not", and beta.
    At positions after the end of a row's draft the coin always says "it does not"."""
    lengths = draft.counted(p.device)[:, None]
    b = survival(p, draft)
    shared, excess = overlap(p.first(draft.q.positions), draft.q, b[:, :-1])
    place = torch.arange(1, b.shape[1], device=p.device)
    # R_1..R_gamma; the last has no q of its own, and where the draft ends the chance is b itself.
    keep = torch.where(place == lengths, b[:, 1:], torch.cat([excess[:, 1:], b[:, -1:]], 1))
    keep, lose = torch.where(place > lengths, 0.0, keep), torch.where(place > lengths, 1.0, 1 - b[:, 1:])
    sure = (keep + lose) <= 0  # 0/0 stands for certainty
    return b, torch.stack([torch.where(sure, 1.0, keep), lose], -1), shared


def survival(p: Law, draft: Draft) -> Tensor:
    """Return b_0..b_gamma of block verification, (rows, gamma + 1), computed in float64 and log space.
    Closed form: log b_i = S_i - max_{j <= i} S_j, where S_i sums the log ratios log p(x)/q(x) up to i."""
    ratio = p.first(draft.q.positions).of(draft.tokens).double().log() - draft.q.of(draft.tokens).double().log()
    sums = torch.nn.functional.pad(ratio.cumsum(-1), (1, 0))
    sums = sums.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)  # padding may hold 0/0
    return (sums - sums.cummax(-1).values).exp()


def overlap(p: Law, q: Law, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return beta_i = sum_v min(p_i(v), q_i(v)) and R_i = sum_v max(w_i p_i(v) - q_i(v), 0), both (rows, positions).
    p, q and the weights w cover the same rows and positions."""
    # In the laws' own dtype: float64 over a whole vocabulary would cost as much as the target's last layer.
    rest = p.dense * weight.unsqueeze(-1).to(p.dense.dtype)
    return beta(p, q), rest.sub_(q.dense).clamp_(min=0).sum(-1).to(weight.dtype)


def match(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Sample and match: draw the target's own choice at every position, keep the draft while it equals it.

    Exact for any draft made without looking at the choice. With draws that depend on the token's position alone
    (`draws.draw_coupled`), for target and draft alike, it is coupled, drafter-invariant sampling (arXiv
    2408.07978): the output is what the target alone would have drawn, the same text for every draft.
    """
    choice = draw(p, Purpose.NEXT)
    if draft.law is None:
        none = torch.zeros(p.rows, dtype=torch.long, device=p.device)
        return Verdict(none, Law(tokens=choice[:, :1]), _no_beta(p))
    accepted = leading(draft.tokens == choice[:, :-1], draft)
    return Verdict(accepted, Law(tokens=choice).at(accepted), beta(p, draft.law))


def everything(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Accept every drafted token without a test: for warming up, where the text does not matter."""
    if draft.law is None:
        return nothing_drafted(p)
    accepted = draft.counted(p.device)
    return Verdict(accepted, next_law(p, draft, accepted), beta(p, draft.law))


def lenient(leniency: float) -> Verifier:
    """Make the verifier of token verification with lenience l in (0, 1] (section A.5): NOT lossless for l < 1.

    Sampling: accept with chance min(1, p/(l q)); the correction comes from the ordinary residual, so that no token
    gets more than p(x)/l. Greedy: accept x if p(x) >= l max p (before standardizing). The verdict reports the price:
    which tokens passed only because of lenience, and the total-variation distance of every position's law from p.
    Raises ValueError for l outside (0, 1].
    """
    if not 0 < leniency <= 1:
        raise ValueError(f"lenience {leniency} is not possible: it must be above 0 and at most 1 (lossless).")

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        if draft.law is None:
            return nothing_drafted(p)
        rule = _lenient_greedy if p.point else _lenient_sampling
        passed, relaxed, distance = rule(p.first(draft.law.positions), draft, draw, leniency)
        accepted = leading(passed, draft)
        return Verdict(accepted, next_law(p, draft, accepted), beta(p, draft.law), relaxed, distance)

    return verify


def _lenient_sampling(p: Law, draft: Draft, draw: Draw, leniency: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens pass, which of these only by leniency, and the distance of each position's law from p."""
    p_x, q_x = p.of(draft.tokens), draft.q.of(draft.tokens)
    strict, keep = torch.minimum(p_x, q_x), torch.minimum(p_x / leniency, q_x)
    side = draw(Law(probs=torch.stack([strict, keep - strict, q_x - keep], -1)), Purpose.ACCEPT)
    return side < 2, side == 1, distance(lenient_law(p, draft.q, leniency), p)


def _lenient_greedy(p: Law, draft: Draft, draw: Draw, leniency: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens pass, which of these only by leniency, and the chance of a token other than the best."""
    assert p.scores is not None and p.tokens is not None
    bar = p.scores.amax(-1) + math.log(leniency)
    passed = (draft.tokens == p.tokens) | (p.scores.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1) >= bar)
    relaxed = passed & (draft.tokens != p.tokens)
    if draft.q.tokens is not None:
        return passed, relaxed, relaxed.float()
    good = (p.scores >= bar.unsqueeze(-1)).scatter(-1, p.tokens.unsqueeze(-1), False)
    return passed, relaxed, (draft.q.dense * good).sum(-1)  # mass that lands on tokens other than the best


def lenient_law(p: Law, q: Law, leniency: float) -> Law:
    """Return the law of one lenient position: min(q, p/l) + (1 - beta_l)/(1 - beta_1) max(0, p - q), at most p/l."""
    dense = q.dense if q.tokens is None else torch.zeros_like(p.dense).scatter_(-1, q.tokens.unsqueeze(-1), 1)
    kept = torch.minimum(dense, p.dense / leniency)
    law = kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q).dense
    assert bool((law <= p.dense / leniency + 1e-5).all()), "lenience gave a token more than p/l"
    return Law(probs=law)


def residual(p: Law, q: Law, weight: Tensor | None = None) -> Law:
    """Return norm(max(0, w p - q)), the law after a rejection (section 2.3; w = 1, or b in block verification).

    p, q and w cover the same (rows, positions). Where the residual is numerically zero, it is p itself. A point mass p
    is its own residual: the token that was rejected is another one.
    """
    if p.point:
        return p
    if q.tokens is not None:
        return Law(probs=without(p.dense.clone(), q.tokens, torch.tensor(True, device=p.device)))
    rest = p.dense.clone() if weight is None else p.dense * weight.unsqueeze(-1).to(p.dense.dtype)
    rest.sub_(q.dense).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    return Law(probs=torch.where(total > 0, rest / total, p.dense))


def without(probs: Tensor, tokens: Tensor, refused: Tensor) -> Tensor:
    """Return the residuals of laws (rows, n, vocab) after point masses at tokens (rows, n), in place.

    w p(x) <= 1 = q(x), so x alone loses its weight, whatever w is. Laws that are not `refused`, and those without other
    weight, stay as they are.
    """
    place = tokens.unsqueeze(-1)
    own = probs.gather(-1, place)
    probs.scatter_(-1, place, own.masked_fill(refused, 0))
    total = probs.sum(-1, keepdim=True)
    probs.scatter_add_(-1, place, own.masked_fill((total > 0) | ~refused, 0))
    return probs.div_(total.masked_fill((total <= 0) | ~refused, 1))


def beta(p: Law, q: Law) -> Tensor:
    """Return sum_x min(p(x), q(x)) (Theorem 3.5) at each of q's positions, (rows, gamma)."""
    ours = p.first(q.positions)
    if ours.tokens is not None:
        return q.of(ours.tokens)
    if q.tokens is not None:
        return ours.of(q.tokens)
    if laws_fit(ours.dense, q.dense):
        return kernels.overlap(ours.dense, q.dense)
    return torch.minimum(ours.dense, q.dense).sum(-1)


def leading(passed: Tensor, draft: Draft) -> Tensor:
    """Count the tokens that passed before the first that failed or was not drafted -> (rows,)."""
    assert draft.parents is None, "this verifier takes chains; `trees` has those for trees"
    if draft.ragged:
        places = torch.arange(passed.shape[1], device=passed.device)
        passed = passed & (places < draft.counted(passed.device)[:, None])
    return passed.cumprod(-1).sum(-1)


def next_law(p: Law, draft: Draft, accepted: Tensor, weight: Tensor | None = None) -> Law:
    """Return the law after the accepted tokens: the residual, with block's b as `weight`, or p where all stand."""
    if p.tokens is not None:
        return Law(tokens=p.tokens.gather(1, accepted[:, None]))
    refused = accepted < draft.counted(p.device)
    if draft.q.tokens is None and laws_fit(p.dense, draft.q.dense):
        weights = torch.ones(p.rows, dtype=torch.float64) if weight is None else weight[:, 0]
        return Law(probs=kernels.following(p.dense, draft.q.dense, accepted, refused, weights))
    here = p.at(accepted)
    q = draft.q.at(accepted.clamp(max=draft.q.positions - 1))
    if q.tokens is not None:
        return Law(probs=without(here.dense, q.tokens, refused[:, None, None]))
    return Law(probs=torch.where(refused[:, None, None], residual(here, q, weight).dense, here.dense))


def nothing_drafted(p: Law) -> Verdict:
    return Verdict(torch.zeros(p.rows, dtype=torch.long, device=p.device), p.first(1), _no_beta(p))


def _no_beta(p: Law) -> Tensor:
    return torch.empty(p.rows, 0, device=p.device)
