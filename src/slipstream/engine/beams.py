"""`BeamTexts` runs the beam searches of a call and returns several texts for each prompt, each with a score."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from slipstream.core.stats import Stats
from slipstream.core.values import OptionError
from slipstream.decoding.beam import BeamDecoder, most_tokens, searches_of
from slipstream.decoding.beam_search import BeamSearch
from slipstream.decoding.scheduler import MemoryLimit
from slipstream.engine.generation import Completion, Job


class BeamTexts:
    """Runs a beam search for each prompt of a job and collects the completions.

    Text i is number i % width of prompt i // width, where `width` is `num_return_sequences`. `memory` limits the bytes
    that the caches may take. Raises ValueError for requests that the target or the draft cannot search, or for which
    there is too little memory.
    """

    def __init__(self, job: Job, memory: int | None = None) -> None:
        beams = job.options.beams
        assert beams is not None
        self._job, self._width = job, beams.num_return_sequences
        self._searches = searches_of(job.decoder.target, [each.request for each in job.generations])
        self._admission = MemoryLimit(memory, job.decoder)
        for search in self._searches:
            if not self._admission.holds([most_tokens(search, job.decoder.controller.most)]):
                raise OptionError(
                    f"num_beams={beams.num_beams} is not possible for prompt {search.index}: with {search.limit} new "
                    f"tokens the caches would take more than {memory} bytes; use fewer beams or new tokens."
                )
        self._done: dict[int, Completion] = {}

    def play(
        self,
        on_completion: Callable[[int, Completion], object] | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Search to the end, or while `wanted()` is true; call `on_completion(index, completion)` for each text as soon
        as its search has ended."""
        with closing(BeamDecoder(self._job.decoder, self._searches, memory=self._admission).rounds()) as rounds:  # type: ignore[type-var]
            for running in rounds:
                for search in running:
                    if search.finish_reason:
                        self._done |= dict(self._completions_of(search))
                        for index in self._texts_of(search.index):
                            if on_completion is not None and index in self._done:
                                on_completion(index, self._done[index])
                if not wanted():
                    return

    @property
    def prompts(self) -> list[Sequence[int]]:
        return [search.request.prompt for search in self._searches]

    @property
    def prompt_tokens(self) -> int:
        return sum(search.request.prompt_tokens for search in self._searches)

    @property
    def completions(self) -> list[Completion]:
        """All completions, in order; unfinished searches give their best texts so far, with reason "interrupted"."""
        return [self._done.get(index, now) for search in self._searches for index, now in self._completions_of(search)]

    def _texts_of(self, place: int) -> range:
        return range(place * self._width, (place + 1) * self._width)

    def _completions_of(self, search: BeamSearch) -> Iterator[tuple[int, Completion]]:
        """Yield the completions of a search with their indices; the first text has the search's statistics."""
        generation, hypotheses = self._job.generations[search.index], search.hypotheses()
        prompt_tokens = search.request.prompt_tokens
        for rank, index in enumerate(self._texts_of(search.index)):
            stats = search.stats if not rank else Stats()
            if rank >= len(hypotheses):
                missing = f"there is no text number {rank + 1}: the settings allow {len(hypotheses)} only."
                yield index, Completion(generation.echo, (), "error", stats, prompt_tokens, missing)
                continue
            found = hypotheses[rank]
            text, tokens, reason = generation.echo + generation.text_of(found.tokens), found.tokens, found.finish_reason
            # A text that is shorter than requested has filled the context.
            full = reason == "length" and len(tokens) < search.request.max_new_tokens
            about = (stats, prompt_tokens, search.error, full)
            yield index, Completion(text, tokens, reason, *about, score=found.score)
