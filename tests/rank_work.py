"""What the ranks of a test do: rank 0 makes one of the pieces of work below and prints what came of it as JSON.

python rank_work.py WORK '{"target": FOLDER, "draft": FOLDER}'
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import slipstream
from slipstream.core.draws import Rng
from slipstream.core.request import Request
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import rule
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.engine import Engine
from toys import SAMPLE, Cycle, first_tokens, ragged, request

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8, 2, 8], [4, 4])
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "verify": "coupled"},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2},
    "token": {"temperature": 0.8, "verify": "token", "gamma": 1},
    "plain": {"plain": True},
    "beams": {"num_beams": 3},
    "ends": {"stop_token_ids": list(range(0, 101, 7))},
}
"""Calls whose texts are compared: more prompts than places, so that rows come and go."""

GAMMAS = (2, 1)
LAW_TOKENS = 2


FEW = ("greedy", "coupled")


def texts(engine: Engine, names: Sequence[str] = tuple(CALLS)) -> dict[str, Any]:
    prompts = [list(prompt) for prompt in PROMPTS]
    return {name: [one.tokens for one in engine.generate(prompts, max_new_tokens=12, **CALLS[name])] for name in names}


def few(engine: Engine) -> dict[str, Any]:
    return texts(engine, FEW)


def read(engine: Engine) -> dict[str, Any]:
    """The texts of an encoder-decoder, which reads the prompts."""
    prompts = [[token + 2 for token in prompt] for prompt in PROMPTS]
    calls = ({}, {"temperature": 1.0, "verify": "coupled"})
    return {"read": [[list(done.tokens) for done in engine.generate(prompts, max_new_tokens=12, **it)] for it in calls]}


def seen(engine: Engine) -> dict[str, Any]:
    """The texts of a vision model, of prompts with images beside others."""
    from visions import picture  # which takes as long to import as the other work to do

    asked = "user: <image>What is this?\nassistant: "
    prompts: list[Any] = [{"text": asked, "images": [picture(1)]}, "def f(x):", {"text": asked, "images": [picture(2)]}]
    return {"seen": [list(done.tokens) for done in engine.generate(prompts, max_new_tokens=10)]}


def grown(engine: Engine) -> dict[str, Any]:
    """The texts of an engine that drafts trees."""
    prompts = [list(prompt) for prompt in PROMPTS]
    calls: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5})
    return {"grown": [[list(it.tokens) for it in engine.generate(prompts, max_new_tokens=12, **on)] for on in calls]}


def disturbed(engine: Engine) -> dict[str, Any]:
    """The texts beside one that fails and one that is aborted, those after a stream that was closed early, and the
    reasons why the two have ended."""

    def fails(ids: Any, scores: Any) -> Any:
        return {}["state 7"] if ids.shape[1] > 6 else scores

    decoder = replace(engine.decoder, batch_size=4)
    bad = Request((9, 9), Sampling(processors=(fails,)), 12, key=7)
    with Scheduler(decoder) as scheduler:
        rows = [scheduler.add(each) for each in (*ragged(), bad, request([5, 5, 5], 60, key=8))]
        scheduler.step()
        scheduler.step()
        scheduler.abort(rows[-1])
        for _ in scheduler.rounds():
            pass
    stream = engine.stream([1, 2, 3], max_new_tokens=50)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    after = [row.output for row in generate(decoder, ragged())]
    return {"beside": [row.output for row in rows[:3]], "after": after, "why": [row.finish_reason for row in rows[3:]]}


def law(engine: Engine) -> dict[str, Any]:
    """The law of the first tokens, by enumeration of all draws, as a list of texts and chances."""
    chosen = rule("token")

    def decoder(rng: Rng) -> Decoder:
        return replace(engine.decoder, verifier=chosen.verify, rng=rng, controller=Cycle(GAMMAS))

    found = first_tokens(decoder, (0, 2), LAW_TOKENS, LAW_TOKENS, SAMPLE)
    return {"law": [[list(text), chance] for text, chance in found.items()]}


def generating(engine: Engine) -> dict[str, Any]:
    """Say that it begins, and generate for a long time."""
    print("begun", flush=True)
    engine.generate([[1, 2, 3]] * 8, max_new_tokens=100_000, ignore_eos=True)
    return {}


WORK = {each.__name__: each for each in (texts, few, read, seen, grown, disturbed, law, generating)}


def loaded(settings: dict[str, Any], **more: Any) -> Engine:
    """The engine of a test's folders, with chains of three tokens or a tree."""
    shape = {"tree": settings["tree"]} if "tree" in settings else {"gamma": 3}
    return slipstream.load(
        Path(settings["target"]), settings.get("draft"), dtype="float32", batch_size=2, **shape, **more
    )


def main() -> None:
    """Follow, or load and work."""
    if slipstream.follow():
        return
    settings = json.loads(sys.argv[2])
    engine = loaded(settings, tp_plan="auto")
    found = {} if sys.argv[1] == "nothing" else WORK[sys.argv[1]](engine)
    print(json.dumps({**found, "bytes_per_token": getattr(engine.decoder.target, "bytes_per_token")}))  # noqa: B009


if __name__ == "__main__":
    main()
