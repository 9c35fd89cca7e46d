"""The library of our kernels: the one that a wheel carries for this processor, or one that is built here and kept.

Building takes some seconds and a C++ compiler (`CXX`, c++, g++ or clang++), as torch.compile needs one too. The
kernels use torch through its stable ABI, so a library serves other versions of torch than the one it was built with.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
CARRIED = HERE / "carried"
HEADERS = tuple(HERE / f"{name}.h" for name in ("lanes", "parallel", "products", "weights"))
PARTS = ("attention", "quantized", "cpu", "recurrences", "laws", "codes", "blocks", "program")
SOURCES = tuple(HERE / f"{name}.cpp" for name in PARTS)
COMPILERS = ("c++", "g++", "clang++")
STABLE_ABI = "0x020b000000000000"  # torch 2.11, the oldest version that a library serves

OPTIONS: tuple[str, ...] = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-Wno-psabi")
OPTIONS += (f"-DTORCH_TARGET_VERSION={STABLE_ABI}",)
LIBRARIES = ("-ltorch_cpu", "-lc10")
DARWIN = sys.platform == "darwin"
PATIENCE = 3600
"""Seconds after which a compiler hangs: half a minute of work takes many where a fraction of a core is left for it."""

CHOICE = "SLIPSTREAM_MARCH"
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
"""The kind of this processor, by the name that Linux has for it."""


@dataclass(frozen=True)
class Level:
    """The instructions that a library is built for: the compiler's options, and what the processor must have."""

    name: str
    options: tuple[str, ...]
    flags: frozenset[str] = frozenset()

    @property
    def fits(self) -> bool:
        return self.flags <= processor_flags()


X86 = frozenset({"x86_64"})
ARM = frozenset({"aarch64"})
V3 = X86 | {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
BF16_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
OWN = () if DARWIN and MACHINE in ARM else ("-mcpu=native",) if MACHINE in ARM else ("-march=native",)
NATIVE = Level("native", OWN)
"""Apple's compilers, of which older ones know no "native", take the processors of Macs for granted."""

PORTABLE = (
    Level("x86-64", ("-march=x86-64",), X86),
    Level("x86-64-v3", ("-march=x86-64-v3",), V3),
    Level("x86-64-v4", ("-march=x86-64-v4",), V4),
    Level("x86-64-v4-bf16", BF16_OPTIONS, BF16),
    Level("x86-64-v4-amx", (*BF16_OPTIONS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), AMX),
    Level("armv8-a", ("-march=armv8-a",), ARM),
    Level("armv8.2-a-dotprod", ("-march=armv8.2-a+dotprod",), ARM | {"asimddp"}),
)
"""Levels that do not depend on the processor of who builds, each with more instructions than those before it."""


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return this processor's kind and the instructions that it has, as Linux names them; elsewhere its kind alone."""
    return frozenset({MACHINE, *described("flags|Features").split()})


def brand() -> str:
    """Return "amd" for processors of AMD, to whose caches weights go by another way, and "any" for all others."""
    return "amd" if described("vendor_id") == "AuthenticAMD" else "any"


def level() -> Level:
    """Return the level of this process: the one that SLIPSTREAM_MARCH names, else the best one that a wheel carries for
    this processor, else "native".

    Raises ValueError if there is no such level, or if this processor lacks its instructions.
    """
    asked = os.environ.get(CHOICE)
    fitting = [each for each in PORTABLE if each.fits]
    if not asked:
        return next((each for each in reversed(fitting) if carried(each).exists()), NATIVE)
    found = next((each for each in (*fitting, NATIVE) if each.name == asked), None)
    if found is None:
        names = ", ".join(each.name for each in (*fitting, NATIVE))
        raise ValueError(f"{CHOICE}={asked} is no level of instructions that this processor has: {names}")
    return found


def carried(level: Level, brand_of: str | None = None) -> Path:
    """Return where a wheel carries the library of a level, for processors of this brand or the one that is named."""
    return CARRIED / f"{level.name}-{brand_of or brand()}.so"


class CompilerMissingError(RuntimeError):
    """There is no C++ compiler."""


def load(level: Level) -> None:
    """Load the kernels of a level. A damaged library that was built here is built again."""
    if (library := carried(level)).exists():
        torch.ops.load_library(library)
        return
    library = _kept(level)
    try:
        torch.ops.load_library(library)
    except OSError:
        library.unlink()
        torch.ops.load_library(_kept(level))


def compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise CompilerMissingError(f"there is no C++ compiler (CXX, {', '.join(COMPILERS)})")


def build(level: Level, brand: str, library: Path, options: Sequence[str] = (), more: Sequence[Path] = ()) -> None:
    """Build the library of a level, for a brand of processors, with other options and `more` sources if given."""
    home, command = Path(torch.__file__).parent, (compiler(), *OPTIONS, *level.options, *options)
    one = (*command, f"-DLOCALITY={0 if brand == 'amd' else 2}", f"-I{home / 'include'}", "-c")  # lanes.h says why
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = [(str(source), f"{folder}/{source.stem}.o") for source in (*SOURCES, *more)]
        list(pool.map(lambda pair: _run(*one, pair[0], "-o", pair[1]), sources))
        part = Path(folder) / library.name  # another process may be building the same library
        # On macOS torch's libraries are found by their names in the process that has loaded them.
        torch_of = ("-undefined", "dynamic_lookup") if DARWIN else (f"-L{home / 'lib'}", *LIBRARIES)
        _run(*command, "-shared", *(made for _, made in sources), "-o", str(part), *torch_of)
        part.replace(library)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except OSError as error:
        raise RuntimeError(f"{command[0]} failed: {error.strerror}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise RuntimeError(f"{command[0]} failed: {' '.join(errors[:1])}")


def _kept(level: Level) -> Path:
    """Return the path of a level's library among those built before, or build it now."""
    import fcntl  # which Windows, where no kernels are built, does not have

    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions") / "slipstream"
    library = home / f"kernel-{_fingerprint(level)}.so"
    if not library.exists():
        try:
            home.mkdir(parents=True, exist_ok=True)
            folder = os.open(home, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # of processes that start together one builds
                if not library.exists():
                    build(level, brand(), library)
            finally:
                os.close(folder)
        except OSError as error:
            raise RuntimeError(
                f"{home} cannot be written ({error.strerror}); set TORCH_EXTENSIONS_DIR to a folder that can be"
            ) from error
    return library


def _fingerprint(level: Level) -> str:
    """Return a hash of everything that a library depends on: source, options, torch, compiler and processor."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=PATIENCE).stdout
    texts = (path.read_text() for path in (*HEADERS, *SOURCES))
    own = (brand(), *sorted(processor_flags())) if level is NATIVE else (brand(),)
    parts = (*texts, *OPTIONS, *level.options, torch.__version__, compiler(), version, MACHINE, *own)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def described(name: str) -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(rf"^(?:{name})\s*:\s*(.*)$", file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1] if found else ""
