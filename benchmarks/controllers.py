"""Adaptive gamma beside fixed ones, plain decoding and transformers' heuristic: on recorded traces and live.

python benchmarks/controllers.py CODE NEWS [--texts 2] [--max-new-tokens 300] [--repetitions 2] [--json]

CODE and NEWS are files of prompts, which the embedded target continues greedily. Then these texts, random tokens, and a
text that changes character (code, random tokens, the code again) are decoded once more by every controller: the
target's law is that text, the draft drafts as usual, and every model runs for real, so all do the same work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import slipstream
from slipstream.core.draft import Draft, Verdict
from slipstream.core.law import Law
from slipstream.core.protocols import Controller
from slipstream.core.request import Prefixes, Request, Row
from slipstream.core.round import Round
from slipstream.decoding.adaptive import Adaptive
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from slipstream.text.prompts import gather

NOTHING = Verdict(torch.zeros(1), Law(tokens=torch.zeros(1, 1).long()), torch.zeros(1, 1))


@dataclass(frozen=True)
class Heuristic:
    """transformers' schedule "heuristic": 2 more when all drafted tokens stood, else 1 less, at least 1."""

    start: int = 5
    most: int = 64

    def init(self) -> dict[int, int]:
        """The gamma of each row that was seen."""
        return {}

    def gammas(self, state: dict[int, int], rows: Sequence[Row]) -> list[int]:
        """Its own for each row."""
        return [state.get(row.index, self.start) for row in rows]

    def update(self, state: dict[int, int], round: Round) -> dict[int, int]:
        """By what was accepted."""
        new = dict(state)
        for row, gamma, stood in zip(round.rows, round.gammas, round.accepted, strict=True):
            new[row.index] = min(self.most, gamma + 2) if stood == gamma else max(1, gamma - 1)
        return new


@dataclass(frozen=True)
class Machine:
    """Seconds of a round: `draft` and `rest` by the depth of the draft, `missing` per token the draft has not read.

    `noise` is the spread of a round (log-normal); one round in `stalls` takes three times as long.
    """

    draft: Sequence[float]
    rest: Sequence[float]
    missing: float = 0.0
    noise: float = 0.0
    stalls: int = 0

    def seconds(self, rng: random.Random, depth: int, missing: int) -> dict[str, float]:
        """Of one round, by phase."""
        factor = rng.lognormvariate(0, self.noise) * (3 if self.stalls and rng.random() * self.stalls < 1 else 1)
        draft = self.draft[depth] + self.missing * missing if depth else 0.0
        return {"draft": draft * factor, "target": self.rest[depth] * factor}


@dataclass(frozen=True)
class Replayed:
    """What a controller made of a trace."""

    tokens: int
    seconds: float
    gammas: list[tuple[int, ...]]
    accepted: list[int]


def replay(
    controller: Controller, texts: Sequence[Sequence[bool]], machine: Machine, batch: int = 1, seed: int = 0
) -> Replayed:
    """Run a controller on texts of which is known, token by token, whether the draft would say the same.

    A round emits the drafted tokens up to the first that the draft gets wrong, and one more, as greedy decoding does.
    """
    rng, state = random.Random(seed), controller.init()
    waiting = [Row(Request((0,), Sampling(), len(text)), index, [0]) for index, text in enumerate(texts)]
    running, seconds, behind, gammas, stood = list[Row](), 0.0, 0, list[tuple[int, ...]](), list[int]()
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        asked = tuple(controller.gammas(state, running))
        lengths = tuple(min(gamma, row.room - 1) for gamma, row in zip(asked, running, strict=True))
        depth = max(lengths)
        accepted = tuple(
            _stood(texts[row.index], len(row.output), length) for row, length in zip(running, lengths, strict=True)
        )
        spent = machine.seconds(rng, depth, behind)
        behind = 0 if depth else behind + 1
        tokens = tuple((1,) * (stood + 1) for stood in accepted)
        for row, new in zip(running, tokens, strict=True):
            row.tokens += new
            row.finish_reason = None if row.room else "length"
        draft = Draft(torch.empty(len(running), depth), None, lengths)
        state = controller.update(state, Round(tuple(running), draft, NOTHING, tokens, accepted, asked, spent))
        running = [row for row in running if row.room]
        seconds += sum(spent.values())
        gammas.append(asked)
        stood.append(sum(accepted))
    return Replayed(sum(map(len, texts)), seconds, gammas, stood)


def _stood(text: Sequence[bool], start: int, length: int) -> int:
    return next((i for i in range(length) if not text[start + i]), length)


# ---- recording and running live ---------------------------------------------------------------------------------

