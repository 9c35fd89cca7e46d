"""Pairs of source and target text to train the stand-ins on: captions with translations, passages with leads."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import cycle, islice, repeat
from pathlib import Path

from slipstream.text.documents import DATASET, read

SENTENCE = re.compile(r"(?<=[.!?])[\"']?\s+(?=[\"'(]?[A-Z])")
LEAD_SENTENCES = 3
PASSAGE_WORDS, LEAD_WORDS = 100, 75
MOST_ARTICLES = 1000  # the most articles taken from a dataset
LONGEST_DOCUMENT = 4  # sentences of a document to be translated


@dataclass(frozen=True)
class Pairs:
    """Aligned texts for training and for measuring, and the name of the task."""

    name: str
    train: tuple[tuple[str, str], ...]  # (source, target)
    held_out: tuple[tuple[str, str], ...]

    def texts(self) -> list[str]:
        return [text for pair in self.train for text in pair]

    def digest(self) -> str:
        """Return the SHA-256 of the pairs for training, which tells them from others."""
        return sha256("\0".join(text for pair in self.train for text in pair).encode()).hexdigest()

    def first(self, most: int | None) -> Pairs:
        return replace(self, train=self.train[:most])


def translation(place: str, source: str = "en", target: str = "de") -> Pairs:
    """Read line-aligned files whose names hold `train` or `test` and end in .en/.de or .en.gz/.de.gz, as Multi30k's.

    `place` is their folder, or `dataset:NAME[:CONFIG]` with such splits and a field per language. Raises ValueError if
    they are not there or of different length.
    """
    return Pairs("translation", *(_aligned(place, part, source, target) for part in ("train", "test")))


def documents(pairs: Pairs, shuffles: int, seed: int = 0) -> Pairs:
    """Join aligned sentences to documents, for texts as long as those of the paper.

    Those of the training have 1 to `LONGEST_DOCUMENT` sentences and are made of `shuffles` orders of all sentences;
    every held-out document has `LONGEST_DOCUMENT` sentences that follow each other.
    """
    rng, train = random.Random(seed), list[tuple[str, str]]()
    for _ in range(shuffles):
        sentences = rng.sample(pairs.train, len(pairs.train))
        train += _joined(sentences, cycle(range(1, LONGEST_DOCUMENT + 1)))
    return Pairs(pairs.name, tuple(train), tuple(_joined(pairs.held_out, repeat(LONGEST_DOCUMENT))))


def _joined(sentences: Sequence[tuple[str, str]], lengths: Iterator[int]) -> Iterator[tuple[str, str]]:
    """Join runs of sentences of these lengths; the last run may be shorter."""
    rest = iter(sentences)
    for length in lengths:
        if not (run := list(islice(rest, length))):
            return
        source, target = (" ".join(side) for side in zip(*run, strict=True))
        yield source, target


def crossed(texts: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Make new texts of two halves each: the second half is from a text with the same word at the cut."""
    rng, known = random.Random(seed), [text.split() for text in texts]
    places: dict[str, list[tuple[int, int]]] = {}
    for name, words in enumerate(known):
        for place in _inner(words):
            places.setdefault(words[place], []).append((name, place))
    found: list[str] = []
    long = [words for words in known if _inner(words)]
    for words in rng.choices(long, k=count if long else 0):
        cut = rng.choice(_inner(words))
        other, place = rng.choice(places[words[cut]])
        found.append(" ".join(words[:cut] + known[other][place:]))
    return found


def _inner(words: Sequence[str]) -> range:
    return range(2, len(words) - 2)


def _aligned(place: str, part: str, source: str, target: str) -> tuple[tuple[str, str], ...]:
    sides = [
        _column(f"{place}:{part}", language) if place.startswith(DATASET) else _lines(Path(place), part, language)
        for language in (source, target)
    ]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"the {part} files in {place} have {len(sides[0])} lines in {source!r} and {len(sides[1])} in {target!r}: "
            "they must be aligned line by line."
        )
    return tuple((a, b) for a, b in zip(*sides, strict=True) if a and b)


def _column(dataset: str, field: str, most: int | None = None) -> list[str]:
    return [str(text).strip() for _, text in islice(read([dataset], field), most)]


def _lines(folder: Path, part: str, language: str) -> list[str]:
    files = sorted(file for end in ("", ".gz") for file in folder.glob(f"*{part}*.{language}{end}"))
    if not files:
        raise ValueError(f"there is no file *{part}*.{language} or *{part}*.{language}.gz in {folder}.")
    return [line.strip() for file in files for line in _read(file).splitlines()]


def leads(articles: str, texts: Sequence[str], held_out: int = 50) -> Pairs:
    """Return passages paired with their first sentences, which is the summary that models of this size can learn.

    `articles` is a JSON list of objects with `article`, or `dataset:NAME[:CONFIG][:SPLIT]` with that field; the
    passages of its last `held_out` are only measured on. `texts` are plain files, whose paragraphs give more passages
    for training, where one begins with every sentence. Raises ValueError if there are too few articles.
    """
    news = _articles(articles)
    if len(news) <= held_out:
        raise ValueError(f"{articles} has {len(news)} articles: {held_out} are measured on, give more than these.")
    train = [text for article in news[:-held_out] for text in _passages(article)]
    train += [text for file in texts for part in _paragraphs(_read(Path(file))) for text in _passages(part)]
    pairs = [pair for text in train if (pair := _lead(text))]
    random.Random(0).shuffle(pairs)
    firsts, others = list[tuple[str, str]](), list[tuple[str, str]]()
    for article in news[-held_out:]:
        found = [_lead(passage) for passage in _passages(article, 0.5)]
        firsts += [pair for pair in found[:1] if pair]
        others += [pair for pair in found[1:] if pair]
    return Pairs("lead", tuple(pairs), (*firsts, *others))


def _articles(source: str) -> list[str]:
    if source.startswith(DATASET):
        return _column(source, "article", MOST_ARTICLES)
    try:
        return [str(item["article"]) for item in json.loads(_read(Path(source)))]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{source} is no JSON list of objects with "article" ({error}).') from error


def _paragraphs(text: str) -> list[str]:
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n|<\|endoftext\|>|\n(?= )", text)]
    return [part.replace(" ,", ",").replace(" .", ".").replace(" 's", "'s").replace(" @-@ ", "-") for part in parts]


def _passages(text: str, share: float = 0.0) -> list[str]:
    """Return runs of whole sentences of about `PASSAGE_WORDS` words.

    Each begins after that share of the last one's sentences, at least after its first.
    """
    sentences, starts = [part.strip() for part in SENTENCE.split(" ".join(text.split())) if part.strip()], [0]
    passages: list[str] = []
    for start in range(len(sentences)):
        if start < starts[-1]:
            continue
        words, end = 0, start
        while end < len(sentences) and words + len(sentences[end].split()) <= PASSAGE_WORDS:
            words += len(sentences[end].split())
            end += 1
        if end - start > LEAD_SENTENCES:
            passages.append(" ".join(sentences[start:end]))
        starts.append(max(start + 1, start + int((end - start) * share)))
    return passages


def _lead(passage: str) -> tuple[str, str] | None:
    sentences = SENTENCE.split(passage)
    lead = " ".join(sentences[:LEAD_SENTENCES])
    if len(sentences) <= LEAD_SENTENCES or not 4 <= len(lead.split()) <= LEAD_WORDS:
        return None
    return passage, lead


def _read(file: Path) -> str:
    if not file.is_file():
        raise ValueError(f"there is no file {file}.")
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
