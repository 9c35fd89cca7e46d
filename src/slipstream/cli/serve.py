"""`slipstream serve`: an OpenAI-compatible server for one target and its draft."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.app import app, say, tell
from slipstream.cli.console import busy, console
from slipstream.cli.options import (
    Compile,
    Device,
    Draft,
    Dtype,
    Gamma,
    Lossless,
    PlanFile,
    Target,
    TargetOptions,
    Task,
    Tree,
    Verify,
    option,
    placed,
    shaped,
    with_options,
)

SERVER, LIMITS = "Server", "Limits"

Host = Annotated[str, option(SERVER, "The address to listen at; 0.0.0.0 is all.", metavar="ADDRESS")]
Port = Annotated[int, option(SERVER, "The port to listen at; 0 is any free one.", metavar="N", min=0, max=65535)]
Keys = Annotated[
    Path | None,
    option(SERVER, "Ask for a bearer key: one per line, after a tenant's name if it has one.", metavar="FILE"),
]
Names = Annotated[
    list[str] | None, option(SERVER, "What clients call the model. Repeatable.", "--served-model-name", metavar="NAME")
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


@app.command()
@with_options(TargetOptions)
def serve(
    context: typer.Context,
    target: Target = None,
    draft: Draft = None,
    gamma: Gamma = "auto",
    tree: Tree = None,
    verify: Verify = "block",
    plan: PlanFile = None,
    lossless: Lossless = False,
    task: Task = None,
    dtype: Dtype = "auto",
    device: Device = None,
    compile: Compile = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: Keys = None,
    names: Names = None,
    chat_template: ChatTemplate = None,
    image_hosts: ImageHosts = None,
    access_log: Log = None,
    log_prompts: LogPrompts = False,
    max_rows: MaxRows = 16,
    max_queue: MaxQueue = 1024,
    max_body: MaxBody = "16M",
    cache_bytes: CacheBytes = "512M",
    memory: Memory = None,
    prefill_chunk: PrefillChunk = None,
) -> None:
    """Serve a model behind OpenAI's interface, with a page at /, until Ctrl-C or SIGTERM.

    What was begun is finished then; a second signal ends at once. Without a target, the embedded pair is served.

    Example: slipstream serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --compile --port 8000
    """
    needed()
    from slipstream.serve.gate import AccessLog
    from slipstream.serve.server import Server
    from slipstream.serve.settings import Limits, Room, ServeSettings, read_keys
    from slipstream.serve.sockets import listen
    from slipstream.serve.state import ServerState

    limits = Limits(body_bytes=parse_bytes("--max-body", max_body))
    limit = None if memory is None else parse_bytes("--memory", memory)
    room = Room(max_rows, parse_bytes("--cache-bytes", cache_bytes), limit, prefill_chunk)
    keys = read_keys(api_key_file) if api_key_file else {}
    template = chat_template.read_text(encoding="utf-8") if chat_template else None
    log = AccessLog(_log(access_log))
    with listen(host, port) as listener:
        with busy(console(stderr=True), "loading"):
            engine = _engine(context, max_rows)
        tell(engine.notes)
        if template is not None:
            _use_template(engine, template)
        served, hosts = tuple(names or [target or "embedded"]), tuple(image_hosts or ())
        settings = ServeSettings(served, keys, max_queue, lossless, log_prompts, limits, hosts)
        drafted = draft or (None if target else "embedded")
        raise typer.Exit(Server(ServerState.new(engine, settings, room, drafted), listener, log).run_to_end())


def _use_template(engine: Any, template: str) -> None:
    for owner in (engine.tokenizer, *([engine.vision.processor] if engine.vision else [])):
        owner.chat_template = template


def _engine(context: typer.Context, max_rows: int) -> Any:
    from slipstream.engine.load import load

    params = context.params
    how = {name: params[name] for name in ("verify", "dtype", "device", "compile", "task", "plan")}
    if params["plan"]:  # it says what nobody gave
        sources = {name: context.get_parameter_source(name) for name in ("gamma", "verify")}
        how |= {name: None for name, source in sources.items() if source and source.name == "DEFAULT"}
    shape = {**shaped(context), **placed(context)}
    return load(params["target"], params["draft"], batch_size=max_rows, progress=say, **{**shape, **how})


def _log(path: str | None) -> Any:
    if path is None:
        return None
    return sys.stdout if path == "-" else open(path, "a", encoding="utf-8", buffering=1)


def needed() -> None:
    """Raises ValueError, which tells how to install them, if the server's libraries are not there."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client", "multipart") if not find_spec(name)]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}: pip install 'slipstream[serve]'.")


def parse_bytes(name: str, text: str) -> int:
    """ "512M" -> 536870912; K, M and G are powers of 1024. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,15})([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{name} {text!r} is no number of bytes: write it as 16777216, 512M or 4G.")
    return int(found[1]) << 10 * " KMG".index(found[2].upper() or " ")
