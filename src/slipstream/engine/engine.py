"""`Engine`, which `slipstream.load` returns: a target, a drafter and a tokenizer that turn prompts into text."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from torch import Tensor

from slipstream.core.draws import request_key
from slipstream.core.protocols import Shape
from slipstream.core.request import Request
from slipstream.core.round import Round
from slipstream.core.source import SourceFrame, framed, numbers
from slipstream.core.values import OptionError
from slipstream.decoding.controllers import Fixed, controller
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import rounds
from slipstream.decoding.grammar import GrammarLimits, Grammars
from slipstream.decoding.rules import BLOCK, WARM_UP, Rule, rule
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler, check_request
from slipstream.drafters.choice import KnownFirst
from slipstream.drafters.lookup import MOST
from slipstream.drafters.tree import TreeDrafter
from slipstream.engine.beams import BeamTexts
from slipstream.engine.defaults import Defaults
from slipstream.engine.generation import Completion, Generation, Job, Piece
from slipstream.engine.media import TextLimit
from slipstream.engine.options import Options, check_callback, check_scoring, read_options, sampling
from slipstream.engine.requests import Encoder, Prompt, read_prompt, read_prompts
from slipstream.engine.transcription import Transcriber
from slipstream.models.media.processor import MediaProcessor
from slipstream.text.spelling import Spelling
from slipstream.text.transcripts import Transcript


class Interrupted(KeyboardInterrupt):
    """Raised for Ctrl-C during `generate`: `completions` holds what was produced, unfinished texts as "interrupted"."""

    def __init__(self, completions: list[Completion]) -> None:
        super().__init__("interrupted")
        self.completions = completions


class Engine:
    """Generates text with a target and, unless it is None, a drafter. Not to be shared between threads.

    With an encoder-decoder, prompts are sources, and `frame` is the text and tokens around them. `media` reads images
    and sounds. `defaults` are the model's own settings of a call.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        rule: Rule = BLOCK,
        exact_shape: bool = False,
        notes: Sequence[str] = (),
        frame: SourceFrame | None = None,
        media: MediaProcessor | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        self.exact_shape = exact_shape
        self._notes = tuple(notes)
        self.decoder = replace(decoder, verifier=rule.verify, rng=rule.rng)
        self.tokenizer = tokenizer
        self.eos = eos
        self.rule = rule
        self.frame = frame
        self.media = media
        self.defaults = Defaults() if defaults is None else defaults

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each choice made while loading, as how a draft drafts, and for each model without programs."""
        faults = (getattr(getattr(each, "execution", None), "fault", None) for each in self.decoder.scorers)
        return (*self._notes, *(f"{fault}." for fault in faults if fault))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | Mapping[str, Any],
        *,
        on_completion: Callable[[int, Completion], object] | None = None,
        on_round: Callable[[Round], object] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Continue every prompt, several at a time -> completions in the order of the prompts.

        Prompts are texts, token ids, chats, `{"text": ..., "images": [...], "audio": [...]}`, or what a tokenizer
        returns; see `requests.read_prompts`. An option that is None takes its default. Options are the settings of
        `Sampling` (`temperature`, 0 is greedy, `top_k`, ...) and:

        - `max_new_tokens` (128), `stop` (strings), `stop_token_ids`, which end a text as EOS does, and `ignore_eos`,
          which ignores EOS but not `stop_token_ids`. `max_time`: a text ends after the round in which this many seconds
          have passed since it began to run: then its length, but not the law of its tokens, depends on the clock.
        - `seed` (0): one number, or one for each prompt. `n` (1): samples of each prompt, which stand one after the
          other in what is returned; the first is what n=1 gives.
        - `gamma`, `verify` (a `Rule` or its name), `lossless` (refuse every lossy rule), `plain` (do not speculate).
        - `logprobs`: return the logprob of every token and of this many of the most probable tokens at its position,
          see `TokenLogprobs`; `prompt_logprobs`: those of the prompt's tokens, also with `max_new_tokens=0`. `echo`:
          begin the texts with the prompt's. `prediction`: a text that the output is expected to resemble, for drafts
          that copy. `grammar`: which texts are allowed, made by `engine.grammars`.
        - `num_beams`: exact beam search, with transformers' `length_penalty` (1.0), `early_stopping` (False) and
          `num_return_sequences` (1): the texts of a prompt stand side by side, the best first, each with a `score`.
          With a `temperature`, the beams of each step are sampled, as with transformers' `do_sample`.
        - `priority` (0; lower ones run first) and `cache_salt`: prompts share cached prefixes only with the same salt.

        `on_completion(index, completion)` is called as soon as a text is finished, not in the order of the prompts. A
        text that cannot go on, for example because a processor raises, has the reason in `error`.

        Raises ValueError for a prompt that is empty or too long and for impossible settings, TypeError for
        unknown options, and `Interrupted` on Ctrl-C.

        >>> engine.generate("def fibonacci(n):", max_new_tokens=32)[0].text  # doctest: +SKIP
        """
        check_callback("on_round", on_round)
        check_callback("on_completion", on_completion)
        job, done = self.prepare(read_prompts(prompts), options), dict[int, Completion]()

        def finish(index: int) -> None:
            done[index] = job.generations[index].completion
            if on_completion is not None:
                on_completion(index, done[index])

        if job.options.beams is not None:
            if on_round is not None:
                raise ValueError("on_round is not called with num_beams, which has no such rounds: leave it out.")
            texts = BeamTexts(job)
            try:
                texts.play(on_completion)
            except KeyboardInterrupt:
                raise Interrupted(texts.completions) from None
            return texts.completions
        with Scheduler(job.decoder) as scheduler:
            job.begin(scheduler)
            try:
                for round in scheduler.rounds():
                    if on_round is not None:
                        on_round(round)
                    for place, row in enumerate(round.rows):
                        job.generations[row.index].record(round, place)
                    for row in round.rows:
                        if row.finish_reason:
                            finish(row.index)
            except KeyboardInterrupt:
                raise Interrupted(
                    [done.get(index) or one.completion for index, one in enumerate(job.generations)]
                ) from None
        for index in range(len(job.generations)):
            if index not in done:  # only its prompt was scored, without a round
                finish(index)
        return [done[index] for index in range(len(job.generations))]

    def stream(self, prompt: Prompt | Mapping[str, Any], **options: Any) -> Iterator[Piece]:
        """Continue one prompt, token by token, as rounds complete; options as for `generate`."""
        read = read_prompts(prompt)
        job = _streamable(self.prepare(read, options))
        check_single(len(read), len(job.generations))
        return job.pieces()

    def stream_batch(
        self, prompts: Prompt | Iterable[Prompt] | Mapping[str, Any], **options: Any
    ) -> Iterator[tuple[int, Piece]]:
        """Continue several prompts at once, token by token -> each piece with the index of its text; see `generate`."""
        return _streamable(self.prepare(read_prompts(prompts), options)).stream()

    def transcribe(
        self,
        sound: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        on_window: Callable[[int, int], object] | None = None,
        **options: Any,
    ) -> Transcript:
        """Transcribe a sound file, its bytes, or samples (n,), with a Whisper model as the target.

        `language` is the one spoken (English without it), `task` "translate" writes English; `timestamps` divides the
        text by the times that the model writes. The sound is read in windows of the encoder's length, which run in
        batches; `on_window` is called with the number of windows that are done, and of all. Other options as for
        `generate`. Raises ValueError for a target that reads no sound, and for what holds none.

        >>> engine.transcribe("talk.wav", timestamps=True).srt()  # doctest: +SKIP
        """
        transcriber = Transcriber.of(self.decoder.target, self.tokenizer)
        if several := [name for name in ("n", "num_return_sequences") if options.get(name, 1) != 1]:
            raise ValueError(f"a transcript is one text of the sound, so {several[0]} cannot be used: leave it out.")
        call_options = {**transcriber.options(language, task, timestamps), **options}
        generate = partial(self.generate, **call_options)
        return transcriber.written(sound, generate, self.decoder.batch_size, timestamps, on_window)

    def warm_up(self, rows: Sequence[int] = (1,), samplers: Sequence[Sampling] = (Sampling(),)) -> None:
        """Decode a few tokens, with and without the draft, so that the graphs for it are made before requests come.

        `rows` are the numbers of texts that run together: 1 and any larger number have graphs of their own. So have
        drafts of each kind in `samplers`: greedy, sampled at a temperature, and sampled with more settings, as top-p.
        """
        most, form = self.decoder.controller.most, self.decoder.target.source_form
        source = None if form is None else form.example()
        # Whole drafts that are accepted, so that the next one is fed most; a controller would choose by the clock.
        accepting = replace(self.decoder, verifier=WARM_UP.verify, controller=Fixed(most))
        verifying = replace(self.decoder, controller=Fixed(most))  # verification may have graphs of its own
        for decoder in (accepting, verifying, replace(self.decoder, drafter=NoDraft(), controller=Fixed(0))):
            for count, sampler in product(rows, samplers):
                requests = [Request((0, 0), sampler, 2 * (1 + most), key=key, source=source) for key in range(count)]
                deque(rounds(decoder, requests), maxlen=0)

    def encode(self, prompt: Prompt | Mapping[str, Any], whole: bool = False) -> tuple[int, ...]:
        """Return the prompt's token ids; for an encoder-decoder, those of the source. Raises ValueError for a prompt
        that is empty or too long, a text without a tokenizer, and, if ids are the `whole` prompt, images and sounds."""
        ids, media = self.encoder.read(read_prompt(prompt))
        if media is not None and whole:
            raise ValueError("a prompt has images or sounds, which only the other commands read: give texts alone.")
        if isinstance(ids, Tensor):
            raise ValueError("audio features have no token ids: only `generate` and `stream` take them.")
        begin, source = framed(self.frame, ids)
        check_request(self.decoder.target, Request(begin, Sampling(), 1, source=source, media=media), 0)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones; empty if there is no tokenizer."""
        return self.spelling.decode(tokens) if self.spelling else ""

    @cached_property
    def spelling(self) -> Spelling | None:
        """The texts and bytes of the tokenizer's tokens; None if there is no tokenizer."""
        return None if self.tokenizer is None else Spelling(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """The maker of grammars for this engine's texts: from a JSON schema, a regular expression, a choice, or Lark.

        Raises ValueError without llguidance, a fast tokenizer, or an end-of-text token.

        >>> engine.generate(prompt, grammar=engine.grammars.choice(["yes", "no"]))  # doctest: +SKIP
        """
        return self.new_grammars()

    def new_grammars(self, limits: GrammarLimits | None = None) -> Grammars:
        """Make another maker of grammars, like `grammars` but with the given limits."""
        return Grammars(self.encoder.needed(), self.decoder.target.vocab, self.eos, limits)

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.decoder.target.name, self.tokenizer, self.frame, self.media, self.text_limit, self.spelling)

    @cached_property
    def text_limit(self) -> TextLimit | None:
        """The limit of texts before they are tokenized; None where the model or the tokenizer has none."""
        target = self.decoder.target
        return TextLimit.of(self.tokenizer, target.source_form.longest if target.source_form else target.context)

    def prepare(self, prompts: Sequence[Prompt], options: Mapping[str, Any], shared: bool = False) -> Job:
        """Encode prompts and read the options of a call, as for `generate`, without running anything.

        With `shared`, the requests run in one batch with those of other calls, as in a server, and each carries its own
        rule and gamma. Raises ValueError for impossible prompts and settings, TypeError for unknown options.
        """
        call, settings = read_options(self.defaults.complete(options))
        settings["model_processors"] = self.defaults.processors(call.max_new_tokens, settings)
        if call.decoder_prompt and self.frame is None:
            raise OptionError("decoder_prompt is for encoder-decoders: write it into the prompt.")
        encoder, generations, copies = self.encoder, list[Generation](), Counter[tuple[int, ...]]()
        for option in ("stop", "bad_words", "prediction"):
            if self.text_limit is not None:
                self.text_limit.check(options.get(option), option)
        if call.beams is not None and self.exact_shape:
            raise OptionError("num_beams cannot be used with exact_shape, for beams make passes of any shape.")
        if call.stops or call.echo:
            encoder.needed()  # to write the text
        sampler = sampling(settings, call, self.eos, encoder, self.decoder.target.vocab)
        template = self._template(call, sampler)
        decoder = self._decoder(call)
        trees = isinstance(decoder.drafter, TreeDrafter)  # a grammar masks the nodes of trees like any other draft
        if not call.plain and (call.prediction or ("grammar" in settings and not trees)):
            decoder = replace(decoder, drafter=KnownFirst(decoder.drafter))
        if shared:
            template, decoder = self._self_contained(call, template), self.decoder
        hidden = self.spelling.hidden if self.spelling else {}
        text: dict[str, Any] = {"stops": tuple(call.stops), "hidden": hidden, "least": sampler.min_new_tokens}
        for index, (prompt, seed) in enumerate(zip(prompts, call.seeds(len(prompts)), strict=True)):
            encoded, media = encoder.read(prompt)
            if call.prompt_logprobs is not None:
                check_scoring(self.decoder.target.name, self.frame is not None, media is not None, self.exact_shape)
            (ids, source), name = framed(self.frame, encoded), (*numbers(encoded), *(media.numbers if media else ()))
            echo = encoder.text(prompt, encoded, self.decode) if call.echo else ""
            for _ in range(call.n):
                # Of equal prompts with one seed, the first gets the text that it would get alone; the others differ.
                key, copies[seed, *name] = request_key(name, copies[seed, *name]), copies[seed, *name] + 1
                prompt_ids = (*ids, *call.decoder_prompt)
                request = replace(template, prompt=prompt_ids, source=source, media=media, seed=seed, key=key)
                generations.append(Generation(request, self.decode, top=call.logprobs, echo=echo, **text))
            check_request(self.decoder.target, generations[-1].request, index)  # before the next one is encoded
        if self.exact_shape:
            # One shape of passes for the whole call; `plain` decoding gets the same shape as speculative decoding.
            width = 1 + self._decoder(replace(call, plain=False)).controller.most
            longest = max((len(each.request.prompt) for each in generations), default=0) + call.max_new_tokens + width
            self.decoder.target.fix_shape(Shape(self.decoder.batch_size, width, 1 << longest.bit_length()))
        return Job(decoder, call, generations)

    def _template(self, call: Options, sampler: Sampling) -> Request:
        prediction = ()
        if call.prediction:
            prediction = tuple(self.encoder.needed().encode(call.prediction, add_special_tokens=False))
        beams = call.beams
        if beams is not None and not sampler.greedy:
            beams, sampler = replace(beams, do_sample=True), sampler.for_beams()
        return Request(
            prompt=(),
            sampler=sampler,
            max_new_tokens=call.max_new_tokens,
            eos=call.ends(self.eos),
            priority=call.priority,
            cache_salt=call.cache_salt,
            prediction=prediction,
            gamma=MOST if prediction and call.gamma is None and not call.plain else None,
            max_time=call.max_time,
            beams=beams,
            prompt_logprobs=call.prompt_logprobs,
        )

    def _self_contained(self, call: Options, template: Request) -> Request:
        if self.exact_shape:
            raise ValueError("exact_shape fixes one shape for a whole call, so its batch cannot be shared with others.")
        if call.beams is not None:
            raise OptionError("num_beams searches a call of its own, so its batch cannot be shared with others.")
        own = None if call.verify is None else self.choose(call.verify)
        gamma = template.gamma if call.own_gamma is None else call.own_gamma
        return replace(template, rule=own, gamma=gamma)

    @property
    def shared_decoder(self) -> Decoder:
        """The decoder for a batch that several calls share, some of which have predictions or grammars."""
        if isinstance(self.decoder.drafter, TreeDrafter):
            return self.decoder
        return replace(self.decoder, drafter=KnownFirst(self.decoder.drafter))

    def choose(self, verify: Rule | str | None) -> Rule:
        """Return the rule of that name, or the rule itself if one is given; the engine's own for None."""
        chosen = self.rule if verify is None else rule(verify)
        if chosen.paths not in (None, self.rule.paths):
            raise OptionError(
                f"verify={chosen.name!r} drafts {chosen.paths} paths, but the models were loaded with "
                f"verify={self.rule.name!r}: load them with verify={chosen.name!r}."
            )
        return chosen

    def _decoder(self, call: Options) -> Decoder:
        chosen = self.choose(call.verify)
        if call.lossless and not chosen.lossless:
            raise OptionError(f"verify={chosen.name!r} is lossy, and lossless=True refuses it.")
        decoder = replace(self.decoder, verifier=chosen.verify, rng=chosen.rng)
        if call.plain:
            return replace(decoder, drafter=NoDraft(), controller=Fixed(0))
        return decoder if call.gamma is None else replace(decoder, controller=controller(call.gamma))


def _streamable(job: Job) -> Job:
    if job.options.beams is not None:
        raise OptionError("num_beams has no text before its search has ended, so it cannot stream: use generate.")
    return job


def check_single(prompts: int, texts: int) -> None:
    if prompts != 1:
        raise ValueError(f"stream continues one prompt, but here are {prompts}: use stream_batch for several.")
    if texts != 1:
        raise ValueError(f"stream gives one text, but n={texts} asks for several: use stream_batch for them.")
