"""`python -m plait_kernels.bench`: how much LoRA costs over the frozen layer, with each backend.

Every shape is first checked for correctness against float64 on the same device, then timed in rounds in which
all subjects take turns: the frozen layer alone (the limit), torch LoRA (autograd, one adapter after the
other), and each backend; forward, backward and both. On a CPU it runs small shapes.

The usual shapes come first, and the file is written after each. `--seconds` limits the time of a run, and the
same command resumes from its file if device, versions, commit and backends are the same. A shape that fails,
or does not fit into memory, is reported, and the others still run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.autotuning import kernel_errors, refused
from plait_kernels.backends import BACKENDS
from plait_kernels.bench_check import Check, check, torch_lora
from plait_kernels.synthetic import Problem, Shape, even_segments, problem
from plait_kernels.timing import Taken, median_seconds, taken
from plait_kernels.triton_backend import available

# (in, outputs of the sites that share x): Llama-3.1-8B and Qwen2.5-32B by their published configurations.
SQUARE = {f"square {size}": (size, (size,)) for size in (4096, 5120, 8192)}
MODELS = {
    "llama-3.1-8b qkv": (4096, (4096, 1024, 1024)),
    "llama-3.1-8b o": (4096, (4096,)),
    "llama-3.1-8b gate up": (4096, (14336, 14336)),
    "llama-3.1-8b down": (14336, (4096,)),
    "qwen2.5-32b qkv": (5120, (5120, 1024, 1024)),
    "qwen2.5-32b o": (5120, (5120,)),
    "qwen2.5-32b gate up": (5120, (27648, 27648)),
    "qwen2.5-32b down": (27648, (5120,)),
}
SMALL = {"smollm2-135m qkv": (576, (576, 192, 192)), "smollm2-135m o": (576, (576,))}
MIXED = (4, 8, 16, 32, 64, 128)
PHASES = ("forward", "backward", "both")
KEY = ("layer", "tokens", "adapters", "ranks", "dropout")  # what identifies a row of the file
Medians = dict[str, dict[str, float]]  # seconds by subject and phase


@dataclass(frozen=True)
class Row:
    """One shape's result: medians in seconds by subject and phase, ratios, and what bounds them.

    `seconds` are the device's, `host_seconds` those until the work was queued; ratios are of the device's.
    `roofline` is the time of both passes over the frozen layer's that the extra bytes and operations need at
    the measured bandwidth and product speed.
    """

    layer: str
    tokens: int
    adapters: int
    ranks: str
    dropout: float
    checks: dict[str, Check]
    seconds: Medians
    host_seconds: Medians
    peak_bytes: dict[str, int]
    to_torch_lora: dict[str, float]
    to_frozen: dict[str, float]
    share_of_peak: dict[str, float]
    roofline: float
    extra_bytes: int
    extra_operations: int


@dataclass(frozen=True)
class Case:
    """A shape to measure: a layer by its name, and the kind of its ranks."""

    layer: str
    shape: Shape
    ranks: str

    @property
    def key(self) -> list[object]:
        """Its values of `KEY`."""
        return [self.layer, self.shape.tokens, len(self.shape.ranks), self.ranks, self.shape.dropout]

    @property
    def unusual(self) -> int:
        """In how many ways it differs from 8,192 tokens of 4 adapters of rank 16 without dropout."""
        shape = self.shape
        usual = (shape.tokens == 8192, len(shape.ranks) == 4, self.ranks == "16", shape.dropout == 0.0)
        return usual.count(False)


def grid(
    names: Sequence[str],
    tokens: Sequence[int],
    adapters: Sequence[int],
    ranks: Sequence[str] = ("16", "mixed"),
    dropouts: Sequence[float] = (0.0, 0.1),
) -> list[Case]:
    """Every combination, the usual ones first."""
    layers = {**SQUARE, **MODELS, **SMALL}
    cases = [
        Case(name, Shape(count, *layers[name], _ranks(number, label), dropout), label)
        for name in names
        for count in tokens
        for number in adapters
        for label in ranks
        for dropout in dropouts
    ]
    return sorted(cases, key=lambda case: case.unusual)


def _ranks(number: int, label: str) -> tuple[int, ...]:
    each = MIXED if label == "mixed" else (int(label),)
    return tuple(each[index % len(each)] for index in range(number))


def subjects(made: Problem, backends: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """The functions of x to be timed, by name."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "frozen": lambda x: linear(x, made.weight),
        "torch-lora": torch_lora(made),
    }
    return found | {backend: partial(made.run, backend) for backend in backends}


def _phase(run: Callable[[Tensor], Tensor], made: Problem, phase: str) -> Callable[[], object]:
    """One phase of a subject; the gradient of x is overwritten, not added to the last one."""

    def backward(out: Tensor, retain: bool) -> None:
        made.x.grad = None
        torch.autograd.backward(out, made.grad, retain_graph=retain)

    if phase == "forward":
        return lambda: run(made.x)
    if phase == "backward":
        out = run(made.x)
        return lambda: backward(out, True)
    return lambda: backward(run(made.x), False)


