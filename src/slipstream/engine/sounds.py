"""Reads sounds that users pass (files, their bytes, `data:` URLs, arrays) into samples, as a whole or in parts.

WAV is read here; other formats need soundfile.
"""

import io
import math
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from slipstream.core.media import open_file

WIDTHS = {1: "u1", 2: "<i2", 3: "<i4", 4: "<i4"}  # the numpy dtype of WAV samples, by their width in bytes
MARGIN = 1  # the seconds on both sides of a part with which it is resampled, so that it is the same as if all were


@dataclass(frozen=True)
class Sound:
    """A sound of `count` samples, `own` per second; `read(first, stop)` returns them as float32, -1 .. 1, at `rate`."""

    read: Callable[[int, int], np.ndarray]
    count: int
    own: int
    rate: int

    @property
    def seconds(self) -> float:
        return self.count / self.own

    def part(self, start: int, stop: int) -> np.ndarray:
        """Return the samples (n,) from one second to another, or to the end, `rate` per second."""
        margin = 0 if self.own == self.rate else MARGIN
        first, last = max(0, start - margin), min(self.count, (stop + margin) * self.own)
        samples = self.read(first * self.own, last)
        if self.own != self.rate:  # resampled by truncating or zero-padding the spectrum
            count = max(1, round(len(samples) * self.rate / self.own))
            spectrum = np.fft.rfft(samples)[: count // 2 + 1]
            samples = (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)
        return samples[(start - first) * self.rate : (stop - first) * self.rate]


def read_sound(sound: Any, rate: int, longest: float | None = None) -> np.ndarray:
    """Read a whole sound -> float32 samples (n,) in -1 .. 1, `rate` per second; see `opened`."""
    with opened(sound, rate, longest) as found:
        return found.part(0, math.ceil(found.seconds))


@contextmanager
def opened(sound: Any, rate: int, longest: float | None = None) -> Iterator[Sound]:
    """Open a sound, to be read at `rate`: a file, its bytes, a `data:` URL, or samples (n,) at that rate.

    Raises ValueError for anything that holds no sound, and for an encoded sound longer than `longest` seconds, before
    its samples are read: small files can hold very long sounds.
    """
    if isinstance(sound, Tensor):
        sound = sound.numpy(force=True)
    if isinstance(sound, np.ndarray):
        if sound.ndim != 1 or sound.dtype.kind != "f" or not sound.size or not np.isfinite(sound).all():
            raise ValueError(
                f"the sound is an array of shape {sound.shape} and {sound.dtype}: pass numbers in -1 .. 1, none of "
                f"them NaN, of shape (n,), {rate} per second."
            )
        yield Sound(lambda first, stop: sound[first:stop].astype(np.float32), len(sound), rate, rate)
        return
    if not isinstance(sound, bytes | str | Path):
        raise ValueError(f"the sound is of type {type(sound).__name__}: pass a file, its bytes, or an array.")
    with open_file(sound, "the sound") as stream:
        try:
            found = _wav(stream, rate)
        except (wave.Error, EOFError, RuntimeError):  # of any of these, if a part ends behind the file
            stream.seek(0)
            found = _other(stream, rate)
        if longest is not None and found.seconds > longest:
            raise ValueError(f"the sound takes {found.seconds:.0f} s, and at most {longest:g} s are taken: cut it.")
        if not found.count:
            raise ValueError("the file holds no sound.")
        yield found


def _wav(stream: BinaryIO, rate: int) -> Sound:
    """Open a WAV file, whose channels are averaged. Raises errors of `wave` for others."""
    file = wave.open(stream)  # noqa: SIM115 -- it is the stream that is closed
    width, channels, own = file.getsampwidth(), file.getnchannels(), file.getframerate()
    if width not in WIDTHS or not own:
        raise ValueError(f"the file has {own} samples per second of {8 * width} bits: use some, of 8, 16, 24 or 32.")

    def read(first: int, stop: int) -> np.ndarray:
        file.setpos(first)
        content = file.readframes(stop - first)
        if width == 3:  # the upper bytes of 4
            content = np.pad(np.frombuffer(content, "u1").reshape(-1, 3), ((0, 0), (1, 0))).tobytes()
        numbers = np.frombuffer(content, np.dtype(WIDTHS[width]))
        samples = numbers.astype(np.float32) - (128 if width == 1 else 0)
        return samples.reshape(-1, channels).mean(1) / float(1 << (8 * numbers.itemsize - 1))

    begin, end = stream.tell(), stream.seek(0, io.SEEK_END)  # what writes to a pipe does not know the length
    return Sound(read, min(file.getnframes(), (end - begin) // (width * channels)), own, rate)


def _other(stream: BinaryIO, rate: int) -> Sound:
    try:
        import soundfile
    except ImportError:
        raise ValueError("the file is no WAV; other formats need soundfile: pip install 'slipstream[audio]'.") from None

    def read(first: int, stop: int) -> np.ndarray:
        try:
            if file.tell() != first:
                file.seek(first)
            samples: np.ndarray = file.read(stop - first, dtype="float32", always_2d=True).mean(1)
        except soundfile.SoundFileError as error:
            raise ValueError(f"the file is damaged after {first / file.samplerate:.0f} s: {error}") from None
        return samples

    try:
        file = soundfile.SoundFile(stream)
        file.read(1)
    except Exception as error:  # soundfile raises its own error types
        reason = str(error).rpartition(">: ")[2]  # what is before it names the stream
        raise ValueError(f"the file holds no sound that can be read: {reason}") from None
    return Sound(read, file.frames, file.samplerate, rate)
