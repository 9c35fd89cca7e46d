"""Drafting ahead in one process: the law, by enumeration; drafts as of a draft that waits; threads; what is refused."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request, Row
from slipstream.core.round import Context, Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, rounds
from slipstream.decoding.rules import BLOCK, COUPLED, MATCH, TOKEN, Rule
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.ahead import AheadDrafter, ExpectedText, ahead_or_waiting
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.load import load
from slipstream.serve.drafts.server import build
from toys.drafts import AtOnce
from toys.enumeration import EXACT, WRONG, NumberedScript, SharedScript, enumerate_outcomes, total_variation
from toys.tables import PAIRS, VOCAB, Table, TableScorer, plain_law, scorer
from toys.texts import GREEDY, SAMPLE, Cycle, request

TARGET, DRAFT = PAIRS["generic"]
SLOW = pytest.mark.slow
PROMPT = (0, 2)


def model(context: int | None = None) -> ModelDrafter:
    return ModelDrafter(scorer(DRAFT, "draft", context=context))


def ahead(draft: Table = DRAFT) -> AheadDrafter:
    return AheadDrafter(ModelDrafter(scorer(draft, "draft")), AtOnce())


def decoder(drafter: Drafter, gammas: Sequence[int], rule: Rule = TOKEN, **kwargs: Any) -> Decoder:
    return Decoder(scorer(TARGET), drafter, rule.verify, Cycle(tuple(gammas)), **{"rng": rule.rng, **kwargs})


# ---- the law ----------------------------------------------------------------------------------------------------


def deviation(
    make: Callable[[Table], Drafter], rule: Rule, count: int, script: Any = NumberedScript, gamma: int = 1
) -> float:
    """How far the law of texts of so many tokens is from the target's: the first round drafts, and what follows was
    drafted ahead."""
    target, draft = PAIRS["zeros"]

    def run(rng: Rng) -> tuple[int, ...]:
        parts = Decoder(scorer(target), make(draft), rule.verify, Cycle((gamma,)), rng=rng)
        return tuple(generate(parts, [request(PROMPT, count)])[0].output)

    return total_variation(enumerate_outcomes(run, 300_000, script), plain_law(target, PROMPT, count))


@pytest.mark.parametrize("rule", [TOKEN, BLOCK, pytest.param(MATCH, marks=SLOW)], ids=lambda rule: rule.name)
def test_the_law_is_the_targets(rule: Rule) -> None:
    assert deviation(ahead, rule, 4) < EXACT


@SLOW
@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=lambda rule: rule.name)
def test_the_law_with_longer_drafts_is_the_targets(rule: Rule) -> None:
    assert deviation(ahead, rule, 5, gamma=2) < EXACT


def test_the_law_of_coupled_draws_is_the_targets() -> None:
    assert deviation(ahead, MATCH, 4, SharedScript) < EXACT


class KeepsWrongGuesses:
    """The control: what was drafted for a text that was guessed is kept for the one that came, under its law."""

    def __init__(self, draft: Table) -> None:
        self._model, self._guessed = ModelDrafter(scorer(draft)), ModelDrafter(scorer(draft))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Tokens for a text with another last token, said to be drawn behind the true one."""
        draft = self._model.propose(context, gammas)
        expected = [Row(row.request, row.index, [*row.tokens[:-1], 0]) for row in context.rows]
        stale = self._guessed.propose(replace(context, rows=tuple(expected)), gammas)
        return draft if draft.law is None else replace(draft, tokens=stale.tokens)

    def observe(self, round: Round) -> None:
        self._model.observe(round)


def test_control_wrong_guesses_that_are_kept_break_the_law() -> None:
    assert deviation(KeepsWrongGuesses, TOKEN, 2) > WRONG


# ---- the drafts -------------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """A drafter whose drafts are written down: tokens and laws of every row of every round."""

    inner: Drafter
    drafts: list[Any] = field(default_factory=list)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        draft = self.inner.propose(context, gammas)
        for place, length in enumerate(draft.lengths):
            tokens = draft.tokens[place, :length].tolist()
            law = draft.law and draft.law.select(torch.tensor([place]))
            dense = law.dense[0, :length].tolist() if law and law.probs is not None else []
            self.drafts.append((context.rows[place].index, len(context.rows[place].tokens), tokens, dense))
        return draft

    def observe(self, round: Round) -> None:
        self.inner.observe(round)


KINDS = [SAMPLE, GREEDY, Sampling(temperature=0.7, top_k=2, repetition_penalty=1.2)]


