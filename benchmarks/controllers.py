"""Replays gamma="auto" on recorded acceptance with the costs of several machines, beside fixed gammas.

python benchmarks/controllers.py [--only WORD]

`traces.json` has, for texts that the embedded target wrote (HumanEval prompts and WikiText's beginnings,
temperature 0 and 1), per token the chance (in per cent) that a draft of it stands: min(1, q(x) / p(x)), for the
embedded draft ("small") and the target in 4 bits ("int4"); for lookup, how many tokens it has there and how many of
them stand. `machines` has milliseconds of rounds by rows and depth, each with its source. Times get noise: 6 %, and
stalls. A controller begins without knowledge and decodes what plain decoding makes in 2,000 rounds; what counts is the
time without noise. Exits with 1 if it misses a bar: 0.98 of plain decoding, 0.95 of the best fixed gamma in hindsight.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.law import Law
from slipstream.core.protocols import Controller
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.controllers import Fixed, controller
from slipstream.decoding.sampling import Sampling

TRACES = Path(__file__).parent / "traces.json"
NOTHING = Verdict(torch.zeros(1), Law(tokens=torch.zeros(1, 1).long()), torch.zeros(1, 1))
MOST, ROUNDS = 8, 2000
OF_PLAIN, OF_BEST = 0.98, 0.95


NOISE = tuple(
    draw.lognormvariate(0, 0.06) * (3 if draw.random() < 0.02 else 1) for draw in [random.Random(1)] for _ in range(997)
)
"""The factors of the times of rounds that follow each other."""


@dataclass(frozen=True)
class Text:
    """A text by what a draft does after every token of it: how many tokens it has, and how many of them stand."""

    prompt: int
    drafted: Sequence[int]
    stands: Sequence[int]
    temperature: float = 0.0


@dataclass(frozen=True)
class Machine:
    """The seconds of a round: `draft` by rows that draft and depth, `rest` by rows and depth, `reading` per token that
    the draft has not read; `noise` are the factors of the times that a controller sees."""

    rows: Sequence[int]
    draft: Sequence[Sequence[float]]
    rest: Sequence[Sequence[float]]
    reading: float = 0.0
    noise: Sequence[float] = NOISE

    def seconds(self, rows: int, drafting: int, depth: int, unread: int) -> dict[str, float]:
        """Return the seconds of a round by phase."""
        draft = self._at(self.draft, drafting, depth) if drafting else 0.0
        return {"draft": draft, "target": self._at(self.rest, rows, depth), "prefill": self.reading * unread}

    def _at(self, table: Sequence[Sequence[float]], rows: int, depth: int) -> float:
        """Return what the table says of a number of rows, between two of its numbers by a straight line."""
        place = next((i for i, known in enumerate(self.rows) if known >= rows), len(self.rows) - 1)
        if self.rows[place] == rows or not place:
            return table[place][depth]
        low, high = self.rows[place - 1], self.rows[place]
        share = (rows - low) / (high - low)
        return table[place - 1][depth] * (1 - share) + table[place][depth] * share


@dataclass(frozen=True)
class Replayed:
    """What a replay took without noise, the gammas of every round, and what the controller knows in the end."""

    seconds: float
    gammas: list[tuple[int, ...]]
    state: Any


def replay(chooser: Controller, texts: Sequence[Text], machine: Machine, batch: int = 1, state: Any = None) -> Replayed:
    """Run a controller on texts, `batch` at a time."""
    state = chooser.init() if state is None else state
    waiting, running, read = rows_of(texts), list[Row](), dict[int, int]()
    played = Replayed(0.0, [], None)
    while waiting or running:
        running += [waiting.pop() for _ in range(min(len(waiting), batch - len(running)))]
        asked, depths, stood, unread = [], [], [], 0
        for row, gamma in zip(running, chooser.gammas(state, running), strict=True):
            text, place = texts[row.index], len(row.output)
            asked.append(min(gamma, row.room - 1))
            depths.append(min(asked[-1], text.drafted[place]))
            stood.append(min(depths[-1], text.stands[place]))
            if asked[-1]:
                unread += len(row.tokens) - read.get(row.index, 0)
                read[row.index] = len(row.tokens) + stood[-1] + 1
        took = machine.seconds(len(running), sum(map(bool, asked)), max(depths), unread)
        tokens = tuple((1,) * (count + 1) for count in stood)
        for row, new in zip(running, tokens, strict=True):
            row.tokens += new
            row.finish_reason = None if row.room else "length"
        factor = machine.noise[len(played.gammas) % len(machine.noise)]
        noisy = {phase: factor * seconds for phase, seconds in took.items()}
        draft = Draft(torch.empty(len(running), max(depths)), None, tuple(depths))
        round = Round(tuple(running), draft, NOTHING, tokens, tuple(stood), tuple(asked), noisy)
        state = chooser.update(state, round)
        running = [row for row in running if row.room]
        played = replace(played, seconds=played.seconds + sum(took.values()), state=state)
        played.gammas.append(tuple(asked))
    return played


def rows_of(texts: Sequence[Text]) -> list[Row]:
    """Return the rows of texts before anything was decoded, the first one last."""
    rows = []
    for index, text in enumerate(texts):
        request = Request((0,) * text.prompt, Sampling(temperature=text.temperature), len(text.drafted))
        rows.append(Row(request, index, [0] * text.prompt))
    return rows[::-1]


def simulated(
    chances: Sequence[float], count: int, seed: int = 0, prompt: int = 150, temperature: float = 0.0
) -> list[Text]:
    """Toss the coins of `count` texts, in which the draft of each token stands with the given chance."""
    rng, texts = random.Random(seed), list[Text]()
    for _ in range(count):
        right = [rng.random() < chance for chance in chances]
        ahead = [right[place : place + MOST] for place in range(len(right))]
        stands = [some.index(False) if False in some else len(some) for some in ahead]
        texts.append(Text(prompt, [MOST] * len(right), stands, temperature))
    return texts


def texts_of(name: str, trace: dict[str, Any], seed: int) -> list[Text]:
    """Return the texts of a recorded trace; what stands of a sampled draft depends on the seed."""
    temperature = float(name[-1])
    if name.startswith("lookup"):
        found = [[list(each) for each in zip(*text, strict=True)] for text in trace["texts"]]
        return [Text(prompt, *both, temperature) for prompt, both in zip(trace["prompts"], found, strict=True)]
    pairs = zip(trace["prompts"], trace["texts"], strict=True)
    tossed = (
        simulated([chance / 100 for chance in text], 1, 1000 * seed + place, prompt, temperature)
        for place, (prompt, text) in enumerate(pairs)
    )
    return [text for some in tossed for text in some]


@dataclass(frozen=True)
class Race:
    """A trace on a machine with a number of rows: seconds of every fixed gamma and of gamma="auto"."""

    trace: str
    machine: str
    rows: int
    fixed: dict[int, float]
    auto: float

    @property
    def best(self) -> int:
        """The best fixed gamma in hindsight."""
        return min(self.fixed, key=self.fixed.__getitem__)

    @property
    def missed(self) -> bool:
        """Whether a bar is missed."""
        return self.fixed[0] < OF_PLAIN * self.auto or self.fixed[self.best] < OF_BEST * self.auto


def races(recorded: dict[str, Any], chooser: Controller, only: str = "") -> Iterator[Race]:
    """Run a controller and all fixed gammas on every trace, machine and number of rows whose names contain `only`."""
    for (name, trace), (where, table) in product(recorded["acceptance"].items(), recorded["machines"].items()):
        free = name.startswith("lookup")
        draft = [[0.01 * row[0]] * (MOST + 1) for row in table["rest"]] if free else table["draft"]
        machine = Machine(table["rows"], draft, table["rest"], 0.0 if free else table["reading"])
        for rows in table["rows"]:
            if only not in f"{name}, {where}, {rows}":
                continue
            tokens = sum(map(len, trace["texts"]))
            again = range(max(1, round(ROUNDS * rows / tokens)))
            texts = [text for seed in again for text in texts_of(name, trace, seed)]
            texts = texts[: max(rows, round(len(texts) * min(1.0, ROUNDS * rows / tokens)))]
            fixed = {gamma: replay(Fixed(gamma), texts, machine, rows).seconds for gamma in range(MOST + 1)}
            yield Race(name, where, rows, fixed, replay(chooser, texts, machine, rows).seconds)


def main() -> None:
    """Replay, and print a line per race."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the name of a trace and machine, as 'small code 0, Xeon'")
    only = parser.parse_args().only
    print("| trace | machine | rows | best fixed gamma, x plain | auto, x plain | auto / best fixed |")
    print("|---|---|---|---|---|---|")
    missed = 0
    for race in races(json.loads(TRACES.read_text()), controller("auto"), only):
        plain, best = race.fixed[0], race.fixed[race.best]
        cells = f"{plain / best:.2f} ({race.best}) | {plain / race.auto:.3f} | {best / race.auto:.3f}"
        print(f"| {race.trace} | {race.machine} | {race.rows} | {cells} |{' missed' * race.missed}", flush=True)
        missed += race.missed
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
