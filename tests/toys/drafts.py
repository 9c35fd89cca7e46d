"""Drafts for some rows, drafters that are changed, and the law of the texts that they lead to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Rng, draw
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request, Row, Sampler
from slipstream.core.round import Context, Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain, rounds
from slipstream.decoding.rules import Rule
from slipstream.decoding.sampling import Sampling
from toys.enumeration import Distribution, Script, Scripts, enumerate_rows, total_variation
from toys.families import HF_VOCAB
from toys.tables import VOCAB, Table, plain_law, scorer
from toys.texts import SAMPLE, Cycle, ragged, request


@dataclass(frozen=True)
class Altered:
    inner: Drafter
    change: Callable[[Draft], Draft]

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        return self.change(self.inner.propose(context, gammas))

    def observe(self, round: Round) -> None:
        self.inner.observe(round)


class Checked:
    """A drafter whose laws are compared with their definition: `laws(text, drafted)` are (vocab,), one per token."""

    def __init__(self, inner: Drafter, laws: Callable[[list[int], list[int]], Sequence[Tensor]]) -> None:
        self.inner, self.laws, self.positions = inner, laws, 0

    @torch.inference_mode()
    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        draft = self.inner.propose(context, gammas)
        for place, row in enumerate(context.rows):
            if count := draft.lengths[place]:
                assert draft.law is not None
                laws = torch.stack([*self.laws(list(row.tokens), draft.tokens[place, :count].tolist())])
                torch.testing.assert_close(draft.law.dense[place, :count], laws, rtol=0, atol=2e-5)
                self.positions += count
        return draft

    def observe(self, round: Round) -> None:
        self.inner.observe(round)


def propose(drafter: Drafter, rows: Sequence[Row], gammas: Sequence[int]) -> Draft:
    return drafter.propose(Context(tuple(rows), draw), gammas)


def drafted(drafter: Drafter, rows: Sequence[Row], gammas: Sequence[int]) -> list[list[int]]:
    draft = propose(drafter, rows, gammas)
    return [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def same_texts(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """The rows of these requests, whose texts have to be those of plain decoding."""
    rows, expected = generate(decoder, requests), plain(decoder, requests)
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    return rows


def company_changes_nothing(alone: Decoder, requests: Sequence[Request] | None = None) -> None:
    """Texts are the same in batches of 2 and 3; some end at an EOS, also inside an accepted draft."""
    if requests is None:
        ends = frozenset(range(0, HF_VOCAB, 4))
        requests = [replace(one, eos=ends, max_new_tokens=5 + 6 * one.key) for one in ragged(SAMPLE)]
    single = [row.tokens for row in generate(alone, requests)]
    for size in (2, 3):
        together = generate(replace(alone, batch_size=size), requests)
        assert [row.tokens for row in together] == single
        assert any(row.finish_reason == "stop" for row in together)


def first_tokens(
    make: Callable[[Rng], Decoder],
    prompt: Sequence[int],
    count: int,
    limit: int,
    sampler: Sampler = SAMPLE,
    **asked: Any,
) -> Distribution:
    """The joint law of the first `count` tokens of a text of `limit`; many branches are rows of one batch."""

    def run(scripts: Sequence[Script]) -> list[tuple[int, ...]]:
        decoder, texts = replace(make(Scripts(scripts)), batch_size=len(scripts)), dict[int, list[int]]()
        requests = [request(prompt, limit, sampler, key=key, **asked) for key in range(len(scripts))]
        for round in rounds(decoder, requests):
            for row in round.rows:
                if row.finish_reason or len(row.output) >= count:
                    texts[row.request.key], scripts[row.request.key].ended = row.output, True
            if len(texts) == len(scripts):
                break
        return [tuple(texts[key][:count]) for key in range(len(scripts))]

    return enumerate_rows(run, 300_000, last=len(prompt) + limit - 1)


def law_distance(
    target: Table,
    make: Callable[[], Drafter],
    rule: Rule,
    gammas: tuple[int, ...],
    prompt: Sequence[int],
    count: int = 3,
    sampler: Sampling = SAMPLE,
) -> float:
    """The distance of the law of the first `count` tokens from the target's, at the sampler's temperature."""

    def decoder(rng: Rng) -> Decoder:
        return Decoder(scorer(target), make(), rule.verify, Cycle(gammas), rng=rng)

    def step(prefix: tuple[int, ...]) -> list[float]:
        weights = [chance ** (1 / sampler.temperature) for chance in target(prefix)]
        return [weight / sum(weights) for weight in weights]

    found = first_tokens(decoder, prompt, count, count + 1, sampler)
    return total_variation(found, plain_law(step, prompt, count))


def text_law(
    decoder: Decoder, count: int = 3, prompt: Sequence[int] = (0, 2), sampler: Sampler = SAMPLE
) -> Distribution:
    """All texts of so many tokens, and their chances."""
    return first_tokens(lambda rng: replace(decoder, rng=rng), prompt, count, count, sampler)


def law_error(decoder: Decoder, count: int = 3, prompt: Sequence[int] = (0, 2)) -> float:
    """The distance between the law of whole texts and that of the target's model, by enumeration of all draws."""
    model = decoder.target.model  # type: ignore[attr-defined]

    @torch.inference_mode()
    def step(prefix: tuple[int, ...]) -> list[float]:
        found: list[float] = model(torch.tensor([prefix]), use_cache=False).logits[0, -1].softmax(-1).tolist()
        return found

    return total_variation(text_law(decoder, count, prompt), plain_law(step, prompt, count))


def drop_what_looks_bad(draft: Draft) -> Draft:
    """A fault of drafters: it drops a token after it was sampled, because the draft itself did not expect it."""
    return draft if draft.law is None else replace(draft, lengths=likely(draft, 0))


def likely(draft: Draft, more: int) -> tuple[int, ...]:
    """How many tokens of each row stand before the first unlikely one, and so many more."""
    assert draft.law is not None
    counts = (draft.law.of(draft.tokens) > 0.3).long().cumprod(1).sum(1) + more
    return tuple(map(min, counts.tolist(), draft.lengths))


def flat(draft: Draft) -> Draft:
    """A fault of drafters on three tokens: the same draft, said to be drawn evenly."""
    even = torch.full((*draft.tokens.shape, VOCAB), 1 / VOCAB, dtype=torch.float64)
    return draft if draft.law is None else replace(draft, law=Law(probs=even))
