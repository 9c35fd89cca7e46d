"""Files of the repository that are no part of a package, as modules."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def script(path: str) -> Any:
    """The module of a file such as benchmarks/tables.py, loaded once, with its folder on the path as when it starts."""
    file = ROOT / path
    spec = spec_from_file_location(f"script_{file.parent.name}_{file.stem}", file)
    assert spec and spec.loader
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module_from_spec(spec)
        sys.path.insert(0, str(file.parent))
        try:
            spec.loader.exec_module(sys.modules[spec.name])
        finally:
            sys.path.remove(str(file.parent))
    return sys.modules[spec.name]