def requests(kinds: Sequence[Sampling] = KINDS, count: int = 14) -> list[Request]:
    prompts = [(0, 2), (1,), (2, 2, 0, 1, 0, 2), (1, 0), (0, 1, 2, 0)]
    return [request(prompt, count - 2 * key, kinds[key % len(kinds)], key=key) for key, prompt in enumerate(prompts)]


@pytest.mark.parametrize("gammas", [(2,), (1, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("rule", [TOKEN, BLOCK, COUPLED], ids=lambda rule: rule.name)
def test_drafts_are_those_of_a_draft_that_waits(rule: Rule, gammas: Sequence[int]) -> None:
    """Token by token and law by law, in ragged batches whose rows come, go and draft in different ways."""
    ours, plain = Recorded(ahead()), Recorded(model())
    rows, others = (generate(decoder(each, gammas, rule, batch_size=3), requests()) for each in (ours, plain))
    assert [row.tokens for row in rows] == [row.tokens for row in others]
    assert ours.drafts == plain.drafts
    assert sum(row.stats.ahead for row in rows) > 0 and not any(row.stats.ahead for row in others)


def test_control_a_wrong_guess_that_is_kept_changes_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(text: ExpectedText) -> None:
        text.base, text.drafted, text.goal = len(text.row.tokens), 0, 0

    monkeypatch.setattr(ExpectedText, "settle", credulous)
    ours, plain = Recorded(ahead()), Recorded(model())
    for each in (ours, plain):
        generate(decoder(each, (2,)), requests())
    assert ours.drafts != plain.drafts


def test_a_text_longer_than_the_drafts_window_is_drafted_as_by_one_that_waits() -> None:
    ours, plain = Recorded(AheadDrafter(model(context=14), AtOnce())), Recorded(model(context=14))
    rows, others = (generate(decoder(each, (2,)), requests(count=24)) for each in (ours, plain))
    assert ours.drafts == plain.drafts
    assert sum(row.stats.windowed for row in rows) == sum(row.stats.windowed for row in others) > 0
    assert sum(row.stats.ahead for row in rows) > 0


@pytest.mark.parametrize("sampler", [SAMPLE, GREEDY])
def test_all_that_a_draft_like_the_target_guesses_is_used(sampler: Sampling) -> None:
    """Greedy, every token but those of the first and the last round is ready; sampled, as often as the guess comes."""
    parts = Decoder(scorer(TARGET), AheadDrafter(ModelDrafter(scorer(TARGET)), AtOnce()), controller=Cycle((2,)))
    row = generate(parts, [request(PROMPT, 12, sampler)])[0]
    assert row.stats.drafted == 8 and row.stats.as_dict()["ahead"] == row.stats.ahead
    assert row.stats.ahead == 6 if sampler.greedy else 0 < row.stats.ahead < 6


def test_code_of_the_users_does_not_run_in_two_threads() -> None:
    """Rows with processors of their own are drafted in their rounds only."""
    mine = Sampling(temperature=1.0, processors=[lambda ids, scores: scores])
    rows = generate(decoder(ahead(), (2,)), requests([mine, SAMPLE]))
    assert not any(row.stats.ahead for row in rows[::2]) and any(row.stats.ahead for row in rows[1::2])


# ---- threads ----------------------------------------------------------------------------------------------------


@dataclass
class Waiting:
    """Counts the tokens that a draft has read, for a target that waits for some."""

    read: int = 0
    more: threading.Condition = field(default_factory=threading.Condition)
    threads: set[str] = field(default_factory=set)

    def draft(self) -> TableScorer:
        """A draft that is counted."""
        waiting = self

        class Counted(TableScorer):
            def extend(self, tokens: Tensor, counts: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
                with waiting.more:
                    waiting.read += 1
                    waiting.threads.add(threading.current_thread().name)
                    waiting.more.notify_all()
                return super().extend(tokens, counts, *args, **kwargs)

        return Counted(DRAFT, VOCAB, "draft")

    def target(self, steps: Sequence[int]) -> TableScorer:
        """A target whose passes end after so many steps of the draft, in turn."""
        waiting = self

        class Slow(TableScorer):
            passes = 0

            def extend(self, tokens: Tensor, counts: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
                with waiting.more:
                    wanted = waiting.read + steps[self.passes % len(steps)]
                    waiting.more.wait_for(lambda: waiting.read >= wanted, 0.05)  # at the end of a text none come
                self.passes += 1
                return super().extend(tokens, counts, *args, **kwargs)

        return Slow(TARGET, VOCAB, "target")


@pytest.mark.parametrize("steps", [(0,), (1,), (3,), (2, 0, 1, 3)])
def test_texts_do_not_depend_on_how_far_the_draft_got(steps: tuple[int, ...]) -> None:
    waiting = Waiting()
    parts = Decoder(
        waiting.target(steps), AheadDrafter(ModelDrafter(waiting.draft())), BLOCK.verify, Cycle((2,)), batch_size=1
    )
    texts = [request((0, key), 15, key=key) for key in range(3)]
    rows, others = generate(parts, texts), generate(decoder(model(), (2,), BLOCK), texts)
    assert [row.tokens for row in rows] == [row.tokens for row in others]
    assert any(row.stats.ahead for row in rows) or max(steps) < 2
    assert waiting.threads and threading.main_thread().name not in waiting.threads


def test_what_the_model_raises_ahead_is_raised_and_leaves_a_drafter_that_works() -> None:
    class Failing(TableScorer):
        left = 5

        def extend(self, *args: Any, **kwargs: Any) -> Tensor:
            self.left -= 1
            if not self.left:
                raise RuntimeError("out of memory")
            return super().extend(*args, **kwargs)

    parts = decoder(AheadDrafter(ModelDrafter(Failing(DRAFT, VOCAB))), (2,))
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(parts, requests())
    again = [row.tokens for row in generate(parts, requests())]
    assert again == [row.tokens for row in generate(decoder(model(), (2,)), requests())]


def test_a_stream_that_is_left_leaves_a_drafter_that_works() -> None:
    parts = decoder(AheadDrafter(model()), (2,))
    next(iter(rounds(parts, requests())))
    rows = generate(parts, requests())
    assert [row.tokens for row in rows] == [row.tokens for row in generate(decoder(model(), (2,)), requests())]


def test_its_thread_ends_with_the_drafter() -> None:
    before = set(threading.enumerate())
    drafter = AheadDrafter(model())
    generate(decoder(drafter, (2,)), requests())
    ours = [each for each in threading.enumerate() if each not in before]
    del drafter
    for thread in ours:
        thread.join(10)
    assert len(ours) == 1 and not ours[0].is_alive()


def test_a_point_law_beside_dense_ones_stays_one() -> None:
    """A greedy row whose draft is ready, beside a sampled one that is drafted anew."""
    rows = [Row(request(PROMPT, 20, sampler), place, list(PROMPT)) for place, sampler in enumerate((GREEDY, SAMPLE))]
    drafter, rng = ahead(), TOKEN.rng
    drafter.propose(Context(tuple(rows), rng), [2, 2])
    for _ in range(3):
        rows[0].tokens.append(max(range(VOCAB), key=DRAFT(tuple(rows[0].tokens)).__getitem__))
    rows[1].tokens.append(1)
    draft = drafter.propose(Context(tuple(rows), rng), [2, 2])
    assert draft.ahead == (2, 0) and draft.law is not None and draft.law.points == (True, False)
    assert isinstance(draft.law, Law) and draft.lengths == (2, 2)


# ---- when it is chosen ------------------------------------------------------------------------------------------


class Elsewhere(TableScorer):
    """A model on another device."""

    device = torch.device("meta")


def test_a_model_goes_ahead_if_told_to_or_if_it_has_a_device_of_its_own() -> None:
    here, there = ModelDrafter(scorer(DRAFT)), ModelDrafter(Elsewhere(DRAFT, VOCAB))
    for ahead, chosen in [(None, (False, True)), (True, (True, True)), (False, (False, False))]:
        made = [ahead_or_waiting(each, scorer(TARGET), ahead) for each in (here, there)]
        assert tuple(isinstance(each, AheadDrafter) for each in made) == chosen
    assert ahead_or_waiting(there, None, None) is there


@pytest.mark.parametrize(
    ("draft", "settings"), [("embedded?ahead=true", {"tree": (2, 1)}), ("embedded?ahead=true>embedded", {})]
)
def test_where_it_is_not_possible_a_sentence_says_so(draft: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"ahead=true is not possible here: .* leave out the tree"):
        load(draft=draft, **settings)


def test_a_draft_server_goes_ahead_by_itself() -> None:
    with pytest.raises(ValueError, match="ahead=true is not possible here"):
        build("embedded?ahead=true")


def test_beams_are_drafted_by_the_model_alone() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3}
    ours, plain = (load(draft=draft, gamma=2) for draft in ("embedded?ahead=true", None))
    texts = [engine.generate(["The river"], **settings)[0].tokens for engine in (ours, plain)]
    assert texts[0] == texts[1]