def time_subjects(
    made: Problem, runs: dict[str, Callable[[Tensor], Tensor]], *, repeats: int
) -> tuple[Medians, Medians]:
    """Median seconds of every phase, of the device and of the host; in each round all subjects take their
    turn."""
    found: dict[str, dict[str, list[Taken]]] = {name: {phase: [] for phase in PHASES} for name in runs}
    device = made.x.device
    for phase in PHASES:
        ready = {name: _phase(run, made, phase) for name, run in runs.items()}
        for run in ready.values():
            taken(run, device, repeats=0)
        for _ in range(repeats):
            for name, run in ready.items():
                _flush(device)
                found[name][phase] += taken(run, device, warmup=0, repeats=1)
    return _medians(found, lambda each: each.device), _medians(found, lambda each: each.host)


def _medians(found: dict[str, dict[str, list[Taken]]], of: Callable[[Taken], float]) -> Medians:
    return {
        name: {phase: statistics.median(map(of, values)) for phase, values in phases.items()}
        for name, phases in found.items()
    }


def _flush(device: torch.device) -> None:
    """Push the last round's data out of the device's cache."""
    if device.type == "cuda":
        torch.empty(256 * 2**20, dtype=torch.int8, device=device).zero_()


def _peak_bytes(made: Problem, run: Callable[[Tensor], Tensor]) -> int:
    """Peak device bytes above those in use before, forward and backward; 0 on a CPU, which does not count
    them."""
    if made.x.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _phase(run, made, "both")()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


@dataclass(frozen=True)
class Peak:
    """The device's measured peaks: operations per second of a large product, bytes per second of a large
    copy."""

    operations: float
    bytes: float


def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Measure both, on operands larger than the cache of a CUDA device."""
    size = 8192 if device.type == "cuda" else 1024
    square = torch.randn(size, size, device=device).to(dtype)
    block = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.int8, device=device)
    product = median_seconds(lambda: square @ square, device)
    copy = median_seconds(lambda: block.clone(), device)
    return Peak(2 * size**3 / product, 2 * block.numel() / copy)


def frozen_operations(shape: Shape) -> int:
    """Operations of both passes over the frozen layer."""
    return 4 * shape.tokens * shape.in_features * sum(shape.out_features)


def extra_work(shape: Shape, element: int) -> tuple[int, int]:
    """Least (bytes, operations) beyond the frozen layer's, of both passes.

    x is read for S and for dA, dh for dS and dB, A and B are read twice, their float32 gradients are read and
    written. Operations: six products with the rank.
    """
    outputs, sites = sum(shape.out_features), len(shape.out_features)
    rows = [each.stop - each.start for each in even_segments(shape.tokens, [""] * len(shape.ranks))]
    sizes = [rank * (sites * shape.in_features + outputs) for rank in shape.ranks]
    moved = shape.tokens * (2 * shape.in_features + outputs) * element + sum(sizes) * (2 * element + 8)
    return moved, 6 * sum(count * size for count, size in zip(rows, sizes, strict=True))


def roofline(shape: Shape, peak: Peak, element: int) -> float:
    """Frozen layer plus the least extra work at the measured peaks, over the frozen layer."""
    frozen = frozen_operations(shape) / peak.operations
    moved, operations = extra_work(shape, element)
    return 1 + (moved / peak.bytes + operations / peak.operations) / frozen


def measure(case: Case, backends: Sequence[str], peak: Peak, options: argparse.Namespace) -> Row:
    """Check and time one shape."""
    shape = case.shape
    made = problem(shape, device=options.device, dtype=getattr(torch, options.dtype))
    checks = {backend: check(made, backend) for backend in backends}
    runs = subjects(made, backends)
    times, host = time_subjects(made, runs, repeats=options.repeats)
    both = {subject: phases["both"] for subject, phases in times.items()}
    operations = frozen_operations(shape)
    extra_bytes, extra_operations = extra_work(shape, made.x.element_size())
    return Row(
        *(case.layer, shape.tokens, len(shape.ranks), case.ranks, shape.dropout, checks, times),
        host_seconds=host,
        peak_bytes={subject: _peak_bytes(made, run) for subject, run in runs.items()},
        to_torch_lora={subject: both["torch-lora"] / value for subject, value in both.items()},
        to_frozen={subject: value / both["frozen"] for subject, value in both.items()},
        share_of_peak={subject: operations / value / peak.operations for subject, value in both.items()},
        roofline=roofline(shape, peak, made.x.element_size()),
        extra_bytes=extra_bytes,
        extra_operations=extra_operations,
    )


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit, and a digest of the kernels' sources, which may be mended between commits."""
    folder = Path(__file__).parent
    sources = sorted((*folder.glob("*.py"), *folder.glob("*.c")))
    triton = None
    if available(device):
        import triton as package

        triton = package.__version__
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "commit": _commit(folder),
        "sources": hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12],
    }