START = 16  # tokens of a text that are its prompt
GAMMAS = (0, 1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Dictated:
    """A sampler under which the target says the given texts, whatever it thinks; the draft is greedy."""

    texts: Sequence[Sequence[int]]
    target: str
    greedy: bool = True

    def law(self, logits: Tensor, rows: Sequence[Row], texts: Prefixes, model: str) -> Law:
        """Point masses on the texts' own tokens, or on the draft's best."""
        if model != self.target:
            return Sampling().law(logits, rows, texts, model)
        tokens = [[self._token(row, len(path)) for path in texts.paths] for row in rows]
        return Law(tokens=torch.tensor(tokens))

    def _token(self, row: Row, drafted: int) -> int:
        text, place = self.texts[row.index], len(row.tokens) + drafted
        return text[place] if place < len(text) else 0


def collect(engine: Engine, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The texts of each kind, as token ids."""
    rng, own = random.Random(0), {}
    for kind, file in (("code", args.code), ("news", args.news)):
        prompts = [item.prompt for item in gather([], file, False)][: args.texts]
        ids = [engine.encode(prompt)[:100] for prompt in prompts]
        done = engine.generate(ids, plain=True, max_new_tokens=args.max_new_tokens, ignore_eos=True)
        own[kind] = [[*prompt, *one.tokens] for prompt, one in zip(ids, done, strict=True)]
    noise = [[rng.randrange(100, engine.decoder.target.vocab) for _ in range(START + 500)] for _ in range(args.texts)]
    third = args.max_new_tokens
    changing = [[*code[-third:], *rest[:third], *code[-third:]] for code, rest in zip(own["code"], noise, strict=True)]
    return {**own, "random tokens": noise, "changing": changing}


def trace(engine: Engine, text: Sequence[int]) -> list[bool]:
    """Would the draft say the same, after every prefix from START on: one pass of the draft over the text."""
    model = engine.decoder.drafter.scorer.model  # type: ignore[attr-defined]
    with torch.inference_mode():
        said = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
    return [said[place - 1] == text[place] for place in range(START, len(text))]


def live(engine: Engine, texts: Sequence[Sequence[int]], controller: Controller) -> list[Round]:
    """Decode the texts once, one after the other -> their rounds."""
    sampler = Dictated(texts, engine.decoder.target.name)
    requests = [Request(tuple(text[:START]), sampler, len(text) - START) for text in texts]
    decoder: Decoder = replace(engine.decoder, controller=controller, batch_size=1)
    played = list(rounds(decoder, requests))
    assert sum(len(round.tokens[0]) for round in played) == sum(len(text) - START for text in texts)
    return played


def spent(played: Sequence[Round]) -> float:
    """Seconds of all rounds, the target's prefill excluded, the draft's included."""
    return sum(sum(round.seconds.values()) for round in played)


def machine_of(played: dict[int, list[Round]]) -> Machine:
    """The costs that were measured with fixed gammas: medians by depth, with lines between them."""

    def medians(draft: bool) -> list[float]:
        known = {}
        for gamma, found in played.items():
            full = [round.seconds for round in found if round.draft.lengths[0] == gamma]
            known[gamma] = statistics.median(s["draft"] if draft else sum(s.values()) - s["draft"] for s in full)
        return [_between(known, depth) for depth in range(65)]

    return Machine([0.0, *medians(True)[1:]], medians(False))


def _between(known: dict[int, float], at: int) -> float:
    right = next((x for x in sorted(known) if x >= at and x), max(known))
    left = max(x for x in known if x < right)
    return known[left] + (known[right] - known[left]) * (at - left) / (right - left)


def contenders() -> dict[str, Controller]:
    """All, by name."""
    return {**{f"gamma {g}": Fixed(g) for g in GAMMAS}, "heuristic": Heuristic(), "adaptive": Adaptive()}


def compare(engine: Engine, texts: dict[str, list[list[int]]], repetitions: int) -> list[dict[str, Any]]:
    """Per kind of text and contender: seconds live (median of the repetitions) and on the recorded trace."""
    times: dict[tuple[str, str], list[float]] = {}
    costs: dict[int, list[Round]] = {gamma: [] for gamma in GAMMAS}
    for kind in texts:  # once to warm up
        live(engine, [text[:60] for text in texts[kind]], Fixed(3))
    for repetition in range(repetitions):
        for kind, some in texts.items():
            names = list(contenders().items())
            for name, controller in names[repetition:] + names[:repetition]:
                played = live(engine, some, controller)
                times.setdefault((kind, name), []).append(spent(played))
                if isinstance(controller, Fixed):
                    costs[controller.tokens] += played
    machine, rows = machine_of(costs), []
    for kind, some in texts.items():
        traces = [trace(engine, text) for text in some]
        agree = statistics.fmean(statistics.fmean(one) for one in traces)
        for name, controller in contenders().items():
            row = {"text": kind, "agree": agree, "contender": name, "live": statistics.median(times[kind, name])}
            rows.append({**row, "trace": replay(controller, traces, machine).seconds})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: speed relative to plain decoding, live and on the trace."""
    lines = ["| text (draft agrees) | contender | live, x plain | trace, x plain |", "|---|---|---|---|"]
    base = {row["text"]: row for row in rows if row["contender"] == "gamma 0"}
    for row in rows:
        plain = base[row["text"]]
        speeds = [plain[how] / row[how] for how in ("live", "trace")]
        lines.append(f"| {row['text']} ({row['agree']:.2f}) | {row['contender']} | {speeds[0]:.2f} | {speeds[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", help="prompts whose continuation is code, one per line or JSON lines")
    parser.add_argument("news", help="prompts of another kind")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = slipstream.load()
    rows = compare(engine, collect(engine, args), args.repetitions)
    print(json.dumps(rows) if args.json else table(rows))


if __name__ == "__main__":
    main()
