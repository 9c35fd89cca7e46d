"""Writes the model card of the demo pair from its measurements."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaForCausalLM

from .corpus import HELD_OUT, TABLE_SHARE, VOCABULARY, Library, Source
from .measure import NEW, Behaviour
from .models import CONTEXT, LIBRARY
from .packages import Package
from .writing import WRITTEN

_TEMPLATE = """\
# The demo pair

Two small models that write Python, made to try speculative decoding without a download: a target
and a draft that guesses for it. They were trained from scratch by this repository's recipe;
neither knows enough to be useful as an assistant.

| | target | draft |
|---|---|---|
{shapes}
| held-out bits per byte | {target_bits:.3f} | {draft_bits:.3f} |

How often a guess of the draft is accepted (alpha), and how much of the target's greedy completions
is repetition:

| prompts | number | alpha, temperature 0 | alpha, temperature 1 | repeated 4-grams |
|---|---|---|---|---|
{found}

At temperature 1, alpha is the mean of sum(min(p, q)) over text sampled from the target; at
temperature 0, the share of positions of the target's greedy text where both models rank the same
token first. Each prompt is continued by up to {new} tokens. All figures were computed in float32
from the saved bfloat16 weights; bits per byte in windows of {context} tokens without overlap.

## Data

{share:.0%} of the windows of text that were read are of the standard library of Python {python} (PSF
License; {files} files, {megabytes:.1f} MB), the others of {number} packages of pure Python
({package_files:,} files, {package_megabytes:.1f} MB), all under permissive licences:

{packages}

Left out:

- folders of tests and of copies of other packages, and comments at the tops of the packages' files;
- tables: files in which more than {table:.0%} of the lines are literals (code pages, entity lists);
- the modules kept for the figures above: {held_out}, and files of packages that copy them.

The draft also learned from {rows} continuations of up to {row} tokens that the target wrote,
prompted with function headers, docstrings and openings from the same training files. HumanEval,
where it appears above, was only measured on.

The tokenizer is a byte-level BPE of {vocabulary} tokens learned on the library's training files.

## Recipe

    {command}

On {device}. The target read {target_tokens:.1f} M tokens, the draft {draft_tokens:.1f} M.
"""


@dataclass(frozen=True)
class Facts:
    """All facts that the card states; pairs are of target and draft."""

    library: Library
    packages: list[Package]
    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    bits: tuple[float, float]  # bits per byte of the held-out modules
    found: dict[str, Behaviour]  # by the name of a set of prompts
    rows: int  # texts that the target wrote for the draft
    command: str
    device: str
    tokens: tuple[int, int]  # tokens that each was trained on


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


def _megabytes(sources: list[Source]) -> float:
    return sum(len(source.text.encode()) for source in sources) / 1e6


def write_card(file: Path, facts: Facts) -> None:
    """Write the card: the template filled in with the facts."""
    train = facts.library.train
    modules = [module for package in facts.packages for module in package.modules]
    file.write_text(
        _TEMPLATE.format(
            shapes=_shapes(facts.target, facts.draft),
            target_bits=facts.bits[0],
            draft_bits=facts.bits[1],
            found="\n".join(
                f"| {name} | {seen.prompts} | {seen.greedy:.3f} | {seen.sampled:.3f} | {seen.repeated:.1%} |"
                for name, seen in facts.found.items()
            ),
            share=LIBRARY,
            python=platform.python_version(),
            files=len(train),
            megabytes=_megabytes(train),
            number=len(facts.packages),
            package_files=len(modules),
            package_megabytes=_megabytes(modules),
            packages="\n".join(f"- {one.name} {one.version}: {one.licence}" for one in facts.packages),
            table=TABLE_SHARE,
            row=WRITTEN,
            new=NEW,
            context=CONTEXT,
            held_out=", ".join(f"`{name}`" for name in HELD_OUT),
            rows=f"{facts.rows:,}",
            vocabulary=f"{VOCABULARY:,}",
            command=facts.command,
            device=facts.device,
            target_tokens=facts.tokens[0] / 1e6,
            draft_tokens=facts.tokens[1] / 1e6,
        ),
        encoding="utf-8",
    )
