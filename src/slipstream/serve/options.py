"""Fields of a request -> the options of the engine, under the engine's names."""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import Any

from slipstream.core.options import REQUEST_FIELDS
from slipstream.decoding.rules import COUPLED
from slipstream.serve.faults import BadRequest
from slipstream.serve.response_schema import ResponsesRequest
from slipstream.serve.schema import Decoding, SpeculationOptions
from slipstream.serve.settings import Limits, ServeSettings


def engine_options(body: Decoding, settings: ServeSettings, tenant: str) -> dict[str, Any]:
    """Return the engine's options for the fields that all requests for text have; fields not sent are left out.

    Without a seed, one is drawn: two equal requests get different texts. With one, the rule is `coupled` unless the
    request names another: the text then depends on the seed alone, not on draft lengths, which vary with the load.
    Raises BadRequest for what is above a limit.
    """
    check_limits(body, settings.limits)
    sent = {name: getattr(body, field, None) for name, field in REQUEST_FIELDS.items()}
    options = {name: value for name, value in sent.items() if value is not None}
    options["seed"] = secrets.randbits(63) if body.seed is None else body.seed % (1 << 64)
    salt = secrets.token_hex() if body.cache_prompt is False else body.cache_salt or ""
    options["cache_salt"] = f"{tenant}/{sha256(salt.encode()).hexdigest()}"  # the cache keeps it: it may be long
    if body.top_k == -1:  # off, as in vLLM
        options["top_k"] = 0
    if body.logit_bias:
        if wrong := [token for token in body.logit_bias if not (token.isascii() and token.isdecimal())]:
            raise BadRequest(f"logit_bias has the key {wrong[0]!r}, but a token id is a whole number.", "logit_bias")
        biases = {int(token): bias for token, bias in body.logit_bias.items()}
        options["logit_bias"] = {token: float("-inf") if bias == -100 else bias for token, bias in biases.items()}
    if body.prediction is not None:
        content = body.prediction.content
        options["prediction"] = content if isinstance(content, str) else "".join(part.text for part in content)
    chosen = speculation(body)
    options["lossless"] = settings.lossless or bool(chosen.lossless)
    if chosen.draft is not None and chosen.draft != settings.draft:
        runs = f"{settings.draft!r} runs here" if settings.draft else "none runs here"
        raise BadRequest(f"draft is {chosen.draft!r}, but {runs}: name that one, or none.", "speculative")
    if chosen.gamma is not None:
        options["gamma"] = chosen.gamma
    if chosen.verify is not None or body.seed is not None:
        options["verify"] = COUPLED if chosen.verify is None else chosen.verify
    return options


def speculation(body: Decoding | ResponsesRequest) -> SpeculationOptions:
    """Return the draft settings of a request; `speculative: false` is gamma 0."""
    speculative = body.speculative
    if isinstance(speculative, SpeculationOptions):
        return speculative
    return SpeculationOptions(gamma=0) if speculative is False else SpeculationOptions()


def check_limits(body: Decoding, limits: Limits) -> None:
    """Raise BadRequest for the first field that exceeds the server's limits."""
    for name, field in REQUEST_FIELDS.items():
        value, most = getattr(body, field, None), {"n": limits.samples, "stop": limits.stops}.get(name, limits.bias)
        count = len(value) if isinstance(value, list | dict) else value if name == "n" else 1
        if count and count > most:
            raise BadRequest(f"{name} asks for {count}, but this server gives at most {most}.", name)
