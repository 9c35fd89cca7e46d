"""The contenders of a benchmark: Slipstream's, by draft, rule and gamma, and those of transformers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from slipstream.bench import peers
from slipstream.bench.records import EAGER, PLAIN, SPECULATIVE, BenchSettings, BenchTask, Contender, Output
from slipstream.core.protocols import HasModel
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import rounds, succeeded
from slipstream.decoding.rules import Rule
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from slipstream.kernels.packing import PackedLinear
from slipstream.measure.environment import scorers
from slipstream.measure.replay import request_for
from slipstream.models.loading.load import load_model
from slipstream.models.loading.twins import encoder_dtype

Play = Callable[[Decoder, Sequence[Request]], Iterator[Round]]  # decodes requests, as `rounds` does


@dataclass(frozen=True)
class Side:
    """An engine that takes part, the name of its draft, and its execution ("eager", "compiled")."""

    engine: Engine
    draft: str | None = None
    execution: str = EAGER


def line_up(engine: Engine, settings: BenchSettings, others: Sequence[Side] = ()) -> list[Contender]:
    """Return the contenders of the engine, and those of transformers that can run with its models.
    `others` are further engines with the same target: other drafts, or compiled execution."""
    drafts = scorers(engine.decoder)[1:]
    sides = [Side(engine, drafts[0].name if drafts else None), *others]
    plain = {side.execution: side for side in reversed(sides)}  # the first side of each execution
    runs = [side for side in sides if side is plain[side.execution]]
    contenders = list[Contender]()
    for side in runs:
        decoder = replace(side.engine.decoder, drafter=NoDraft(), controller=Fixed(0))
        contenders.append(replace(ours(PLAIN, _ruled(decoder, side.engine.rule)), execution=side.execution))
    for side in sides:
        if not isinstance(side.engine.decoder.drafter, NoDraft):
            rules = [side.engine.choose(name) for name in settings.rules] or [side.engine.rule]
            for rule, gamma in product(rules, settings.gammas):
                decoder = replace(_ruled(side.engine.decoder, rule), controller=Fixed(gamma))
                made = ours(SPECULATIVE, decoder, gamma)
                contenders.append(replace(made, draft=side.draft, rule=rule.name, execution=side.execution))
    return contenders + _transformers(engine, settings)


def _ruled(decoder: Decoder, chosen: Rule) -> Decoder:
    return replace(decoder, verifier=chosen.verify, rng=chosen.rng)


def _transformers(engine: Engine, settings: BenchSettings) -> list[Contender]:
    everyone = scorers(engine.decoder)
    models = [untouched(scorer) for scorer in everyone if isinstance(scorer, HasModel)]
    if len(models) < len(everyone):
        return []
    if engine.frame:  # the best settings of assisted generation for encoder-decoders are not known
        return [peers.generate(models[0], engine.frame.begin)]
    contenders = [peers.generate(models[0])]
    if len({model.config.get_text_config().vocab_size for model in models}) == 1 < len(models):
        contenders += [peers.assisted(models[0], models[1], gamma) for gamma in (*settings.gammas, None)]
    return contenders + [peers.lookup(models[0], gamma) for gamma in settings.gammas]


def untouched(scorer: HasModel) -> Any:
    """Return the model as transformers loads it, without packed weights, which would make its contenders faster."""
    model = scorer.model
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        return model
    name = model.config.name_or_path
    plain = {"dequantize": True} if Path(name).suffix == ".gguf" else {}
    adapted = {"adapter": model.adapter} if hasattr(model, "adapter") else {}
    return load_model(name, model.dtype, str(model.device), encoder_dtype(model), **plain, **adapted)


def ours(name: str, decoder: Decoder, gamma: int | None = None, play: Play = rounds) -> Contender:
    """Make the contender of a decoder, with its drafter, verifier and controller; `play` may observe its rounds."""

    def run(task: BenchTask) -> Output:
        sampler, rows, count = Sampling(temperature=task.temperature), dict[int, Row](), 0
        requests = [
            request_for(
                prompt, sampler, task.max_new_tokens, copy=index, eos=task.eos, seed=task.seed, frame=task.frame
            )
            for index, prompt in enumerate(task.prompts)
        ]
        for round in play(replace(decoder, batch_size=task.batch), requests):
            rows |= {row.index: row for row in round.rows}
            count += 1
        done = succeeded(rows[index] for index in range(len(requests)))
        return Output([row.output for row in done], sum((row.stats for row in done), Stats()), count)

    return Contender(name, run, gamma)
