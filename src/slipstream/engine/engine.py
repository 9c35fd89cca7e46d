"""What `slipstream.load` returns: a target, a drafter and a tokenizer, bound once; text in, text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slipstream.core.draws import request_key
from slipstream.core.protocols import Shape
from slipstream.core.request import Request
from slipstream.core.round import Round
from slipstream.core.source import Frame, framed, numbers
from slipstream.decoding.controllers import Fixed, controller
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import rounds
from slipstream.decoding.rules import BLOCK, Rule, rule
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler, check_requests
from slipstream.engine.generation import Completion, Generation, Piece
from slipstream.engine.requests import Encoder, Options, Prompt, read_options, read_prompt, read_prompts, sampling


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`: `completions` hold what was produced, unfinished ones as "interrupted"."""

    def __init__(self, completions: list[Completion]) -> None:
        super().__init__("interrupted")
        self.completions = completions


@dataclass(frozen=True)
class Job:
    """A call, ready to run: what decodes, what was asked for, and a generation for each prompt."""

    decoder: Decoder
    options: Options
    generations: list[Generation]

    def begin(self, scheduler: Scheduler, skip: Collection[int] = ()) -> dict[int, Generation]:
        """Queue all generations but those at the indices `skip` -> them, by index."""
        begun = {index: one for index, one in enumerate(self.generations) if index not in skip}
        for index, generation in begun.items():
            generation.row = scheduler.add(generation.request, index)
        return begun


