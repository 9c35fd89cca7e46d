"""The loop: where texts end, what is counted, and that no text depends on what runs beside it."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.draws import request_key
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request, Row
from slipstream.core.round import Context, Round
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain, rounds
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.models.causal import CausalScorer
from toys.drafts import Altered, same_texts
from toys.families import FAMILIES, HF_VOCAB, tiny
from toys.tables import PAIRS, TableScorer, dirichlet_table, scorer
from toys.texts import GREEDY, SAMPLE, Cycle, request

V = 20


def counting(prefix: tuple[int, ...]) -> list[float]:
    """A target that counts: the next token is one more than the last."""
    return [float(token == (prefix[-1] + 1) % V) for token in range(V)]


@dataclass
class Scripted:
    """A drafter that proposes what a function of the text says, as point masses, and remembers what it saw."""

    script: Callable[[list[int]], Sequence[int]]
    asked: list[list[int]] = field(default_factory=list)
    observed: list[Round] = field(default_factory=list)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """At most `gammas[r]` tokens of the script, padded with zeros."""
        self.asked.append(list(gammas))
        drafts = [list(self.script(row.tokens))[:gamma] for row, gamma in zip(context.rows, gammas, strict=True)]
        width = max(map(len, drafts))
        tokens = torch.tensor([[*draft, *[0] * (width - len(draft))] for draft in drafts], dtype=torch.long)
        law = Law(tokens=tokens) if width else None
        return Draft(tokens.view(len(drafts), width), law, tuple(map(len, drafts)))

    def observe(self, round: Round) -> None:
        self.observed.append(round)


def right(text: list[int]) -> list[int]:
    return [(text[-1] + i) % V for i in range(1, 9)]


def wrong(text: list[int]) -> list[int]:
    """Never what the counting target will say."""
    return [text[-1]] * 8


def sometimes(text: list[int]) -> list[int]:
    """Right for as many tokens as the text's last token says, and no draft at all for multiples of five."""
    if text[-1] % 5 == 0:
        return []
    good = text[-1] % 4
    return [*right(text)[:good], 0, 0, 0]


def counter(drafter: Drafter, gamma: int = 4, context: int | None = None, batch_size: int = 8) -> Decoder:
    target = TableScorer(counting, V, "target", context)
    return Decoder(target, drafter, controller=Fixed(gamma), batch_size=batch_size)


def pair(name: str = "generic", gamma: int = 3, batch_size: int = 8) -> Decoder:
    p, q = PAIRS[name]
    drafter = ModelDrafter(scorer(q, "draft"))
    return Decoder(scorer(p, "target"), drafter, controller=Fixed(gamma), batch_size=batch_size)


def single(decoder: Decoder, one: Request) -> Row:
    (row,) = generate(decoder, [one])
    return row


# ---- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [right, wrong, sometimes], ids=lambda script: script.__name__)
@pytest.mark.parametrize("eos", range(2, 9))
def test_a_text_ends_at_eos_wherever_it_stands_in_a_round(eos: int, script: Callable[..., list[int]]) -> None:
    """As a drafted token, a correction or the bonus."""
    row = single(counter(Scripted(script)), request([1], 12, GREEDY, eos=frozenset({eos, 19})))
    assert row.output == list(range(2, eos + 1))
    assert row.finish_reason == "stop"
    assert row.stats.emitted == len(row.output)


@pytest.mark.parametrize("end", range(2, 9))
def test_a_stop_callable_ends_a_text_in_mid_round_and_is_asked_once_per_token(end: int) -> None:
    asked: list[list[int]] = []

    def stop(tokens: list[int]) -> str | None:
        asked.append(list(tokens))
        return "enough" if tokens[-1] == end else None

    row = single(counter(Scripted(right)), request([0, 1], 12, GREEDY, stop=stop))
    assert row.output == list(range(2, end + 1)) and row.finish_reason == "enough"
    assert asked == [list(range(last + 1)) for last in range(2, end + 1)]


