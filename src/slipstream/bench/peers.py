"""The contenders of transformers: `generate`, assisted generation and prompt lookup, each at its best usual settings.

All run with the models as transformers loads them, without packed weights, and with a generation configuration that
replaces the model's own for the call: its settings (top-k 50, penalties, end tokens) would make the work different.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel

from slipstream.bench.records import ASSISTED, ASSISTED_AUTO, GENERATE, LOOKUP, BenchTask, Contender, Output
from slipstream.core.draft import padded
from slipstream.execution.names import CACHE


def generate(model: PreTrainedModel, begin: Sequence[int] = ()) -> Contender:
    """Make the contender of plain decoding by transformers, batches padded on the left; `begin` are the first tokens of
    an encoder-decoder's decoder, whose prompts are sources."""
    return Contender(GENERATE, lambda task: _generate(model, task, begin))


def assisted(target: PreTrainedModel, draft: PreTrainedModel, gamma: int | None = None) -> Contender:
    """Make the contender of assisted generation, without a `gamma` by transformers' own schedule of draft lengths."""
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    settings: dict[str, Any] = {} if gamma is None else {"num_assistant_tokens": gamma, **constant}

    def run(task: BenchTask) -> Output:
        # These are read from the assistant's own configuration, which arguments of `generate` do not reach. It is a new
        # one for every call, as some schedules write into it.
        with _configured(draft, **settings):
            return _generate(target, task, assistant_model=draft)

    return Contender(ASSISTED_AUTO if gamma is None else ASSISTED, run, gamma, largest_batch=1)


def lookup(model: PreTrainedModel, gamma: int) -> Contender:
    """Make the contender of prompt lookup: up to gamma tokens copied from the text, without a draft model."""

    def run(task: BenchTask) -> Output:
        return _generate(model, task, prompt_lookup_num_tokens=gamma)

    return Contender(LOOKUP, run, gamma, largest_batch=1)


def _generate(model: PreTrainedModel, task: BenchTask, begin: Sequence[int] = (), **arguments: Any) -> Output:
    eos, tokens, calls = sorted(task.eos), list[list[int]](), list[None]()
    limits = {"max_new_tokens": task.max_new_tokens, "eos_token_id": eos or None, "pad_token_id": (eos or [0])[0]}
    limits |= {"decoder_start_token_id": begin[0]} if begin else {}
    sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    with (
        _configured(model, **limits, **(sampling if task.temperature else {"do_sample": False})),
        model.register_forward_hook(lambda *_: calls.append(None)),  # at every pass
    ):
        for start in range(0, len(task.prompts), task.batch):
            texts = task.prompts[start : start + task.batch]
            attended = [[1] * len(text) for text in texts]
            if begin:
                rows = {"input_ids": texts, "attention_mask": attended, "decoder_input_ids": [begin] * len(texts)}
                inputs: dict[str, Any] = {name: padded(each, model.device) for name, each in rows.items()}
                # The cache that `generate` makes has as many layers as the encoder: too few for a deeper decoder.
                inputs[CACHE] = EncoderDecoderCache(DynamicCache(), DynamicCache())
            else:
                ids = padded([text[::-1] for text in texts], model.device).flip(1)
                inputs = {"input_ids": ids, "attention_mask": padded(attended, model.device).flip(1)}
            out = model.generate(**inputs, **arguments)
            tokens += out[:, len(begin) or inputs["input_ids"].shape[1] :].tolist()
    return Output(tokens, calls=len(calls))


@contextmanager
def _configured(model: PreTrainedModel, **settings: Any) -> Iterator[None]:
    """Replace a model's generation configuration for the block: `generate` takes missing settings from it."""
    kept, model.generation_config = model.generation_config, GenerationConfig(**settings)
    try:
        yield
    finally:
        model.generation_config = kept
