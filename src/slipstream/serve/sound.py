"""Sound files -> samples. WAV is read here; other formats need the package soundfile."""

from __future__ import annotations

import io
import wave

import numpy as np

from slipstream.serve.faults import BadRequest

WIDTHS = {1: "u1", 2: "<i2", 4: "<i4"}
"""The number format of samples of so many bytes."""


def read_sound(content: bytes, rate: int) -> np.ndarray:
    """The samples (n,) of a sound file in -1 .. 1, one channel, `rate` per second. Raises BadRequest without sound."""
    try:
        samples, own = _read_wav(content)
    except (wave.Error, EOFError):
        samples, own = _read_other(content)
    if not len(samples):
        raise BadRequest("the file holds no sound.", "file")
    return _resampled(samples, own, rate)


def _read_wav(content: bytes) -> tuple[np.ndarray, int]:
    with wave.open(io.BytesIO(content)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        if width not in WIDTHS:
            raise BadRequest(f"the file has samples of {8 * width} bits: send 8, 16 or 32.", "file")
        whole = file.readframes(file.getnframes())
    numbers = np.frombuffer(whole[: len(whole) // (width * channels) * width * channels], np.dtype(WIDTHS[width]))
    samples = numbers.astype(np.float32) - (128 if width == 1 else 0)
    return samples.reshape(-1, channels).mean(1) / float(1 << (8 * width - 1)), rate


def _read_other(content: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError:
        raise BadRequest(
            "the file is no WAV; for other formats the server needs the package soundfile.", "file"
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile's own kinds
        raise BadRequest(f"the file holds no sound that can be read: {error}", "file") from None
    return samples.mean(1), rate


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """The same sound at another rate, limited to the band of both: by cutting or padding its spectrum."""
    if own == rate:
        return samples
    count = max(1, round(len(samples) * rate / own))
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)
