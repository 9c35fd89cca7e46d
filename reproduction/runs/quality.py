"""The quality of texts by BLEU and chrF (sacrebleu)."""

from collections.abc import Sequence
from typing import Any


def quality(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF of texts, 0 to 100. Raises ValueError if sacrebleu is not installed."""
    scores = {"bleu": _sacrebleu().BLEU(), "chrf": _sacrebleu().CHRF()}
    return {name: metric.corpus_score(list(texts), [list(references)]).score for name, metric in scores.items()}


def unlike(text: str, other: str) -> float:
    return 0.0 if text == other else 1 - _sacrebleu().sentence_chrf(text, [other]).score / 100


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        raise ValueError("the quality of texts needs sacrebleu: pip install 'slipstream[paper]'.") from None
    return sacrebleu
