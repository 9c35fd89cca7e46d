"""Acceptance rules under the names that users give: their verifiers for chains and trees, and their draws."""

from dataclasses import dataclass

from slipstream.core.draft import Draft, Draw, Verdict, Verifier
from slipstream.core.draws import draw_coupled
from slipstream.core.law import Law
from slipstream.core.request import Rule
from slipstream.core.values import OptionError
from slipstream.decoding import acceptance
from slipstream.decoding import tree_acceptance as trees


@dataclass(frozen=True)
class ByShape:
    """Verifies a draft by its shape: with one verifier for chains, one for trees, one for independent paths."""

    chain: Verifier
    tree: Verifier
    paths: Verifier

    def __call__(self, p: Law, draft: Draft, draw: Draw) -> Verdict:
        if draft.parents is None:
            return self.chain(p, draft, draw)
        return (self.tree if draft.paths is None else self.paths)(p, draft, draw)


TOKEN = Rule("token", ByShape(acceptance.token, trees.recursive, trees.recursive))
BLOCK = Rule("block", ByShape(acceptance.block, trees.traversal, trees.gbv))
MATCH = Rule("match", ByShape(acceptance.match, trees.match, trees.match))
COUPLED = Rule("coupled", MATCH.verify, draw_coupled)

WARM_UP = Rule("everything", ByShape(acceptance.everything, trees.recursive, trees.recursive), lossless=False)
"""Accepts whole chains. After those a draft is fed the most tokens, so warming up makes its graphs for that."""

MOST_PATHS = 32  # the greatest number of paths in a round; each is a chain of gamma tokens that the target scores


def lenient(leniency: float) -> Rule:
    """Make the lossy rule of section A.5, for chains; lossless at 1. Raises ValueError outside (0, 1]."""
    return Rule(f"lenient:{leniency:g}", acceptance.lenient(leniency), lossless=leniency == 1)


def gbv(paths: int) -> Rule:
    """Make the rule of greedy multi-path block verification. Raises ValueError for paths outside 1 to MOST_PATHS."""
    if not 1 <= paths <= MOST_PATHS:
        raise ValueError(f"{paths} paths are not possible: it must be 1 to {MOST_PATHS}.")
    return Rule(f"gbv:{paths}", BLOCK.verify, paths=paths)


def rule(name: str | Rule) -> Rule:
    """Convert a name to its rule: "token", "block", "match", "coupled", "gbv:3" or "lenient:0.5"; return a rule as it
    is. Raises ValueError for anything else."""
    if isinstance(name, Rule):
        return name
    if not isinstance(name, str):
        raise OptionError(f"verify={name!r} is not possible: give the name of a rule, or a Rule.")
    plain = {known.name: known for known in (TOKEN, BLOCK, MATCH, COUPLED)}
    kind, _, value = name.partition(":")
    if name in plain:
        return plain[name]
    try:
        if kind == "lenient" and _is_number(value):
            return lenient(float(value))
        if kind == "gbv" and value.isascii() and value.isdigit():
            return gbv(int(value))
    except ValueError as error:
        raise OptionError(f"verify={name!r}: {error}") from error
    raise OptionError(
        f"verify={name!r} is not known: use {', '.join(plain)}, gbv:K with K paths or lenient:L with L between 0 and 1."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
