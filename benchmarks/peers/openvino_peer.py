"""OpenVINO GenAI for `benchmarks/race.py`, in an environment of its own: plain, with a draft model, or prompt lookup.

python -m venv OV && OV/bin/pip install openvino-genai            (and optimum-intel, to convert)
OV/bin/optimum-cli export openvino --model FOLDER/target-134m --task text-generation-with-past \\
    --weight-format fp16 FOLDER/target-134m-openvino-bfloat16     (int8; or int4 --group-size 32 --ratio 1)

Texts run together by continuous batching. Prefix caching is off: it would keep prompts warm between laps. Draft lengths
are constant (confidence threshold 0).
"""

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import worker

PIPES: dict[str, Any] = {}
HOW: dict[str, Any] = {}


def load(asked: worker.Asked) -> worker.Asked:
    """Load the target; each kind of draft has a pipeline of its own."""
    HOW.update(asked)
    pipe("plain")
    bits = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {"about": f"OpenVINO GenAI {genai.__version__}, {' '.join(bits)}"}


def pipe(kind: str) -> Any:
    """Return the pipeline for plain decoding, "lookup" or "draft"."""
    if kind not in PIPES:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 1
        how: dict[str, Any] = {"INFERENCE_NUM_THREADS": HOW["threads"]}
        more: dict[str, Any] = {"prompt_lookup": True} if kind == "lookup" else {}
        if kind == "draft":
            more = {"draft_model": genai.draft_model(HOW["draft"], "CPU", **how)}
        PIPES[kind] = genai.ContinuousBatchingPipeline(HOW["model"], scheduler, "CPU", how | more)
    return PIPES[kind]


def run(asked: worker.Asked) -> worker.Asked:
    """Continue the prompts, `batch` at a time."""
    kind, _, gamma = asked["way"].partition("@")
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = asked["count"], True
    if asked["temperature"]:
        config.do_sample, config.temperature, config.rng_seed = True, asked["temperature"], asked["seed"]
        config.top_k, config.top_p = 10**6, 1.0
    if gamma:
        config.num_assistant_tokens = int(gamma)
        if kind == "lookup":
            config.max_ngram_size = 3
        else:
            config.assistant_confidence_threshold = 0.0
    found, batch = [], asked["batch"]
    for start in range(0, len(asked["prompts"]), batch):
        texts = [ov.Tensor(np.array([text], dtype=np.int64)) for text in asked["prompts"][start : start + batch]]
        done = pipe(kind).generate(texts, [config] * len(texts))
        found += [list(each.m_generation_ids[0]) for each in done]
    return {"tokens": found}


if __name__ == "__main__":
    worker.serve(load, run)