@pytest.mark.parametrize(("eos", "reason"), [(frozenset({4}), "stop"), (frozenset[int](), "enough")])
def test_eos_comes_before_the_stop_callable_and_both_before_the_limit(eos: frozenset[int], reason: str) -> None:
    both = request([1], 3, GREEDY, eos=eos, stop=lambda tokens: "enough" if tokens[-1] == 4 else None)
    assert single(counter(Scripted(right)), both).finish_reason == reason


@pytest.mark.parametrize("limit", range(1, 12))
@pytest.mark.parametrize("script", [right, sometimes], ids=lambda script: script.__name__)
def test_the_limit_is_met_exactly_and_nothing_is_drafted_beyond_it(
    limit: int, script: Callable[..., list[int]]
) -> None:
    drafter = Scripted(script)
    row = single(counter(drafter), request([1], limit, GREEDY))
    assert row.output == list(range(2, 2 + limit)) and row.finish_reason == "length"
    rooms = [limit - sum(len(round.tokens[0]) for round in drafter.observed[:i]) for i in range(len(drafter.asked))]
    assert drafter.asked == [[min(4, room - 1)] for room in rooms]


@pytest.mark.parametrize("context", range(4, 12))
@pytest.mark.parametrize("script", [right, sometimes], ids=lambda script: script.__name__)
def test_a_full_context_ends_a_text_like_the_limit(context: int, script: Callable[..., list[int]]) -> None:
    prompts = [[1, 2, 3], [4]]
    requests = [request(prompt, 30, GREEDY) for prompt in prompts]
    decoder = counter(Scripted(script), context=context)
    decoder.target.table = lambda prefix: counting(prefix) if len(prefix) < context else pytest.fail("beyond")  # type: ignore[attr-defined]
    rows = generate(decoder, requests)
    assert [len(row.tokens) for row in rows] == [context, context]
    assert [row.finish_reason for row in rows] == ["length", "length"]
    assert [row.tokens for row in plain(decoder, requests)] == [row.tokens for row in rows]


# ---- drafts of every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_draft_that_is_the_target_gains_gamma_plus_one(gamma: int, greedy: bool) -> None:
    row = single(pair("same", gamma), request([1], 4 * (gamma + 1), GREEDY if greedy else SAMPLE))
    stats = row.stats
    assert stats.mean_acceptance_length == gamma + 1
    assert (stats.target_calls, stats.accepted, stats.drafted) == (4, 4 * gamma, 4 * gamma)
    assert stats.alpha == pytest.approx(1) and stats.draft_acceptance_rate == 1
    assert stats.acceptance_by_position == [1.0] * gamma


def test_processors_see_the_drafted_tokens_on_both_sides() -> None:
    """Penalties move the laws of target and draft alike, also inside a round: equal models still agree on all."""
    sampler = Sampling(temperature=1.0, repetition_penalty=3.0, presence_penalty=1.0, frequency_penalty=0.5)
    stats = single(pair("same", 4), request([1], 30, sampler)).stats
    assert stats.alpha == pytest.approx(1) and stats.accepted == stats.drafted == 24


@pytest.mark.parametrize("greedy", [True, False])
def test_a_draft_that_is_always_wrong_costs_no_tokens(greedy: bool) -> None:
    if greedy:
        row = single(counter(Scripted(wrong)), request([1], 10, GREEDY))
        assert row.output == list(range(2, 12))
    else:
        row = single(pair("disjoint"), request([1], 10))
    stats = row.stats
    assert (stats.accepted, stats.alpha, stats.mean_acceptance_length) == (0, 0, 1)
    assert stats.target_calls == stats.emitted == 10
    assert stats.drafted > 0 and set(stats.acceptance_by_position) == {0}


def test_rows_may_draft_nothing_while_others_draft() -> None:
    prompts = [[1], [5], [10], [3]]  # multiples of five draft nothing
    drafter = Scripted(sometimes)
    rows = generate(counter(drafter), [request(prompt, 9, GREEDY) for prompt in prompts])
    assert [row.output for row in rows] == [[(prompt[0] + i) % V for i in range(1, 10)] for prompt in prompts]
    lengths = [round.draft.lengths for round in drafter.observed]
    assert any(0 in each and max(each) > 0 for each in lengths)
    assert drafter.observed[0].draft.lengths == (4, 0, 0, 4)


