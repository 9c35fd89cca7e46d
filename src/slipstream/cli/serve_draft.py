"""`slipstream serve-draft`: a draft for targets on other machines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

from slipstream.cli.app import app, say
from slipstream.cli.console import busy, console
from slipstream.cli.options import MODELS, OUTPUT, Compile, Device, Dtype, ThreadOptions, option, with_options
from slipstream.cli.serve import Host
from slipstream.text.jsontext import json_text

SERVER = "Server"

ServedDraft = Annotated[
    str, option(MODELS, "What drafts: hub name or folder, ngram:FILE, lookup, embedded, choices.", metavar="DRAFT")
]
Tokenizer = Annotated[
    str | None,
    option(MODELS, "The targets' tokenizer, for drafts that have none: hub name or folder.", metavar="NAME"),
]
Port = Annotated[int, option(SERVER, "The port to listen at; 0 is any free one.", metavar="N", min=0, max=65535)]
KeyFile = Annotated[
    Path | None,
    option(SERVER, "The key that clients must have; without: SLIPSTREAM_DRAFT_KEY, or none.", metavar="FILE"),
]
TlsCert = Annotated[Path | None, option(SERVER, "A certificate (PEM): clients then use tls://.", metavar="FILE")]
TlsKey = Annotated[Path | None, option(SERVER, "The certificate's private key (PEM).", metavar="FILE")]
MaxRows = Annotated[int, option(SERVER, "Texts that are drafted for at once.", metavar="N", min=1)]
ReadyJson = Annotated[bool, option(OUTPUT, "When it is ready, say where as one JSON object.", "--json")]


@app.command("serve-draft")
@with_options(ThreadOptions)
def serve_draft(
    draft: ServedDraft = "embedded",
    tokenizer: Tokenizer = None,
    dtype: Dtype = "auto",
    device: Device = None,
    compile: Compile = False,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    key_file: KeyFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_rows: MaxRows = 64,
    as_json: ReadyJson = False,
) -> None:
    """Serve a draft to targets elsewhere, until Ctrl-C or SIGTERM; they use it as --draft tcp://HOST:8100.

    Example: slipstream serve-draft --draft Qwen/Qwen3-0.6B --host 0.0.0.0 --key-file draft.key
    """
    from slipstream.drafters.remote.hello import read_key
    from slipstream.serve.drafts.build import How, build
    from slipstream.serve.drafts.server import DraftServer, DraftSettings, tls_context
    from slipstream.serve.sockets import listen

    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both, or neither.")
    tls = tls_context(tls_cert, tls_key) if tls_cert and tls_key else None
    key = read_key(key_file)
    if not key and not host.startswith("127.") and host not in ("localhost", "::1"):
        say("note: anybody who reaches this server may use it: give --key-file, and --tls-cert where others listen.")
    with listen(host, port) as listener:
        with busy(console(stderr=True), "loading"):
            drafter, vocabulary = build(draft, How(dtype, device, compile, tokenizer))
        server = DraftServer(drafter, DraftSettings(draft, vocabulary, key, max_rows), listener, tls)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        _say_ready(draft, f"{'tls' if tls else 'tcp'}://{_place(listener)}", as_json)
        server.run()


def _place(listener: Any) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say_ready(draft: str, url: str, as_json: bool) -> None:
    if as_json:
        print(json_text({"draft": draft, "url": url}), flush=True)
    else:
        say(f"{draft} drafts at {url}")
