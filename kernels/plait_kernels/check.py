"""`python -m plait_kernels.check`: are the backends right on this machine? Needs only torch (and Triton).

Every case is compared with float64 by the rule of `bench_check`, run twice for equal bits, and its dropout
masks are compared with the formula; unwritten memory is filled with NaN. It prints one line for each case and
writes JSON; the exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from plait_kernels.backends import BACKENDS
from plait_kernels.bank import GRADIENTS
from plait_kernels.bench import environment
from plait_kernels.bench_check import check
from plait_kernels.dropout import keep_mask
from plait_kernels.errors import KernelError
from plait_kernels.synthetic import Problem, Shape, problem

DTYPES = ("float32", "float16", "bfloat16")
RANKS = (1, 3, 16, 17, 100, 256)


@dataclass(frozen=True)
class Finding:
    """One backend at one shape: its relative RMS errors and torch LoRA's, and the faults found."""

    backend: str
    dtype: str
    shape: Shape
    errors: dict[str, float]
    torch_errors: dict[str, float]
    wrong: tuple[str, ...]


def shapes() -> Iterator[Shape]:
    """Sizes that fit no tile: few and many rows, all ranks mixed, one adapter, adapters without rows, 130."""
    for dropout in (0.0, 0.1):
        for tokens in (1, 63, 1000):
            yield Shape(tokens, 136, (72, 40), RANKS, dropout)
        yield Shape(63, 133, (65, 31, 7), RANKS, dropout)
        yield from (Shape(150, 80, (48,), (rank,), dropout) for rank in RANKS)
        yield Shape(700, 96, (80,), tuple(1 + index % 19 for index in range(130)), dropout)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every new uninitialised tensor with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    deterministic: Any = torch.utils.deterministic
    # Only warn: cuBLAS counts as not deterministic if no workspace is set, and refuses.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _bits(made: Problem, backend: str) -> list[torch.Tensor]:
    """Output, dx and all gradients of A and B of one run."""
    made.bank.zero_gradients()
    x = made.x.detach().requires_grad_()
    out = made.run(backend, x)
    torch.autograd.backward(out, made.grad)
    gradients = [span.block.state[GRADIENTS].clone() for span in made.routing.spans]
    return [out.detach(), *([] if x.grad is None else [x.grad]), *gradients]


def _same_mask(made: Problem, backend: str) -> bool:
    """Whether forward drops the right features; with x and A of ones, the output counts those that are
    kept."""
    features = made.shape.in_features
    for span in made.routing.spans:
        for a, b in made.bank.weights(span.block.adapter).values():
            a.zero_()[0, :: 2 + span.start % 3] = 1.0
            b.zero_()[0, 0] = 1.0
    made.bank.refresh()
    ones = torch.ones_like(made.x.detach())
    out = made.run(backend, ones) - torch.nn.functional.linear(ones, made.weight)
    for span in made.routing.spans:
        column = 0
        for site in made.bank.sites:
            words = made.routing.counters[span.start : span.stop]
            keep = keep_mask((span.block.seed, site.module), words, features, span.threshold)
            kept = keep[:, :: 2 + span.start % 3].sum(dim=1)
            expected = span.block.scale * kept * 65536 / (65536 - span.threshold)
            got = out[span.start : span.stop, column].double()
            if not bool(((got - expected.double()).abs() < 0.02 * expected.clamp(min=8.0)).all()):
                return False
            column += site.out_features
    return True


def examine(shape: Shape, backend: str, device: torch.device, dtype: torch.dtype) -> Finding:
    """Everything about one backend at one shape."""
    made = problem(shape, device=device, dtype=dtype)
    with poisoned_memory():
        found = check(made, backend)
        first, second = _bits(made, backend), _bits(made, backend)
        wrong = [] if found.right else ["error above twice torch's"]
        if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
            wrong.append("two runs differ")
        if shape.dropout and dtype == torch.float32 and not _same_mask(made, backend):
            wrong.append("another dropout mask")
    return Finding(backend, str(dtype), shape, found.errors, found.torch_errors, tuple(wrong))


def _examined(shape: Shape, backend: str, device: torch.device, dtype: torch.dtype) -> Finding:
    """What `examine` finds; an error becomes a finding, so that the other cases still run."""
    try:
        return examine(shape, backend, device, dtype)
    except (RuntimeError, KernelError) as error:
        return Finding(backend, str(dtype), shape, {}, {}, (str(error)[:500],))


def _print(found: Finding) -> None:
    shape = found.shape
    ratios = [
        found.errors[name] / found.torch_errors[name] for name in found.errors if found.torch_errors[name]
    ]
    print(
        f"{found.backend:9s} {found.dtype:14s} {shape.tokens:5d} tokens {len(shape.ranks):3d} adapters"
        f" dropout {shape.dropout:.1f} | error {max(ratios, default=0.0):.2f} of torch's |",
        ", ".join(found.wrong) or "right",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine every backend; return 1 if something is wrong."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with it cuBLAS repeats its bits
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m plait_kernels.check", description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if cuda else "cpu"))
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(arguments)
    there = [name for name in BACKENDS if BACKENDS[name].runs(options.device, torch.float32)]
    findings = []
    for shape in shapes():
        for dtype in (getattr(torch, name) for name in options.dtypes or DTYPES):
            for backend in options.backends or there:
                runs = BACKENDS[backend].runs(options.device, dtype)
                if runs or options.dtypes or backend not in there:
                    findings.append(_examined(shape, backend, options.device, dtype))
                    _print(findings[-1])
    wrong = sum(bool(found.wrong) for found in findings)
    print(f"{len(findings)} cases, {wrong} wrong")
    if options.json is not None:
        result = {
            "environment": environment(options.device),
            "findings": [asdict(found) for found in findings],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