def test_the_caches_hold_the_text_without_its_pending_token_after_every_round() -> None:
    decoder = pair(gamma=2)
    draft = decoder.drafter.scorer  # type: ignore[attr-defined]
    requests = [request([key % 3], 4 + key, key=key) for key in range(5)]
    ends = 0
    for round in rounds(decoder, requests):
        running = [row for row in round.rows if row.finish_reason is None]
        ends += len(round.rows) - len(running)
        assert decoder.target.texts == [row.tokens[:-1] for row in running]  # type: ignore[attr-defined]
        for row, have in zip(round.rows, draft.texts, strict=True):  # its ended rows leave with the next draft
            assert row.tokens[: len(have)] == have and len(have) < len(row.tokens)
    assert ends == 5 and decoder.target.lengths == []


# ---- what is counted --------------------------------------------------------------------------------------------


def test_statistics_of_a_scripted_text_counted_by_hand() -> None:
    drafts: dict[int, list[int]] = {
        1: [2, 3, 9, 9],  # two accepted, one tested in vain, one untested; emits 2 3 4
        4: [],  # plain; emits 5
        5: [6],  # accepted, bonus; emits 6 7
        7: [9, 8],  # rejected at once; emits 8
        8: [9, 10, 11, 12],  # 10 ends the text: two of four accepted, no more tested
    }
    drafter = Scripted(lambda text: drafts[text[-1]])
    row = single(counter(drafter), request([0, 1], 30, GREEDY, eos=frozenset({10})))
    assert row.output == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    stats = row.stats
    assert (stats.emitted, stats.target_calls) == (9, 5)
    assert (stats.drafted, stats.accepted, stats.tested, stats.beta) == (11, 5, 7, 5.0)
    assert stats.drafted_by_position == [4, 3, 2, 2]
    assert stats.accepted_by_position == [3, 2, 0, 0]
    assert stats.alpha == 5 / 7 and stats.draft_acceptance_rate == 5 / 11 and stats.mean_acceptance_length == 9 / 5
    assert stats.acceptance_by_position == [3 / 4, 2 / 3, 0, 0]
    assert {"prefill", "draft", "target", "accept", "rest"} <= set(stats.seconds)
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    sources = [[round.source(0, i) for i in range(len(round.tokens[0]))] for round in drafter.observed]
    both = ["draft", "draft"]
    assert sources == [[*both, "correction"], ["target"], ["draft", "bonus"], ["correction"], both]


@pytest.mark.parametrize("end", range(2, 7))
def test_tokens_that_are_cut_are_neither_emitted_nor_accepted(end: int) -> None:
    """Five right tokens drafted; the text ends at the last, before it, or at the bonus."""
    drafter = Scripted(lambda text: [2, 3, 4, 5])
    row = single(counter(drafter), request([1], 30, GREEDY, eos=frozenset({end})))
    emitted = end - 1
    stats = row.stats
    assert (stats.emitted, stats.accepted, stats.drafted) == (emitted, min(emitted, 4), 4)
    assert stats.tested == stats.beta == min(emitted, 4)
    (round,) = drafter.observed
    assert round.tokens == (tuple(range(2, end + 1)),) and round.accepted == (min(emitted, 4),)
    assert [round.source(0, i) for i in range(emitted)] == (["draft"] * 4 + ["bonus"])[:emitted]


def test_alpha_is_the_mean_overlap_whatever_is_drawn() -> None:
    target, draft = scorer(lambda prefix: (0.5, 0.3, 0.2)), scorer(lambda prefix: (0.1, 0.3, 0.6))
    decoder = Decoder(target, ModelDrafter(draft), controller=Fixed(3))
    stats = single(decoder, request([0], 200)).stats
    assert stats.alpha == pytest.approx(0.1 + 0.3 + 0.2, abs=1e-12)
    assert 0 < stats.accepted < stats.tested < stats.drafted


