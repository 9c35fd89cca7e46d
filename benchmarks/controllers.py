"""Compares adaptive gamma with fixed gammas, plain decoding and transformers' heuristic, live and on recorded traces.

python benchmarks/controllers.py CODE NEWS [--texts 2] [--max-new-tokens 300] [--repetitions 2] [--json]

CODE and NEWS are files of prompts, which the embedded target continues greedily. Then these texts, random tokens, and a
text that changes character (code, random tokens, the same code) are decoded with every controller: the target is made
to emit exactly that text, while the draft drafts as usual and both models really run, so that all do the same work. A
trace is the list of a text's tokens that the draft would get right; on it, controllers are replayed without models.
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
    """transformers' schedule "heuristic": gamma grows by 2 when all drafted tokens are accepted, else falls by 1."""

    start: int = 5
    most: int = 64

    def init(self) -> dict[int, int]:
        """Return an empty state: the gamma of each row by its index."""
        return {}

    def gammas(self, state: dict[int, int], rows: Sequence[Row]) -> list[int]:
        """Return the gamma of each row."""
        return [state.get(row.index, self.start) for row in rows]

    def update(self, state: dict[int, int], round: Round) -> dict[int, int]:
        """Return the state after a round, by how many drafted tokens of each row it accepted."""
        new = dict(state)
        for row, gamma, accepted in zip(round.rows, round.gammas, round.accepted, strict=True):
            new[row.index] = min(self.most, gamma + 2) if accepted == gamma else max(1, gamma - 1)
        return new


@dataclass(frozen=True)
class Machine:
    """The seconds of a round: `draft` and `rest` by the draft's depth, `missing` per token that the draft has not read.

    `noise` is the log-normal spread of a round's time; one round in `stalls` takes three times as long.
    """

    draft: Sequence[float]
    rest: Sequence[float]
    missing: float = 0.0
    noise: float = 0.0
    stalls: int = 0

    def seconds(self, rng: random.Random, depth: int, missing: int) -> dict[str, float]:
        """Return the seconds of one round by phase; `missing` is the number of tokens that the draft has not read."""
        factor = rng.lognormvariate(0, self.noise) * (3 if self.stalls and rng.random() * self.stalls < 1 else 1)
        draft = self.draft[depth] + self.missing * missing if depth else 0.0
        return {"draft": draft * factor, "target": self.rest[depth] * factor}


@dataclass(frozen=True)
class Replayed:
    """The result of replaying traces: tokens, seconds, and each round's gammas and accepted tokens."""

    tokens: int
    seconds: float
    gammas: list[tuple[int, ...]]
    accepted: list[int]


def replay(
    controller: Controller, texts: Sequence[Sequence[bool]], machine: Machine, batch: int = 1, seed: int = 0
) -> Replayed:
    """Run a controller on traces, which say for every token of a text whether the draft gets it right.

    A round emits the drafted tokens up to the first that the draft gets wrong, and one more, as greedy decoding does.
    """
    rng, state = random.Random(seed), controller.init()
    waiting = [Row(Request((0,), Sampling(), len(text)), index, [0]) for index, text in enumerate(texts)]
    running, seconds, unread, gammas, kept = list[Row](), 0.0, 0, list[tuple[int, ...]](), list[int]()
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        chosen = tuple(controller.gammas(state, running))
        lengths = tuple(min(gamma, row.room - 1) for gamma, row in zip(chosen, running, strict=True))
        depth = max(lengths)
        accepted = tuple(
            _accepted(texts[row.index], len(row.output), length) for row, length in zip(running, lengths, strict=True)
        )
        spent = machine.seconds(rng, depth, unread)
        unread = 0 if depth else unread + 1
        tokens = tuple((1,) * (count + 1) for count in accepted)
        for row, new in zip(running, tokens, strict=True):
            row.tokens += new
            row.finish_reason = None if row.room else "length"
        draft = Draft(torch.empty(len(running), depth), None, lengths)
        state = controller.update(state, Round(tuple(running), draft, NOTHING, tokens, accepted, chosen, spent))
        running = [row for row in running if row.room]
        seconds += sum(spent.values())
        gammas.append(chosen)
        kept.append(sum(accepted))
    return Replayed(sum(map(len, texts)), seconds, gammas, kept)


def _accepted(text: Sequence[bool], start: int, length: int) -> int:
    """Return how many of `length` tokens from `start` on the draft gets right before its first error."""
    return next((i for i in range(length) if not text[start + i]), length)


# ---- recording and running live ---------------------------------------------------------------------------------

