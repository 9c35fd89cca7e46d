"""The work of `slipstream generate`: its prompts, its engine, and running them with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cli.app import INTERRUPTED, say
from slipstream.cli.console import console, progress, steps
from slipstream.core.stats import Stats
from slipstream.engine.explain import breakdown
from slipstream.text.prompts import Item

if TYPE_CHECKING:
    from slipstream.engine.generation import Completion


@dataclass
class Work:
    """The work of `generate`: an item for each answer, of which `samples` side by side have the same prompt.

    The engine is None if no prompt can be used; `failed` is True once a text could not go on.
    """

    engine: Any
    items: list[Item]
    options: dict[str, Any]
    profile: bool = False
    samples: int = 1
    failed: bool = False

    @property
    def good(self) -> list[Item]:
        return [item for item in self.items if not item.error]

    @property
    def together(self) -> int:
        """The number of answers that one beam search gives for a prompt; 1 without beams."""
        return self.options.get("num_return_sequences") or 1

    def place(self, index: int) -> dict[str, int]:
        """Return which sample of which prompt an answer is; {} if prompts have a single one."""
        return {} if self.samples == 1 else {"prompt": index // self.samples, "sample": index % self.samples}

    def run(self, **listeners: Any) -> tuple[list[Completion], int]:
        """Generate all good prompts -> completions, and INTERRUPTED or 0."""
        from slipstream.engine.engine import Interrupted

        prompts = [item.prompt for item in self.good[:: self.together]]
        if not self.good:
            return [], 0
        try:
            return self.engine.generate(prompts, **listeners, **self.options), 0
        except Interrupted as stop:
            return stop.completions, INTERRUPTED

    def run_watched(self, **listeners: Any) -> tuple[list[Completion], int]:
        """Generate with a progress bar; see `run`."""
        if self.options.get("num_beams", 1) > 1:
            return self._search_watched(**listeners)
        count, most = len(self.good), self.options["max_new_tokens"]
        with progress(console(stderr=True), count, most) as on_round:
            return self.run(on_round=on_round, **listeners)

    def _search_watched(
        self, on_completion: Callable[[int, Completion], object] | None = None
    ) -> tuple[list[Completion], int]:
        """Run a beam search with a progress bar of finished texts, since their tokens are known only at the end."""
        done, most = set[int](), len(self.good)
        with steps(console(stderr=True)) as tell_done:

            def show(place: int, completion: Completion) -> None:
                done.add(place)
                tell_done(len(done), most, "texts")
                if on_completion is not None:
                    on_completion(place, completion)

            tell_done(0, most, "texts")
            return self.run(on_completion=show)

    def close(self, completions: Sequence[Completion]) -> None:
        """Print notes on standard error: failures, full contexts, and times if `profile` is set."""
        full = []
        for item, completion in zip(self.good, completions, strict=False):
            if completion.error:
                self.failed = True
                say(f"{item.where}: {completion.error}")
            full += [item.where] if completion.context_full else []
        if full:
            names, target = ", ".join([*full[:3], *["..."][: len(full) - 3]]), self.engine.decoder.target
            count = f"{len(full)} answers" if len(full) > 1 else "the answer"
            say(f"note: {count} ({names}) ended early, at the {target.context} tokens that {target.name} holds.")
        if self.profile:
            console(stderr=True).print(breakdown(sum((completion.stats for completion in completions), Stats())))
