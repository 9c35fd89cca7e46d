"""Toys of the tests: table models on three tokens, tiny models of transformers, and enumerations of all outcomes."""

from toys.drafts import *  # noqa: F403
from toys.enumeration import *  # noqa: F403
from toys.families import *  # noqa: F403
from toys.tables import *  # noqa: F403
from toys.texts import *  # noqa: F403
