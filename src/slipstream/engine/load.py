"""`load` builds an engine from the target, draft, gamma, rule, plan and device that a user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.core.garbage import uncollected
from slipstream.core.media import only
from slipstream.core.model_options import MODEL_OPTIONS, ModelOptions, signature_of
from slipstream.core.protocols import Controller
from slipstream.core.source import SourceFrame
from slipstream.decoding.captured_verification import verification_on
from slipstream.decoding.controllers import Fixed, Planned, controller
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.rules import BLOCK, rule
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.specification import drafter, paths_shape, read_tree
from slipstream.engine.defaults import AUTO, Defaults
from slipstream.engine.engine import Engine
from slipstream.engine.plan_file import Plan
from slipstream.engine.target import as_they_are, self_draft_proposal, target_scorer
from slipstream.engine.tasks import Task, frame
from slipstream.execution.passes import Mode
from slipstream.kernels.quantization import Precision
from slipstream.kernels.threads import release_threads, use_threads
from slipstream.models.loading.adapters import merged
from slipstream.models.loading.load import find_tokenizer
from slipstream.models.loading.origin import source_name
from slipstream.models.loading.pairings import draft_of, located, pairing_of
from slipstream.models.media.processor import MediaProcessor
from slipstream.models.media.trial import try_media

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

    `task` of an encoder-decoder may be a `tasks.Task` too. A multimodal model reads images or sounds if its `processor`
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
    if processor is not None:
        media = MediaProcessor.with_processor(processor, scorer.model)
        for modality in media.modalities:
            try_media(scorer, media, modality)
        return media, []
    try:
        media, faults = MediaProcessor.of(scorer.model), list[str]()
    except ValueError as error:
        return None, [f"{scorer.name} reads {only(frozenset())} here: {error}"]
    for modality in sorted(media.modalities):
        try:
            try_media(scorer, media, modality)
        except ValueError as error:
            media = media.without(modality)
            faults.append(str(error))
    notes = [f"{scorer.name} reads {only(media.modalities)} here: {' '.join(faults)}"] if faults else []
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
        raise ValueError(
            f"tokenizer={how.tokenizer!r} is not possible: give one of transformers, or None for the target's."
        )
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
