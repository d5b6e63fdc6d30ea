"""This machine's device and kernels, its memory, and a container's limits on them."""

from __future__ import annotations

import math
import os
import platform
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from plait.adapters.variants import VARIANTS
from plait.core.errors import ConfigError, choices
from plait_kernels import KernelError, choose_backend
from plait_kernels.autotuning import prepare
from plait_kernels.backends import BACKENDS, check_backend, find_backend

if TYPE_CHECKING:
    from plait.models.base import BaseModel

CGROUP = Path("/sys/fs/cgroup")


def choose_device(device: str) -> torch.device:
    """The device named by ``engine.device``; "auto" chooses a GPU if there is one.

    Raises:
        ConfigError: it is "cuda", and there is no GPU.
    """
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError(
            "engine.device=cuda",
            "torch does not find a CUDA device.",
            "Use engine.device=auto, or install a CUDA build of torch on a machine with a GPU.",
        )
    return torch.device("cuda" if device != "cpu" and there else "cpu")


def choose_dtype(device: torch.device) -> str:
    """The dtype for ``model.dtype=auto``: bfloat16 if the device is fast with it, else float32.

    A processor without it (x86 before AVX-512) emulates bfloat16 some thirty times slower than float32.
    """
    return "bfloat16" if computes_bfloat16(device) else "float32"


def computes_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are not emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    mkldnn: Any = torch.backends.mkldnn  # missing in some builds, as on macOS
    return bool(mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend named by ``engine.kernels``; "auto" chooses the fastest correct one on the device.

    Raises:
        ConfigError: the backend does not run there.
    """
    check_kernels(kernels, device, dtype)
    return choose_backend(device, dtype=dtype).backend if kernels == "auto" else kernels


def prepare_tiles(model: BaseModel, backend: str, tokens: int, recorded: str) -> str:
    """Have tiles of the kernels for all layers of a model before it trains, as JSON; "" if there are none.

    Args:
        tokens: capacity of a microbatch.
        recorded: tiles of an earlier part of the search.
    """
    if model.device.type != "cuda" or backend != "triton":
        return ""
    layers = [
        (group.sites[0].in_features, tuple(site.out_features for site in group.sites))
        for group in model.groups
    ]
    return prepare(layers, model.device, model.dtype, tokens=tokens, recorded=recorded)


def check_variants(kernels: str, variants: Iterable[str]) -> None:
    """Refuse a backend that was chosen by name and does not compute these adapter variants.

    Raises:
        ConfigError: a variant is unknown, or the backend supports only plain LoRA.
    """
    for name in variants:
        variant = VARIANTS.get(name)
        if kernels != "auto" and not variant.fused and not find_backend(kernels).any_variant:
            general = [backend.name for backend in BACKENDS.values() if backend.any_variant]
            raise ConfigError(
                f"engine.kernels={kernels} with adapter.variant={name}",
                f"The kernels {kernels} compute plain LoRA only.",
                f"Use {choices(general)}, or auto: then only the rows of {name} go through reference.",
            )


def check_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse kernels that do not run on a device, without measuring or loading anything.

    Raises:
        ConfigError: as for :func:`choose_kernels`.
    """
    if kernels == "auto" or (refusal := _refusal(kernels, device, dtype)) is None:
        return
    right = [name for name in BACKENDS if _refusal(name, device, dtype) is None]
    raise ConfigError(
        f"engine.kernels={kernels} on {device} in {str(dtype).removeprefix('torch.')}",
        f"{refusal.rule[0].upper()}{refusal.rule[1:]}.",
        f"Here engine.kernels may be {choices(['auto', *right])}.",
    ) from refusal


def _refusal(kernels: str, device: torch.device, dtype: torch.dtype) -> KernelError | None:
    try:
        check_backend(kernels, device, dtype)
    except KernelError as error:
        return error
    return None


@cache
def device_kind(device: str) -> str:
    """The name of the processor or the GPU that "cpu" or "cuda" means here."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "cpu")


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Products of two square matrices a second, as in a decoder layer: of the quickest of some."""
    left, right = (torch.ones(1024, 1024, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        float((left @ right)[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return 1.0 / min(seconds)


def device_bytes(device: torch.device) -> int:
    """Memory available to this process: all of a GPU; on a CPU, what is free and what it already uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return free_bytes() + int(psutil.Process().memory_info().rss)


def free_bytes() -> int:
    """Bytes of the host's memory that this process may still take."""
    free, left = int(psutil.virtual_memory().available), free_under_limit()
    return free if left is None else min(free, left)


def free_under_limit(root: Path = CGROUP) -> int | None:
    """Bytes that the processes of this container may still allocate; None if there is no limit.

    Cached file pages count as free, because the kernel releases them. Only control groups of version 2 are
    read, as seen in the container; others count as no limit.
    """
    with suppress(OSError, ValueError):
        limit = int((root / "memory.max").read_text())  # "max" if there is none
        used = int((root / "memory.current").read_text())
        facts = dict(line.split(maxsplit=1) for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(facts.get("inactive_file", 0)))
    return None


def cores() -> int:
    """Processor cores that this process may use."""
    there = len(_own_cores())
    return min(there, allowed_cores() or there)


def host_cores() -> int:
    """Processor cores that all processes of this host may use together."""
    there = os.cpu_count() or 1
    return min(there, allowed_cores() or there)


@dataclass(frozen=True, slots=True)
class Cores:
    """What one process may use of its host's processor.

    Attributes:
        own: numbers of the cores that it may run on.
        threads: that it would use if it were alone.
        quota: whole cores that all processes of its container may use together; None: no limit.
    """

    own: frozenset[int] = frozenset({0})
    threads: int = 1
    quota: int | None = None

    @classmethod
    def here(cls) -> Cores:
        """What this process may use."""
        return cls(frozenset(_own_cores()), usual_threads(), allowed_cores())


def thread_shares(processes: Sequence[Cores]) -> tuple[int, ...]:
    """Threads for each of several processes of one host, so that none waits for another's core.

    A core is shared by those that may run on it: processes that are bound to cores of their own have all of
    them.
    """
    users = Counter(core for each in processes for core in each.own)
    shares = []
    for each in processes:
        part = sum(Fraction(1, users[core]) for core in each.own) / len(each.own)
        whole = math.floor(each.threads * part)
        shares.append(max(1, whole if each.quota is None else min(whole, each.quota // len(processes))))
    return tuple(shares)


def usual_threads() -> int:
    """The default of engine.threads: as many as torch uses by default and the container allows.

    torchrun sets OMP_NUM_THREADS=1 whatever there is, so under it all cores that this process may run on
    count.
    """
    usual = torch.get_num_threads()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        usual = min(len(_own_cores()), psutil.cpu_count(logical=False) or usual)
    return min(usual, allowed_cores() or usual)


def _own_cores() -> Collection[int]:
    """The processor cores that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return range(os.cpu_count() or 1)


def allowed_cores(root: Path = CGROUP) -> int | None:
    """Whole processor cores in the container's quota, at least one; None if there is no quota."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    return None