def _commit(folder: Path) -> str | None:
    """The commit that is checked out; None without git, as on a bare GPU machine."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; defaults by device."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m plait_kernels.bench", description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if cuda else "cpu"))
    known = parser.parse_known_args(arguments)[0]
    large = known.device.type == "cuda"
    layers = [*SQUARE, *MODELS] if large else list(SMALL)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--layers", nargs="+", default=layers, choices=[*SQUARE, *MODELS, *SMALL])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 16384] if large else [512])
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 2, 4, 8, 32, 128] if large else [1, 4])
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS))
    parser.add_argument("--repeats", type=int, default=20 if large else 5)
    parser.add_argument("--ranks", nargs="+", default=["16", "mixed"], help="numbers, or mixed: 4 to 128")
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after so many")
    parser.add_argument("--json", type=Path, help="write every figure to this file, and resume from it")
    found = parser.parse_args(arguments)
    if found.backends is None:
        dtype = getattr(torch, found.dtype)
        runs = [name for name in BACKENDS if BACKENDS[name].runs(found.device, dtype)]
        found.backends = [name for name in runs if name != "reference"] if large else ["reference", "grouped"]
    return found


def _print(row: dict[str, Any], backends: Sequence[str]) -> None:
    host = {name: 1e6 * times["both"] for name, times in row["host_seconds"].items()}
    parts = [
        f"{name} {row['to_torch_lora'][name]:.2f}x torch-lora {row['to_frozen'][name]:.2f}x frozen"
        f" {100 * row['share_of_peak'][name]:.0f}% of peak, host {host[name]:.0f} us"
        f" {row['peak_bytes'][name] / 2**20:.0f} MiB"
        f"{'' if row['checks'][name]['right'] else ' WRONG'}"
        for name in backends
    ]
    print(
        f"{row['layer']:20s} {row['tokens']:6d} tokens {row['adapters']:4d} adapters rank {row['ranks']:5s}"
        f" dropout {row['dropout']:.1f} | {' | '.join(parts)} | roofline {row['roofline']:.2f}x"
        f" ({row['extra_bytes'] / 1e6:.0f} MB, {row['extra_operations'] / 1e9:.0f} GFLOP more)",
        flush=True,
    )


def resumed(file: Path | None, fresh: dict[str, Any]) -> dict[str, Any]:
    """The result in the file, if all but its lists are those of a new one, such as device and commit."""
    try:
        found = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):
        found = {}
    same = all(found.get(key) == value for key, value in fresh.items() if not isinstance(value, list))
    return {**fresh, **found} if same else fresh


def write(file: Path | None, result: dict[str, Any]) -> None:
    """Replace the file; a run that is stopped leaves the last complete one."""
    if file is not None:
        scratch = file.with_name(file.name + ".part")
        scratch.write_text(json.dumps(result, indent=1) + "\n")
        scratch.replace(file)


def _measured(case: Case, peak: Peak, options: argparse.Namespace, result: dict[str, Any]) -> bool:
    """Add a case's row to the result, or the reason why there is none; whether the device can be used after
    it."""
    usable = True
    try:
        result["rows"].append(asdict(measure(case, options.backends, peak, options)))
        _print(result["rows"][-1], options.backends)
    except kernel_errors() as problem_found:
        reason = f"{type(problem_found).__name__}: {problem_found}"[:500]
        result["failures"].append({**dict(zip(KEY, case.key, strict=True)), "reason": reason})
        print(f"{case.layer}, {case.shape}: {reason}", flush=True)
        usable = not isinstance(problem_found, RuntimeError) or refused(problem_found)
    if options.device.type == "cuda" and usable:
        torch.cuda.empty_cache()
    return usable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a backend is wrong at a shape, or a shape could not be measured."""
    options = parse(arguments)
    begin = time.monotonic()
    fresh = {"environment": environment(options.device), "dtype": options.dtype}
    fresh |= {"backends": " ".join(options.backends), "rows": [], "failures": []}
    result = resumed(options.json, fresh)
    cases = grid(options.layers, options.tokens, options.adapters, options.ranks, options.dropout)
    done = [[row[name] for name in KEY] for row in (*result["rows"], *result["failures"])]
    left = [case for case in cases if case.key not in done]
    if left:  # else the file has what they were measured with
        peak = measure_peak(options.device, getattr(torch, options.dtype))
        result["peak"] = asdict(peak)
    for index, case in enumerate(left):
        if time.monotonic() - begin > options.seconds:
            print(f"{len(left) - index} of {len(cases)} shapes are left: run again with the same file")
            break
        usable = _measured(case, peak, options, result)
        write(options.json, result)
        if not usable:
            print("the device cannot be used after this: run again with the same file for the other shapes")
            break
    rows = result["rows"]
    for backend in options.backends if rows else ():
        speed = math.exp(statistics.fmean(math.log(row["to_torch_lora"][backend]) for row in rows))
        print(f"{backend}: {speed:.3f} times torch LoRA's speed, geometric mean of {len(rows)} shapes")
    write(options.json, result)
    right = all(found["right"] for row in rows for found in row["checks"].values())
    return 0 if right and not result["failures"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
