"""C sources compiled once by the machine's own compiler and kept in a cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

_FLAGS = ("-O3", "-shared", "-fPIC")
# The first set that the compiler accepts is used; a processor-specific build is about seven times as fast.
_OPTIONAL_FLAGS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-fopenmp",),
    (),
)


def cache_folder() -> Path:
    """The folder of compiled code and tuned configurations: PLAIT_KERNELS_CACHE, else in the user's cache
    folder."""
    named = os.environ.get("PLAIT_KERNELS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait_kernels"


def _processor() -> str:
    """What the compiler's idea of `native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))


def _build(compiler: str, source: Path, target: Path) -> str:
    """Compile `source` into `target`; return the compiler's last message if nothing works, else ''."""
    message = ""
    for optional in _OPTIONAL_FLAGS:
        command = [compiler, *_FLAGS, *optional, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ""
        message = done.stderr.strip()
    return message or "the compiler failed without a message"


def compile_library(source: Path, folder: Path) -> Path:
    """The shared library of one C source, compiled into `folder` unless it already exists.

    Raises:
        OSError: no compiler, or it failed, or the folder cannot be written.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise OSError("no C compiler found (gcc, clang or cc, or the variable CC)")
    identity = "\n".join((source.read_text(), compiler, repr(_OPTIONAL_FLAGS), _processor()))
    library = folder / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if _is_whole(library):
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / library.name
        message = _build(compiler, source, built)
        if message:
            raise OSError(message)
        built.chmod(0o755)
        checksum = Path(scratch) / "checksum"
        checksum.write_text(_digest(built))
        for file in (built, checksum):
            _to_disk(file)
        checksum.replace(_checksum_of(library))  # first: a library without its checksum is compiled again
        built.replace(library)  # atomic: another process sees all of it or nothing
        _to_disk(folder)
    return library


def _is_whole(library: Path) -> bool:
    """Whether the library is as this user compiled it. A library that others can write, as in a shared
    folder, would run with this user's rights, and loading a partial library kills the process with a
    signal."""
    try:
        facts = library.stat()
        own = facts.st_uid in (0, os.geteuid()) and not facts.st_mode & 0o022
        return own and _checksum_of(library).read_text() == _digest(library)
    except OSError:
        return False


def _checksum_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_library(source: Path, otherwise: str) -> ctypes.CDLL | None:
    """The compiled functions of one C source; None, with a warning that says what runs `otherwise`, if they
    cannot be built."""
    if sys.byteorder != "little":
        return None
    try:
        return ctypes.CDLL(str(compile_library(source, cache_folder())))
    except OSError as problem:
        warnings.warn(f"{otherwise}: {problem}. Install gcc.", RuntimeWarning, stacklevel=3)
        return None
