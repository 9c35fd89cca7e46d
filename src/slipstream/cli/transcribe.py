"""`slipstream transcribe`: sound files to text, or to subtitles, by a Whisper with a draft."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.app import app
from slipstream.cli.console import steps
from slipstream.cli.options import Plain, asked_models, grouped, options_of, own, panel, with_options
from slipstream.cli.settings import loaded
from slipstream.text.jsontext import json_text


class TranscriptFormat(StrEnum):
    """The formats in which a transcript is printed."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


Sounds = Annotated[list[Path], typer.Argument(metavar="FILE", help="WAV files; others need the package soundfile.")]
Speech = panel(
    None,
    language=own(str | None, None, "The language spoken, as de; English without it.", "CODE"),
    translate=own(bool, False, "Write English for any spoken language."),
    form=own(
        TranscriptFormat, TranscriptFormat.TEXT, "text; json, with times; or subtitles, srt or vtt.", flag="--format"
    ),
    as_json=own(bool, False, "A JSON line per file: the same as --format json.", flag="--json"),
)


@app.command()
@with_options(
    *(
        grouped("pair", "rounds", "compile", "threads", "target", gamma="auto", verify="block"),
        options_of(["temperature"]),
    ),
    *(Plain, Speech),
)
def transcribe(context: typer.Context, sounds: Sounds) -> None:
    """Write down what is said in sound files, with a Whisper as the target and a smaller one as its draft.

    Example: slipstream transcribe talk.wav --target openai/whisper-small --draft openai/whisper-tiny --format srt
    """
    params = context.params
    if params["target"] is None:
        raise ValueError("the embedded target reads text: name a Whisper with --target, such as openai/whisper-small.")
    engine = loaded(asked_models(context))
    form = TranscriptFormat.JSON if params["as_json"] else params["form"]
    task, timestamps = "translate" if params["translate"] else "transcribe", form is not TranscriptFormat.TEXT
    for sound in sounds:
        how: dict[str, Any] = {name: params[name] for name in ("language", "temperature", "plain")}
        with steps() as show:
            how["on_window"] = lambda done, total, file=sound: show(done, total, f"{file.name}: windows")
            transcript = engine.transcribe(sound, task=task, timestamps=timestamps, **how)
        if form is TranscriptFormat.JSON:
            about = {"text": transcript.text, "duration": transcript.duration}
            text = json_text({"file": str(sound), **about, "segments": list(map(asdict, transcript.segments))})
        elif form is TranscriptFormat.TEXT:
            text = transcript.text
        else:
            text = (transcript.srt() if form is TranscriptFormat.SRT else transcript.vtt()).rstrip("\n") + "\n"
        print(text, flush=True)