def test_statistics_add_up_over_rows() -> None:
    drafter = Scripted(sometimes)
    rows = generate(counter(drafter), [request([key], 6 + key, GREEDY) for key in range(1, 5)])
    total = sum((row.stats for row in rows), Stats())
    assert total.emitted == sum(6 + key for key in range(1, 5)) == sum(len(row.output) for row in rows)
    for name in ("accepted", "drafted", "tested", "beta", "target_calls"):
        assert getattr(total, name) == sum(getattr(row.stats, name) for row in rows)
    assert total.target_calls == sum(len(round.rows) for round in drafter.observed)
    assert total.drafted == sum(total.drafted_by_position) == sum(sum(r.draft.lengths) for r in drafter.observed)
    assert total.accepted == sum(total.accepted_by_position) == sum(sum(r.accepted) for r in drafter.observed)
    spent = sum(sum(round.seconds.values()) for round in drafter.observed)
    assert total.total_seconds - total.seconds["prefill"] == pytest.approx(spent)


def test_statistics_of_different_depth_add_position_by_position() -> None:
    left = Stats(drafted_by_position=[3, 2], accepted_by_position=[2, 1], seconds={"draft": 1.0})
    right = Stats(drafted_by_position=[1, 1, 1], accepted_by_position=[1, 0, 0], seconds={"draft": 2.0, "rest": 3.0})
    for total in (left + right, right + left):
        assert (total.drafted_by_position, total.accepted_by_position) == ([4, 3, 1], [3, 1, 0])
        assert total.seconds == {"draft": 3.0, "rest": 3.0}
    assert left.drafted_by_position == [3, 2]


# ---- rows beside each other -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generic", "zeros", "points"])
@pytest.mark.parametrize("greedy", [True, False])
def test_no_text_depends_on_its_batch(name: str, greedy: bool) -> None:
    """Nine requests of different prompts and limits, ending at different times, for one to nine places."""
    sampler = GREEDY if greedy else SAMPLE
    prompts = [(key % 3, *[(key * i) % 3 for i in range(key)]) for key in range(9)]
    requests = [
        request(prompt, 3 + 5 * (place % 3), sampler, seed=4, key=request_key(prompt), eos=frozenset({place % 4}))
        for place, prompt in enumerate(prompts)
    ]
    alone = [single(pair(name), one).output for one in requests]
    assert len({len(output) for output in alone}) > 2
    for batch_size in (1, 2, 4, 9):
        rows = generate(pair(name, batch_size=batch_size), requests)
        assert [row.output for row in rows] == alone
        assert [row.index for row in rows] == list(range(9))
    if not greedy:
        assert [row.output for row in generate(pair(name), [replace(one, seed=5) for one in requests])] != alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_of_a_model_depends_on_its_batch(temperature: float) -> None:
    """The same with Hugging Face models. Rounding could move a draw: about 300 draws at 1e-6 each."""
    sampler = Sampling(temperature=temperature, repetition_penalty=1.2)
    target, draft = tiny(FAMILIES["gemma3"]), tiny(FAMILIES["llama"], seed=1)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(HF_VOCAB, (1 + 5 * i,), generator=generator).tolist() for i in (4, 0, 2, 5, 1, 3)]
    requests = [
        request(prompt, 6 + 7 * (place % 3), sampler, seed=1, key=request_key(prompt))
        for place, prompt in enumerate(prompts)
    ]
    outputs = []
    for batch_size in (1, 4):
        drafter = ModelDrafter(CausalScorer(draft))
        decoder = Decoder(CausalScorer(target), drafter, controller=Fixed(3), batch_size=batch_size)
        outputs.append([row.output for row in generate(decoder, requests)])
    assert outputs[0] == outputs[1]
    assert [len(output) for output in outputs[0]] == [6, 13, 20, 6, 13, 20]


