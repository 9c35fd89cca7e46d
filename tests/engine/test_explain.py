"""What a stream of rounds looks like, on rounds made by hand with bytes as tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream.cli.console import console, progress
from slipstream.core.draft import Draft, Verdict
from slipstream.core.law import Law
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.stats import Stats
from slipstream.decoding.sampling import Sampling
from slipstream.engine.explain import LOOKS, Explanation, breakdown

EOS = 256
HEAD = "accepted   ~rejected~   ‹correction›   «bonus»   {target alone}   ×cut off×\n\nround  kept of drafted\n"


def test_the_breakdown_names_every_phase_and_its_share_of_the_rounds() -> None:
    stats = Stats(emitted=10, seconds={"prefill": 1.0, "draft": 0.03, "target": 0.06, "accept": 0.005, "rest": 0.005})
    lines = _text(breakdown(stats)).splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == list(stats.seconds)
    assert lines[1].split()[-1] == "1.000"
    assert lines[2].split()[-3:] == ["0.030", "30.0%", "3.00"]
    assert _text(breakdown(Stats())).count("\n") == 1


def _text(table: Any) -> str:
    screen = Console(width=100, file=io.StringIO())
    screen.print(table)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def decode(tokens: Sequence[int]) -> str:
    """Bytes as a byte-level tokenizer decodes them; what is above them is special and has no text."""
    return bytes(token for token in tokens if token < EOS).decode(errors="replace")


def ids(text: str) -> list[int]:
    """A token per byte; ∎ is the end of text."""
    return [token for part in text.split("∎") for token in (*part.encode(), EOS)][:-1]


@dataclass
class Play:
    """One text, to which rounds happen."""

    row: Row

    @staticmethod
    def of(prompt: str, index: int = 0) -> Play:
        request = Request(tuple(ids(prompt)), Sampling(), max_new_tokens=100, eos=frozenset({EOS}))
        return Play(Row(request, index, list(request.prompt)))

    def round(self, proposed: str | list[int], accepted: int, own: str | list[int]) -> Round:
        """`accepted` proposals stand, then the target's `own` token comes (none, if a cut came before)."""
        draft = ids(proposed) if isinstance(proposed, str) else proposed
        emitted = (*draft[:accepted], *(ids(own) if isinstance(own, str) else own))
        self.row.tokens += emitted
        return Round(
            rows=(self.row,),
            draft=Draft(torch.tensor([draft], dtype=torch.long), None, (len(draft),)),
            verdict=Verdict(torch.tensor([accepted]), Law(tokens=torch.zeros(1, 1).long()), torch.zeros(1, len(draft))),
            tokens=(emitted,),
            accepted=(accepted,),
            gammas=(len(draft),),
            seconds={},
        )


def plain_console(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None)


def coloured_console() -> Console:
    return Console(file=io.StringIO(), width=80, color_system="standard", force_terminal=True, no_color=False)


def shown(rounds: Sequence[Round], screen: Console | None = None, names: Sequence[str] = ("",)) -> str:
    screen = screen or plain_console()
    explanation = Explanation(decode, screen, names)
    for round in rounds:
        explanation(round)
    explanation.finish()
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def lines(rounds: Sequence[Round]) -> list[str]:
    return shown(rounds).removeprefix(HEAD).split("\n\n")[0].split("\n")


def test_everything_exactly() -> None:
    play = Play.of("def f(")
    rounds = [play.round("x, y", 2, "*"), play.round("):", 2, "\n"), play.round("", 0, "∎")]
    counts: dict[str, Any] = {"emitted": 7, "accepted": 4, "drafted": 6, "tested": 5, "beta": 4.1, "target_calls": 3}
    counts |= {"drafted_by_position": [2, 2, 1, 1], "accepted_by_position": [2, 2, 0, 0]}
    play.row.stats = Stats(**counts, seconds={"prefill": 0.5, "draft": 0.25, "target": 0.75})
    assert shown(rounds) == (
        HEAD
        + "    1    2/4   x,~ y~‹*›\n"
        + "    2    2/2   ):«⏎»\n"
        + "    3    0/0   {∎}\n"
        + "\n"
        + "def f(x,‹*›):«\n"
        + "»{∎}\n"
        + "\n"
        + "alpha                   0.820  chance to keep a tested token; 5 tested\n"
        + "draft acceptance rate   0.667  4 of 6\n"
        + "mean acceptance length  2.33  tokens per target call\n"
        + "target calls            3  for 7 tokens\n"
        + "acceptance by position  1.00 1.00 0.00 0.00\n"
        + "tokens per second       7.0  without prefill\n"
        + "seconds                 1.500  prefill 0.500, draft 0.250, target 0.750\n"
        + "\n"
    )


