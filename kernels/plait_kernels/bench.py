"""`python -m plait_kernels.bench`: how much LoRA costs over the frozen layer, with each backend.

Every shape is first checked for correctness against float64 where it is timed, then timed in rounds in which
all subjects take turns: the frozen layer alone (the limit), torch LoRA (autograd, one adapter after the
other), and each backend; forward, backward and both. On a CPU it runs small shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.backends import BACKENDS
from plait_kernels.bench_check import Check, check, torch_lora
from plait_kernels.synthetic import Problem, Shape, problem
from plait_kernels.timing import seconds
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


@dataclass(frozen=True)
class Row:
    """One shape's result: medians in seconds by subject and phase, ratios, and what bounds them.

    `roofline` is the time of both passes over the frozen layer's that the extra bytes and operations need at
    the measured bandwidth and product speed.
    """

    layer: str
    tokens: int
    adapters: int
    ranks: str
    dropout: float
    checks: dict[str, Check]
    seconds: dict[str, dict[str, float]]
    peak_bytes: dict[str, int]
    to_torch_lora: dict[str, float]
    to_frozen: dict[str, float]
    share_of_peak: dict[str, float]
    roofline: float


def grid(
    names: Sequence[str], tokens: Sequence[int], adapters: Sequence[int]
) -> Iterator[tuple[str, Shape, str]]:
    """(layer, shape, how ranks go) of every combination, rank 16 and mixed, without and with dropout."""
    layers = {**SQUARE, **MODELS, **SMALL}
    for name in names:
        in_features, outputs = layers[name]
        for count in tokens:
            for number in adapters:
                for ranks, label in (((16,) * number, "16"), (_mixed(number), "4 to 128")):
                    for dropout in (0.0, 0.1):
                        yield name, Shape(count, in_features, outputs, ranks, dropout), label


def _mixed(number: int) -> tuple[int, ...]:
    return tuple(MIXED[index % len(MIXED)] for index in range(number))


def subjects(made: Problem, backends: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, by name: functions of x."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "frozen": lambda x: linear(x, made.weight),
        "torch-lora": torch_lora(made),
    }
    return found | {backend: partial(_by_backend, made, backend) for backend in backends}


def _by_backend(made: Problem, backend: str, x: Tensor) -> Tensor:
    return made.run(backend, x)


def _phase(run: Callable[[Tensor], Tensor], made: Problem, phase: str) -> Callable[[], object]:
    if phase == "forward":
        return lambda: run(made.x)
    if phase == "backward":
        out = run(made.x)
        return lambda: torch.autograd.backward(out, made.grad, retain_graph=True)
    return lambda: torch.autograd.backward(run(made.x), made.grad)


def time_subjects(
    made: Problem, runs: dict[str, Callable[[Tensor], Tensor]], *, repeats: int
) -> dict[str, dict[str, float]]:
    """Median seconds of every phase; in each round all subjects take their turn."""
    found: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in runs}
    device = made.x.device
    for phase in PHASES:
        ready = {name: _phase(run, made, phase) for name, run in runs.items()}
        for run in ready.values():
            seconds(run, device, warmup=3, repeats=0)
        for _ in range(repeats):
            for name, run in ready.items():
                _flush(device)
                found[name][phase] += seconds(run, device, warmup=0, repeats=1)
    return {
        name: {phase: statistics.median(values) for phase, values in phases.items()}
        for name, phases in found.items()
    }


def _flush(device: torch.device) -> None:
    """Push the last round's data out of the device's cache."""
    if device.type == "cuda":
        torch.empty(256 * 2**20, dtype=torch.int8, device=device).zero_()


def _peak_bytes(made: Problem, run: Callable[[Tensor], Tensor]) -> int:
    """Most device bytes above those held before, forward and backward; 0 on a CPU, which does not count."""
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
    """What the device reaches: operations a second of a large product, bytes a second of a large copy."""

    operations: float
    bytes: float


def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Measure both, on operands larger than the cache of a CUDA device."""
    size = 8192 if device.type == "cuda" else 1024
    square = torch.randn(size, size, device=device).to(dtype)
    block = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.int8, device=device)
    product = statistics.median(seconds(lambda: square @ square, device, warmup=3, repeats=10))
    copy = statistics.median(seconds(lambda: block.clone(), device, warmup=3, repeats=10))
    return Peak(2 * size**3 / product, 2 * block.numel() / copy)


