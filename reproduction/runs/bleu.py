"""BLEU of the target's translations, plain and speculative."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from reproduction.runs.acceptance import BATCH
from reproduction.runs.subjects import Subject
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, succeeded
from slipstream.measure.environment import environment

GAMMA = 5


def bleu(subject: Subject, temperatures: Sequence[float], most: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Return BLEU (sacrebleu) of plain and speculative translations of held-out sources, and counts of equal texts.

    Above temperature 0, only the first draft is used.
    """
    try:
        import sacrebleu
    except ImportError:
        raise ValueError("BLEU needs sacrebleu: pip install 'slipstream[paper]'.") from None
    metric, references = sacrebleu.BLEU(), list(subject.references[:most])
    rows: list[dict[str, Any]] = []
    decoders = {"plain": subject.plain, **{name: subject.drafted(name, GAMMA) for name in subject.drafts}}
    for temperature in temperatures:
        plain: list[str] = []
        for name, decoder in list(decoders.items())[: 2 if temperature else None]:
            say(f"BLEU at temperature {temperature:g}: {name}")
            texts = _translate(subject, decoder, temperature, len(references))
            plain = plain or texts
            score = metric.corpus_score(texts, [references], n_bootstrap=200)
            same = sum(map(str.__eq__, texts, plain))
            interval = {"low": score._mean - score._ci, "high": score._mean + score._ci}
            rows.append({"decoding": name, "temperature": temperature, "bleu": score.score, "same": same, **interval})
    return {
        "subject": subject.name,
        **subject.models,
        "rows": rows,
        "texts": len(references),
        "signature": str(metric.get_signature()),
        "environment": environment(subject.engine),
    }


def _translate(subject: Subject, decoder: Decoder, temperature: float, most: int) -> list[str]:
    rows = succeeded(generate(replace(decoder, batch_size=BATCH), subject.requests(temperature, range(most))))
    return [subject.engine.decode([token for token in row.output if token not in subject.engine.eos]) for row in rows]
