"""Fields of a request -> the options of the engine, under the engine's names."""

import secrets
from hashlib import sha256
from typing import Any

from slipstream.core.options import REQUEST_FIELDS
from slipstream.decoding.grammar import Grammars
from slipstream.decoding.rules import COUPLED
from slipstream.serve.faults import BadRequest
from slipstream.serve.response_schema import ResponsesRequest
from slipstream.serve.schema import Decoding, SpeculationOptions
from slipstream.serve.state import ServerState


def engine_options(body: Decoding, state: ServerState, tenant: str) -> dict[str, Any]:
    """Return the engine's options for the fields that all requests for text have; fields not sent are left out.

    Without a seed, one is drawn: two equal requests get different texts. With one, the rule is `coupled` unless the
    request names another: the text then depends on the seed alone, not on draft lengths, which vary with the load.
    Raises BadRequest for what is above a limit.
    """
    sent = {name: getattr(body, field, None) for name, field in REQUEST_FIELDS.items()}
    options = {name: value for name, value in sent.items() if value is not None}
    settings, limits = state.settings, state.settings.limits
    for name, value in options.items():
        most = {"n": limits.samples, "stop": limits.stops}.get(name, limits.bias)
        count = len(value) if isinstance(value, list | dict) else value if name == "n" else 1
        if count > most:
            raise BadRequest(f"{name} asks for {count}, but this server gives at most {most}.", name)
    options["seed"] = secrets.randbits(63) if body.seed is None else body.seed % (1 << 64)
    salt = secrets.token_hex() if body.cache_prompt is False else body.cache_salt or ""
    options["cache_salt"] = f"{tenant}/{sha256(salt.encode()).hexdigest()}"  # the cache keeps it: it may be long
    if body.max_tokens == -1:  # no limit, as in llama.cpp
        options["max_new_tokens"] = state.longest
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


MAKERS = {"json_": Grammars.json_schema, "regex": Grammars.regex, "choice": Grammars.choice, "grammar": Grammars.lark}
"""The forms of `structured_outputs` -> what makes a grammar of each."""


def constraint(body: Decoding, state: ServerState, calls: str | None = None) -> dict[str, Any]:
    """Return the engine's option for `response_format` or `structured_outputs`; {} if the answer is free text.

    `calls` are the rules by which the answer may be calls of tools instead. Raises BadRequest, which names the field,
    for a form that is not possible.
    """
    form, outputs = body.response_format, body.structured_outputs
    formed = form is not None and form.type != "text"
    if formed and outputs is not None:
        raise BadRequest("response_format and structured_outputs exclude each other.", "structured_outputs")
    if not formed and outputs is None:
        return {}
    with state.refusing("response_format" if formed else "structured_outputs"):
        if outputs is not None:
            forms = {name: value for name, value in vars(outputs).items() if value is not None}
            if len(forms) != 1:
                kinds = "give one of json, regex, choice and grammar."
                raise ValueError(f"structured_outputs has {len(forms)} forms: {kinds}")
            [(name, value)] = forms.items()
            made = MAKERS[name](state.grammars, value)
        else:
            assert form is not None
            named = form.json_schema.schema_ if form.json_schema else None
            schema = form.schema_ if form.type == "json_object" else named
            if schema is None and form.type != "json_object":
                raise ValueError("response_format of type json_schema needs json_schema.schema, the schema itself.")
            made = state.grammars.json_object() if schema is None else state.grammars.json_schema(schema)
        return {"grammar": state.grammars.within(calls, made) if calls else made}