# ---- the draft's limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "gamma"), [(6, 2), (8, 5), (3, 5)])
def test_a_text_longer_than_the_drafts_context_is_drafted_from_a_window(context: int, gamma: int) -> None:
    """The table looks at the last token only, so a window loses nothing."""
    table = dirichlet_table(1)
    small, large = (scorer(lambda prefix: table(prefix[-1:]), "any", context=most) for most in (context, None))
    drafter = ModelDrafter(small)
    decoder = Decoder(large, drafter, controller=Fixed(gamma))
    requests = [request([0, 1, 2] * 4, 20, key=0), request([1], 20, key=1)]
    long, short = (row.stats for row in generate(decoder, requests))
    assert long.drafted == long.accepted > 0 and short.drafted == short.accepted > 0
    assert drafter.scorer.lengths == [] or max(drafter.scorer.lengths) <= max(context, gamma)


def test_a_window_leaves_the_output_alone_and_still_finds_tokens() -> None:
    """The target's own weights with a shorter context, on a prompt that does not fit."""
    target, draft = tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], max_position_embeddings=16)
    draft.load_state_dict(target.state_dict())
    drafter = ModelDrafter(CausalScorer(draft))
    decoder = Decoder(CausalScorer(target), drafter, controller=Fixed(3))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(HF_VOCAB, (length,), generator=generator).tolist() for length in (40, 5, 14)]
    requests = [request(prompt, 30, GREEDY) for prompt in prompts]
    rows = same_texts(decoder, requests)
    assert rows[0].stats.accepted > 0


@pytest.mark.parametrize("draft_vocab", [HF_VOCAB - 30, HF_VOCAB + 30])
def test_vocabularies_may_be_padded_differently(draft_vocab: int) -> None:
    """Also with prompts and outputs full of tokens that the draft does not know."""
    target, draft = tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], vocab_size=draft_vocab)
    drafter = ModelDrafter(CausalScorer(draft), vocab=HF_VOCAB)
    seen: list[int] = []

    def watch(draft: Draft) -> Draft:
        seen.extend(draft.tokens.flatten().tolist())
        return draft

    decoder = Decoder(CausalScorer(target), Altered(drafter, watch), controller=Fixed(3))
    requests = [request(prompt, 20, GREEDY) for prompt in ([HF_VOCAB - 1, 3], [5, HF_VOCAB - 7, HF_VOCAB - 2])]
    rows = same_texts(decoder, requests)
    assert any(token >= HF_VOCAB - 30 for row in rows for token in row.output)
    assert min(seen) >= 0 and max(seen) < min(draft_vocab, HF_VOCAB)


# ---- errors and unusual ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 5, r"^prompt 1 is empty: it needs at least one token\.$"),
        ([0] * 9, 5, r"^prompt 1 has 9 tokens, but target holds 9; shorten it to at most 8\.$"),
        ([0, V], 5, r"^prompt 1 has token ids outside 0\.\.19, which target knows\.$"),
        ([0, -1], 5, r"^prompt 1 has token ids outside 0\.\.19, which target knows\.$"),
        ([0], 0, r"^max_new_tokens=0 is not possible: it must be at least 1\.$"),
    ],
    ids=["empty", "too long", "unknown", "negative", "no tokens"],
)
def test_impossible_requests_are_refused_before_any_work(prompt: list[int], limit: int, message: str) -> None:
    drafter = Scripted(right)
    decoder = counter(drafter, context=9)
    with pytest.raises(ValueError, match=message):
        generate(decoder, [request([1], 3, GREEDY), request(prompt, limit, GREEDY)])
    assert drafter.asked == [] and decoder.target.lengths == []


@pytest.mark.parametrize("hf", [False, True], ids=["table", "model"])
def test_a_stream_has_the_decoder_alone_until_it_ends_or_is_closed(hf: bool) -> None:
    """Two streams would mix their rows in one cache."""
    decoder = any_decoder(hf)
    requests = [request([key % 3, 1], 8, key=key) for key in range(3)]
    want = [row.output for row in generate(any_decoder(hf), requests)]
    stream = rounds(decoder, requests)
    next(stream)
    with pytest.raises(RuntimeError, match="one call at a time"):
        generate(decoder, requests)
    texts = {row.index: row.output for round in stream for row in round.rows}
    assert [texts[index] for index in range(3)] == want, "the first stream is not disturbed"
    stream = rounds(decoder, requests)
    next(stream), next(stream)
    assert len(decoder.target.lengths) == 2
    stream.close()  # type: ignore[attr-defined]
    assert decoder.target.lengths == []
    assert [row.output for row in generate(decoder, requests)] == want
    for round in rounds(decoder, requests):  # a loop that breaks lets go of its stream
        if round.rows[0].output:
            break
    del round
    gc.collect()
    assert [row.output for row in generate(decoder, requests)] == want


