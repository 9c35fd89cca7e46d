"""Prints rounds in a terminal: a line per round as in the paper's Figure 1, the whole text coloured by the origin of
each token, and the figures.

Without colours every kind of token has marks instead, so that the output is readable in a file. A Console with
`record=True` also exports HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.core.stats import Stats
from slipstream.text.detokenize import Decode, Detokenizer

if TYPE_CHECKING:
    from slipstream.core.request import Row
    from slipstream.core.round import Round


INCOMPLETE = "◌"  # a token that is a character only together with later ones
END = "∎"  # an end-of-text token


@dataclass(frozen=True)
class Look:
    """The look of a kind of token: a rich style with colours, or marks around it without, and its meaning."""

    style: str
    left: str
    right: str
    meaning: str


LOOKS = {
    "draft": Look("green", "", "", "accepted"),
    "rejected": Look("dim red strike", "~", "~", "rejected"),
    "correction": Look("bold yellow", "‹", "›", "correction"),
    "bonus": Look("bold blue", "«", "»", "bonus"),
    "target": Look("magenta", "{", "}", "target alone"),
    "cut": Look("dim", "×", "×", "cut off"),
}
"""The looks of tokens by their `Round.source`, and `rejected` and `cut` for drafted tokens that were not emitted."""


@dataclass(frozen=True)
class Span:
    """The text of one token (empty if it only begins a character) and its kind, a key of LOOKS."""

    text: str
    kind: str


@dataclass(frozen=True)
class RoundLine:
    """A round of one text: the drafted tokens that stand, those that were refused, and the target's own token."""

    spans: tuple[Span, ...]
    accepted: int
    drafted: int


class Story:
    """The rounds of one text, as lines and as the coloured spans of the output."""

    def __init__(self, row: Row, decode: Decode) -> None:
        self.row = row
        self.lines: list[RoundLine] = []
        self.spans: list[Span] = []
        self._decode = decode
        self._tokens = list(row.request.prompt)
        self._reader = Detokenizer(decode, self._tokens)

    def add(self, round: Round, place: int) -> RoundLine:
        """Add a round, in which the text is at `place` -> its line."""
        accepted, emitted = round.accepted[place], round.tokens[place]
        fate = "rejected" if len(emitted) > accepted else "cut"
        lost, spans = list[Span](), list[Span]()
        for depth, tokens in _lost(round, place):
            reader = Detokenizer(self._decode, [*self._tokens, *emitted[:depth]])
            lost.append(Span("".join(_closed([self._shown(reader, token) for token in tokens])), fate))
        for i, token in enumerate(emitted):
            self._tokens.append(token)
            spans.append(Span(self._shown(self._reader, token), round.source(place, i)))
        self.spans += spans
        shown = _closed([span.text for span in spans])
        own = [Span(text, spans[-1].kind) for text in shown[accepted:]]
        line = RoundLine((Span("".join(shown[:accepted]), "draft"), *lost, *own), accepted, round.draft.lengths[place])
        self.lines.append(line)
        return line

    def whole(self, prompt: str = "") -> Iterator[Span]:
        """Yield the prompt, as it was written or else decoded, and the output, with INCOMPLETE for cut characters."""
        source = self.row.request.source
        begin = prompt or self._decode(self.row.request.prompt)
        yield Span(f"{self._decode(source)}\n{begin}" if isinstance(source, tuple) else begin, "prompt")
        shown = _closed([span.text for span in self.spans])
        yield from (Span(text, span.kind) for text, span in zip(shown, self.spans, strict=True))

    def _shown(self, reader: Detokenizer, token: int) -> str:
        return END if token in self.row.request.eos else reader.push(token)