START = 16  # the number of tokens of a text that are used as its prompt
GAMMAS = (0, 1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Dictated:
    """A sampler that makes the target emit the given texts, regardless of its logits; the draft is greedy."""

    texts: Sequence[Sequence[int]]
    target: str
    greedy: bool = True

    def law(self, logits: Tensor, rows: Sequence[Row], texts: Prefixes, model: str) -> Law:
        """Return point masses: on the texts' own tokens for the target, on the likeliest tokens for the draft."""
        if model != self.target:
            return Sampling().law(logits, rows, texts, model)
        tokens = [[self._token(row, len(path)) for path in texts.paths] for row in rows]
        return Law(tokens=torch.tensor(tokens))

    def _token(self, row: Row, drafted: int) -> int:
        text, place = self.texts[row.index], len(row.tokens) + drafted
        return text[place] if place < len(text) else 0


def collect(engine: Engine, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return the texts of each kind, as token ids."""
    rng, continued = random.Random(0), {}
    for kind, file in (("code", args.code), ("news", args.news)):
        prompts = [item.prompt for item in gather([], file, False)][: args.texts]
        ids = [engine.encode(prompt)[:100] for prompt in prompts]
        done = engine.generate(ids, plain=True, max_new_tokens=args.max_new_tokens, ignore_eos=True)
        continued[kind] = [[*prompt, *one.tokens] for prompt, one in zip(ids, done, strict=True)]
    noise = [[rng.randrange(100, engine.decoder.target.vocab) for _ in range(START + 500)] for _ in range(args.texts)]
    third, pairs = args.max_new_tokens, zip(continued["code"], noise, strict=True)
    changing = [[*code[-third:], *rest[:third], *code[-third:]] for code, rest in pairs]
    return {**continued, "random tokens": noise, "changing": changing}


def trace(engine: Engine, text: Sequence[int]) -> list[bool]:
    """Return, for every token from START on, whether it is the draft's likeliest one, by one pass over the text."""
    model = engine.decoder.drafter.scorer.model  # type: ignore[attr-defined]
    with torch.inference_mode():
        predicted = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
    return [predicted[place - 1] == text[place] for place in range(START, len(text))]


def live(engine: Engine, texts: Sequence[Sequence[int]], controller: Controller) -> list[Round]:
    """Decode the texts once, one after the other -> their rounds."""
    sampler = Dictated(texts, engine.decoder.target.name)
    requests = [Request(tuple(text[:START]), sampler, len(text) - START) for text in texts]
    decoder: Decoder = replace(engine.decoder, controller=controller, batch_size=1)
    played = list(rounds(decoder, requests))
    assert sum(len(round.tokens[0]) for round in played) == sum(len(text) - START for text in texts)
    return played


def spent(played: Sequence[Round]) -> float:
    """Return the seconds of all rounds, without the target's prefill but with the draft's."""
    return sum(sum(round.seconds.values()) for round in played)


def machine_of(played: dict[int, list[Round]]) -> Machine:
    """Return the costs measured with fixed gammas: medians by depth, interpolated linearly between them."""

    def medians(draft: bool) -> list[float]:
        known = {}
        for gamma, rounds_of in played.items():
            full = [round.seconds for round in rounds_of if round.draft.lengths[0] == gamma]
            known[gamma] = statistics.median(s["draft"] if draft else sum(s.values()) - s["draft"] for s in full)
        return [_between(known, depth) for depth in range(65)]

    return Machine([0.0, *medians(True)[1:]], medians(False))


def _between(known: dict[int, float], at: int) -> float:
    right = next((x for x in sorted(known) if x >= at and x), max(known))
    left = max(x for x in known if x < right)
    return known[left] + (known[right] - known[left]) * (at - left) / (right - left)


def contenders() -> dict[str, Controller]:
    """Return all controllers by name; "gamma 0" is plain decoding."""
    return {**{f"gamma {g}": Fixed(g) for g in GAMMAS}, "heuristic": Heuristic(), "adaptive": Adaptive()}


def compare(engine: Engine, texts: dict[str, list[list[int]]], repetitions: int) -> list[dict[str, Any]]:
    """Return, by kind of text and contender, the seconds live (median of repetitions) and on the recorded trace."""
    times: dict[tuple[str, str], list[float]] = {}
    costs: dict[int, list[Round]] = {gamma: [] for gamma in GAMMAS}
    for kind in texts:  # warm up
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
    """Return a Markdown table of the speed relative to plain decoding, live and on the trace."""
    lines = ["| text (draft agrees) | contender | live, x plain | trace, x plain |", "|---|---|---|---|"]
    base = {row["text"]: row for row in rows if row["contender"] == "gamma 0"}
    for row in rows:
        plain = base[row["text"]]
        speeds = [plain[how] / row[how] for how in ("live", "trace")]
        lines.append(f"| {row['text']} ({row['agree']:.2f}) | {row['contender']} | {speeds[0]:.2f} | {speeds[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table or JSON."""
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