class Engine:
    """Generates text with a target and, unless it is None, a drafter. Not to be shared between threads.

    `notes` say in a sentence each what was chosen while loading, such as how a draft with another tokenizer drafts.
    With an encoder-decoder, prompts are sources; `frame` tells what stands around them.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        rule: Rule = BLOCK,
        exact_shape: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        self.exact_shape = exact_shape
        self.notes = tuple(notes)
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.eos = eos
        self.rule = rule

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | Mapping[str, Any],
        *,
        on_completion: Callable[[int, Completion], object] | None = None,
        on_round: Callable[[Round], object] | None = None,
        skip: Collection[int] = (),
        **options: Any,
    ) -> list[Completion]:
        """Continue every prompt, several at a time -> completions in the order of the prompts.

        Prompts are texts, token ids, chats, or what a tokenizer returns; see `requests.read_prompts`. Options are
        `max_new_tokens` (128), `stop` (strings), `seed` (0), `gamma`, `verify` (a `Rule` or its name), `lossless`
        (refuse every lossy rule), `plain` (do not speculate), `ignore_eos`, and the settings of `Sampling`:
        `temperature` (0 = greedy), `top_k`, `top_p`, ... None stands for the default.

        `on_completion(index, completion)` is called as soon as a prompt is finished, in whatever order that is. The
        prompts at the indices `skip` are left out, also in what is returned: the others get the texts that they would
        have had among all. A text that cannot go on, as where a processor raises, has the reason in its `error`.

        Raises ValueError for a prompt that is empty or too long and for impossible settings, TypeError for
        unknown options, and `Interrupted` on Ctrl-C.

        >>> engine.generate("def fibonacci(n):", max_new_tokens=32)[0].text  # doctest: +SKIP
        """
        job, done = self.prepare(read_prompts(prompts), options), dict[int, Completion]()
        with Scheduler(job.decoder) as scheduler:
            begun = job.begin(scheduler, skip)
            try:
                while (round := scheduler.step()) is not None:
                    if on_round:
                        on_round(round)
                    for index in (row.index for row in round.rows if row.finish_reason):
                        done[index] = begun[index].completion
                        if on_completion:
                            on_completion(index, done[index])
            except KeyboardInterrupt:
                raise Interrupted([done.get(index) or one.completion for index, one in begun.items()]) from None
        return [done[index] for index in begun]

    def stream(self, prompt: Prompt | Mapping[str, Any], **options: Any) -> Iterator[Piece]:
        """Continue one prompt, token by token, as rounds complete; options as for `generate`."""
        prompts = read_prompts(prompt)
        if len(prompts) != 1:
            raise ValueError(f"stream continues one prompt, but here are {len(prompts)}: use generate for several.")
        job = self.prepare(prompts, options)
        check_requests(self.decoder.target, [job.generations[0].request])
        return self._stream(job)

    def _stream(self, job: Job) -> Iterator[Piece]:
        with Scheduler(job.decoder) as scheduler:
            [generation] = job.begin(scheduler).values()
            while (round := scheduler.step()) is not None:
                yield from generation.follow(round, 0)

    def warm_up(self) -> None:
        """Decode a few tokens of one text, with and without the draft, so that the graphs for it are made."""
        most = self.decoder.controller.most
        for decoder in (self.decoder, replace(self.decoder, drafter=NoDraft(), controller=Fixed(0))):
            form = decoder.target.source_form
            source = None if form is None else form.example()
            deque(rounds(decoder, [Request((0, 0), Sampling(), 2 + most, source=source)]), maxlen=0)

    def encode(self, prompt: Prompt | Mapping[str, Any]) -> tuple[int, ...]:
        """The prompt's token ids; for an encoder-decoder, those of the source. Raises ValueError if it cannot be one:
        empty, too long, or no tokenizer."""
        ids = self._encoder(read_prompt(prompt))
        if isinstance(ids, Tensor):
            raise ValueError("audio features have no token ids: only `generate` and `stream` take them.")
        begin, source = framed(self.frame, ids)
        check_requests(self.decoder.target, [Request(begin, Sampling(), 1, source=source)])
        return ids

    @property
    def frame(self) -> Frame | None:
        """What stands around sources; None for a causal target."""
        return self.decoder.frame

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones; empty if there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def _encoder(self) -> Encoder:
        return Encoder(self.decoder.target.name, self.tokenizer, self.frame)

    def prepare(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> Job:
        """Encode prompts and read the options of a call, as for `generate`, without running anything.

        Raises ValueError for prompts and settings that cannot be, TypeError for unknown options.
        """
        asked, settings = read_options(options)
        encoder = self._encoder
        if asked.stops:
            encoder.needed()  # to write the text in which they stand
        eos = frozenset() if asked.ignore_eos else self.eos
        sampler = sampling(settings, eos, encoder, self.decoder.target.vocab)
        if sampler.min_new_tokens > asked.max_new_tokens:
            least, most = sampler.min_new_tokens, asked.max_new_tokens
            raise ValueError(f"min_new_tokens={least} is above max_new_tokens={most}: lower one or raise the other.")
        generations, copies = [], dict[tuple[int, ...], int]()
        for prompt in prompts:
            given = encoder(prompt)
            (ids, source), name = framed(self.frame, given), numbers(given)
            copies[name] = copies.get(name, -1) + 1
            key = request_key(name, copies[name])
            request = Request(ids, sampler, asked.max_new_tokens, eos, asked.seed, key, source=source)
            generations.append(Generation(request, self.decode, tuple(asked.stops)))
        if self.exact_shape:
            self._fix_shape(asked, [generation.request for generation in generations])
        return Job(self._decoder(asked), asked, generations)

    def _fix_shape(self, asked: Options, requests: Sequence[Request]) -> None:
        """One shape for the whole call, the same with `plain` as without."""
        width = 1 + self._decoder(replace(asked, plain=False)).controller.most
        longest = max((len(request.prompt) for request in requests), default=0) + asked.max_new_tokens + width
        self.decoder.target.fix_shape(Shape(self.decoder.batch_size, width, 1 << longest.bit_length()))

    def _decoder(self, asked: Options) -> Decoder:
        chosen = self.rule if asked.verify is None else rule(asked.verify)
        if asked.lossless and not chosen.lossless:
            raise ValueError(f"verify={chosen.name!r} is lossy, and lossless=True refuses it.")
        decoder = replace(self.decoder, verifier=chosen.verify, rng=chosen.rng)
        if asked.plain:
            return replace(decoder, drafter=NoDraft(), controller=Fixed(0))
        return decoder if asked.gamma is None else replace(decoder, controller=controller(asked.gamma))
