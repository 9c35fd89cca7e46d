"""Checks which architectures of the installed transformers work, with tiny random models of each.

Three prompts of different lengths are decoded greedily in one batch, with drafts of four tokens that are wrong in every
other round, and compared with transformers' own `generate` of each prompt alone. Every architecture runs in a process
of its own, so that a crash or an endless run affects only itself.
"""

import itertools
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request
from slipstream.core.round import Context, Round
from slipstream.core.values import first_sentence
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.models.loading.load import load_scorer
from slipstream.models.tiny import VOCAB, tiny_config, tiny_model

TOKENS, GAMMA = 12, 4
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": TOKENS, "pad_token_id": 0}
SECONDS = 60.0  # the time limit of one architecture, in seconds
VERDICTS = ("works", "refused", "differs", "fails", "not tried")

KINDS = {(False, False): "causal", (True, False): "encoder-decoder", (False, True): "vision"}
"""What an architecture is called, by whether it has an encoder, and whether it reads images."""


@dataclass(frozen=True)
class FamilyTrial:
    """An architecture, a class that generates text and the type of its configuration, and what came of trying it.

    `encoder`: it is listed as an encoder-decoder, which reads a text or sound first. `vision`: it is listed among
    models that read images too; it is tried on texts. The verdict is one of `VERDICTS`; `way` is how its cache is
    rolled back, and `why` the reason if it does not work, in one sentence.
    """

    family: str
    name: str
    encoder: bool = False
    vision: bool = False
    verdict: str = "not tried"
    way: str = ""
    why: str = ""
    seconds: float = 0.0

    @property
    def config(self) -> Any:
        return CONFIG_MAPPING[self.family]

    @property
    def kind(self) -> Any:
        return getattr(transformers, self.name)


def architectures(names: Sequence[str] = ()) -> list[FamilyTrial]:
    """List the architectures of the installed transformers, or those of the families or classes named."""
    listed = list[FamilyTrial]()
    for encoder, vision, task in (
        (False, False, "CAUSAL_LM"),
        (True, False, "SEQ_TO_SEQ_CAUSAL_LM"),
        (False, True, "IMAGE_TEXT_TO_TEXT"),
    ):
        for family, kinds in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            some = kinds if isinstance(kinds, tuple | list) else (kinds,)
            listed += [FamilyTrial(family, kind, encoder, vision) for kind in some if family in CONFIG_MAPPING]
    known = {name.lower() for each in listed for name in (each.family, each.name)}
    if unknown := [name for name in names if name.lower() not in known]:
        raise ValueError(
            f"{', '.join(unknown)}: transformers has no such model for texts; name a type, such as qwen3_next, or a "
            "class, such as LlamaForCausalLM."
        )
    wanted = {name.lower() for name in names}
    return [each for each in listed if not wanted or {each.family.lower(), each.name.lower()} & wanted]


def attempts(chosen: Sequence[FamilyTrial], seconds: float = SECONDS) -> Iterator[FamilyTrial]:
    """Try each architecture in a process of its own, for at most `seconds`, and yield the outcomes."""
    ways = multiprocessing.get_all_start_methods()
    processes = multiprocessing.get_context("fork" if "fork" in ways else None)
    for each in chosen:
        ours, its = processes.Pipe()
        started = perf_counter()
        process = processes.Process(target=_send, args=(each, its))
        process.start()
        its.close()
        outcome = replace(each, verdict="fails", why=f"it did not end within {seconds:g} seconds")
        try:
            outcome = ours.recv() if ours.poll(seconds) else outcome
        except EOFError:
            outcome = replace(outcome, why="its process died")
        process.kill()
        process.join()
        yield replace(outcome, seconds=round(perf_counter() - started, 1))


