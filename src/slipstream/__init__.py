"""Lossless speculative decoding for the models people already have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.core.garbage import uncollected
from slipstream.version import __version__ as __version__

if TYPE_CHECKING:
    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.engine.engine import Engine, Interrupted
    from slipstream.engine.generation import Completion, Piece
    from slipstream.engine.load import follow, load
    from slipstream.engine.transformers_hook.custom_generate import custom_generate


__all__ = ["AsyncEngine", "Completion", "Engine", "Interrupted", "Piece", "custom_generate", "follow", "load"]


def __getattr__(name: str) -> Any:
    """Load torch and transformers only when they are needed: `slipstream --help` must not wait for them."""
    if name not in __all__:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    rooms = {
        "AsyncEngine": "engine.async_engine",
        "Completion": "engine.generation",
        "Engine": "engine.engine",
        "Interrupted": "engine.engine",
        "Piece": "engine.generation",
        "custom_generate": "engine.transformers_hook.custom_generate",
        "follow": "engine.load",
        "load": "engine.load",
    }
    with uncollected():
        return getattr(import_module(f"slipstream.{rooms[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
