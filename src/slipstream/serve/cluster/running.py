"""Runs replicas until a signal: starts or joins a Ray cluster, serves, and shuts down."""

import logging
import os
import threading
from dataclasses import replace
from types import FrameType

from slipstream.core.signals import ENDING, handling
from slipstream.serve.cluster.scale import Scale
from slipstream.serve.recipe import Recipe
from slipstream.serve.sockets import say

NAME = "slipstream"  # name of the application in the cluster


def run_to_end(recipe: Recipe, scale: Scale, address: str | None, host: str, port: int) -> int:
    """Serve until a signal, then finish the running requests; a second signal ends at once -> the exit code.

    `address` is the cluster's: without one, that in RAY_ADDRESS, or a new one on this machine, whose proxies listen at
    `host` and `port`. Raises ValueError if it cannot be reached or its replicas cannot load the models.
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
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        resources = ray.cluster_resources()
        if scale.gpus is None and resources.get("GPU"):
            scale = replace(scale, gpus=1)
        if scale.cpus is None and not scale.gpus:
            scale = replace(scale, cpus=max(1, resources.get("CPU", 1) // scale.most))
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(recipe, scale), name=NAME, route_prefix="/")
    except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
        ray.shutdown()
        raise ValueError(f"the cluster cannot serve: {' '.join(str(error).split())[-400:]}") from error
    draft = f" with the draft {recipe.draft}" if recipe.draft else " without a draft"
    with handling(end, *ENDING):
        say(f"{recipe.settings.names[0]}{draft} is ready at http://{host}:{port}")
        try:
            while not ended.wait(1):
                pass
            serve.delete(NAME)
            if address is None:
                serve.shutdown()
        finally:
            ray.shutdown()
    return 0
