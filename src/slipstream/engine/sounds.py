"""Reads sounds that users pass (files, their bytes, `data:` URLs, arrays) into samples.

WAV is read here; other formats need soundfile.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from slipstream.engine.data_urls import data_url

WIDTHS = {1: "u1", 2: "<i2", 4: "<i4"}
"""The numpy dtype of WAV samples, by their width in bytes."""


def read_sound(sound: Any, rate: int, longest: float | None = None) -> np.ndarray:
    """Read a sound: a file, its bytes, a `data:` URL, or samples (n,) at `rate`.

    Returns float32 samples (n,) in -1 .. 1, `rate` per second. Raises ValueError for anything that holds no sound, and
    for an encoded sound longer than `longest` seconds.
    """
    if isinstance(sound, Tensor):
        sound = sound.numpy(force=True)
    if isinstance(sound, np.ndarray):
        if sound.ndim != 1 or not np.issubdtype(sound.dtype, np.floating) or not sound.size:
            raise ValueError(
                f"the sound is an array of shape {sound.shape} and {sound.dtype}: pass numbers in -1 .. 1, "
                f"of shape (n,), {rate} per second."
            )
        return sound.astype(np.float32)
    if not isinstance(sound, bytes | str | Path):
        raise ValueError(f"the sound is of type {type(sound).__name__}: pass a file, its bytes, or an array.")
    content = sound if isinstance(sound, bytes) else _content(sound)
    try:
        samples, own = _read_wav(content, longest)
    except (wave.Error, EOFError):
        samples, own = _read_other(content, longest)
    if not len(samples):
        raise ValueError("the file holds no sound.")
    return _resampled(samples, own, rate)


def _content(location: str | Path) -> bytes:
    """Return the bytes of a sound file, given by path or as a `data:` URL. Raises ValueError for a web address."""
    if isinstance(location, str) and location.startswith("data:"):
        return data_url(location, "the sound")
    if isinstance(location, str) and location.startswith(("http://", "https://")):
        raise ValueError("the sound is a web address: load it, and pass the file or its bytes.")
    try:
        return Path(location).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"the sound cannot be read: {error.strerror or error}: {location}.") from error


def _check_length(count: int, rate: int, longest: float | None) -> None:
    """Raises ValueError for a sound longer than `longest` seconds before its samples are read.

    Small files can hold very long sounds.
    """
    if longest is not None and count > longest * rate:
        raise ValueError(f"the sound takes {count / rate:.0f} s, and at most {longest:g} s are taken: cut it.")


def _read_wav(content: bytes, longest: float | None) -> tuple[np.ndarray, int]:
    """Read a WAV file -> its samples (n,) in -1 .. 1, with channels averaged, and their rate in Hz."""
    with wave.open(io.BytesIO(content)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        if width not in WIDTHS:
            raise ValueError(f"the file has samples of {8 * width} bits: use 8, 16 or 32.")
        _check_length(file.getnframes(), rate, longest)
        whole = file.readframes(file.getnframes())
    numbers = np.frombuffer(whole[: len(whole) // (width * channels) * width * channels], np.dtype(WIDTHS[width]))
    samples = numbers.astype(np.float32) - (128 if width == 1 else 0)
    return samples.reshape(-1, channels).mean(1) / float(1 << (8 * width - 1)), rate


def _read_other(content: bytes, longest: float | None) -> tuple[np.ndarray, int]:
    """Read a sound file with soundfile -> its samples (n,), with channels averaged, and their rate in Hz."""
    try:
        import soundfile
    except ImportError:
        raise ValueError("the file is no WAV; other formats need soundfile: pip install 'slipstream[audio]'.") from None
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            _check_length(file.frames, file.samplerate, longest)
            samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    except ValueError:
        raise
    except Exception as error:  # soundfile raises its own error types
        raise ValueError(f"the file holds no sound that can be read: {error}") from None
    return samples.mean(1), rate


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Resample a sound from rate `own` to `rate` by truncating or zero-padding its spectrum."""
    if own == rate:
        return samples
    count = max(1, round(len(samples) * rate / own))
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)
