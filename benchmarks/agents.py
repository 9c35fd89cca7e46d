"""Measures how many tokens per target call drafts by copying give on recorded agent conversations, in their order.

python benchmarks/agents.py CONVERSATIONS.json [--target DIR] [--limit 50] [--gamma 16] [--json]

The text is replayed: the target is a stand-in that emits exactly the recorded assistant turns, so this measures the
drafts, not a model. Each turn is a request whose prompt is the conversation before it. The memory learns a turn when it
has ended; the corpus holds the assistant turns of all earlier conversations and is rebuilt for each conversation.

CONVERSATIONS is a list of objects with `traj` or `messages` (tau-bench's results as they are published): messages
with role, content and tool_calls. `--tasks-once` keeps the first conversation of every `task_id`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.core.request import Request
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import Datastore, DatastoreSettings
from slipstream.drafters.datastore.embedding import InputEmbeddings
from slipstream.drafters.datastore.memory import ResponseMemory
from slipstream.models.loading.load import load_model, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from toys.tables import TableScorer

Turn = tuple[list[int], list[int]]  # token ids of the prompt and of the response
SOURCES = ("own", "corpus", "memory", "corpus+memory", "own+corpus", "own+memory", "own+corpus+memory")
"""Where drafts are copied from; "own" is the request's own text."""


class Recorded(TableScorer):
    """A stand-in for the model that was recorded: its text is always `said`, regardless of the drafts."""

    said: Sequence[int] = ()

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Return logits (rows, n, vocab) whose greatest one is the next recorded token."""
        logits = torch.zeros(*tokens.shape, self.vocab)
        for r, (row, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            for j, new in enumerate(row[:count]):
                self.texts[first + r].append(new)
                logits[r, j, self.said[min(len(self.texts[first + r]), len(self.said) - 1)]] = 1
        return logits


def main() -> None:
    args = arguments()
    tokenizer = load_tokenizer(args.target or EMBEDDED / "target")
    model = load_model(args.target or EMBEDDED / "target", "float32", "cpu")
    weights = model.get_input_embeddings().weight
    recorded = list(conversations(args, tokenizer))[: args.limit]
    turns = [turn for conversation in recorded for turn in conversation]
    prompts, size = [len(prompt) for prompt, _ in turns], sum(len(response) for _, response in turns)
    about = f"{len(recorded)} conversations, {len(turns)} turns, {size} tokens, prompts of {sum(prompts) // len(turns)}"
    rows = [{"source": source, **replay(recorded, source, weights, args)} for source in args.sources]
    if args.json:
        print(json.dumps({"conversations": len(recorded), "turns": len(turns), "tokens": size, "rows": rows}))
        return
    print(f"{about} on average, gamma {args.gamma}; replay of recorded text")
    for row in rows:
        print(
            "{source:18} mean acceptance length {mean_acceptance_length:.2f}   first half {first_half:.2f}   "
            "second half {second_half:.2f}   drafted per call {drafted_per_call:.2f}   kept {kept:.2f}   "
            "drafting {draft_ms_per_call:.2f} ms per call".format_map(row)
        )


def replay(found: Sequence[Sequence[Turn]], source: str, weights: Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Replay all conversations in order with drafts from one of SOURCES -> its figures."""
    stats: list[Stats] = []
    with TemporaryDirectory() as folder:
        memory = (
            ResponseMemory(Path(folder) / "memory.sqlite", InputEmbeddings(weights)) if "memory" in source else None
        )
        said: list[list[int]] = []
        for conversation in found:
            corpus = Corpus.build(said, len(weights)) if "corpus" in source and said else None
            stats.append(Stats())
            if corpus or memory or "own" in source:
                drafter = Datastore(
                    len(weights),
                    corpus,
                    memory,
                    learn=bool(memory),
                    settings=DatastoreSettings(own="own" in source, factor=args.factor),
                )
            else:  # no corpus yet, as no conversation came before the first
                drafter = None
            for prompt, response in conversation:
                stats[-1] += respond(prompt, response, drafter, len(weights), args.gamma)
            said += [response for _, response in conversation]
        if memory:
            memory.close()
    half = len(stats) // 2
    total = sum(stats, Stats())
    return {
        "mean_acceptance_length": total.mean_acceptance_length or 0,
        "first_half": sum(stats[:half], Stats()).mean_acceptance_length or 0,
        "second_half": sum(stats[half:], Stats()).mean_acceptance_length or 0,
        "drafted_per_call": total.drafted / total.target_calls,
        "kept": total.accepted / max(1, total.drafted),
        "draft_ms_per_call": 1e3 * total.seconds.get("draft", 0) / total.target_calls,
    }


def respond(prompt: list[int], response: list[int], drafter: Datastore | None, vocab: int, gamma: int) -> Stats:
    """Replay one turn, token for token as it was recorded -> its statistics."""
    target = Recorded(lambda prefix: (), vocab, "the recorded agent")
    target.said = [*prompt, *response]
    decoder = (
        Decoder(target, controller=Fixed(0)) if drafter is None else Decoder(target, drafter, controller=Fixed(gamma))
    )
    (row,) = generate(decoder, [Request(tuple(prompt), Sampling(), len(response))])
    assert row.output == response
    return row.stats


def conversations(args: argparse.Namespace, tokenizer: Any) -> Iterator[list[Turn]]:
    """Yield the turns of each conversation: the text before the agent's answer, and the answer."""
    seen = set()
    for number, record in enumerate(json.loads(Path(args.conversations).read_text())):
        task = record.get("task_id", number)
        if args.tasks_once and task in seen:
            continue
        seen.add(task)
        text, turns = list[int](), list[Turn]()
        for message in record.get("traj") or record["messages"]:
            head = encode(tokenizer, f"\n<|{message['role']}|>\n")
            said = [*encode(tokenizer, content(message)), tokenizer.eos_token_id or 0]
            if message["role"] == "assistant":
                turns.append(([*text, *head], said))
            text += [*head, *said]
        yield turns


def content(message: dict[str, Any]) -> str:
    """Return the text of a message, with its tool calls as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    calls_json = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
    return (message.get("content") or "") + "".join(f"<tool_call>{call}</tool_call>" for call in calls_json)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", help="a JSON file")
    parser.add_argument(
        "--target", help="the model whose tokenizer and input embeddings are used (default: the embedded target)"
    )
    parser.add_argument("--limit", type=int, help="conversations to use (default: all)")
    parser.add_argument("--tasks-once", action="store_true", help="only the first conversation of each task")
    parser.add_argument("--gamma", type=int, default=16)
    parser.add_argument("--factor", type=float, default=1.0, help="drafted tokens per matched token")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
