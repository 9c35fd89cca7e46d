"""/v1/audio/transcriptions and translations: sound in, text out, for Whisper."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, Response, UploadFile
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool

from slipstream.core.values import OptionError
from slipstream.engine.engine import Engine
from slipstream.engine.transcription import Transcriber
from slipstream.serve import answers, published
from slipstream.serve.body import Addressed, ignored
from slipstream.serve.call import unless_gone
from slipstream.serve.faults import BadRequest
from slipstream.serve.output import ERRORS, answered, completed, finish_reason
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.text.transcripts import Transcript

router = APIRouter(tags=["audio"])

PLAIN: dict[str, Any] = {"description": "The text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
TRANSCRIBE, TRANSLATE = "transcribe", "translate"
STAMPED = ("srt", "verbose_json", "vtt")
"""The formats of answers that have times."""


class AudioForm(Addressed):
    """The fields of both endpoints: transcriptions and translations."""

    others = published.AUDIO

    file: UploadFile = Field(description="A sound file; WAV always works.")
    language: str | None = Field(None, description="The language that is spoken, as in ISO 639-1; English without it.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, le=1, strict=False)  # forms hold texts
    timestamp_granularities: list[Literal["segment"]] | None = Field(
        None, alias="timestamp_granularities[]", description="With verbose_json; words have no times here."
    )

    @model_validator(mode="before")
    @classmethod
    def _given(cls, form: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is null, as forms have it."""
        return {name: value for name, value in form.items() if value not in ("", "null")}


Asked = Annotated[AudioForm, Form(media_type="multipart/form-data")]


@router.post(
    "/v1/audio/transcriptions",
    responses={**ERRORS, 200: PLAIN},
    response_model=answers.Transcription | answers.VerboseTranscription,
)
async def transcriptions(request: Request, form: Asked) -> Response:
    """Transcribe speech."""
    return await _written(request, form, TRANSCRIBE)


@router.post(
    "/v1/audio/translations",
    responses={**ERRORS, 200: PLAIN},
    response_model=answers.Transcription | answers.VerboseTranscription,
)
async def translations(request: Request, form: Asked) -> Response:
    """Translate speech in another language to English text."""
    return await _written(request, form, TRANSLATE)


async def _written(request: Request, form: AudioForm, task: str) -> Response:
    state = state_of(request)
    state.check_model(form.model)
    request.state.ignored = [*ignored(form)]
    transcriber, stamped = _transcriber(state), form.response_format in STAMPED
    try:
        task_options = transcriber.options(form.language, task, stamped)
    except OptionError as error:
        raise BadRequest(str(error), "response_format" if error.option == "timestamps" else error.option) from None
    try:
        samples = await run_in_threadpool(transcriber.read, await form.file.read())
    except ValueError as error:
        raise BadRequest(str(error), "file") from None
    windows = await run_in_threadpool(transcriber.windows, samples)
    options = {**task_options, "temperature": form.temperature, "cache_salt": tenant_of(request)}
    call = await state.call(request, windows, options, "file")
    done = [completed(pieces) for pieces in await unless_gone(request, call.collect())]
    for completion in done:
        finish_reason(completion)
    return _answer(transcriber.transcript(done, samples, stamped), form, task)


def _answer(transcript: Transcript, form: AudioForm, task: str) -> Response:
    texts = {"text": lambda: transcript.text, "srt": transcript.srt, "vtt": transcript.vtt}
    if form.response_format in texts:
        return Response(texts[form.response_format](), media_type="text/plain")
    if form.response_format == "json":
        return answered(answers.Transcription(text=transcript.text))
    segments = [
        answers.TranscriptionSegment(
            id=number,
            start=each.start,
            end=each.end,
            text=each.text,
            tokens=list(each.tokens),
            temperature=form.temperature,
        )
        for number, each in enumerate(transcript.segments)
    ]
    language = form.language or "en"
    return answered(
        answers.VerboseTranscription(
            task=task, language=language, duration=transcript.duration, text=transcript.text, segments=segments
        )
    )


def _transcriber(state: ServerState) -> Transcriber:
    try:
        return _of(state.engine)
    except ValueError as error:
        raise BadRequest(f"{state.model}: {error}", "model") from None


@lru_cache(maxsize=1)
def _of(engine: Engine) -> Transcriber:
    return Transcriber.of(engine.decoder.target, engine.tokenizer)