def test_colours_instead_of_marks() -> None:
    play = Play.of("a")
    text = shown([play.round("bcd", 1, "x"), play.round("e", 1, "y"), play.round("", 0, "z")], coloured_console())
    assert "\x1b[32mb\x1b[0m\x1b[2;9;31mcd\x1b[0m\x1b[1;33mx\x1b[0m" in text
    assert "\x1b[32me\x1b[0m\x1b[1;34my\x1b[0m" in text
    assert "\x1b[35mz\x1b[0m" in text
    assert "a\x1b[32mb\x1b[0m\x1b[1;33mx\x1b[0m\x1b[32me\x1b[0m\x1b[1;34my\x1b[0m\x1b[35mz\x1b[0m" in text
    assert not {mark for look in LOOKS.values() for mark in (look.left, look.right) if mark} & set(text)


def test_every_kind_has_a_look_of_its_own() -> None:
    marks = [look.left for look in LOOKS.values()]
    styles = [look.style for look in LOOKS.values()]
    assert len(set(marks)) == len(marks) and len(set(styles)) == len(styles)


@pytest.mark.parametrize(
    ("proposed", "accepted", "own", "line"),
    [
        ("abc", 0, "x", "    1    0/3   ~abc~‹x›"),
        ("abc", 3, "x", "    1    3/3   abc«x»"),
        ("", 0, "x", "    1    0/0   {x}"),  # a plain step
        ("ab∎cd", 3, "", "    1    3/5   ab∎×cd×"),  # an accepted end of text cuts the rest
        ("abc", 2, "", "    1    2/3   ab×c×"),  # a stop string inside the accepted tokens
        ("abc", 3, "", "    1    3/3   abc"),  # a stop string at their end: no bonus
        ("ab", 1, "∎", "    1    1/2   a~b~‹∎›"),
        ("ab∎", 1, "x", "    1    1/3   a~b∎~‹x›"),
        ("a\n\n    b\tc", 10, " ", "    1   10/10  a⏎⏎····b⇥c«·»"),
        (" a b", 4, "c", "    1    4/4    a b«c»"),
        ("\x1b[2J\r\x00\x7f\u202e", 0, "x", "    1    0/10  ~␛[2J␍␀␡\\u202e~‹x›"),
    ],
)
def test_one_line_per_round(proposed: str, accepted: int, own: str, line: str) -> None:
    assert lines([Play.of("p").round(proposed, accepted, own)]) == [line]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        # é = c3 a9, ê = c3 aa, 日 = e6 97 a5
        ([([0xC3, 0xA9], 2, "x")], ["é«x»"]),
        ([([0xC3, 0xAA], 1, [0xA9])], ["~ê~‹é›"]),  # the rejected byte would have made another character
        ([([0xC3], 1, [0xA9])], ["«é»"]),
        ([([0xE6, 0x97], 2, [0xA5]), ("a", 1, "b")], ["«日»", "a«b»"]),
        ([([0x61, 0xE6], 1, [0xE6]), ([0x97], 1, [0xA5])], ["a~◌~‹◌›", "«日»"]),
        ([("ab", 1, [0xE6])], ["a~b~‹◌›"]),
    ],
)
def test_characters_split_between_tokens(rounds: list[tuple[str | list[int], int, str]], expected: list[str]) -> None:
    play = Play.of("p")
    played = [play.round(*round) for round in rounds]
    assert [line[15:] for line in lines(played)] == expected
    assert "\ufffd" not in shown(played)


def test_a_character_that_never_ends() -> None:
    play = Play.of("p")
    assert "\np‹a›{◌}\n" in shown([play.round("x", 0, "a"), play.round("", 0, [0xE6])])


