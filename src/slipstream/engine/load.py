"""`load` builds an engine from what a user names; `follow` works for one on another rank; `Task` is for translators."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.core.garbage import uncollected
from slipstream.core.media import only
from slipstream.core.model_options import MODEL_OPTIONS, ModelOptions, signature_of
from slipstream.core.protocols import Controller, HasModel, LiesOnRanks
from slipstream.core.signals import ENDING, handling
from slipstream.core.source import SourceFrame
from slipstream.decoding.controllers import Fixed, Planned, controller
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.rules import BLOCK, rule
from slipstream.decoding.verification import verification_on
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.specification import drafter, paths_shape, read_tree
from slipstream.engine.defaults import AUTO, Defaults
from slipstream.engine.engine import Engine
from slipstream.engine.plan_file import Plan
from slipstream.execution.passes import Mode
from slipstream.execution.ranks import join, place
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import layer_bytes, lowest_bits, quantizing_fault
from slipstream.kernels.placement import is_sharded, why_in_parts
from slipstream.kernels.quantization import Precision
from slipstream.kernels.threads import release_threads, use_threads
from slipstream.models.leading import FollowingRank, LeadingScorer, lead
from slipstream.models.loading.adapters import merged
from slipstream.models.loading.load import AnyScorer, find_tokenizer, load_scorer
from slipstream.models.loading.origin import source_name
from slipstream.models.loading.pairings import draft_of, located, pairing_of
from slipstream.models.media.processor import MediaProcessor, try_media


@dataclass(frozen=True)
class Task:
    """A task, for models that can do several.

    `name` is one of the model's own (`task_specific_params` in its configuration, such as translation_en_to_de of
    T5), which stands for a prefix. `prefix` is such a text itself ("summarize: "), put before every source that is
    text. `src_lang` and `tgt_lang` are languages as the tokenizer writes them (eng_Latn, de_DE, de).
    """

    name: str | None = None
    prefix: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None

    @staticmethod
    def parse(text: str | None) -> Task:
        """Read a task as users write it: languages with a >, a prefix with a colon or a space, or a name."""
        if text is None:
            return Task()
        if ">" in text:
            src, _, tgt = text.partition(">")
            return Task(src_lang=src.strip() or None, tgt_lang=tgt.strip() or None)
        return Task(prefix=text) if ":" in text or " " in text else Task(text)


def frame(model: Any, tokenizer: Any, task: Task) -> SourceFrame:
    settings = model.generation_config
    start = _first(settings, model.config, "decoder_start_token_id", "bos_token_id")
    if start is None:
        raise ValueError(f"{type(model).__name__} does not say how its decoder begins: set decoder_start_token_id.")
    if task.src_lang is not None:
        _language(tokenizer, task.src_lang)
        tokenizer.src_lang = task.src_lang
    forced = _first(settings, model.config, "forced_bos_token_id")
    if task.tgt_lang is not None:
        forced = _language(tokenizer, task.tgt_lang)
    begin = (int(start), *([] if forced is None else [int(forced)]))
    prefix = task.prefix or ""
    if task.name is not None:
        if task.prefix is not None:
            raise ValueError(f"task {task.name!r} has a prefix of its own: leave one of them out.")
        known = getattr(model.config, "task_specific_params", None) or {}
        if task.name not in known:
            choice = f"it knows {', '.join(known)}" if known else "it knows none by name"
            raise ValueError(f"the model does not know the task {task.name!r}: {choice}. A prefix has a colon in it.")
        prefix = known[task.name].get("prefix") or ""
    return SourceFrame(prefix, begin)


def _first(settings: Any, config: Any, *names: str) -> Any:
    values = (getattr(place, name, None) for name in names for place in (settings, config))
    return next((value for value in values if value is not None), None)


def _language(tokenizer: Any, name: str) -> int:
    token = None
    with suppress(KeyError):
        if hasattr(tokenizer, "src_lang"):
            own = getattr(tokenizer, "get_lang_id", None)
            token = own(name) if own else tokenizer.convert_tokens_to_ids(name)
    if token is None or token == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer does not know the language {name!r}; its documentation lists how to write it.")
    return int(token)


WORTHWHILE = 1 << 26
"""The size of linear layers, in bytes, above which reading fewer bits saves time: smaller ones fit processor caches."""


def self_draft_proposal(scorer: Any, least: int = WORTHWHILE) -> list[str]:
    """Return a sentence that proposes the target's own weights in fewer bits as its draft, in a list.

    They are 4, or 8 where passes also read a source's keys, which cost as much with 4. The list is empty where that is
    impossible, and where the linear layers take under `least` bytes or have so few bits.
    """
    if not isinstance(scorer, HasModel) or isinstance(scorer, LiesOnRanks) or quantizing_fault(scorer.model):
        return []
    bits = 8 if scorer.source_form else 4
    if (lowest_bits(scorer.model) or 16) <= bits or layer_bytes(scorer.model) < least:
        return []
    own = f"draft='int{bits}' (--draft int{bits}) drafts with its own weights in {bits} bits and leaves its texts exact"
    return [f"{scorer.name} decodes without a draft; {own}, and `slipstream plan` measures if that is faster here."]


OTHERWISE = ("tp_size", "distributed_config", "device_mesh")
"""Options of transformers that divide a model too; they are refused, because the other ranks would not take part."""


def target_scorer(how: ModelOptions, mode: Mode) -> AnyScorer | LeadingScorer:
    """Load a target -> its Scorer; with a plan for tensor parallelism, on all ranks. Raises ValueError."""
    if refused := [name for name in OTHERWISE if name in how.from_pretrained]:
        raise ValueError(f"{refused[0]} is not possible here: give tp_plan='auto', which divides the target by itself.")
    if how.tp_plan is None:
        if is_sharded(how.target):  # the other ranks have to load it together with this one
            raise ValueError(
                f"this model lies on {how.target.tp_size} ranks already: give its name or folder, and tp_plan='auto'."
            )
        return load_scorer(how.target, how.dtype, how.device, mode, **how.for_target())
    if not isinstance(how.target, str | Path):
        raise ValueError("tp_plan divides a model while it is loaded on every rank: give its name or folder.")
    if how.tp_plan != "auto" and not isinstance(how.tp_plan, dict):
        raise ValueError(f"tp_plan={how.tp_plan!r} is not possible: give 'auto', or a dict of transformers' rules.")
    for name in how.given():
        if reason := MODEL_OPTIONS[name].one_piece:
            raise ValueError(f"{name} cannot be used with tp_plan, for {reason}: leave one of them out.")
    ranks = join()
    if not ranks.leads:
        raise ValueError(f"this is rank {ranks.rank}, which works for rank 0: call slipstream.follow() before load().")
    scorer = lead(ranks, how.target, how.dtype, how.tp_plan, **how.for_target())
    if mode.compiled:
        warnings.warn(f"{scorer.name} runs eagerly: {why_in_parts(scorer.model)}.", RuntimeWarning, stacklevel=3)
    return scorer


def as_they_are(scorer: Any, mode: Mode) -> list[str]:
    """List a sentence for the user if the weights stay unpacked as the model is in parts."""
    why = why_in_parts(scorer.model)
    if not why or mode.packed is False or scorer.device.type != "cpu" or kernel_missing():
        return []
    return [f"{source_name(scorer.name)} runs with its weights as they are, not packed for this processor: {why}."]


def follow() -> bool:
    """Work for rank 0 until it ends -> True; on rank 0, and where torchrun did not start several, return False at once.

    Every rank but the first holds a part of each target that rank 0 loads with `tp_plan`, and repeats its calls.
    Raises ConnectionError, with the reason, if a rank is lost.

    >>> if slipstream.follow(): sys.exit()  # doctest: +SKIP
    """
    if place()[1] < 2:
        return False
    ranks = join()
    if ranks.leads:
        return False
    logging.getLogger("transformers").setLevel(logging.ERROR)  # rank 0 logs the same messages
    try:
        with handling(signal.SIG_IGN, *ENDING):  # rank 0 gets them too, finishes, and ends the other ranks
            FollowingRank(ranks).run()
    finally:
        ranks.close()
    return True


GAMMA = 5  # the default number of tokens drafted per round


@uncollected()
def load(
    target: Any = None, draft: Any = None, *, progress: Callable[[str], object] | None = None, **options: Any
) -> Engine:
    """Load a target and a draft -> an Engine that generates text with them; the options are those of `ModelOptions`.

    The target is a hub name, a folder, a .gguf file, a name of `models.loading.pairings` ("smollm2") or a loaded model;
    without one, the embedded pair is loaded. A LoRA adapter (in its place, beside it as `adapter`, or a model of peft)
    is merged into a copy of its weights. The draft is a model too, another specification ("lookup", "ngram:FILE", ...:
    `slipstream.drafters.specification`) or a Drafter; without one, a named target has the draft that is declared for it
    ("plain": none), and any other decodes plainly. `gamma` tokens (5) are drafted per round; "auto" or a controller
    chooses the number, or a `tree` gives the candidates per level, e.g. (3, 2, 1). `verify` is the acceptance rule
    (block) or its name. A `plan` (or its file) supplies what is not given here.

    Some options make another model, whose law texts then follow: `quantize` ("int8", "int4?group=128&rounding=gptq") of
    its weights, `kv_dtype` ("int8") of its keys and values, `encoder_dtype` of an encoder alone. To keep the law,
    quantize the draft: draft="int4" for the target's own weights, draft="NAME?quantize=int8" for those of a draft.

    `task` of an encoder-decoder may be a `Task` too. A multimodal model reads images or sounds if its `processor`
    is stored with it or given; its draft reads the text without them. `compile` captures passes as graphs on a GPU
    before `load` returns, and calls `progress` with a line for each; on a CPU it packs the weights of models that are
    passed in, as those of models loaded by name always are. `dtype` and `device` apply to both models: to place them
    apart, pass loaded ones. With `tp_plan`, rank 0 calls `load`, and the others `slipstream.follow()` before that.
    Without `threads`, the first call lowers torch's to the cores that affinity and quota allow, unless OMP_NUM_THREADS
    is set. Further arguments go to transformers' `from_pretrained` of the target.

    `Engine.notes` say what was chosen. Raises ValueError if a model cannot be loaded or rolled back, if target and
    draft have no token in common, or if the plan is for another target.
    """
    how = target if isinstance(target, ModelOptions) else ModelOptions.of(target, draft, **options)
    if made := _read_plan(how.plan, how.target):
        how = how.over(made.models)
    place, dtype = alone(how.target, how.dtype)
    target, draft = place if how.target is None else merged(how.target), draft_of(how.target, how.draft)
    how = replace(how, target=target, draft=draft, dtype=dtype)
    shape, chosen = read_tree(how.tree, how.gamma, draft), BLOCK if how.verify is None else rule(how.verify)
    steering = _controller(how.tree, how.gamma, made)
    if chosen.paths is not None and draft is not None:
        shape = paths_shape(chosen.paths, steering.most, shape)
    _check_settings(how, shape)
    use_threads(how.threads)
    packed, precision = False if how.exact_shape else None, how.quantize
    if not isinstance(precision, Precision | None):
        precision = Precision.read(precision)
    mode = Mode(how.compile, packed, progress=progress, precision=precision, kv_dtype=how.kv_dtype)
    scorer = target_scorer(how, mode)
    tokenizer = how.tokenizer
    if tokenizer is None:
        tokenizer = find_tokenizer(target, how.trust_remote_code, how.adapter)
    if made:
        made.check_target(None, scorer.vocab)
    own = Defaults.of(scorer.model, tokenizer, AUTO if how.generation_config is None else how.generation_config)
    framing = _frame(scorer, tokenizer, how.task, how.exact_shape)
    # Graphs of whole drafts are for a gamma that is known before decoding.
    gammas = (steering.most,) if isinstance(steering, Fixed | Planned) and steering.most else ()
    ahead, verification = mode.of_draft(gammas), verification_on(scorer.device, mode)
    context = BuildContext(scorer, tokenizer, dtype, how.device, shape, mode=ahead, independent=bool(chosen.paths))
    drafts, steering = (NoDraft(), Fixed(0)) if draft is None else (drafter(draft, context), steering)
    decoder = Decoder(scorer, drafts, controller=steering, batch_size=how.batch_size, verification=verification)
    decoder, (media, notes) = replace(decoder, compiled=how.compile), _media(scorer, how.processor)
    if media is not None and tokenizer is not None:  # a chat template that is stored with one is for both
        own_template, its = (getattr(each, "chat_template", None) for each in (tokenizer, media.processor))
        tokenizer.chat_template, media.processor.chat_template = own_template or its, its or own_template
    notes += [*_notes(context, decoder, media is not None, proposes=draft is made is None), *own.notes]
    exact = how.exact_shape and draft is not None
    engine = Engine(decoder, tokenizer, own.eos, chosen, exact, notes, framing, media, own)
    if how.compile:
        engine.warm_up()
    release_threads()  # generation may run in another thread
    return engine


load.__signature__ = signature_of(load)  # type: ignore[attr-defined]  # with the options by their names


def _media(scorer: Any, processor: Any) -> tuple[MediaProcessor | None, list[str]]:
    """Return the processor of images and sounds for a target (None: text only), and notes about what it cannot read."""
    if not scorer.modalities:
        if processor is not None:
            raise ValueError(f"{scorer.name} reads text only, so it has no use for a processor: leave it out.")
        return None, []
    try:
        media, faults = MediaProcessor.of(scorer.model, processor), list[str]()
    except ValueError as error:
        if processor is not None:
            raise ValueError(f"this processor is not possible for {scorer.name}: {error}") from error
        return None, [f"{scorer.name} reads {only(frozenset())} here: {error}"]
    for modality in sorted(media.modalities):
        try:
            try_media(scorer, media, modality)
        except ValueError as error:
            media = media.without(modality)
            faults.append(str(error))
    notes = [f"{scorer.name} reads {only(media.modalities)} here: {' '.join(faults)}"] if faults else []
    if notes and processor is not None:
        raise ValueError(notes[0])
    return media if media.modalities else None, notes


def _notes(context: BuildContext, decoder: Decoder, reads_media: bool, proposes: bool) -> list[str]:
    proposed = self_draft_proposal(decoder.target) if proposes else []
    drafts = decoder.scorers[1:] if reads_media else ()
    limits = [f"{each.name} reads no images and sounds, but the texts around them." for each in drafts]
    read = (note for each in decoder.scorers for note in getattr(getattr(each, "model", None), "notes", ()))
    return [*context.notes, *limits, *as_they_are(decoder.target, context.mode), *dict.fromkeys(read), *proposed]


def _read_plan(plan: Any, target: Any) -> Plan | None:
    if plan is None:
        return None
    if not isinstance(plan, str | Path | Plan):
        raise ValueError(f"plan={plan!r} is not possible: give a file that `slipstream plan --save` wrote, or a Plan.")
    made = plan if isinstance(plan, Plan) else Plan.read(plan)
    made.check_target(source_name(target))
    return made


def _check_settings(how: ModelOptions, tree: Sequence[int] | None) -> None:
    if how.tokenizer is not None and not callable(getattr(how.tokenizer, "decode", None)):
        raise ValueError(f"tokenizer={how.tokenizer!r} is not possible: give one, or None for the target's.")
    for name, option in MODEL_OPTIONS.items():
        option.check(getattr(how, name))
    if how.exact_shape and (tree or how.compile):
        other = "a tree or several paths" if tree else "compile=True"
        raise ValueError(f"exact_shape runs chains of drafts eagerly, without {other}: leave one of them out.")


def alone(target: Any, dtype: Any) -> tuple[Any, Any]:
    """Return where a target is found and its dtype, to load it without the draft that is declared for it."""
    pairing = pairing_of(target)
    return located(target), pairing.dtype if pairing and dtype == "auto" else dtype


def _frame(scorer: Any, tokenizer: Any, task: str | Task | None, exact_shape: bool) -> SourceFrame | None:
    if scorer.source_form is None:
        if task is not None:
            raise ValueError(f"{scorer.name} is no encoder-decoder, so it has no tasks: write it into the prompt.")
        return None
    if exact_shape:
        raise ValueError(f"{scorer.name} is an encoder-decoder, for which exact_shape is not available: leave it out.")
    return frame(scorer.model, tokenizer, task if isinstance(task, Task) else Task.parse(task))


def _controller(tree: Sequence[int] | None, gamma: int | str | Controller | None, plan: Plan | None) -> Controller:
    """Return the controller of gamma; an explicit gamma or tree takes precedence over the plan."""
    if plan is not None and gamma is None and not tree:
        return Planned(plan.gammas)
    if tree and gamma is None:
        return Fixed(len(tree))
    return controller(GAMMA if gamma is None else gamma, most=len(tree) if tree else None)
