"""The rows of all clients of a draft server, in one batch of one drafter.

Each row holds the text that its client has committed and, behind it, tokens that were drafted ahead. A commit that
equals the guessed tokens keeps the rest of them; any other discards the tokens that it contradicts, by position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.draws import Key, Rng, RowByRow, draw, draw_coupled
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Traits
from slipstream.core.request import Request, Row
from slipstream.core.round import Context, Round
from slipstream.core.source import check_source
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.remote.frames import FrameError
from slipstream.drafters.remote.messages import AskRow, DraftMode, DraftRow, OpenRow, SentLaw
from slipstream.text.jsontext import json_text

Name = tuple[int, int]  # name of a row: its client, and the number that the client gave it
ENDLESS = 1 << 62  # length limit of texts at the server: practically none, because clients end their texts themselves


@dataclass
class Served:
    """A row of a client: `row.tokens` are the `base` committed tokens and up to `goal` tokens drafted ahead.

    In mode `LAW`, `laws` and `drawn_by` have an entry for each token ahead: the law it was drawn from, and the number
    that drew it. `numbers` draw the `gamma` tokens of the present round, and `later` those of the next if all of these
    are accepted.
    """

    opened: OpenRow
    row: Row
    base: int
    laws: list[SentLaw] = field(default_factory=list)
    drawn_by: list[float | None] = field(default_factory=list)
    gamma: int = 0
    goal: int = 0
    numbers: tuple[float, ...] = ()
    later: tuple[float, ...] = ()

    @property
    def ahead(self) -> list[int]:
        return self.row.tokens[self.base :]

    @property
    def rng(self) -> Rng:
        if self.opened.mode == DraftMode.LAW:
            return ByNumbers(self)
        return draw_coupled if self.opened.mode == DraftMode.COUPLED else draw

    def number(self, position: int) -> float | None:
        """Return the number that draws the token at a position of the text, or None for the most probable token.

        It is None for the guess at the bonus token, and for tokens beyond the ones that numbers were sent for, which
        are drafted only because other rows need longer drafts.
        """
        place = position - self.base
        numbers = [*self.numbers[: self.gamma], None, *self.later]
        return numbers[place] if len(self.numbers) >= self.gamma and place < len(numbers) else None

    def commit(self, ask: AskRow, ahead: bool) -> tuple[int, list[int]]:
        """Apply a client's commit -> how many tokens of the old text stay valid, and the new text.

        The new text may end with tokens drafted ahead. Raises FrameError for a commit that does not fit the known text,
        and without the numbers that mode `LAW` needs.
        """
        if ask.keep > self.base:
            raise FrameError(f"row {ask.row} is not known as far as that: open it")
        if self.opened.mode == DraftMode.LAW and len(ask.numbers) < ask.gamma:
            raise FrameError(f"row {ask.row} has no numbers to draw with")
        old, committed = self.row.tokens, [*self.row.tokens[: ask.keep], *ask.tail]
        if not committed:
            raise FrameError(f"row {ask.row} would have no text")
        stand = next((i for i, (a, b) in enumerate(zip(old, committed, strict=False)) if a != b), None)
        stand = min(len(old), len(committed)) if stand is None else stand
        guessed = old[len(committed) :] if stand == len(committed) else []
        skipped = len(committed) - self.base
        laws, used = self.laws[skipped:] if skipped >= 0 else [], self.drawn_by[skipped:] if skipped >= 0 else []
        self.base, self.numbers, self.later, self.gamma = len(committed), ask.numbers, ask.later, ask.gamma
        if self.opened.mode == DraftMode.LAW:
            # The guessed tokens that were drawn by the same numbers that the client now sends for them stay.
            same = (a == b for a, b in zip(used, self.numbers, strict=False))
            guessed = [token for token, _ in zip(guessed, takewhile(bool, same), strict=False)]
        self.laws, self.drawn_by = laws[: len(guessed)], used[: len(guessed)]
        further = ahead and (self.opened.mode != DraftMode.LAW or len(self.later) >= ask.gamma)
        self.goal = 2 * ask.gamma + 1 if further else ask.gamma
        return min(stand + len(guessed), len(old)), [*committed, *guessed]

    def take(self, tokens: Sequence[int], law: Law | None) -> None:
        """Append drafted tokens; in mode `LAW`, store their laws, cut from `law` (1, positions), and their numbers."""
        for place, token in enumerate(tokens):
            if self.opened.mode == DraftMode.LAW and law is not None:
                self.drawn_by.append(self.number(len(self.row.tokens)))
                self.laws.append(_sent(law, place, self.opened.top))
            self.row.tokens.append(token)

    def draft(self) -> DraftRow:
        tokens = tuple(self.ahead[: self.gamma])
        return DraftRow(self.opened.row, tokens, tuple(self.laws[: len(tokens)]))


def _sent(law: Law, position: int, top: int) -> SentLaw:
    if law.probs is None:
        return SentLaw((int(law.ids[0, position]),), (1.0,))
    return SentLaw.cut(law.probs[0, position], top)


@dataclass(frozen=True)
class ByNumbers:
    """An `Rng` that draws from laws as they are sent (cut), with the numbers of the row's client."""

    served: Served
    coupled = False

    def __call__(self, law: Law, key: Key) -> Tensor:
        tokens = list[int]()
        for place in range(law.positions):
            sent = _sent(law, place, self.served.opened.top)
            number = self.served.number(key.positions[0] + place)
            tokens.append(sent.best if number is None else sent.draw(number))
        return torch.tensor([tokens], device=law.device)

    def chances(self, key: Key, positions: int) -> None:
        """Return None, so that no compiled graph draws: laws are cut before tokens are drawn; see `Rng`."""

    def select(self, places: Sequence[int]) -> Rng:
        return self


