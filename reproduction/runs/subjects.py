"""The subjects of measurements: a target, its drafts from the smallest on, and the texts to continue."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reproduction.published import GAMMAS, WRITING
from reproduction.standins import python_prompts as writing
from reproduction.standins.corpora import Pairs
from slipstream.core.draws import request_key
from slipstream.core.protocols import Scorer
from slipstream.core.request import Request
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.rules import TOKEN
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.specification import drafter
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.execution.passes import Mode
from slipstream.measure.environment import parameters
from slipstream.measure.replay import request_for
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.models.loading.twins import encoder_dtype

DRAFT = "embedded draft"


@dataclass(frozen=True)
class Subject:
    """A target (as an engine without a draft), with drafts and texts to measure on.

    `drafts` are by name, `sources` are texts, `references` the expected answers (or none), `length` is the most tokens
    of an answer, and `known()` returns the token ids of the texts in which n-grams are counted.
    """

    name: str
    engine: Engine
    drafts: Mapping[str, Scorer]
    sources: tuple[str, ...]
    known: Callable[[], list[list[int]]]
    length: int
    references: tuple[str, ...] = ()
    _drafters: dict[str, ModelDrafter] = field(default_factory=dict)

    @property
    def plain(self) -> Decoder:
        alone = replace(self.engine.decoder, drafter=NoDraft(), controller=Fixed(0), batch_size=1)
        return replace(alone, verifier=TOKEN.verify, rng=TOKEN.rng)

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens with which the decoder of an encoder-decoder begins; empty for a causal model."""
        return self.engine.frame.begin if self.engine.frame else ()

    def drafted(self, draft: str, gamma: int) -> Decoder:
        if draft not in self._drafters:
            self._drafters[draft] = ModelDrafter(self.drafts[draft], self.engine.decoder.target.vocab)
        return replace(self.plain, drafter=self._drafters[draft], controller=Fixed(gamma))

    def lend(self, draft: str) -> Scorer:
        """Return a draft's Scorer with an empty cache, for uses other than drafting."""
        self._drafters.pop(draft, None)
        self.drafts[draft].free(range(len(self.drafts[draft].lengths)))
        return self.drafts[draft]

    def requests(self, temperature: float, places: Sequence[int], seed: int = 0) -> list[Request]:
        """Return requests for some of the sources; repeated sources get different random numbers."""
        sampler, copies, requests = Sampling(temperature=temperature), Counter[int](), list[Request]()
        eos, frame = self.engine.eos, self.engine.frame
        for place in places:
            text = self.engine.encode(self.sources[place])
            request = request_for(text, sampler, self.length, eos=eos, seed=seed, frame=frame)
            requests.append(replace(request, key=request_key((place, *request.prompt), copies[place])))
            copies[place] += 1
        return requests

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """The numbers of parameters and the dtypes of all models, for reports."""
        scorers = {"target": self.engine.decoder.target, **self.drafts}
        models = {name: scorer.model for name, scorer in scorers.items() if hasattr(scorer, "model")}
        return {
            "parameters": {name: parameters(model) for name, model in models.items()},
            "dtypes": {name: _dtypes(model) for name, model in models.items()},
        }


@dataclass(frozen=True)
class Loading:
    """The options with which models are loaded."""

    compile: bool = False
    device: str | None = None
    dtype: str = "float32"
    encoder_dtype: str | None = None  # of encoder-decoder targets; None: `dtype`
    draft_dtype: str | None = None  # None: `dtype`
    progress: Callable[[str], object] | None = None
    task: str | None = None  # for encoder-decoders with several tasks, as in `slipstream.load`


def _dtypes(model: Any) -> str:
    own = encoder_dtype(model)
    name = f"{model.dtype} with an encoder in {own}" if own else str(model.dtype)
    return name.replace("torch.", "")


def embedded(length: int, how: Loading) -> Subject:
    """Return the embedded pair, which ships with the package, with Python functions to write."""
    engine, drafts = _loaded(EMBEDDED / "target", {DRAFT: EMBEDDED / "draft"}, how)

    def known() -> list[list[int]]:
        return [engine.tokenizer(text, verbose=False)["input_ids"] for text in writing.texts()]

    return Subject(WRITING, engine, drafts, tuple(writing.prompts()), known, length)


def family(pairs: Pairs, target: str | Path, drafts: Mapping[str, str | Path], length: int, how: Loading) -> Subject:
    """Return a target and drafts that answer the sources of `pairs`, from folders or by hub names."""
    engine, scorers = _loaded(target, drafts, how)
    sources, references = zip(*pairs.held_out, strict=True)

    def known() -> list[list[int]]:
        return engine.tokenizer([target for _, target in pairs.train])["input_ids"]

    return Subject(pairs.name, engine, scorers, sources, known, length, references)


def _loaded(target: str | Path, drafts: Mapping[str, str | Path], how: Loading) -> tuple[Engine, dict[str, Scorer]]:
    """Load a target without a draft, and the draft models by name, which must share its tokenizer."""
    options: dict[str, Any] = {"compile": how.compile, "progress": how.progress, "task": how.task, "verify": TOKEN}
    engine = load(target, dtype=how.dtype, encoder_dtype=how.encoder_dtype, device=how.device, **options)
    mode = Mode(how.compile, ahead=GAMMAS, progress=how.progress)
    dtype = how.draft_dtype or how.dtype
    context = BuildContext(engine.decoder.target, engine.tokenizer, dtype, how.device, mode=mode)
    scorers = dict[str, Scorer]()
    for name, source in drafts.items():
        made = drafter(str(source), context)
        if not isinstance(made, ModelDrafter):
            raise ValueError(f"draft {name} does not share the target's tokenizer, as the paper's drafts do.")
        scorers[name] = made.scorer
    return engine, scorers
