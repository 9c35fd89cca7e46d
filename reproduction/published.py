"""The figures printed in the paper (arXiv 2211.17192), to compare ours with; none of our own figures are here."""

from typing import NamedTuple


class Ideal(NamedTuple):
    """A row of Table 1, for c = c-hat = 0."""

    alpha: float
    gamma: int
    operations: float
    speed: float


class Speed(NamedTuple):
    """A row of Tables 2 and 4 joined: `expected` by Theorem 3.8 from the row's alpha and c, `measured` by Table 2."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


class Acceptance(NamedTuple):
    """A row of Table 3: alpha at temperature 0 and 1."""

    target: str
    task: str
    draft: str
    greedy: float
    sampled: float


class Lenient(NamedTuple):
    """A row of Table 5: alpha by lenience."""

    draft: str
    alphas: dict[float, float]


TRANSLATION, SUMMARIES, WRITING, DIALOG = "translation", "lead", "embedded", "dialog"
"""Our names for the paper's tasks: WMT English-German, CNN/DailyMail, lm1b, and dialog, for which we have no task."""

EDITING = "edits"
"""A task for the baselines only, whose answers resemble their sources, as in grammar correction."""

TASKS = {TRANSLATION: "EnDe", SUMMARIES: "CNN/DM", WRITING: "lm1b", DIALOG: "dialog"}
TABLE_1 = (
    Ideal(0.6, 2, 1.53, 1.96),
    Ideal(0.7, 3, 1.58, 2.53),
    Ideal(0.8, 2, 1.23, 2.44),
    Ideal(0.8, 5, 1.63, 3.69),
    Ideal(0.9, 2, 1.11, 2.71),
    Ideal(0.9, 10, 1.60, 6.86),
)
TABLES_2_AND_4 = (
    Speed(TRANSLATION, "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Speed(TRANSLATION, "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Speed(TRANSLATION, "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Speed(TRANSLATION, "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Speed(TRANSLATION, "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Speed(TRANSLATION, "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Speed(SUMMARIES, "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Speed(SUMMARIES, "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Speed(SUMMARIES, "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Speed(SUMMARIES, "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Speed(SUMMARIES, "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Speed(SUMMARIES, "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
TABLE_3 = (
    Acceptance("GPT-like 97M", WRITING, "unigram", 0.03, 0.03),
    Acceptance("GPT-like 97M", WRITING, "bigram", 0.05, 0.05),
    Acceptance("GPT-like 97M", WRITING, "GPT-like 6M", 0.88, 0.89),
    Acceptance("T5-XXL", TRANSLATION, "unigram", 0.08, 0.07),
    Acceptance("T5-XXL", TRANSLATION, "bigram", 0.20, 0.19),
    Acceptance("T5-XXL", TRANSLATION, "small", 0.75, 0.62),
    Acceptance("T5-XXL", TRANSLATION, "base", 0.80, 0.68),
    Acceptance("T5-XXL", TRANSLATION, "large", 0.82, 0.71),
    Acceptance("T5-XXL", SUMMARIES, "unigram", 0.13, 0.08),
    Acceptance("T5-XXL", SUMMARIES, "bigram", 0.23, 0.16),
    Acceptance("T5-XXL", SUMMARIES, "small", 0.65, 0.53),
    Acceptance("T5-XXL", SUMMARIES, "base", 0.73, 0.55),
    Acceptance("T5-XXL", SUMMARIES, "large", 0.74, 0.56),
    Acceptance("LaMDA 137B", DIALOG, "LaMDA 100M", 0.61, 0.57),
    Acceptance("LaMDA 137B", DIALOG, "LaMDA 2B", 0.71, 0.71),
    Acceptance("LaMDA 137B", DIALOG, "LaMDA 8B", 0.75, 0.74),
)
LENIENCES = (1.0, 0.5, 0.3, 0.1)
TABLE_5 = (
    Lenient("unigram", dict(zip(LENIENCES, (0.07, 0.10, 0.11, 0.16), strict=True))),
    Lenient("bigram", dict(zip(LENIENCES, (0.19, 0.23, 0.25, 0.32), strict=True))),
    Lenient("small", dict(zip(LENIENCES, (0.62, 0.71, 0.76, 0.84), strict=True))),
    Lenient("base", dict(zip(LENIENCES, (0.68, 0.80, 0.83, 0.90), strict=True))),
)

GREEDY_LENIENCE = Lenient("small", dict(zip(LENIENCES, (0.75, 0.75, 0.80, 0.87), strict=True)))
"""Section A.5, for greedy decoding; its test is printed there with the inequality the wrong way round."""

LENIENT_C = 0.015
"""The c of the speeds that section A.5 states (Table 4 has 0.02 for the same draft)."""

BASELINES = {
    "lenience": "2.5x to 5x for l = 1 to .1 (A.5)",
    "typical acceptance": "2.2x; 2.3x to 2.8x (Medusa-1; -2)",
    "speculative cascade": "",
    "committee": "5.4x; 2.3x (vision)",
    "CALM": "up to 3x",
    "Shallow Aggressive Decoding": "about 10x (grammar correction)",
    "Blockwise Parallel Decoding": "1.72x to 3.31x, BLEU 28.95 to 27.40",
}
"""The speed-ups in the methods' own papers, on their models, tasks and machines; "" if there is no single figure."""

FIGURE_1 = (38, 9)
"""The numbers of tokens and of serial target runs in Figure 1."""

FIGURE_5_GAMMAS = (7, 3)

GAMMAS = (3, 5, 7)
"""The gammas among which the paper chose in Table 2."""