class Explanation:
    """Receives rounds (as `on_round`) and prints them: at once for one text, text by text at the end for several.

    `names` are the titles of the texts, in the order of their requests, and `prompts` what was written for them, if
    not the decoded tokens are to be shown. Call `finish` after the last round.
    """

    def __init__(
        self, decode: Decode, console: Console, names: Sequence[str] = ("",), prompts: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._console = console
        self._coloured = console.color_system is not None and not console.no_color
        self._names, self._prompts = names, prompts
        self._stories: dict[int, Story] = {}

    def __call__(self, round: Round) -> None:
        for place, row in enumerate(round.rows):
            if row.index not in self._stories:
                self._stories[row.index] = Story(row, self._decode)
                if self._live:
                    self._head()
            story = self._stories[row.index]
            line = story.add(round, place)
            if self._live:
                self._line(len(story.lines), line)

    def finish(self) -> None:
        for index in sorted(self._stories):
            story = self._stories[index]
            if not self._live:
                self._title(self._names[index])
                self._head()
                for number, line in enumerate(story.lines, 1):
                    self._line(number, line)
            text = Text()
            for span in story.whole(self._prompts[index] if self._prompts else ""):
                text.append_text(self._painted(tame(span.text), span.kind))
            self._console.print()
            self._console.print(text, soft_wrap=True)
            self._console.print()
            self._figures(story.row.stats)
        if len(self._stories) > 1:
            self._title(f"all {len(self._stories)} texts")
            self._figures(sum((story.row.stats for story in self._stories.values()), Stats()))

    @property
    def _live(self) -> bool:
        return len(self._names) == 1

    def _title(self, name: str) -> None:
        self._console.rule(name, align="left")
        self._console.print()

    def _head(self) -> None:
        legend = [self._painted(LOOKS[kind].meaning, kind) for kind in LOOKS]
        self._put(Text("   ").join(legend), "")
        self._console.print()
        self._put(Text("kept of drafted", "dim"), "round  ")

    def _line(self, number: int, line: RoundLine) -> None:
        text = Text()
        for span in line.spans:
            spaced = re.sub(r"^ +$| {2,}", lambda run: "·" * len(run.group()), span.text)
            text.append_text(self._painted(spaced.translate(_VISIBLE), span.kind))
        self._put(text, f"{number:5}  {line.accepted:3}/{line.drafted:<3} ")

    def _figures(self, stats: Stats) -> None:
        rows = figures(stats)
        width = max(len(name) for name, _, _ in rows)
        for name, value, note in rows:
            tail = f"  {note}" if note else ""
            self._put(Text.assemble((value, "bold"), (tail, "dim")), f"{name:{width}}  ")
        self._console.print()

    def _painted(self, text: str, kind: str) -> Text:
        look = LOOKS.get(kind)
        if look is None or not text:
            return Text(text)
        return Text(text, look.style) if self._coloured else Text(f"{look.left}{text}{look.right}")

    def _put(self, text: Text, margin: str) -> None:
        indent = cell_len(margin)
        lines = text.wrap(self._console, max(20, self._console.width - indent), overflow="fold")
        for i, line in enumerate(lines or [Text()]):
            line.rstrip()
            before = Text(margin if i == 0 else " " * indent)
            self._console.print(before.append_text(line), no_wrap=True, overflow="ignore", crop=False)


def figures(stats: Stats) -> list[tuple[str, str, str]]:
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in stats.seconds.items())
    lines = [
        ("alpha", number(stats.alpha, 3), f"chance to keep a tested token; {stats.tested} tested"),
        ("draft acceptance rate", number(stats.draft_acceptance_rate, 3), f"{stats.accepted} of {stats.drafted}"),
        ("mean acceptance length", number(stats.mean_acceptance_length, 2), "tokens per target call"),
        ("target calls", str(stats.target_calls), f"for {stats.emitted} tokens"),
        ("acceptance by position", " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position) or "-", ""),
        ("tokens per second", number(stats.tokens_per_second, 1), "without prefill"),
        ("seconds", f"{stats.total_seconds:.3f}", phases),
    ]
    if stats.relaxed:
        lines.append(("relaxed", str(stats.relaxed), "tokens kept only by a lossy rule"))
        lines.append(("mean distance", number(stats.mean_distance, 4), "total variation from the target"))
    if stats.undrafted:
        reasons = ", ".join(f"{reason} {rounds}" for reason, rounds in sorted(stats.undrafted.items()))
        lines.append(("undrafted", str(sum(stats.undrafted.values())), f"rounds without the remote draft: {reasons}"))
    return lines


PHASES = {
    "prefill": "the prompt through the target",
    "draft": "drafting",
    "target": "the target's verifying passes",
    "accept": "distributions, acceptance and draws",
    "rest": "bookkeeping, rolling back",
}


def breakdown(stats: Stats) -> Table:
    """Return a table of the time: seconds by phase, their share of the rounds, and milliseconds per emitted token."""
    table = Table("phase", box=None, header_style="dim", pad_edge=False)
    for name in ("seconds", "of rounds", "ms per token"):
        table.add_column(name, justify="right")
    rounds = stats.total_seconds - stats.seconds.get("prefill", 0.0)
    for phase, seconds in stats.seconds.items():
        share = f"{seconds / rounds:.1%}" if rounds > 0 and phase != "prefill" else ""
        each = f"{1000 * seconds / stats.emitted:.2f}" if stats.emitted and phase != "prefill" else ""
        table.add_row(f"{phase}: {PHASES.get(phase, '')}".removesuffix(": "), f"{seconds:.3f}", share, each)
    return table


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _lost(round: Round, place: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the drafted tokens that were not accepted, per branch of a tree: accepted tokens before it, its tokens."""
    draft, accepted = round.draft, round.accepted[place]
    tokens = draft.tokens[place, : draft.lengths[place]].tolist()
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents
    path = range(accepted) if round.verdict.path is None else round.verdict.path[place, :accepted].tolist()
    nodes = [node for node, token in enumerate(tokens) if token >= 0 and node not in path]
    inner = {parents[node] for node in nodes}
    for leaf in (node for node in nodes if node not in inner):
        branch = [leaf]
        while parents[branch[0]] in nodes:
            branch.insert(0, parents[branch[0]])
        start = parents[branch[0]]
        yield (path.index(start) + 1 if start >= 0 else 0), [tokens[node] for node in branch]


def _closed(texts: list[str]) -> list[str]:
    return [*texts[:-1], texts[-1] or INCOMPLETE] if texts else texts


_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(32)},
    0x7F: "␡",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in (*_BIDI, 0x2028, 0x2029)},
}
_TAME = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in "\n\t"}
_VISIBLE = {**_CONTROLS, ord("\n"): "⏎", ord("\t"): "⇥"}


def tame(text: str) -> str:
    """Replace characters that move the cursor or change the direction of text; line breaks and tabs stay."""
    return text.translate(_TAME)
