"""Measures the time of making a grammar's token masks, for drafted tokens and the target, as a share of a round.

python benchmarks/grammar.py TARGET DRAFT [--tokens 200] [--gamma 5]

It is meant for a pair with a vocabulary of 32,000 tokens (`benchmarks/cost_padded.py`). The pair's own tokenizer has
fewer tokens, so one of that size is trained on Python's standard library; the sampled texts themselves do not matter.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.core.request import Request
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds
from slipstream.decoding.grammar import Grammar, Grammars
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.models.loading.load import load_scorer

PROMPT = tuple(range(10, 60))  # any token ids
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}},
    },
    "required": ["name", "tags", "place"],
}


class Timed(Grammar):
    """A grammar that adds up the seconds in which its masks are made."""

    seconds = 0.0

    def masks(self, outputs: Sequence[Sequence[int]]) -> torch.Tensor:
        """Make the masks, and add the time to `seconds`."""
        start = perf_counter()
        made = super().masks(outputs)
        self.seconds += perf_counter() - start
        return made


def main() -> None:
    """Measure, and print a table with a line per grammar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--gamma", type=int, default=5)
    args = parser.parse_args()
    target, draft = (load_scorer(name) for name in (args.target, args.draft))
    decoder = Decoder(target, ModelDrafter(draft), controller=Fixed(args.gamma))
    grammars = Grammars(trained_tokenizer(target.vocab), target.vocab, frozenset({0}))
    made = {
        "schema": grammars.json_schema(SCHEMA),
        "any object": grammars.json_object(),
        "regex": grammars.regex("([A-Z][a-z]{2,12} ){3,400}"),
        "choice": grammars.choice([f"answer number {n} of " + "many " * 90 for n in range(100)]),
    }
    print("| grammar | rounds | a round, ms | its masks, ms | share |\n|---|---|---|---|---|")
    for name, grammar in made.items():
        count, seconds, masks = measured(decoder, grammar, args.tokens)
        print(
            f"| {name} | {count} | {1000 * seconds / count:.1f} | {1000 * masks / count:.2f} | {masks / seconds:.1%} |"
        )


def trained_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a vocabulary of `words` tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train([str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def measured(decoder: Decoder, grammar: Grammar, tokens: int) -> tuple[int, float, float]:
    """Generate within a grammar -> the number of rounds, their seconds, and the seconds of masks among these."""
    grammar.__class__ = Timed  # `Grammars` makes plain grammars
    assert isinstance(grammar, Timed)
    count, seconds = 0, 0.0
    sampler = Sampling(temperature=1.0, eos=frozenset({0}), grammar=grammar)
    for key in range(6):  # several texts, as one may end early; the first is the warm-up
        grammar.seconds = 0.0 if key == 1 else grammar.seconds
        for round in rounds(decoder, [Request(PROMPT, sampler, tokens, frozenset({0}), key=key)]):
            count += key > 0
            seconds += sum(round.seconds.values()) if key else 0.0
    return count, seconds, grammar.seconds


if __name__ == "__main__":
    main()
