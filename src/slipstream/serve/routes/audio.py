"""/v1/audio/transcriptions and translations: sound in, text out, for Whisper."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, Response, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from slipstream.core.protocols import HasModel
from slipstream.models.speech import SpeechInput
from slipstream.serve import answers
from slipstream.serve.call import unless_gone
from slipstream.serve.faults import BadRequest
from slipstream.serve.output import ERRORS, answered, completed, finish_reason
from slipstream.serve.sound import read_sound
from slipstream.serve.state import ServerState, state_of, tenant_of

router = APIRouter(tags=["audio"])

PLAIN: dict[str, Any] = {"description": "The text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
TRANSCRIBE, TRANSLATE = "transcribe", "translate"


class AudioForm(BaseModel):
    """The fields of both forms."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile = Field(description="A sound file; WAV always works.")
    model: str | None = None
    language: str | None = Field(None, description="The language that is spoken, as in ISO 639-1; English without it.")
    response_format: Literal["json", "text"] = "json"
    temperature: float = Field(0.0, ge=0, le=1)


Asked = Annotated[AudioForm, Form(media_type="multipart/form-data")]


@router.post("/v1/audio/transcriptions", responses={**ERRORS, 200: PLAIN}, response_model=answers.Transcription)
async def transcriptions(request: Request, form: Asked) -> Response:
    """Write down what is said."""
    return await _written(request, form, TRANSCRIBE)


@router.post("/v1/audio/translations", responses={**ERRORS, 200: PLAIN}, response_model=answers.Transcription)
async def translations(request: Request, form: Asked) -> Response:
    """Write down in English what is said in another language."""
    return await _written(request, form, TRANSLATE)


async def _written(request: Request, form: AudioForm, task: str) -> Response:
    state = state_of(request)
    state.check_model(form.model)
    speech = _speech(state)
    try:
        begin = speech.decoder_prompt(form.language, task)
    except ValueError as error:
        raise BadRequest(str(error), "language") from None
    samples = await run_in_threadpool(read_sound, await form.file.read(), speech.rate)
    windows = await run_in_threadpool(speech.windows, samples)
    options = {
        "temperature": form.temperature,
        "decoder_prompt": begin,
        "max_new_tokens": state.longest - len(begin) - 1,
        "cache_salt": tenant_of(request),
    }
    call = await state.call(request, windows, options, "file")
    done = [completed(pieces) for pieces in await unless_gone(request, call.collect())]
    for completion in done:
        finish_reason(completion)
    text = " ".join(completion.text.strip() for completion in done)
    if form.response_format == "text":
        return Response(text, media_type="text/plain")
    return answered(answers.Transcription(text=text))


def _speech(state: ServerState) -> SpeechInput:
    form = state.engine.decoder.target.source_form
    if form is None or form.features is None:
        raise BadRequest(f"{state.model} does not read sound: serve a Whisper.", "model")
    target = state.engine.decoder.target
    assert isinstance(target, HasModel), "what reads features is a model"
    try:
        return _input_of(target.model)
    except ValueError as error:
        raise BadRequest(str(error), "model") from None


@lru_cache(maxsize=1)
def _input_of(model: Any) -> SpeechInput:
    return SpeechInput.of(model)
