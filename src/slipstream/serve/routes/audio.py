"""/v1/audio/transcriptions and translations: sound in, text out, for Whisper."""

from dataclasses import asdict
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, Response, UploadFile
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from slipstream.engine.engine import Engine
from slipstream.engine.transcription import Transcriber
from slipstream.serve import answers, published
from slipstream.serve.body import Addressed, ignored
from slipstream.serve.call import unless_gone
from slipstream.serve.output import ERRORS, answered, completed, finish_reason
from slipstream.serve.state import state_of, tenant_of

router = APIRouter(tags=["audio"])
PLAIN: dict[str, Any] = {"description": "The text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
OUTCOMES = {**ERRORS, 200: PLAIN}
Written = answers.Transcription | answers.VerboseTranscription
STAMPED = ("srt", "verbose_json", "vtt")  # formats of answers that have times


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


@router.post("/v1/audio/transcriptions", responses=OUTCOMES, response_model=Written)
async def transcriptions(request: Request, form: Asked) -> Response:
    """Transcribe speech."""
    return await _written(request, form, "transcribe")


@router.post("/v1/audio/translations", responses=OUTCOMES, response_model=Written)
async def translations(request: Request, form: Asked) -> Response:
    """Translate speech in another language to English text."""
    return await _written(request, form, "translate")


async def _written(request: Request, form: AudioForm, task: str) -> Response:
    state = state_of(request)
    state.check_model(form.model)
    request.state.ignored = [*ignored(form)]
    with state.refusing("model"):
        transcriber, stamped = _transcriber(state.engine), form.response_format in STAMPED
        task_options = transcriber.options(form.language, task, stamped)
    with state.refusing("file"):
        content = await form.file.read()

        def read_windows() -> tuple[list[Tensor], float]:
            with transcriber.opened(content) as sound:
                return list(transcriber.windows(sound)), sound.seconds

        windows, seconds = await run_in_threadpool(read_windows)
    options = {**task_options, "temperature": form.temperature, "cache_salt": tenant_of(request)}
    call = await state.call(request, windows, options, "file")
    done = [completed(pieces) for pieces in await unless_gone(request, call.collect())]
    for completion in done:
        finish_reason(completion)
    transcript = transcriber.transcript(done, seconds, stamped)
    texts = {"text": lambda: transcript.text, "srt": transcript.srt, "vtt": transcript.vtt}
    if form.response_format in texts:
        return Response(texts[form.response_format](), media_type="text/plain")
    if form.response_format == "json":
        return answered(answers.Transcription(text=transcript.text))
    segments = [
        answers.TranscriptionSegment(id=number, temperature=form.temperature, **asdict(each))
        for number, each in enumerate(transcript.segments)
    ]
    found = {"language": form.language or "en", "duration": transcript.duration, "text": transcript.text}
    return answered(answers.VerboseTranscription(task=task, segments=segments, **found))


@lru_cache(maxsize=1)
def _transcriber(engine: Engine) -> Transcriber:
    return Transcriber.of(engine.decoder.target, engine.tokenizer)
