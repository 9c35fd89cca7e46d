"""Begins the answer to a chat: for /v1/chat/completions, and for /v1/responses, whose requests mean a chat."""

from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from slipstream.core.media import Modality, data_url, only
from slipstream.engine.media import decode, media_in, media_part, part_content, part_modality
from slipstream.engine.requests import Chat
from slipstream.engine.sounds import read_sound
from slipstream.serve.call import Call
from slipstream.serve.faults import BadRequest
from slipstream.serve.json_route import off_loop
from slipstream.serve.options import constraint, engine_options
from slipstream.serve.schema import ChatRequest
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.serve.tools import Tools

SECONDS = 10.0  # timeout for fetching an image, in seconds
REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
AS_IT_IS = {"User-Agent": "slipstream", "Accept-Encoding": "identity"}


def fetch(url: str, hosts: Sequence[str], most: int, seconds: float = SECONDS) -> bytes:
    """Fetch at most `most` bytes from one of the allowed hosts.
    Raises ValueError for other hosts (redirects included), longer answers, timeouts and HTTP errors."""
    content, until = bytearray(), monotonic() + seconds
    try:
        with httpx.Client(timeout=seconds, trust_env=False) as client:  # without proxies
            for _ in range(1 + REDIRECTS):
                check_host(url, hosts)
                with client.stream("GET", url, headers=AS_IT_IS) as response:
                    if response.next_request is not None:  # the body of a redirect is not read: it may be long
                        url = str(response.next_request.url)
                        continue
                    if not response.is_success:
                        code = response.status_code
                        raise ValueError(f"an image of messages cannot be fetched: its host answers {code}.")
                    for piece in response.iter_raw():
                        content += piece
                        if len(content) > most:
                            raise ValueError(f"an image of messages is longer than the {most} bytes that are fetched.")
                        if monotonic() > until:
                            raise ValueError("an image of messages takes too long to come.")
                    return bytes(content)
    except (httpx.HTTPError, httpx.InvalidURL):
        raise ValueError("an image of messages cannot be fetched: its host does not answer as hosts do.") from None
    raise ValueError("an image of messages cannot be fetched: its host redirects too often.")


def check_host(url: str, hosts: Sequence[str]) -> None:
    """Raises ValueError unless a web address is at one of the hosts; a host without a port allows the default port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("an image of messages has an address that is none: send a data: URL.") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError("an image of messages is neither a data: URL nor a web address: send one of these.")
    usual = port in (None, PORTS[parts.scheme])
    names = {f"{parts.hostname}:{port or PORTS[parts.scheme]}", *([parts.hostname] if usual else [])}
    if parts.username is not None or names.isdisjoint(host.lower() for host in hosts):
        raise ValueError("an image of messages is at a host this server does not fetch from: send it as a data: URL.")


def with_open_media(messages: Sequence[dict[str, Any]], state: ServerState, field: str) -> list[dict[str, Any]]:
    """Return the messages of a field with their images and sounds opened, so that no URL or path is passed on.
    Raises BadRequest for media that are not allowed, too many, damaged, or not supported by the model."""
    counts, limits = Counter(media_in(messages)), state.settings.limits
    read = state.engine.media.modalities if state.engine.media else frozenset[Modality]()
    for modality, most in ((Modality.IMAGE, limits.images), (Modality.AUDIO, limits.sounds)):
        count = counts[modality]
        if count and modality not in read:
            raise BadRequest(f"{field} holds {modality}, but {state.model} reads {only(read)}: leave them out.", field)
        if count > most:
            raise BadRequest(f"{field} holds {count} {modality}, but at most {most} are taken.", field)
    opened = [dict(message) for message in messages]
    for message in opened if counts else ():
        if isinstance(content := message.get("content"), list):
            message["content"] = [_part(part, state, field) for part in content]
    return opened


def _part(part: dict[str, Any], state: ServerState, field: str) -> dict[str, Any]:
    modality, limits = part_modality(part), state.settings.limits
    if modality is None:
        return part
    with state.refusing(field):
        found = part_content(part, field)
        if modality is Modality.AUDIO:
            assert state.engine.media is not None and isinstance(found, bytes), "the schema takes data alone"
            return media_part(modality, read_sound(found, state.engine.media.rate, limits.sound_seconds))
        if found.startswith("data:"):
            content = data_url(found, "an image of messages")
        else:
            content = fetch(found, state.settings.image_hosts, limits.image_bytes)
        return media_part(modality, decode(content, "an image of messages", limits.image_pixels))


EFFORTS = {  # names of `reasoning_effort` in the requests that mean a chat
    "/v1/responses": "reasoning.effort",
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), "thinking"),
}


async def begun(
    body: ChatRequest, request: Request, field: str = "messages", plain: str | None = None
) -> tuple[Call, Tools]:
    """Queue the answers to a chat -> the call and its tools, which read them.

    `field` is the one that errors about the messages name. A model without a chat template continues `plain`, if there
    is such a text. Raises a ServeError for a chat that is refused.
    """
    state = state_of(request)
    tools = Tools(body, state)
    options = await run_in_threadpool(_options, body, tools, state, tenant_of(request))  # grammars may take a while
    continued = plain is not None and state.engine.encoder.template is None
    prompt = plain if continued and plain else await chat_of(body, tools, request, field)
    return await state.call(request, [prompt], options, field), tools


async def chat_of(body: ChatRequest, tools: Tools, request: Request, field: str = "messages") -> Chat:
    """Return the chat of a request, with its images and sounds opened.
    Raises BadRequest for those that are refused, and where the model has no chat template."""
    state = state_of(request)
    if state.engine.encoder.template is None:
        raise BadRequest(
            f"{state.model} has no chat template, so it cannot answer a chat: send a text as the prompt of "
            "/v1/completions, or start the server with --chat-template FILE.",
            field,
        )
    messages = [message.model_dump(exclude_none=True, by_alias=True) for message in body.messages]
    messages = await off_loop(request, with_open_media, messages, state, field)
    return Chat(messages, tools.for_template(), _variables(body, state, request))


def _options(body: ChatRequest, tools: Tools, state: ServerState, tenant: str) -> dict[str, Any]:
    options = engine_options(body, state, tenant)
    options.setdefault("max_new_tokens", state.longest)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true.", "top_logprobs")
    if body.logprobs:
        wanted, most = body.top_logprobs or 0, state.settings.limits.logprobs
        if wanted > most:
            raise BadRequest(f"top_logprobs={wanted} is above the {most} that this server gives.", "top_logprobs")
        options["logprobs"] = wanted
    options |= constraint(body, state, tools.calls())
    if (schema := tools.schema()) is not None:
        with state.refusing("tools"):
            options["grammar"] = state.grammars.json_schema(schema)
    return options


def _variables(body: ChatRequest, state: ServerState, request: Request) -> dict[str, Any]:
    """Return the variables of the chat template. Those that the template does not have are noted as without effect."""
    template = state.engine.encoder.template.source if state.engine.encoder.template else ""
    named = {f"chat_template_kwargs.{name}": name for name in body.chat_template_kwargs or ()}
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        named[EFFORTS.get(request.url.path, "reasoning_effort")] = (
            "reasoning_effort" if "reasoning_effort" in template else "enable_thinking"
        )
        own = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
        variables = own | variables
    request.state.ignored += [field for field, name in named.items() if name not in template]
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise BadRequest("add_generation_prompt excludes continue_final_message.", "add_generation_prompt")
        return {**variables, "continue_final_message": True, "add_generation_prompt": False}
    return {"add_generation_prompt": body.add_generation_prompt is not False, **variables}
