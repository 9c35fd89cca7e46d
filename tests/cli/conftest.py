"""Commands share the engines of the embedded pair, whose loading takes most of the time of a short one."""

from typing import Any

import pytest

from slipstream.core.model_options import ModelOptions
from slipstream.engine import load as engine_room
from slipstream.engine.engine import Engine

ENGINES: dict[str, Engine] = {}
LOAD = engine_room.load


def shared(how: Any = None, *rest: Any, **settings: Any) -> Engine:
    """Load an engine, or take the one that was loaded with the same options, if nobody has left rows in it."""
    if not isinstance(how, ModelOptions) or how.target is not None or how.draft is not None or how.plan is not None:
        return LOAD(how, *rest, **settings)
    made = ENGINES.get(repr(how))
    if made is None or made.decoder.target.lengths:
        made = ENGINES[repr(how)] = LOAD(how, **settings)
    return made


@pytest.fixture(autouse=True)
def engines_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_room, "load", shared)