def any_decoder(hf: bool) -> Decoder:
    """Two places for the rows of tables or of models."""
    if not hf:
        return pair(batch_size=2)
    drafter = ModelDrafter(CausalScorer(tiny(FAMILIES["llama"], seed=1)))
    return Decoder(CausalScorer(tiny(FAMILIES["llama"])), drafter, controller=Fixed(3), batch_size=2)


class Trouble(Exception):
    pass


@pytest.mark.parametrize("hf", [False, True], ids=["table", "model"])
@pytest.mark.parametrize("place", ["stop", "observe", "extend", "prefill", "add", "draft"])
@pytest.mark.parametrize("call", [1, 2])
def test_an_exception_leaves_the_decoder_usable(
    hf: bool, place: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised after the work is done, so that it may have left something behind."""
    decoder, calls = any_decoder(hf), count(1)
    requests = [request([key % 3, 1], 8, key=key) for key in range(3)]
    want = [row.output for row in generate(any_decoder(hf), requests)]

    def trouble(result: Any) -> Any:
        if next(calls) == call:
            raise Trouble
        return result

    asked = requests
    with monkeypatch.context() as patch:
        if place == "stop":
            asked = [replace(one, stop=lambda tokens: trouble(None)) for one in requests]
        else:
            draft = decoder.drafter.scorer  # type: ignore[attr-defined]
            owner: Any = {"observe": decoder.drafter, "draft": draft}.get(place, decoder.target)
            name = "extend" if place == "draft" else place
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **kwargs: trouble(real(*args, **kwargs)))
        with pytest.raises(Trouble):
            generate(decoder, asked)
    assert decoder.target.lengths == []
    assert [row.output for row in generate(decoder, requests)] == want


# ---- controllers ------------------------------------------------------------------------------------------------


def test_the_controller_sees_every_round_and_its_gamma_is_obeyed() -> None:
    drafter = Scripted(right)
    decoder = Decoder(TableScorer(counting, V), drafter, controller=Cycle((3, 0, 1)), batch_size=2)
    generate(decoder, [request([1], 20, GREEDY), request([4], 20, GREEDY)])
    assert [round.gammas[0] for round in drafter.observed[:5]] == [3, 0, 1, 3, 0]
    assert [round.draft.lengths for round in drafter.observed[:3]] == [(3, 3), (0, 0), (1, 1)]
    assert drafter.asked[:3] == [[3, 3], [0, 0], [1, 1]]


def test_a_row_without_room_for_a_draft_teaches_nothing_about_drafting() -> None:
    """What a controller asked for beyond the last token would look like a draft that took no time and had no tokens."""
    drafter = Scripted(right)
    decoder = Decoder(TableScorer(counting, V), drafter, controller=Fixed(3))
    generate(decoder, [request([1], 5, GREEDY)])  # 4 tokens of the first round leave room for one
    assert [round.gammas for round in drafter.observed] == [(3,), (0,)]


@pytest.mark.parametrize("decoder", [pair(gamma=0), Decoder(scorer(PAIRS["generic"][0]), Scripted(lambda text: []))])
def test_gamma_0_and_empty_drafts_are_plain_decoding(decoder: Decoder) -> None:
    requests = [request([1], 9, key=1)]
    (row,), (alone,) = generate(decoder, requests), plain(pair(), requests)
    assert row.output == alone.output and generate(decoder, []) == []
    stats = row.stats
    assert (stats.target_calls, stats.drafted, stats.alpha, stats.draft_acceptance_rate) == (9, 0, None, None)
    assert stats.mean_acceptance_length == 1
    with pytest.raises(ValueError, match=r"^gamma=-1 is not possible: it must be 0 \(plain decoding\) or more\.$"):
        Fixed(-1)
