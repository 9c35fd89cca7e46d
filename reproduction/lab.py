"""The lab: the user's models and corpora, the measurements made with them, and those kept from earlier runs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reproduction.pages.sheet import write_json
from reproduction.published import EDITING, SUMMARIES, TRANSLATION, WRITING
from reproduction.runs import acceptance as trails
from reproduction.runs import baselines as plane
from reproduction.runs import methods, speeds
from reproduction.runs.bleu import bleu
from reproduction.runs.speeds import Course
from reproduction.runs.subjects import DRAFT, Loading, Subject, embedded, family
from reproduction.runs.timelines import story, timeline
from reproduction.runs.trained import Trained
from reproduction.standins import build as families
from reproduction.standins import corpora, edits
from reproduction.standins.build import QUICK_RECIPES, RECIPES, Recipe
from reproduction.standins.copies import QUICK_LESSONS, Copies, Lessons
from reproduction.standins.corpora import Pairs
from slipstream.text.jsontext import json_text

MEASURED = "measured"  # the folder of the measurements
LENGTHS = {TRANSLATION: 128, SUMMARIES: 144, EDITING: 128}
STORY, STORY_GAMMA = 38, 7  # tokens of the text in Figure 1, as many as in the paper, and its gamma


@dataclass(frozen=True)
class Inputs:
    """The places and models that the user named: a folder of stand-ins, corpora, or models of their own."""

    standins: Path | None = None
    pairs: str | None = None
    articles: str | None = None
    texts: tuple[str, ...] = ()
    target: str | None = None
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """The amount to measure: `FULL` for the page of results, `QUICK` to check that everything runs."""

    tokens: int = 10_000  # tokens of the target's texts along which every alpha is measured
    length: int = 128  # the most tokens of a text of the embedded pair
    sentences: int = 1000  # sentences that are translated for BLEU
    course: Course = field(default_factory=Course)
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)
    plane: tuple[int, int] = (5, 3)  # texts and repetitions of the baselines
    plane_length: int = 48  # the most tokens of their texts, except of edits, which are written to their end
    calibration: int = 40  # texts that thresholds of exits are calibrated on
    lessons: Lessons = field(default_factory=Lessons)
    most_pairs: int | None = None  # the most pairs that are read from a corpus; None: all
    shuffles: int = 3  # orders in which sentences are joined to documents that stand-ins learn to translate
    quick: bool = False


FULL = Scale()
QUICK = Scale(1500, 48, 60, Course(2, 8, 3), QUICK_RECIPES, (3, 1), 24, 30, QUICK_LESSONS, 6000, 1, quick=True)


@dataclass
class Lab:
    """Makes the measurements that tables need, each once; with a folder `out`, they are stored for later runs.

    With `again`, everything is measured again, even if an earlier run has stored it.
    """

    inputs: Inputs
    scale: Scale = FULL
    how: Loading = field(default_factory=Loading)
    out: Path | None = None
    again: bool = False
    say: Callable[[str], Any] = print
    _subjects: dict[tuple[str, bool], Subject] = field(default_factory=dict)
    _ngrams: dict[str, dict[str, Any]] = field(default_factory=dict)  # n-gram models by task, counted once
    _records: dict[str, dict[str, Any]] = field(default_factory=dict)  # measurements by name

    # ---- models and corpora ----

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks with encoder-decoders that can be measured with the given models and corpora."""
        corpora_by_task = {TRANSLATION: self.inputs.pairs, SUMMARIES: self.inputs.articles}
        has_models = self.inputs.standins or self.inputs.target
        measurable = tuple(task for task, corpus in corpora_by_task.items() if corpus and has_models)
        if self.inputs.target and not measurable:
            raise ValueError(
                "--target needs something to translate or to summarize: give --pairs FOLDER or --articles FILE."
            )
        return measurable

    def need_tasks(self) -> tuple[str, ...]:
        if not self.tasks:
            raise ValueError(
                "this table needs encoder-decoders: give --standins FOLDER with --pairs FOLDER (translation) or "
                "--articles FILE (summaries), or models of your own by --target and --draft with either."
            )
        return self.tasks

    def subject(self, task: str, compiled: bool | None = None) -> Subject:
        """Return the models and texts of a task, loaded once; `compiled` overrides the setting of `how`."""
        key = (task, self.how.compile if compiled is None else compiled)
        if key not in self._subjects:
            how = replace(self.how, compile=key[1])
            causal = replace(how, encoder_dtype=None)
            makers = {WRITING: lambda: embedded(self.scale.length, causal), EDITING: lambda: self._editing(causal)}
            self._subjects[key] = makers[task]() if task in makers else self._family(task, how)
        return self._subjects[key]

    def _editing(self, how: Loading) -> Subject:
        assert self.trained is not None
        pairs = edits.pairs()
        folders = self.trained.copies.editing(pairs)
        return family(pairs, folders.pop("target"), dict(folders), LENGTHS[EDITING], how)

    @cached_property
    def trained(self) -> Trained | None:
        """The copies of the embedded target trained for other papers' methods; None without a folder of stand-ins."""
        if self.inputs.standins is None:
            return None
        return Trained(
            Copies(self.standins / WRITING, self.scale.lessons, self.say),
            replace(self.how, compile=False, encoder_dtype=None),
        )

    def _family(self, task: str, how: Loading) -> Subject:
        pairs = self._pairs(task)
        if self.inputs.target:
            drafts: dict[str, Path | str] = {Path(name).name: name for name in self.inputs.drafts}
            return family(pairs, self.inputs.target, drafts, LENGTHS[task], how)
        recipe, folder = self.scale.recipes[task], self.standins / task
        families.make(pairs, folder, recipe, self.say)
        return family(pairs, folder / "target", {name: folder / name for name in recipe.drafts}, LENGTHS[task], how)

    @property
    def standins(self) -> Path:
        """The folder of the stand-ins; quick ones have a folder of their own."""
        assert self.inputs.standins is not None
        return self.inputs.standins / "quick" if self.scale.quick else self.inputs.standins

    def _pairs(self, task: str) -> Pairs:
        if task == SUMMARIES:
            assert self.inputs.articles is not None
            return corpora.leads(self.inputs.articles, self.inputs.texts).first(self.scale.most_pairs)
        assert self.inputs.pairs is not None
        sentences = corpora.translation(self.inputs.pairs).first(self.scale.most_pairs)
        return sentences if self.inputs.target else corpora.documents(sentences, self.scale.shuffles)

    # ---- measurements ----

    def alphas(self, task: str, temperature: int) -> dict[str, Any]:
        """Return the acceptance of n-grams and draft models along the target's texts, by draft."""

        def measure() -> dict[str, Any]:
            subject = self.subject(task, compiled=False)
            if task not in self._ngrams:
                self._ngrams[task] = trails.tables(subject)
            return trails.measure(subject, temperature, self.scale.tokens, self._ngrams[task], self.say)

        return self._measured(f"alphas-{task}-{temperature}", measure)

    def raced(self, task: str, temperature: int) -> dict[str, Any]:
        """Return the drafts' acceptance along the target's texts for only those sources that the race decodes."""

        def measure() -> dict[str, Any]:
            subject = self.subject(task, compiled=False)
            some = replace(subject, sources=subject.sources[: self.scale.course.texts])
            return trails.measure(some, temperature, self.scale.tokens, {}, self.say)

        return self._measured(f"raced-{task}-{temperature}", measure)

    def speeds(self, task: str, temperature: int) -> dict[str, Any]:
        """Return the speeds of plain, speculative and transformers' decoding, which run in turns."""

        def measure() -> dict[str, Any]:
            alphas, raced = (each(task, temperature)["drafts"] for each in (self.alphas, self.raced))
            return speeds.race(self.subject(task), temperature, alphas, raced, self.scale.course, self.say)

        return self._measured(f"speeds-{task}-{temperature}", measure)

    def baselines(self, task: str, temperature: int) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            whole = self.subject(task, compiled=False)
            most = whole.length if task == EDITING else min(whole.length, self.scale.plane_length)
            subject = replace(whole, length=most)
            course = plane.Course(*self.scale.plane, temperature)
            return plane.measure(subject, self._methods(task, subject, temperature), course, self.say)

        return self._measured(f"baselines-{task}-{temperature}", measure)

    def _methods(self, task: str, subject: Subject, temperature: int) -> list[methods.Method]:
        chosen = methods.drafted(subject, next(iter(subject.drafts)))
        if task == EDITING and not temperature:
            chosen += methods.from_sources(subject, edits.source_of(subject.sources, subject.engine.encode))
        if task == WRITING and self.trained is not None:
            texts, most, calibrate = self.scale.plane[0], self.scale.calibration, self.trained.calibrate
            calibration = self._measured("calibration", lambda: calibrate(subject, texts, most, self.say))
            chosen += self.trained.blockwise(subject) if not temperature else []
            chosen += self.trained.early_exits(subject, calibration)
        return chosen

    def bleu(self) -> dict[str, Any]:
        """Return the BLEU of translations. Raises ValueError without pairs of texts."""
        if TRANSLATION not in self.need_tasks():
            raise ValueError("BLEU is of translations: give --pairs FOLDER.")
        return self._measured(
            "bleu", lambda: bleu(self.subject(TRANSLATION, compiled=False), (0.0, 1.0), self.scale.sentences, self.say)
        )

    def story(self) -> dict[str, Any]:
        return self._measured(
            "story", lambda: story(replace(self.subject(WRITING, False), length=STORY), DRAFT, STORY_GAMMA, 1.0)
        )

    def timeline(self) -> dict[str, Any]:
        """Return the calls over time of translations if they can be measured, else of the embedded pair (Figure 5)."""

        def measure() -> dict[str, Any]:
            subject = self.subject(TRANSLATION if TRANSLATION in self.tasks else WRITING)
            return timeline(subject, next(iter(subject.drafts)), self.scale.course.repetitions, self.say)

        return self._measured("timeline", measure)

    def _measured(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the measurement of this name: from this run, from an earlier one at the same scale, or made now."""
        file = self.out / MEASURED / f"{name}.json" if self.out else None
        if name not in self._records and file and file.is_file() and not self.again:
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["quick"] == self.scale.quick:
                self._records[name] = record
        if name not in self._records:
            self._records[name] = {**json.loads(json_text(measure())), "quick": self.scale.quick}
            if file:
                write_json(self._records[name], file)
        return self._records[name]
