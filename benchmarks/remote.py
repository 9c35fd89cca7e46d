"""Compares the measured speed of a draft on another machine with the plan's prediction, by the delay between them.

python benchmarks/remote.py [--target T --draft D] [--delay 0 --delay 1 --delay 5] [--gamma 2 --gamma 4] [--json FILE]

The draft is served by another process on this machine, behind a relay that delays every byte by half of the delay in
each direction. Acceptance and costs are measured with the same draft in this process, as `slipstream plan` does. The
round-trip time is the median over requests whose answer the server already has, so it includes what both sides do to
ask and to answer, but no drafting. Then plain decoding and the served draft take turns, text by text, and their speeds
are compared with the prediction. Each process has one thread; on an idle machine with two cores or more, predictions
should be within 10 %. While the server drafts ahead, it takes memory bandwidth from the target, which it would not do
on a machine of its own: "T slower" is the factor on the target's time, and the columns to the right of it include that.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from slipstream.bench.records import PROMPTS
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import NoDraft
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.remote.drafter import RemoteDrafter
from slipstream.drafters.remote.frames import Frame, FrameType
from slipstream.drafters.remote.link import Missed
from slipstream.drafters.remote.messages import AskRow, DraftMode, OpenRow, ask_frame, read_drafts
from slipstream.drafters.specification import drafter
from slipstream.engine.engine import Engine
from slipstream.engine.load import alone, load
from slipstream.measure.environment import environment
from slipstream.measure.replay import request_for
from slipstream.measure.timing import beats
from slipstream.plan.measure import PlanTask, Speed, speeds, sweep, using
from slipstream.plan.predict import AcceptanceCounts, PlanCosts, predict

QUESTIONS = 60
"""The number of requests of which the round-trip time is the median."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# ---- a wire with a delay ----------------------------------------------------------------------------------------


def relay(upstream: int, delay: float) -> None:
    """Listen on a free port, print it, and forward bytes to and from port `upstream`, each `delay` seconds later.

    It runs forever, in a process of its own.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", upstream))
        for source, sink in ((client, server), (server, client)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=take, args=(source, held, delay), daemon=True).start()
            threading.Thread(target=give, args=(sink, held), daemon=True).start()


def take(source: socket.socket, held: queue.SimpleQueue[tuple[float, bytes]], delay: float) -> None:
    """Read from a socket, and queue each piece with the time at which it is due; an empty piece is the end."""
    data = b"?"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(1 << 16)
        held.put((perf_counter() + delay, data))


def give(sink: socket.socket, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    """Write the queued pieces to a socket, each when it is due."""
    while True:
        due, data = held.get()
        if (wait := due - perf_counter()) > 0:
            sleep(wait)
        with suppress(OSError):
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)


@contextmanager
def started(*command: str) -> Iterator[str]:
    """Run a Python process within the context, and yield the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env={**os.environ, **ONE_THREAD}
    )
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{' '.join(command)} did not start.")
        yield line
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


# ---- measuring --------------------------------------------------------------------------------------------------


def distance(remote: RemoteDrafter, text: tuple[int, ...], gamma: int) -> float:
    """Return the median round-trip time, in seconds, of requests whose answer the server already has.

    Only the first request makes the server draft; the others ask for the same tokens again.
    """
    link, times, row = remote.link, list[float](), 1 << 30
    link.tell(link.generation, [OpenRow(row, DraftMode.GUESS, {"temperature": 0.0}, text, len(text)).frame()])
    for number in range(QUESTIONS + 1):
        begin, sequence = perf_counter(), (1 << 30) + number
        question = ask_frame(sequence, [AskRow(row, len(text), (), gamma)], False)
        answer = link.ask(link.generation, [question], sequence)
        if isinstance(answer, Missed) or len(read_drafts(answer, remote.vocab)[0].tokens) != gamma:
            raise SystemExit("the server does not answer.")
        times.append(perf_counter() - begin)
    link.tell(link.generation, [Frame(FrameType.CLOSE, 0, {"row": row})])
    return median(times[1:])


def measured(engine: Engine, local: Any, task: PlanTask, most: int) -> tuple[list[AcceptanceCounts], PlanCosts]:
    """Measure acceptance and costs with the draft in this process."""
    plain, [record] = sweep(engine.decoder, [local], task, most, lambda name: None)
    return record.tallies, record.costs(plain)


def compare(
    engine: Engine, far: RemoteDrafter, task: PlanTask, gammas: Sequence[int], repetitions: int
) -> dict[int, list[tuple[Speed, Speed]]]:
    """Run plain decoding and the served draft in turns -> pairs (plain, drafted) of speeds for each gamma."""
    pairs: dict[int, list[tuple[Speed, Speed]]] = {gamma: [] for gamma in gammas}
    plain = using(engine.decoder, NoDraft(), Fixed(0), 1)
    for turn in range(repetitions):
        for gamma in gammas:
            drafted = using(engine.decoder, far, Fixed(gamma), 1)
            plain_speed, drafted_speed = speeds([plain, drafted], task, turn)
            pairs[gamma].append((plain_speed, drafted_speed))
    return pairs


