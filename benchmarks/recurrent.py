"""Measures what rollback costs a hybrid model: a round with partial acceptance over a bare pass of as many tokens.

python benchmarks/recurrent.py [--family qwen3_5 nemotron_h] [--gamma 5] [--json FILE]

Models have random weights, of a size where a pass reads a gigabyte of them, so that the text means nothing but costs
are real. Drafts are the target's own greedy tokens up to a wrong one, whose position moves from round to round, so that
1 to gamma - 1 tokens are accepted. The bare pass is transformers' own forward pass over gamma + 1 tokens after the
text; "our pass" is our Scorer's over as many, which are then rolled back; "two passes" reads the accepted tokens again
instead of restoring states from within the pass. All take turns; ratios are medians.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.request import Request
from slipstream.core.round import Context, Round
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, rounds
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from slipstream.execution.names import state_in, with_cache
from slipstream.kernels.packing import PackedLinear, packed
from slipstream.measure.environment import environment
from slipstream.models.recurrent.rewinding import copied
from slipstream.models.recurrent.scorer import StateScorer

SIZES: dict[str, dict[str, Any]] = {"vocab_size": 32000, "hidden_size": 1024}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {"num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mlp"] * 4,
            "intermediate_size": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
        },
    ),
}


def made(family: str, layers: int | None) -> StateScorer:
    """Return a random model of a family, or its first layers, with packed weights as when it is loaded by name.

    It is in float32, so that rounding makes no texts differ.
    """
    config, kind, sizes = FAMILIES[family]
    if layers:
        first = sizes.get("layers_block_type", [])[:layers]
        sizes = {**sizes, **({"layers_block_type": first} if first else {"num_hidden_layers": layers})}
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**SIZES, **sizes, max_position_embeddings=4096)
    return StateScorer(packed(getattr(transformers, kind)(settings).eval()), family)


class Known:
    """Drafts a known text with one wrong token, so that 1, 2, ..., gamma - 1 tokens are accepted in turn."""

    def __init__(self, text: Sequence[int], vocab: int) -> None:
        self.text, self.vocab, self.turn = list(text), vocab, 0

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Return the next gamma tokens of the text, one of them wrong."""
        [gamma], done = gammas, len(context.rows[0].output)
        if not gamma:
            return Draft.empty(1, torch.device("cpu"))
        correct = 1 + self.turn % (gamma - 1) if gamma > 1 else 0
        self.turn += 1
        tokens = (self.text[done : done + gamma] + [0] * gamma)[:gamma]
        tokens[correct] = (tokens[correct] + 1) % self.vocab
        drafted = torch.tensor([tokens])
        return Draft(drafted, Law(tokens=drafted), (gamma,))

    def observe(self, round: Round) -> None:
        """Do nothing: the text is known."""


def round_seconds(decoder: Decoder, request: Request) -> tuple[float, int, list[int]]:
    """Decode a text -> the median seconds of a round, the number of accepted tokens, and the text."""
    times, accepted, began = list[float](), 0, perf_counter()
    output: list[int] = []
    for round in rounds(decoder, [request]):
        times.append(perf_counter() - began)
        accepted += sum(round.accepted)
        output, began = list(round.rows[0].output), perf_counter()
    return statistics.median(times[1:]), accepted, output  # the first round includes reading the prompt


def pass_seconds(scorer: StateScorer, prompt: Sequence[int], count: int, repetitions: int) -> Iterator[float]:
    """Yield the seconds of our Scorer's pass over `count` tokens after a prompt, which are then rolled back."""
    scorer.clear()
    scorer.add(1)
    scorer.prefill([prompt])
    for _ in range(repetitions):
        tokens = torch.randint(0, scorer.vocab, (1, count))
        began = perf_counter()
        scorer.extend(tokens, [count])
        yield perf_counter() - began
        scorer.rollback([len(prompt)])
    scorer.clear()


def bare_seconds(scorer: StateScorer, prompt: Sequence[int], count: int, repetitions: int) -> Iterator[float]:
    """Yield the seconds of transformers' own forward pass over `count` tokens after a prompt."""
    model: Any = scorer.model
    call = with_cache(model)
    with torch.inference_mode():
        before = state_in(model(input_ids=torch.tensor([prompt]), use_cache=True))
        for _ in range(repetitions):
            state, tokens = copied(before), torch.randint(0, scorer.vocab, (1, count))
            began = perf_counter()
            call(input_ids=tokens, cache=state, use_cache=True)
            yield perf_counter() - began


WAYS = {"one pass": True, "two passes": False}
"""How rounds are run: the name, and whether rollback restores states from within a pass."""


def taken_in_turn(scorer: StateScorer, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the seconds of every turn, by what was measured."""
    prompt = torch.randint(0, scorer.vocab, (args.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    request, plain = Request(tuple(prompt), Sampling(), args.tokens), Decoder(scorer, controller=Fixed(0))
    text, way, turns = generate(plain, [request])[0].output, scorer.way, list[dict[str, float]]()
    for _ in range(1 + args.repetitions):
        seconds = {"bare": statistics.median(bare_seconds(scorer, prompt, args.gamma + 1, 5))}
        for name, rewinds in WAYS.items():
            scorer.way = replace(way, rewinds=rewinds)
            seconds[f"our pass, {name}"] = statistics.median(pass_seconds(scorer, prompt, args.gamma + 1, 5))
            drafted = replace(plain, drafter=Known(text, scorer.vocab), controller=Fixed(args.gamma))
            seconds[name], accepted, output = round_seconds(drafted, request)
            assert accepted and output == text, "a draft must not change the text"
            scorer.clear()
            seconds[f"plain step, {name}"] = round_seconds(plain, request)[0]
            scorer.clear()
        turns.append(seconds)
    scorer.way = way
    return turns[1:]  # the first is the warm-up


def measured(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a family -> its figures: milliseconds, ratios, and the facts of the model and machine."""
    scorer = made(family, args.layers)
    began = perf_counter()
    turns = taken_in_turn(scorer, args)

    def over(name: str, other: str) -> float:
        return statistics.median(turn[name] / turn[other] for turn in turns)

    times = {name: 1e3 * statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "family": family,
        "way": str(scorer.way),
        "parameters": parameters(scorer.model),
        "milliseconds": {"plain step": times["plain step, one pass"], **times},
        "over a bare pass": {name: over(name, "bare") for name in turns[0]},
        "over our pass": {name: over(name, f"our pass, {name}") for name in WAYS},
        "seconds": perf_counter() - began,
        "machine": environment(Engine(Decoder(scorer, controller=Fixed(0)))),
    }


def parameters(model: Any) -> int:
    """Return the number of weights, including those of packed layers, which are no parameters of the module."""
    in_packed_layers = sum(
        part.in_features * part.out_features for part in model.modules() if isinstance(part, PackedLinear)
    )
    return in_packed_layers + sum(each.numel() for each in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--layers", type=int, help="take the first layers only")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the first round")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to write in each run")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    found = [measured(family, args) for family in args.family]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
