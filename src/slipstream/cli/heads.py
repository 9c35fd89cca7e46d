"""`slipstream heads train`: parallel heads for a target, from text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream.cli.app import INTERRUPTED, app, say, tell_skipped
from slipstream.cli.console import busy, console
from slipstream.cli.options import Device, Dtype, Force, ReportJson, ThreadOptions, with_options
from slipstream.files import check_folder
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.training.trainer import Watch

heads = typer.Typer(no_args_is_help=True)


app.add_typer(heads, name="heads")


Target = Annotated[str | None, typer.Argument(metavar="TARGET", help="Hub name or folder. Without: the embedded one.")]
Text = Annotated[list[Path], typer.Option(metavar="FILE", help="Text to learn on: a file, or a folder. Repeatable.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where heads and the state of their training go.")]
Count = Annotated[int, typer.Option("--heads", metavar="N", min=1, help="Heads, and so the most tokens of a draft.")]
Inner = Annotated[int, typer.Option(metavar="N", min=0, help="Hidden units of a head; 0: as a layer of the target.")]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the whole training.")]
Rows = Annotated[int, typer.Option(metavar="N", min=1, help="Windows of text in a step.")]
Length = Annotated[int, typer.Option(metavar="N", min=3, help="Tokens of a window.")]
Rate = Annotated[float, typer.Option(metavar="X", help="Learning rate.")]
Blind = Annotated[bool, typer.Option("--blind", help="Heads that do not see the pending token, as in Stern et al.")]
Bfloat16 = Annotated[bool, typer.Option("--bfloat16", help="Multiply in bfloat16: faster where the processor can.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Same seed, same heads.")]


@heads.callback()
def root() -> None:
    """Parallel heads: several drafted tokens from one hidden state of the target.

    Example: slipstream heads train --text src --out my-heads
    """


@heads.command()
@with_options(ThreadOptions)
def train(
    target: Target = None,
    *,
    text: Text,
    out: Out,
    count: Count = 4,
    inner: Inner = 0,
    steps: Steps = 1000,
    rows: Rows = 4,
    length: Length = 256,
    rate: Rate = 2e-3,
    blind: Blind = False,
    bfloat16: Bfloat16 = False,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = None,
    force: Force = False,
    as_json: ReportJson = False,
) -> None:
    """Train heads on the frozen target; the same command resumes a training that was interrupted.

    Then: slipstream generate --draft heads:DIR

    Example: slipstream heads train --text src --out my-heads --steps 500
    """
    from slipstream.models.loading.load import EMBEDDED, load_model, load_tokenizer
    from slipstream.training.heads import FILES, HeadTrainer, TrainingSettings
    from slipstream.training.memory import keep_freed_memory

    keep_freed_memory()
    check_folder(out, FILES, force, text)
    settings = TrainingSettings(count, inner, not blind, steps, rows, length, rate, seed, bfloat16)
    skipped = list[Path]()
    texts = read_texts(text, skipped)
    tell_skipped(skipped)
    with busy(console(stderr=True), "loading"):
        source = EMBEDDED / "target" if target is None else target
        model = load_model(source, dtype, device)
        name = target or "the embedded target"
        settings.check_target(model, name)
        trainer = HeadTrainer(model, name, tokens_of(texts, load_tokenizer(source)), out, settings)
    if trainer.step:
        say(f"going on from step {trainer.step} of {settings.steps}")
    try:
        with _bar(trainer.step, settings.steps) as watch:
            trainer.train(watch)
    except KeyboardInterrupt:
        say(f"stopped and saved at step {trainer.step} of {settings.steps}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    report = trainer.report()
    if as_json:
        print(json_text({"out": str(out), **report}))
        return
    print(f"{out}: {count} heads after {report['steps']} steps; alpha on text kept aside, by position:")
    print("  ".join(f"{position}: {alpha:.3f}" for position, alpha in enumerate(report["alpha"], 1)))


def read_texts(paths: Sequence[Path], skipped: list[Path]) -> list[str]:
    """Return the text of files, and of all text files below folders; other files are added to `skipped`.

    Raises ValueError for a named file that is no text, and if there is no text at all.
    """
    texts = list[str]()
    for path in paths:
        if path.is_dir():
            by_file = {file: _text(file) for file in sorted(path.rglob("*")) if file.is_file()}
            skipped += [file for file, text in by_file.items() if text is None]
            texts += filter(None, by_file.values())
        elif (text := _text(path)) is None:
            raise ValueError(f"{path} is no text in UTF-8.")
        else:
            texts.append(text)
    if not any(texts):
        raise ValueError(f"there is no text in {', '.join(map(str, paths))}.")
    return texts


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def tokens_of(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """Return all texts as one list of token ids, each after the end-of-text token, if the tokenizer has one."""
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [token for one in ids for token in (*between, *one)]


@contextmanager
def _bar(done: int, steps: int) -> Iterator[Watch]:
    """Show a progress bar of training steps, on a terminal only -> a function to call with progress and loss."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("training", completed=done, total=steps)
        yield lambda progress, loss: bar.update(task, description=f"loss {loss:.3f}", completed=progress.steps)