def _send(architecture: FamilyTrial, answers: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some models print to stdout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers.send(attempt(architecture))


def attempt(architecture: FamilyTrial) -> FamilyTrial:
    try:
        model = tiny_model(architecture.kind, tiny_config(architecture.config))
        requests = _requests(bool(model.config.is_encoder_decoder))
        wanted = [_generated(model, each) for each in requests]
    except Exception as error:  # any error: some families need more than small sizes
        return replace(architecture, why=f"a tiny one does not run by itself: {first_sentence(error)}")
    try:
        named = type(model.config) is architecture.config  # else transformers' automatic classes cannot load it
        target = _by_name(model) if named else load_scorer(model)
        decoder = Decoder(target, EveryOther(ModelDrafter(load_scorer(model))), controller=Fixed(GAMMA))
        rows = generate(decoder, requests)
        same = [row.output for row in rows] == wanted == [row.output for row in plain(decoder, requests)]
    except ValueError as error:
        return replace(architecture, verdict="refused", why=first_sentence(error))
    except Exception as error:
        return replace(architecture, verdict="fails", why=f"{type(error).__name__}: {first_sentence(error)}")
    some = 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.drafted for row in rows)
    why = "" if same and some else "its texts are others" if some else "all drafts were accepted, or none"
    return replace(architecture, verdict="differs" if why else "works", way=str(target.way), why=why)


def _by_name(model: Any) -> Any:
    with TemporaryDirectory() as folder:
        place = Path(folder) / type(model).__name__
        model.save_pretrained(place)
        try:
            return load_scorer(place, "float32")
        except ValueError as error:
            raise ValueError(str(error).replace(f"{folder}/", "")) from error


def _text(name: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, VOCAB, (count,), generator=torch.Generator().manual_seed(name)).tolist())


def _requests(encoder: bool) -> list[Request]:
    """Return requests with three prompts of different lengths, some beyond a tiny model's window; with sources if
    `encoder`."""
    lengths, sources = (15, 3, 9), (6, 17, 2)
    return [
        Request(
            (*((2,) if encoder else ()), *_text(place, length)),  # a decoder begins with its own token
            Sampling(),
            TOKENS,
            source=_text(10 + place, sources[place]) if encoder else None,
        )
        for place, length in enumerate(lengths)
    ]


def _generated(model: Any, request: Request) -> list[int]:
    """Return the output tokens of transformers' own greedy decoding. Raises ValueError if it ends early."""
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, name, None)
    prompt, source = torch.tensor([request.prompt]), request.source
    read = prompt if source is None else torch.tensor([source])
    decoder = {} if source is None else {"decoder_input_ids": prompt}
    mask = torch.ones_like(read)
    text = model.generate(read, attention_mask=mask, **decoder, **GREEDY)[0].tolist()
    if len(text) != prompt.shape[1] + TOKENS:
        raise ValueError(f"generate gave {len(text) - prompt.shape[1]} tokens instead of {TOKENS}")
    return text[prompt.shape[1] :]


class EveryOther:
    """Wraps a drafter and makes its drafts wrong at the second token, in every other round and every other row."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self._turns = inner, itertools.count()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        draft = self.inner.propose(context, gammas)
        if not next(self._turns) % 2:
            return draft
        tokens = draft.tokens.clone()
        tokens[::2, 1:2] = (tokens[::2, 1:2] + 1) % VOCAB
        return replace(draft, tokens=tokens, law=draft.law and Law(tokens=tokens))

    def observe(self, round: Round) -> None:
        self.inner.observe(round)


def table(outcomes: Sequence[FamilyTrial]) -> str:
    """Return the outcomes in Markdown: a count of the verdicts, what works by kind and way, and a table of the rest."""
    ways: dict[str, list[str]] = {}
    others = ["| type | class | verdict | why not |", "|---|---|---|---|"]
    for each in sorted(outcomes, key=lambda each: (each.vision, each.encoder, each.family, each.name)):
        if each.verdict == "works":
            kind = KINDS[each.encoder, each.vision]
            ways.setdefault(f"- **{kind}, {each.way}**: ", []).append(each.name)
        else:
            why = " ".join(each.why.split()).replace("|", "/")
            others.append(f"| {each.family} | {each.name} | {each.verdict} | {why} |")
    working = [way + ", ".join(names) for way, names in ways.items()]
    return "\n".join([counted(outcomes), "", *working, "", *others])


def counted(outcomes: Sequence[FamilyTrial]) -> str:
    """Return the number of outcomes per kind and verdict, as one to three sentences."""
    parts = []
    for sort, what in KINDS.items():
        some = [each.verdict for each in outcomes if (each.encoder, each.vision) == sort]
        if some:
            counts = [f"{some.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in some]
            parts.append(f"{len(some)} {what} architectures: {', '.join(counts)}.")
    return " ".join(parts)
