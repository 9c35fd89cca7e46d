"""The messages between `benchmarks/race.py` and the programs that it races, a line of JSON each, on stdin and stdout.

A program first says that it is ready, after its imports. `{"do": "load", "model", "draft", "threads", "rows", ...}` is
answered by `{"about": its version and what it uses of the processor}`, and `{"do": "run", "way", "prompts", "batch",
"count", "temperature", "seed"}` by `{"tokens": the new token ids of every prompt}`. `way` is "plain", or a draft and
its length ("lookup@5"). The race takes the time of the whole exchange, so a program's own clock has no say.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Asked = dict[str, Any]


def serve(load: Callable[[Asked], Asked], run: Callable[[Asked], Asked]) -> None:
    """Answer messages until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    say(answers, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        say(answers, load(asked) if asked["do"] == "load" else run(asked))


def say(answers: Any, message: Asked) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
