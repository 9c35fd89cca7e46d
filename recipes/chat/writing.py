"""Chats that a target writes with itself, in batches that are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chat.openings import opening
from slipstream.files import atomic_write

USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
TEMPERATURES = (0, 0, 0, 0.7, 1, 1, 1, 1)
ASKED, ANSWERED, OPENED, LONG = 120, 288, 300, 40  # tokens: the longest turns and openings; of a text worth quoting


@dataclass
class Chat:
    """A chat: the tokens that must come next, how many its turn has, and what the answer has so far."""

    temperature: float
    forced: list[int] = field(default_factory=list)
    answers: bool = False  # whether the present turn is the assistant's
    count: int = 0
    answer: list[int] = field(default_factory=list)


class ChatWriter:
    """Writes batches of chats with a target, all of one length, turn after turn, with a seed of their own."""

    def __init__(self, scorer: Any, tokenizer: Any, folder: Path, rows: int, length: int) -> None:
        self.scorer, self.tokenizer, self.folder, self.rows, self.length = scorer, tokenizer, folder, rows, length
        self.answers = list[str]()
        self.end = self.ids(END)[0]
        whole = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        self.start = self.ids(whole[: whole.index(USER)] + USER)
        folder.mkdir(parents=True, exist_ok=True)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write(self, batches: int, say: Callable[[str], object]) -> list[Path]:
        """Write the batches that are not there yet -> the files of all."""
        files = [self.folder / f"{number:04d}.safetensors" for number in range(batches)]
        for number, file in enumerate(files):
            if not file.exists():
                batch = self._batch(number)
                with atomic_write(file) as part:
                    save_file(batch, part)
                say(f"batch {number + 1} of {batches}: {int((batch['answer'] > 0).sum()):,} tokens of answers")
            elif number == len(files) - 1 or not files[number + 1].exists():
                self._quote(load_file(file))
        return files

    def _quote(self, batch: dict[str, Tensor]) -> None:
        """Read passages to quote from a stored batch, so that a resumed recipe has some."""
        for row, kinds in zip(batch["tokens"], batch["answer"], strict=True):
            self.answers.append(self.tokenizer.decode(row[kinds > 0][:220]))

    @torch.inference_mode()
    def _batch(self, number: int) -> dict[str, Tensor]:
        rng, generator = Random(number), torch.Generator().manual_seed(number)
        chats = [Chat(rng.choice(TEMPERATURES)) for _ in range(self.rows)]
        for chat in chats:
            self._ask(chat, rng, further=False)
        self.scorer.add(1)
        self.scorer.prefill([self.start])
        self.scorer.fork([0] * self.rows)
        self.scorer.free([0])
        tokens = torch.zeros(self.rows, self.length, dtype=torch.int32)
        tokens[:, : len(self.start)] = torch.tensor(self.start)
        answer = torch.zeros_like(tokens, dtype=torch.uint8)
        pending = [self._next(chat, self.ids("What")[0], rng) for chat in chats]
        for place in range(len(self.start), self.length):
            tokens[:, place], answer[:, place] = torch.tensor(pending).T
            logits = self.scorer.extend(tokens[:, place, None].long(), [1] * self.rows)[:, 0].float()
            drawn = _drawn(logits, chats, generator)
            pending = [self._next(chat, token, rng) for chat, token in zip(chats, drawn, strict=True)]
        self.scorer.free(range(self.rows))
        return {"tokens": tokens, "answer": answer}

    def _next(self, chat: Chat, drawn: int, rng: Random) -> tuple[int, int]:
        """Return the next token of a chat, and whether it is of an answer: 1 for the likeliest, 2 for a sampled one."""
        if chat.forced:
            return chat.forced.pop(0), 0
        chat.count += 1
        over = drawn == self.end or chat.count > (ANSWERED if chat.answers else ASKED)
        if not chat.answers:
            if over:
                chat.forced, chat.answers, chat.count = self.ids("\n" + ASSISTANT), True, 0
            return self.end if over else drawn, 0
        if over:
            if len(chat.answer) > LONG:
                self.answers = [*self.answers[-2000:], self.tokenizer.decode(chat.answer[:220])]
            chat.forced = [] if drawn == self.end else [self.end]
            self._ask(chat, rng, further=True)
        else:
            chat.answer.append(drawn)
        return drawn, 2 if chat.temperature else 1

    def _ask(self, chat: Chat, rng: Random, further: bool) -> None:
        text, whole = opening(rng, self.answers, further)
        chat.forced += (self.ids("\n" + USER) if further else []) + self.ids(text)[:OPENED]
        chat.forced += [self.end, *self.ids("\n" + ASSISTANT)] if whole else []
        chat.answers, chat.count, chat.answer = whole, 0, []


def _drawn(logits: Tensor, chats: list[Chat], generator: torch.Generator) -> list[int]:
    """Return the likeliest token of greedy answers, and a sampled one of others and of questions."""
    found = logits.argmax(-1)
    heat = torch.tensor([float(chat.temperature) if chat.answers else 0.9 for chat in chats])
    warm = heat.nonzero()[:, 0]
    sums = (logits[warm] / heat[warm, None]).softmax(-1).cumsum(-1)
    aims = torch.rand(len(warm), 1, generator=generator) * sums[:, -1:]
    found[warm] = torch.searchsorted(sums, aims)[:, 0].clamp(max=logits.shape[-1] - 1)
    return list(map(int, found))
