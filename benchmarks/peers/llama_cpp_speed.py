"""Decodes greedily with llama.cpp for `benchmarks/chat_file.py`, which runs it in the Python with llama-cpp-python.

PYTHON benchmarks/peers/llama_cpp_speed.py MODEL.gguf THREADS

Reads a line of JSON for each text, {"tokens": [...], "count": n}, and writes a line with the seconds of prompt and text
and the tokens. The model stays loaded, and no prompt is kept.
"""

import json
import sys
import time


def main(model: str, threads: str) -> None:
    """Answer every line."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    reader = Llama(model, n_ctx=4096, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
    for line in sys.stdin:
        asked = json.loads(line)
        reader.reset()
        began, found = time.perf_counter(), list[int]()
        for token in reader.generate(asked["tokens"], temp=0.0, repeat_penalty=1.0):
            found.append(int(token))
            if len(found) == asked["count"]:
                break
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
