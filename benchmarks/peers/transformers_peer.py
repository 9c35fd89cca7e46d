"""transformers for `benchmarks/race.py`, run as `slipstream bench` does it: `generate`, assisted, prompt lookup."""

from typing import Any

import torch
import transformers
import worker
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.bench.peers import assisted, generate, lookup
from slipstream.bench.records import BenchTask

MODELS: dict[str, PreTrainedModel] = {}


def load(asked: worker.Asked) -> worker.Asked:
    """Load the models as transformers does it."""
    torch.set_num_threads(asked["threads"])
    for role in ("model", "draft"):
        if asked.get(role):
            how: dict[str, Any] = {"dtype": getattr(torch, asked["dtype"])}
            MODELS[role] = AutoModelForCausalLM.from_pretrained(asked[role], **how).eval()
    return {"about": f"transformers {transformers.__version__}, torch {torch.__version__}"}


@torch.inference_mode()
def run(asked: worker.Asked) -> worker.Asked:
    """Continue the prompts, `batch` at a time."""
    kind, _, gamma = asked["way"].partition("@")
    model = MODELS["model"]
    if kind == "plain":
        contender = generate(model)
    elif kind == "lookup":
        contender = lookup(model, int(gamma))
    else:
        draft = MODELS["draft"]
        contender = assisted(model, draft, None if gamma == "auto" else int(gamma))
    torch.manual_seed(asked["seed"])
    prompts = tuple(map(tuple, asked["prompts"]))
    task = BenchTask(prompts, asked["batch"], asked["temperature"], asked["count"], frozenset(), asked["seed"])
    return {"tokens": contender.run(task).tokens}


if __name__ == "__main__":
    worker.serve(load, run)
