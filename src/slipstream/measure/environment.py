"""The facts that figures depend on: machine, threads, versions, models, and the load before the measurement."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from slipstream.core.protocols import Scorer
from slipstream.decoding.decoder import Decoder
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.kernels import library
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import PackedLinear, precision_of
from slipstream.models.loading.twins import encoder_dtype

PACKAGES = ("slipstream", "transformers")
CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16")  # of processors that multiply it natively


def environment(engine: Engine) -> dict[str, Any]:
    """Return the facts for a report, without names of folders of this machine."""
    everyone = scorers(engine.decoder)
    device, info = everyone[0].device, CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = (_value(info, "flags") or _value(info, "Features")).split()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(map(without_folder, sys.argv)),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "cpu": _value(info, "model name") or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": ("native" if {*BFLOAT16}.intersection(flags) else "emulated") if flags else None,
        "kernel": (kernel_missing() or library.level().name) if device.type == "cpu" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [*os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "rule": engine.rule.name,
        "torch": torch.__version__,  # with its build, which the version of the installed package may not say
        **{name: next((d.version for d in distributions(name=name)), None) for name in PACKAGES},
        **{role: _model(scorer) for role, scorer in zip(("target", "draft"), everyone, strict=False)},
    }


def _value(info: str, name: str) -> str:
    lines = (line.partition(":") for line in info.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _model(scorer: Scorer) -> dict[str, Any]:
    model = getattr(scorer, "model", None)
    facts = {"parameters": parameters(model), "dtype": str(model.dtype)} if model else {}
    encoder = {"encoder_dtype": str(own)} if model and (own := encoder_dtype(model)) else {}
    weights = {"weights": str(precision)} if model and (precision := precision_of(model)) else {}
    cache = {"kv_dtype": held} if (held := getattr(scorer, "kv_dtype", None)) else {}
    return {"name": without_folder(scorer.name), "vocab": scorer.vocab, **facts, **encoder, **weights, **cache}


def parameters(model: Any) -> int:
    """Return the number of a model's parameters, by its configuration if weights are packed; tied ones count once."""
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        return int(model.num_parameters())
    with torch.device("meta"):
        return int(type(model)(model.config).num_parameters())


def without_folder(text: str) -> str:
    """Return a text without folders of this machine; `--option=/folder/file` becomes `--option=file`."""
    option, equals, value = text.rpartition("=")
    return option + equals + (Path(value).name if Path(value).expanduser().is_absolute() else value)


def scorers(decoder: Decoder) -> list[Scorer]:
    drafter = decoder.drafter
    return [decoder.target, *([drafter.scorer] if isinstance(drafter, ModelDrafter) else [])]
