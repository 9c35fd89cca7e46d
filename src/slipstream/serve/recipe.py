"""`Recipe`: the arguments of a server, so that any process can make the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.core.model_options import ModelOptions
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.engine.worker import Capacity
from slipstream.models.loading.origin import source_name
from slipstream.models.loading.pairings import draft_of
from slipstream.serve.settings import ServeSettings

if TYPE_CHECKING:
    from slipstream.serve.state import ServerState


@dataclass(frozen=True)
class Recipe:
    """The arguments from which a server's state is made; it can be pickled, so that other processes make the same.
    `template` is a Jinja chat template in place of the tokenizer's."""

    models: ModelOptions
    settings: ServeSettings
    room: Capacity
    template: str | None = None

    @property
    def draft(self) -> str | None:
        """The name of the draft: as users wrote it, of a path its last part, or the one declared for the target."""
        return source_name(draft_of(self.models.target, self.models.draft))

    def engine(self, progress: Callable[[str], object] | None = None) -> Engine:
        engine = load(replace(self.models, batch_size=self.room.rows), progress=progress)
        if self.template is not None:
            for owner in (engine.tokenizer, *([engine.media.processor] if engine.media else [])):
                owner.chat_template = self.template
        return engine

    def state(self, progress: Callable[[str], object] | None = None) -> ServerState:
        from slipstream.serve.state import ServerState  # it needs the server's libraries, as a batch need not

        return ServerState.new(self.engine(progress), self.settings, self.room, self.draft)
