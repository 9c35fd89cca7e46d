"""Writing the model card of the demo pair from its measurements."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaForCausalLM

from .corpus import HELD_OUT, SKIPPED_FOLDERS, TABLE_SHARE, VOCABULARY, Library
from .measure import NEW, Alpha
from .models import CONTEXT
from .sampling import ROW

_TEMPLATE = """\
# The demo pair

Two small models that write Python, made to try speculative decoding without a download: a target
and a draft that guesses for it. They were trained from scratch by this repository's recipe;
neither knows enough to be useful as an assistant.

| | target | draft |
|---|---|---|
{shapes}
| held-out bits per byte | {target_bits:.3f} | {draft_bits:.3f} |

How often a guess of the draft is accepted (alpha):

| prompts | number | temperature 0 | temperature 1 |
|---|---|---|---|
{alphas}

At temperature 1, alpha is the mean of sum(min(p, q)) over text sampled from the target; at
temperature 0, the share of positions of the target's greedy text where both models rank the same
token first. Each prompt is continued by up to {new} tokens. All figures were computed in float32
from the saved bfloat16 weights; bits per byte in windows of {context} tokens without overlap.

## Data

The source of the standard library of Python {python}, under the PSF License: {files} files,
{megabytes:.1f} MB. Left out:

- the folders {skipped};
- tables: files in which more than {table:.0%} of the lines are literals (code pages, entity lists);
- the modules kept for the figures above: {held_out}.

The draft also learned from {rows} continuations of up to {row} tokens that the target wrote,
prompted with function headers, docstrings and openings from the same training files. HumanEval,
where it appears above, was only measured on.

The tokenizer is a byte-level BPE of {vocabulary} tokens learned on the training files.

## Recipe

    {command}

On {device}: {timing}.
"""


@dataclass(frozen=True)
class Facts:
    """All facts that the card states."""

    library: Library
    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    bits: tuple[float, float]
    alphas: dict[str, Alpha]
    rows: int
    command: str
    device: str
    timing: str


def _shapes(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> str:
    rows = {
        "parameters": lambda m: f"{m.num_parameters():,}",
        "layers": lambda m: m.config.num_hidden_layers,
        "width": lambda m: m.config.hidden_size,
        "heads (key-value)": lambda m: f"{m.config.num_attention_heads} ({m.config.num_key_value_heads})",
        "feed-forward width": lambda m: m.config.intermediate_size,
        "context": lambda m: m.config.max_position_embeddings,
    }
    return "\n".join(f"| {name} | {get(target)} | {get(draft)} |" for name, get in rows.items())


def write_card(file: Path, facts: Facts) -> None:
    """Write the card: the template filled in with the facts."""
    train = facts.library.train
    file.write_text(
        _TEMPLATE.format(
            shapes=_shapes(facts.target, facts.draft),
            target_bits=facts.bits[0],
            draft_bits=facts.bits[1],
            alphas="\n".join(
                f"| {name} | {a.prompts} | {a.greedy:.3f} | {a.sampled:.3f} |" for name, a in facts.alphas.items()
            ),
            python=platform.python_version(),
            files=len(train),
            megabytes=sum(len(s.text.encode()) for s in train) / 1e6,
            skipped=", ".join(f"`{name}`" for name in sorted(SKIPPED_FOLDERS)),
            table=TABLE_SHARE,
            row=ROW,
            new=NEW,
            context=CONTEXT,
            held_out=", ".join(f"`{name}`" for name in HELD_OUT),
            rows=f"{facts.rows:,}",
            vocabulary=f"{VOCABULARY:,}",
            command=facts.command,
            device=facts.device,
            timing=facts.timing,
        ),
        encoding="utf-8",
    )
