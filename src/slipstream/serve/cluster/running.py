"""Runs replicas until a signal: starts or joins a Ray cluster, serves, and shuts down."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, replace
from types import FrameType

from slipstream.core.signals import ENDING, handling
from slipstream.serve.cluster.scale import Scale
from slipstream.serve.recipe import Recipe
from slipstream.serve.sockets import say

NAME = "slipstream"
"""The name of the application in the cluster."""


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that serves: its `address`, and the host and port where its proxies listen.

    Without an address it is the cluster in RAY_ADDRESS, or a new one on this machine.
    """

    address: str | None
    host: str
    port: int

    def run_to_end(self, recipe: Recipe, scale: Scale) -> int:
        """Serve until a signal, then finish the running requests; a second signal ends at once -> the exit code.

        Raises ValueError if the cluster cannot be reached or its replicas cannot load the models.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics unless the user enables them
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # a busy machine takes more than 5
        import ray
        from ray import serve

        from slipstream.serve.cluster.replicas import application

        ended = threading.Event()

        def end(number: int, frame: FrameType | None) -> None:
            if ended.is_set():
                say("ended at once.")
                os._exit(1)
            say("ending: what was begun is finished; once more to end at once.")
            ended.set()

        try:
            ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
            resources = ray.cluster_resources()
            if scale.gpus is None and resources.get("GPU"):
                scale = replace(scale, gpus=1)
            if scale.cpus is None and not scale.gpus:
                scale = replace(scale, cpus=max(1, resources.get("CPU", 1) // scale.most))
            serve.start(http_options={"host": self.host, "port": self.port})
            serve.run(application(recipe, scale), name=NAME, route_prefix="/")
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            ray.shutdown()
            raise ValueError(f"the cluster cannot serve: {' '.join(str(error).split())[-400:]}") from error
        draft = f" with the draft {recipe.draft}" if recipe.draft else " without a draft"
        with handling(end, *ENDING):
            say(f"{recipe.settings.names[0]}{draft} is ready at http://{self.host}:{self.port}")
            try:
                while not ended.wait(1):
                    pass
                serve.delete(NAME)
                if self.address is None:
                    serve.shutdown()
            finally:
                ray.shutdown()
        return 0
