"""Models, health, version, properties and metrics of the server; tokens of texts; and the page, a chat in a browser."""

from importlib.resources import files

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from slipstream.serve import answers
from slipstream.serve.chats import chat_of
from slipstream.serve.faults import BadRequest, NotServed
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.output import ERRORS, answered
from slipstream.serve.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from slipstream.serve.state import ServerState, state_of
from slipstream.serve.tools import Tools
from slipstream.text.detokenize import Detokenizer
from slipstream.version import __version__

router = APIRouter(tags=["server"], route_class=JsonRoute)
PIECE = 4096  # tokens that are decoded in one go
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


@router.get("/", include_in_schema=False)
@router.get("/page.js", include_in_schema=False)
@router.get("/page.css", include_in_schema=False)
def page(request: Request) -> Response:
    name, kind = FILES[request.url.path]
    content = files("slipstream.serve").joinpath("page", name).read_bytes()
    return Response(content, media_type=kind, headers=SECURITY)


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/ping", responses={503: ERRORS[503]}, response_model=answers.Health)
@router.get("/health", responses={503: ERRORS[503]}, response_model=answers.Health)
async def health(request: Request) -> Response:
    """Answer 200 while requests are taken: once the models are ready, until the server ends."""
    state_of(request).worker.check()
    return answered(answers.Health())


@router.get("/version", response_model=answers.Version)
async def version() -> Response:
    """Return the version of the server."""
    return answered(answers.Version(version=__version__))


@router.get("/models", responses={401: ERRORS[401]}, response_model=answers.Models)
@router.get("/v1/models", responses={401: ERRORS[401]}, response_model=answers.Models)
async def models(request: Request) -> Response:
    """List all names under which the model is served."""
    state = state_of(request)
    return answered(answers.Models(data=[_model(state, name) for name in state.settings.names]))


@router.get("/v1/models/{name:path}", responses={s: ERRORS[s] for s in (401, 404)}, response_model=answers.Model)
async def model(name: str, request: Request) -> Response:
    """Return one name under which the model is served, as /v1/models lists it."""
    state = state_of(request)
    if name not in state.settings.names:
        raise NotServed(name, state.model)
    return answered(_model(state, name))


@router.get("/props", responses={s: ERRORS[s] for s in (401, 503)}, response_model=answers.Properties)
async def properties(request: Request) -> Response:
    """Return the server's properties: target, draft, rule, gamma, notes; and the acceptance of drafts so far."""
    return answered(state_of(request).properties())


@router.get("/metrics", responses={401: ERRORS[401], 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(request: Request) -> Response:
    """Return counters and times for Prometheus."""
    text = await run_in_threadpool(state_of(request).metrics.text)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.post("/tokenize", responses=ERRORS, response_model=answers.Tokenized)
async def tokenize(body: Once[TokenizeRequest], request: Request) -> Response:
    """Return the tokens of a text, or of a chat in the model's chat template."""
    state = state_of(request)
    if sum(each is not None for each in (body.prompt, body.content, body.messages)) != 1:
        raise BadRequest("give either prompt (or content) or messages.", "prompt")
    chat = None
    if body.messages is not None:
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        asked = ChatRequest.of({name: getattr(body, name) for name in names})
        chat = await chat_of(asked, Tools(asked, state), request)

    def tokenized() -> Response:
        if chat is not None:
            ids = state.encode(chat, "messages")
        else:
            llama = body.content is not None
            text, special = (body.content, body.add_special) if llama else (body.prompt, body.add_special_tokens)
            state.check_length("content" if llama else "prompt", text)
            ids = list(state.engine.tokenizer.encode(text, add_special_tokens=special))
        strings = [state.spelling.text(token) for token in ids] if body.return_token_strs or body.with_pieces else []
        pieces = [answers.TokenPiece(id=token, piece=text) for token, text in zip(ids, strings, strict=False)]
        return answered(
            answers.Tokenized(
                count=len(ids),
                max_model_len=state.engine.decoder.target.context,
                tokens=pieces if body.with_pieces else ids,
                token_strs=strings if body.return_token_strs else None,
            )
        )

    return await off_loop(request, tokenized)


@router.post("/detokenize", responses=ERRORS, response_model=answers.Detokenized)
async def detokenize(body: Once[DetokenizeRequest], request: Request) -> Response:
    """Return the text of tokens, with special ones."""
    state = state_of(request)
    vocabulary = state.engine.decoder.target.vocab
    if max(body.tokens, default=0) >= vocabulary:
        raise BadRequest(f"tokens holds an id that the model does not know: it knows 0..{vocabulary - 1}.", "tokens")

    def detokenized() -> Response:
        reader = Detokenizer(state.engine.tokenizer.decode)  # in pieces, as a decoder keeps the interpreter for itself
        pieces = [reader.push(*body.tokens[start : start + PIECE]) for start in range(0, len(body.tokens), PIECE)]
        text = "".join(pieces) + reader.flush()
        return answered(answers.Detokenized(prompt=text, content=text))

    return await off_loop(request, detokenized)


@router.get("/tokenizer_info", responses={401: ERRORS[401]})
async def tokenizer_info(request: Request) -> dict[str, str | None]:
    """Return the special tokens and the chat template, for clients that let the server tokenize, as vLLM does."""
    engine, names = state_of(request).engine, ("bos_token", "eos_token", "pad_token")
    template = engine.encoder.template
    special = {name: getattr(engine.tokenizer, name, None) for name in names}
    return {**special, "chat_template": template.source if template else None}


def _model(state: ServerState, name: str) -> answers.Model:
    return answers.Model(id=name, created=state.started, max_model_len=state.engine.decoder.target.context)
