"""`slipstream transcribe`: sound files to text, or to subtitles, by a Whisper with a draft."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import app, say
from slipstream.cli.console import steps
from slipstream.cli.settings import loaded
from slipstream.text.jsontext import json_text

Sounds = Annotated[list[Path], typer.Argument(metavar="FILE", help="WAV files; others need the package soundfile.")]
Written = opt.panel(
    None,
    form=opt.own(Literal["text", "json", "srt", "vtt"], "text", "With times: json, or subtitles.", flag="--format"),
    as_json=opt.own(bool, False, "A JSON line per file: the same as --format json.", flag="--json"),
)


@app.command()
@opt.with_options(
    opt.grouped("pair", "rounds", "plan", "compile", "threads", "target", gamma="auto", verify="block"),
    *(opt.options_of(["temperature"]), opt.Plain, opt.Spoken, Written),
)
def transcribe(context: typer.Context, sounds: Sounds) -> None:
    """Write down what is said in sound files, with a Whisper as the target and a smaller one as its draft.

    Example: slipstream transcribe talk.wav --target openai/whisper-small --draft openai/whisper-tiny --format srt
    """
    params = context.params
    if params["target"] is None and params["plan"] is None:
        raise ValueError("the embedded target reads text: name a Whisper with --target, such as openai/whisper-small.")
    engine = loaded(opt.asked_models(context))
    form = "json" if params["as_json"] else params["form"]
    how: dict[str, Any] = {name: params[name] for name in ("language", "temperature", "plain")}
    how |= {"task": "translate" if params["translate"] else "transcribe", "timestamps": form != "text"}
    code = 0
    for sound in sounds:
        try:
            with steps() as show:
                how["on_window"] = lambda done, total, file=sound.name: show(done, total, f"{file}: windows")
                made = engine.transcribe(sound, **how)
        except ValueError as error:  # the other files can be heard nevertheless
            code = say(f"{sound}: {error}")
            continue
        if form == "json":
            about = {"file": str(sound), "text": made.text, "duration": made.duration}
            print(json_text({**about, "segments": list(map(asdict, made.segments))}), flush=True)
        else:
            print(made.text if form == "text" else f"{getattr(made, form)().rstrip()}\n", flush=True)
    raise typer.Exit(code)