def slowdown(engine: Engine, local: Any, far: RemoteDrafter, task: PlanTask, gamma: int) -> float:
    """Return the factor on the time of a target's pass while the server drafts ahead on the same machine.

    On two machines it would be 1.
    """

    def passes(draft: Any) -> list[float]:
        decoder = using(engine.decoder, draft, Fixed(gamma), 1)
        timed = (beat for part in task.parts() for _, beat in beats(decoder, task.requests(part)))
        return [beat.target for beat in timed if beat.width == gamma + 1]

    return median(passes(far)) / median(passes(local))


@dataclass(frozen=True)
class Place:
    """One measured delay: the relay's, the round-trip time with it, and the factor on the target's time."""

    added: float  # milliseconds, there and back
    away: float  # seconds
    slower: float


def lines(
    place: Place,
    known: tuple[list[AcceptanceCounts], PlanCosts],
    found: dict[int, list[tuple[Speed, Speed]]],
    length: int,
) -> list[dict[str, Any]]:
    """Return the measured and the predicted speed-up for each gamma at one delay."""
    tallies, costs = known
    outlook = predict(tallies, replace(costs, delay=place.away), tuple(found), length, replicates=100)
    shared = tuple(replace(beat, target=beat.target * place.slower) for beat in costs.speculative)
    here = predict(tallies, replace(costs, delay=place.away, speculative=shared), tuple(found), length, replicates=100)
    made = []
    for prediction, on_one_machine in zip(outlook.predictions, here.predictions, strict=True):
        pairs = found[prediction.gamma]
        factor = median(ours.per_second / plain.per_second for plain, ours in pairs)
        made.append(
            {
                "added_ms": place.added,
                "network_ms": 1000 * place.away,
                "gamma": prediction.gamma,
                "predicted": prediction.factor,
                "predicted_on_one_machine": on_one_machine.factor,
                "measured": factor,
                "difference": factor / prediction.factor - 1,
                "difference_on_one_machine": factor / on_one_machine.factor - 1,
                "target_slower": place.slower,
                "tokens_per_call": sum(ours.tokens for _, ours in pairs) / sum(ours.rounds for _, ours in pairs),
                "tokens_per_call_predicted": prediction.tokens_per_call,
                "longest_delay_ms": 1000 * (outlook.longest_delay or 0.0),
            }
        )
    return made


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all delays, with one server and a relay for each delay -> the report."""
    torch.set_num_threads(1)
    place, dtype = alone(args.target, args.dtype)
    engine = load(place, dtype=dtype)
    context = BuildContext(engine.decoder.target, engine.tokenizer, dtype)
    sampler, prompts = Sampling(temperature=args.temperature), list(PROMPTS)[: args.texts]
    texts = tuple(request_for(engine.encode(prompt), sampler, args.max_new_tokens) for prompt in prompts)
    task = PlanTask(texts, 1)
    local, table = drafter(args.draft, context), list[dict[str, Any]]()
    known = measured(engine, local, task, max(args.gamma))
    serve = ("-m", "slipstream", "serve-draft", "--draft", args.draft, "--dtype", str(dtype), "--port", "0", "--json")
    with started(*serve) as ready:
        port = json.loads(ready)["url"].rsplit(":", 1)[1]
        for added in args.delay:
            with started(str(Path(__file__)), "--relay", port, str(added)) as shown:
                name = f"tcp://127.0.0.1:{int(shown)}?timeout-ms=10000&trust={'true' if args.trust else 'false'}"
                far = drafter(name, context)
                assert isinstance(far, RemoteDrafter)
                most = max(args.gamma)
                away = distance(far, texts[0].prompt, most)
                spot = Place(added, away, slowdown(engine, local, far, task, most))
                found = compare(engine, far, task, args.gamma, args.repetitions)
                table += lines(spot, known, found, args.max_new_tokens)
    costs = known[1]
    facts = {"step_ms": 1000 * costs.step, "draft_ms": 1000 * costs.draft(args.gamma[-1]) / args.gamma[-1]}
    return {"environment": environment(engine), "settings": vars(args), **facts, "lines": table}


def show(result: dict[str, Any]) -> None:
    """Print the report as a table."""
    print(f"target step {result['step_ms']:.1f} ms, drafted token {result['draft_ms']:.2f} ms")
    names = ("added ms", "away ms", "gamma", "predicted", "measured", "off", "T slower", "predicted", "off")
    print(" ".join(f"{name:>9}" for name in names))
    for line in result["lines"]:
        print(
            f"{line['added_ms']:9g} {line['network_ms']:9.2f} {line['gamma']:9d} {line['predicted']:9.2f} "
            f"{line['measured']:9.2f} {line['difference']:+9.1%} {line['target_slower']:9.2f} "
            f"{line['predicted_on_one_machine']:9.2f} {line['difference_on_one_machine']:+9.1%}"
        )


def main() -> None:
    """Parse the arguments, measure, print, and write the JSON file; with --relay as the first argument, be a relay."""
    if sys.argv[1:2] == ["--relay"]:
        relay(int(sys.argv[2]), float(sys.argv[3]) / 2000)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--delay", type=float, action="append", help="milliseconds there and back; repeatable")
    parser.add_argument("--gamma", type=int, action="append", help="repeatable")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trust", action="store_true", help="use the probabilities that the server sends")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    args.delay, args.gamma = args.delay or [0.0, 1.0, 5.0], args.gamma or [2, 4]
    result = run(args)
    show(result)
    if args.json:
        from slipstream.text.jsontext import json_text

        Path(args.json).write_text(json_text(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
