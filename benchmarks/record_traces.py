"""Records the acceptance of drafts for `controllers.py` in traces.json; the machines there stay as they are.

python benchmarks/record_traces.py CODE PROSE

CODE and PROSE are files of prompts (recorded: HumanEval, and paragraphs of WikiText-2 of more than 400 characters). The
embedded target continues 16 of each by 192 tokens, greedily and at temperature 1, and the chances of drafts by the
embedded draft, by itself in 4 bits, and by lookup are computed at every token.
"""

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import slipstream
from slipstream.core.draws import draw
from slipstream.core.request import Request, Row
from slipstream.core.round import Context, stopwatch
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.lookup import Lookup
from slipstream.text.prompts import gather

from controllers import MOST, TRACES  # isort: skip

TEXTS, TOKENS, PROMPT = 16, 192, 150


def laws(scorer: Any, text: Sequence[int], temperature: float) -> Tensor:
    """Return the distributions after every token of a text."""
    with torch.inference_mode():
        logits = scorer.model(torch.tensor([text])).logits[0].float()
    if temperature:
        return logits.softmax(-1)
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def chances(p: Tensor | None, q: Tensor, text: Sequence[int], start: int) -> list[int]:
    """Return per token from `start` on, in per cent, the chance that it is drafted and stands: min(1, q / p)."""
    places = range(start, len(text))
    least = [(float(q[at - 1, text[at]]), 1.0 if p is None else float(p[at - 1, text[at]])) for at in places]
    return [round(100 * min(1.0, small / max(large, 1e-9))) for small, large in least]


def copies(text: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Return, before every token from `start` on, how many tokens lookup drafts and how many of them are right."""
    lookup, found = Lookup(), list[tuple[int, int]]()
    row = Row(Request(tuple(text[:start]), Sampling(), len(text)), 0, [])
    for at in range(start, len(text)):
        row.tokens = list(text[:at])
        draft = lookup.propose(Context((row,), draw, 1, stopwatch(torch.device("cpu"))), [MOST])
        tokens = draft.tokens[0, : draft.lengths[0]].tolist()
        wrong = (place for place, token in enumerate(tokens) if list(text[at + place : at + place + 1]) != [token])
        found.append((len(tokens), next(wrong, len(tokens))))
    return found


def recorded(code: Sequence[Any], prose: Sequence[Any]) -> dict[str, Any]:
    """Return the traces by draft, kind of text and temperature."""
    engine, quantized = slipstream.load(), slipstream.load(draft="int4")
    small, int4 = (each.decoder.drafter.scorer for each in (engine, quantized))  # type: ignore[attr-defined]
    traces = dict[str, Any]()
    for (kind, prompts), temperature in ((pair, t) for pair in (("code", code), ("prose", prose)) for t in (0, 1)):
        ids = [list(engine.encode(prompt))[-PROMPT:] for prompt in prompts]
        options = {"max_new_tokens": TOKENS, "temperature": float(temperature), "seed": 1, "ignore_eos": True}
        done = engine.generate(ids, plain=True, **options)
        lengths = list(map(len, ids))
        for name in ("small", "int4", "lookup"):
            traces[f"{name} {kind} {temperature}"] = {"prompts": lengths, "texts": []}
        for prompt, one in zip(ids, done, strict=True):
            text, start = [*prompt, *one.tokens], len(prompt)
            p = laws(engine.decoder.target, text, temperature)
            for name, scorer in (("small", small), ("int4", int4)):
                made = chances(p, laws(scorer, text, temperature), text, start)
                traces[f"{name} {kind} {temperature}"]["texts"].append(made)
            traces[f"lookup {kind} {temperature}"]["texts"].append(copies(text, start))
    rng = random.Random(0)
    noise = [[rng.randrange(100, 4000) for _ in range(PROMPT + TOKENS)] for _ in range(TEXTS // 2)]
    useless = [chances(None, laws(small, text, 0), text, PROMPT) for text in noise]
    return {**traces, "small random 0": {"prompts": [PROMPT] * len(noise), "texts": useless}}


def main() -> None:
    """Record, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", help="prompts whose continuation is code, one per line or JSON lines")
    parser.add_argument("prose", help="prompts of another kind")
    args = parser.parse_args()
    prompts = ([item.prompt for item in gather([], file, False)][:TEXTS] for file in (args.code, args.prose))
    found = {"acceptance": recorded(*prompts), "machines": json.loads(TRACES.read_text())["machines"]}
    TRACES.write_text(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
