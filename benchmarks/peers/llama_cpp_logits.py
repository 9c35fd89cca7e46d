"""Writes llama.cpp's logits of texts, for `benchmarks/fidelity.py`, which runs it in the Python with llama-cpp-python.

PYTHON benchmarks/peers/llama_cpp_logits.py MODEL.gguf TOKENS.npy LOGITS.npy

Tokens are (windows, n); logits become (windows, n, vocabulary) in float32.
"""

import sys

import numpy as np


def main(model: str, tokens: str, logits: str) -> None:
    """Read every window without context before it, by one thread and llama.cpp's defaults."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    windows = np.load(tokens)
    count, length = windows.shape
    reader = Llama(model, n_ctx=length, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    shape = (count, length, reader.n_vocab())
    found = np.lib.format.open_memmap(logits, mode="w+", dtype=np.float32, shape=shape)
    for place, window in enumerate(windows):
        reader.reset()
        reader.eval(window.tolist())
        found[place] = reader.scores[:length]
    found.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
