"""`slipstream serve-draft`: a draft for targets on other machines."""

from __future__ import annotations

import signal
from pathlib import Path

import typer

from slipstream.cli.app import app, say
from slipstream.cli.console import busy
from slipstream.cli.options import MODELS, OUTPUT, Where, options_of, own, panel, with_options
from slipstream.cli.serve import HOST
from slipstream.text.jsontext import json_text

Drafting = panel(
    MODELS,
    draft=own(str, "embedded", "What drafts: hub name or folder, ngram:FILE, lookup, embedded, choices.", "DRAFT"),
    tokenizer=own(str | None, None, "The targets' tokenizer, for drafts that have none: hub name or folder.", "NAME"),
)
Listening = panel(
    "Server",
    host=HOST,
    port=own(int, 8100, "The port to listen at; 0 is any free one.", "N", min=0, max=65535),
    key_file=own(Path | None, None, "The key that clients must have; without: SLIPSTREAM_DRAFT_KEY, or none.", "FILE"),
    tls_cert=own(Path | None, None, "A certificate (PEM): clients then use tls://.", "FILE"),
    tls_key=own(Path | None, None, "The certificate's private key (PEM).", "FILE"),
    max_rows=own(int, 64, "Texts that are drafted for at once.", "N", min=1),
)
Ready = panel(OUTPUT, as_json=own(bool, False, "When it is ready, say where as one JSON object.", flag="--json"))


@app.command("serve-draft")
@with_options(Drafting, Where, options_of(["compile"]), Listening, Ready)
def serve_draft(context: typer.Context) -> None:
    """Serve a draft to targets elsewhere, until Ctrl-C or SIGTERM; they use it as --draft tcp://HOST:8100.

    Example: slipstream serve-draft --draft Qwen/Qwen3-0.6B --host 0.0.0.0 --key-file draft.key
    """
    from slipstream.drafters.remote.hello import read_key
    from slipstream.serve.drafts.build import build
    from slipstream.serve.drafts.server import DraftServer, DraftSettings, tls_context
    from slipstream.serve.sockets import listen

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
        name, port = listener.getsockname()[:2]
        url = f"{'tls' if tls else 'tcp'}://{f'[{name}]' if ':' in name else name}:{port}"
        if params["as_json"]:
            print(json_text({"draft": draft, "url": url}), flush=True)
        else:
            say(f"{draft} drafts at {url}")
        server.run()
