"""Prints the lower bounds of pyproject.toml as pins: what `make test-oldest` installs."""

import re
import tomllib
from itertools import chain
from pathlib import Path


def requirements(pyproject: str) -> list[str]:
    """The third parties that a pyproject.toml names, extras included, as it writes them."""
    project = tomllib.loads(pyproject)["project"]
    named = chain(project["dependencies"], *project["optional-dependencies"].values())
    return [line for line in named if not line.startswith(project["name"])]  # an extra may be part of another


def pins(pyproject: str) -> list[str]:
    """A pin for every lower bound."""
    bounds = {re.sub(r"^([\w.-]+)(?:\[.*\])?>=([\w.]+).*$", r"\1==\2", line) for line in requirements(pyproject)}
    return sorted(bound for bound in bounds if "==" in bound)


if __name__ == "__main__":
    print("\n".join(pins((Path(__file__).parents[1] / "pyproject.toml").read_text())))