def test_a_tree_shows_every_branch() -> None:
    """Nodes: a (kept) and b below the root, c (kept), d and an absent one below a, e below b."""
    play = Play.of("p")
    round = play.round("", 0, "")
    tokens = [*ids("abcd"), -1, *ids("e"), 0]
    path = torch.tensor([[0, 2]])
    verdict = Verdict(torch.tensor([2]), round.verdict.law, torch.zeros(1, 2), path=path)
    draft = Draft(torch.tensor([tokens]), None, (6,), parents=(-1, -1, 0, 0, 0, 1, 5))
    emitted = tuple(ids("acx"))
    tree = Round((play.row,), draft, verdict, (emitted,), (2,), 2, {})
    assert lines([tree]) == ["    1    2/6   ac~d~~be~«x»"]


def test_long_lines_wrap_below_themselves() -> None:
    screen = plain_console(width=40)
    text = shown([Play.of("p").round("word " * 9, 45, "x")], screen)
    start = text.index("    1  ")
    assert text[start : text.index("\n\n", start)].split("\n") == [
        "    1   45/45  word word word word word",
        "               word word word word «x»",
    ]


def test_several_texts_have_sections_and_a_total() -> None:
    plays = [Play.of("one "), Play.of("two ", index=1)]
    first, second = plays[0].round("a", 1, "b"), plays[1].round("c", 0, "d")
    plays[0].row.stats = Stats(emitted=2, accepted=1, drafted=1, target_calls=1)
    plays[1].row.stats = Stats(emitted=1, accepted=0, drafted=1, target_calls=1)
    draft = Draft(torch.tensor([ids("a"), ids("c")]), None, (1, 1))
    rows, tokens = (plays[0].row, plays[1].row), (first.tokens[0], second.tokens[0])
    both = Round(rows, draft, first.verdict, tokens=tokens, accepted=(1, 0), gammas=(1, 1), seconds={})
    text = shown([both], names=["prompt 1", "prompt 2"])
    sections = text.split("───\n")
    titles = [section.split(" ─")[0].split("\n")[-1] for section in sections[:-1]]
    assert titles == ["prompt 1", "prompt 2", "all 2 texts"]
    assert "one a«b»" in sections[1] and "draft acceptance rate   1.000  1 of 1" in sections[1]
    assert "two ‹d›" in sections[2] and "draft acceptance rate   0.000  0 of 1" in sections[2]
    assert "draft acceptance rate   0.500  1 of 2" in sections[3]


def test_one_text_is_shown_as_it_comes() -> None:
    screen, play = plain_console(), Play.of("p")
    explanation = Explanation(decode, screen)
    explanation(play.round("a", 1, "b"))
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue() == HEAD + "    1    1/1   a«b»\n"


def test_nothing_happened() -> None:
    assert shown([]) == ""


def test_figures_without_a_draft_and_with_a_lossy_rule() -> None:
    play = Play.of("p")
    rounds = [play.round("", 0, "a")]
    play.row.stats = Stats(emitted=1, target_calls=1)
    text = shown(rounds)
    assert "alpha                   -  " in text and "acceptance by position  -\n" in text
    assert "relaxed" not in text
    play.row.stats = Stats(emitted=1, target_calls=1, tested=4, relaxed=2, distance=0.5)
    text = shown(rounds)
    assert "relaxed                 2  " in text and "mean distance           0.1250  " in text


def test_markup_in_the_text_is_text() -> None:
    assert lines([Play.of("p").round("[red]", 5, ":")]) == ["    1    5/5   [red]«:»"]


@pytest.mark.parametrize(("variable", "escapes"), [("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_console_follows_the_environment(
    variable: str, escapes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv(variable, "1")
    shown_to = console()
    explanation = Explanation(decode, shown_to)
    explanation(Play.of("p").round("a", 1, "b"))
    out = capsys.readouterr().out
    assert ("\x1b[" in out) is escapes and ("«b»" in out) is not escapes


def test_progress_counts_tokens_and_ended_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("slipstream.cli.console.console", lambda stderr: screen)
    play = Play.of("p")
    with progress(2, 100) as on_round:
        on_round(play.round("a", 1, "b"))
        play.row.finish_reason = "stop"
        on_round(play.round("a", 1, "b"))
    assert isinstance(screen.file, io.StringIO)
    assert "1 of 2 prompts" in screen.file.getvalue() and "4 tokens" in screen.file.getvalue()


def test_progress_is_silent_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = plain_console()
    monkeypatch.setattr("slipstream.cli.console.console", lambda stderr: screen)
    with progress(1, 100) as on_round:
        on_round(Play.of("p").round("a", 1, "b"))
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue() == ""
