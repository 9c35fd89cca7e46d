"""Begins the answer to a chat: for /v1/chat/completions, and for /v1/responses, whose requests mean a chat."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from slipstream.engine.requests import Chat
from slipstream.serve.call import Call
from slipstream.serve.faults import BadRequest
from slipstream.serve.json_route import off_loop
from slipstream.serve.media import with_open_media
from slipstream.serve.options import constraint, engine_options
from slipstream.serve.schema import ChatRequest
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.serve.tools import Tools

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

    Raises BadRequest for those that are refused, and where the model has no chat template.
    """
    state = state_of(request)
    if state.engine.encoder.template is None:
        raise BadRequest(
            f"{state.model} has no chat template, so it cannot answer a chat: send a text as the prompt of "
            "/v1/completions, or start the server with --chat-template FILE.",
            field,
        )
    messages = [message.model_dump(exclude_none=True, by_alias=True) for message in body.messages]
    messages = await off_loop(request, with_open_media, messages, state)
    return Chat(messages, tools.for_template(), _variables(body, state, request))


def _options(body: ChatRequest, tools: Tools, state: ServerState, tenant: str) -> dict[str, Any]:
    options = engine_options(body, state.settings, tenant)
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
            raise BadRequest(
                "add_generation_prompt and continue_final_message exclude each other.", "add_generation_prompt"
            )
        return {**variables, "continue_final_message": True, "add_generation_prompt": False}
    return {"add_generation_prompt": body.add_generation_prompt is not False, **variables}
