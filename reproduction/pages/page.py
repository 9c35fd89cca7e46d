"""reproduction/paper.md: every sheet with the command that makes it, from the JSON files alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reproduction.pages.sheet import Sheet, markdown
from slipstream.files import TextFileKind, atomic_write

KIND = TextFileKind("page of the paper", "# The paper, reproduced\n")
"""The first line that tells the page from other files."""

INTRODUCTION = """\
# The paper, reproduced

Every table and figure of "Fast Inference from Transformers via Speculative Decoding" (Leviathan, Kalman, Matias;
ICML 2023, [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)) beside our own runs. This page is written by
`python -m reproduction` in a checkout; every number on it comes from the command beside it, and lies as JSON in
[paper/](paper). Columns named `paper` hold what the paper prints; `ours / paper` is the ratio.
`pip install 'slipstream[paper]'` brings what the commands need beside the core.

## What is different here

| | paper | here |
|---|---|---|
| target | T5 v1.1 XXL, 11 B parameters, fine-tuned | T5 v1.1 type, trained from scratch (sizes below the tables) |
| drafts | T5 v1.1 small 77 M, base 250 M, large 800 M: 1/140, 1/44, 1/14 of it | the same type: 1/150, 1/48, 1/16 of \
it; taught by what the target says |
| translation | WMT English-German | Multi30k: documents of four captions of pictures, in short and simple sentences |
| summaries | CNN/DailyMail, articles to highlights | `lead`: a passage of a CNN/DailyMail article to its first three \
sentences |
| unconditional text | GPT-like 97 M and 6 M on lm1b | the embedded pair, Llama type, 9.9 M and 0.9 M, on Python |
| dialog | LaMDA 137 B with 100 M, 2 B, 8 B | none |
| machine | one TPU-v4, T5X | those named below each table |
| texts | long enough that the encoder does not count | translations of about 50 tokens, summaries of 100: the \
encoder's share is measured and included |

The models are small and were trained within hours on a CPU. They do not replace the paper's. What can be compared is
the method: how alpha orders the drafts, how alpha and c determine the speed, and how the measured speed compares with
the theory. For translations and summaries, the target's encoder and the drafts are in bfloat16, the target's decoder
and all distributions in float32, for plain decoding and transformers too.

The targets were first trained at a tenth of their size or less and then grown: their feed-forward layers were widened
without changing the function, and all weights trained a little further. So a target costs what its size costs, and
writes what a small model can learn from few texts. For translations the target took 4 passes over 34,800 documents; the
drafts small, base and large learned from 18,000 of its answers in 40, 5 and 1.3 passes, most of them to texts made of
halves of two documents, because the target answers memorized texts differently from new ones. For summaries all models
first learned to copy random tokens, up to 160 of them; then the target took 6 passes over 7,852 passages, and the
drafts 20, 12 and 3 over 4,000 of its answers. So summaries are copied sentences, and say nothing of how well news can
be summarized.

The paper's own models can be measured by whoever has the hardware:

```
$ python -m reproduction table2 table4 --target google/t5-v1_1-xxl --draft google/t5-v1_1-small \\
    --draft google/t5-v1_1-base --draft google/t5-v1_1-large --pairs dataset:bentrevett/multi30k --out build/paper
```

T5 v1.1 has seen no task and must be fine-tuned first, as the paper did; the first T5 was trained on several, so that
`--target google-t5/t5-large --draft google-t5/t5-small --task translation_en_to_de` works as it is.

Not copied from the paper, for they do not follow from its own figures: the speeds of section A.5 for lenience at
temperature 1, the inequality of greedy lenience (printed the wrong way round), and the remark that c was always below
0.05 (Table 4 has 0.11 for large).
"""


def page(sheets: Sequence[Sheet], folder: str) -> str:
    """Return the page as Markdown; pictures lie in `folder` beside it."""
    parts = [INTRODUCTION]
    for sheet in sheets:
        parts.append("\n".join(_section(sheet, folder)))
    return "\n".join(parts).rstrip() + "\n"


def _section(sheet: Sheet, folder: str) -> Iterator[str]:
    yield f"## {sheet.title}\n"
    yield f"```\n$ {sheet.command}\n```\n"
    if sheet.quick:
        yield "**Quick: tiny models and few texts, to show that it runs. Not to be compared with the paper's.**\n"
    if sheet.drawn:
        yield f"![{sheet.title}]({folder}/{sheet.name}.svg)\n"
    if table := markdown(sheet):
        yield "\n".join(table) + "\n"
    if sheet.text:
        yield f"```\n{sheet.text.rstrip()}\n```\n"
    yield from (f"{note}\n" for note in sheet.notes)
    if sheet.environment:
        yield f"{machine(sheet.environment)}\n"


def machine(facts: dict[str, Any]) -> str:
    """Return a sentence on where everything was measured, and with which models."""
    places: dict[str, list[str]] = {}
    for task, run in facts["runs"].items():
        places.setdefault(_place(run), []).append(task)
    described = [place if len(places) == 1 else f"{' and '.join(tasks)} {place}" for place, tasks in places.items()]
    models = [
        f"{name} {count / 1e6:.2f} M {facts['dtypes'].get(name, '')}".rstrip()
        for name, count in facts["parameters"].items()
    ]
    parameters = f"; parameters: {', '.join(models)}" if models else ""
    return f"Measured {'; '.join(described)}{parameters}."


def _place(run: dict[str, Any]) -> str:
    cpu = f"{run['cpu']}, {run['threads']} of {run['cores']} threads"
    versions = ", ".join(f"{name} {run[name]}" for name in ("slipstream", "torch", "transformers"))
    return f"{run['date'][:10]} on {cpu if 'cpu' in str(run['device']) else run['device']} ({versions})"


def page_file(out: Path) -> Path:
    """Return the file of the page, beside that of the sheets: `reproduction/paper.md` for `reproduction/paper`."""
    out = out.absolute()
    return out.with_name(f"{out.name}.md")


def write_page(sheets: Sequence[Sheet], out: Path) -> Path:
    """Write the page, whole or not at all -> its file."""
    file = page_file(out)
    with atomic_write(file) as part:
        part.write_text(page(sheets, out.name), encoding="utf-8")
    return file
