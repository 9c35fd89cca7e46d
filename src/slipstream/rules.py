"""Rules: a verifier and the seam it draws through, under the names users give."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream import acceptance, sampling
from slipstream.records import Seam, Verifier


@dataclass(frozen=True)
class Rule:
    """How drafts are accepted. `lossless` rules leave the target's law exactly as it is."""

    name: str
    verify: Verifier
    seam: Seam = sampling.draw
    lossless: bool = True


TOKEN = Rule("token", acceptance.token)
BLOCK = Rule("block", acceptance.block)
COUPLED = Rule("coupled", acceptance.coupled, sampling.draw_coupled)


def lenient(leniency: float) -> Rule:
    """The lossy rule of section A.5; lossless at 1. Raises ValueError outside (0, 1]."""
    return Rule(f"lenient:{leniency:g}", acceptance.lenient(leniency), lossless=leniency == 1)


def rule(name: str) -> Rule:
    """ "token", "block", "coupled" or "lenient:0.5" -> the rule. Raises ValueError for anything else."""
    plain = {known.name: known for known in (TOKEN, BLOCK, COUPLED)}
    kind, _, value = name.partition(":")
    if name in plain:
        return plain[name]
    try:
        if kind == "lenient":
            return lenient(float(value))
    except ValueError as error:
        raise ValueError(f"verify={name!r}: {error}") from error
    raise ValueError(f"verify={name!r} is not known: use {', '.join(plain)} or lenient:L with L between 0 and 1.")