class DraftRows:
    """The rows of all clients, and the drafter that serves them; all calls must come from one thread.

    Requests of several clients at the same time are served by the same passes. Only a drafter of one model drafts
    ahead: others cost nothing, and what they read cannot be rolled back.
    """

    def __init__(self, drafter: Drafter, most_rows: int) -> None:
        self.drafter, self.most_rows = drafter, most_rows
        self.rows: dict[Name, Served] = {}
        self._samplers: dict[str, Sampling] = {}
        traits = Traits.of(drafter)
        self._goes_ahead, self._scorers = traits.model is not None and not traits.on_target_rows, traits.scorers

    def open(self, client: int, opened: OpenRow) -> None:
        """Add a row, replacing one of the same name.
        Raises FrameError if there are too many rows, or if the draft cannot read its source."""
        self.close(client, opened.row)
        if len(self.rows) >= self.most_rows:
            raise FrameError(f"this draft server serves {self.most_rows} rows at once: use less, or raise --max-rows")
        # Rows with equal settings share a sampler, so that their laws are computed together.
        if len(self._samplers) > 256:
            self._samplers.clear()
        settings = f"{opened.mode} {json_text(opened.sampling, sort_keys=True)}"
        request = Request(
            opened.text[: opened.prompt],
            self._samplers.setdefault(settings, opened.sampler()),
            ENDLESS,
            seed=opened.seed,
            key=opened.key,
            source=opened.source or None,
        )
        try:
            for scorer in self._scorers:
                if scorer.source_form is not None:
                    check_source(scorer.source_form, request.source, "the row", scorer.name)
        except ValueError as error:
            raise FrameError(str(error)) from None
        self.rows[client, opened.row] = Served(opened, Row(request, 0, list(opened.text)), len(opened.text))

    def close(self, client: int, row: int) -> None:
        if (served := self.rows.pop((client, row), None)) is not None:
            served.row.finish_reason = "abort"

    def reset(self, client: int | None = None) -> None:
        """Remove the rows of a client, or all."""
        for name in [name for name in self.rows if client in (None, name[0])]:
            self.close(*name)

    def commit(self, client: int, asks: Sequence[AskRow], ahead: bool) -> list[Served]:
        served = list[Served]()
        for ask in asks:
            if (client, ask.row) not in self.rows:
                raise FrameError(f"row {ask.row} is not known: open it")
            served.append(self.rows[client, ask.row])
        texts = list[tuple[Row, list[int], int]]()
        for each, ask in zip(served, asks, strict=True):
            stand, text = each.commit(ask, ahead and self._goes_ahead)
            texts.append((each.row, text, stand))
        # Replace the texts of rows; the drafter is first rolled back to the tokens that stay valid.
        new = {id(row): tuple(text[stand:]) for row, text, stand in texts}
        for row, text, stand in texts:
            row.tokens[:] = [*text[:stand], *text[stand : stand + 1]]
        self._observe(((),) * len(self.rows))
        for row, text, _ in texts:
            row.tokens[:] = text
        self._observe(tuple(new.get(id(served.row), ()) for served in self.rows.values()))
        return served

    def draft(self, asking: Sequence[Served]) -> None:
        lacking = {id(each): max(0, each.gamma - len(each.ahead)) for each in asking}
        if any(lacking.values()):
            self._propose([lacking.get(id(each), 0) for each in self.rows.values()])

    def go_ahead(self) -> bool:
        """Draft one more token for every row with fewer tokens ahead than its goal -> whether there was one."""
        lacking = [len(each.ahead) < each.goal for each in self.rows.values()]
        if not self._goes_ahead or not any(lacking):
            return False
        self._propose([int(each) for each in lacking])
        return True

    @torch.inference_mode()
    def _propose(self, gammas: Sequence[int]) -> None:
        """Draft up to `gammas[r]` more tokens for every row in one call, and append them to its text."""
        every = list(self.rows.values())
        context = Context(tuple(each.row for each in every), RowByRow.of([each.rng for each in every]))
        draft = self.drafter.propose(context, gammas)
        tokens = draft.tokens.tolist()
        for place, served in enumerate(every):
            law = draft.law.select(torch.tensor([place], device=draft.law.device)) if draft.law else None
            served.take(tokens[place][: draft.lengths[place]], law)
        self._observe(((),) * len(every))

    def _observe(self, new: tuple[tuple[int, ...], ...]) -> None:
        """Call the drafter's `observe` after texts have changed, as after a round that emitted the new tokens."""
        rows = tuple(served.row for served in self.rows.values())
        none = torch.zeros(len(rows), dtype=torch.long)
        verdict = Verdict(none, Law(tokens=none[:, None]), none[:, None].float()[:, :0])
        draft = Draft.empty(len(rows), none.device)
        self.drafter.observe(Round(rows, draft, verdict, new, (0,) * len(rows), (1,) * len(rows), {}))