def roofline(shape: Shape, peak: Peak, element: int) -> float:
    """Frozen layer plus the least extra work, over the frozen layer.

    Least bytes beyond the frozen layer's: x read for S and for dA, dh read for dS and dB, A and B read
    twice, their float32 gradients read and written. Operations: six products with the rank.
    """
    rows, outputs = shape.tokens / len(shape.ranks), sum(shape.out_features)
    sites = len(shape.out_features)
    frozen = 4 * shape.tokens * shape.in_features * outputs / peak.operations
    weights = sum(rank * (sites * shape.in_features + outputs) for rank in shape.ranks)
    moved = shape.tokens * (2 * shape.in_features + outputs) * element + weights * (2 * element + 8)
    return 1 + (moved / peak.bytes + 6 * rows * weights / peak.operations) / frozen


def measure(
    name: str, shape: Shape, ranks: str, backends: Sequence[str], peak: Peak, options: argparse.Namespace
) -> Row:
    """Check and time one shape."""
    made = problem(shape, device=options.device, dtype=getattr(torch, options.dtype))
    checks = {backend: check(made, backend) for backend in backends}
    runs = subjects(made, backends)
    times = time_subjects(made, runs, repeats=options.repeats)
    both = {subject: phases["both"] for subject, phases in times.items()}
    operations = 4 * shape.tokens * shape.in_features * sum(shape.out_features)
    return Row(
        *(name, shape.tokens, len(shape.ranks), ranks, shape.dropout, checks, times),
        peak_bytes={subject: _peak_bytes(made, run) for subject, run in runs.items()},
        to_torch_lora={subject: both["torch-lora"] / value for subject, value in both.items()},
        to_frozen={subject: value / both["frozen"] for subject, value in both.items()},
        share_of_peak={subject: operations / value / peak.operations for subject, value in both.items()},
        roofline=roofline(shape, peak, made.x.element_size()),
    )


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
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
        "commit": commit.stdout.strip() or None,
    }


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
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    found = parser.parse_args(arguments)
    if found.backends is None:
        found.backends = ["grouped", "triton"] if large else ["reference", "grouped"]
    return found


def _print(row: Row, backends: Sequence[str]) -> None:
    parts = [
        f"{name} {row.to_torch_lora[name]:.2f}x torch-lora {row.to_frozen[name]:.2f}x frozen"
        for name in backends
    ]
    print(
        f"{row.layer:20s} {row.tokens:6d} tokens {row.adapters:4d} adapters rank {row.ranks:8s} dropout"
        f" {row.dropout:.1f} | {' | '.join(parts)} | roofline {row.roofline:.2f}x",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a backend is wrong at a shape."""
    options = parse(arguments)
    peak = measure_peak(options.device, getattr(torch, options.dtype))
    rows = []
    for name, shape, ranks in grid(options.layers, options.tokens, options.adapters):
        rows.append(measure(name, shape, ranks, options.backends, peak, options))
        _print(rows[-1], options.backends)
    for backend in options.backends:
        speed = math.exp(statistics.fmean(math.log(row.to_torch_lora[backend]) for row in rows))
        print(f"{backend}: {speed:.3f} times torch LoRA's speed, geometric mean of {len(rows)} shapes")
    if options.json is not None:
        result = {
            "environment": environment(options.device),
            "dtype": options.dtype,
            "peak": asdict(peak),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(found.right for row in rows for found in row.checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
