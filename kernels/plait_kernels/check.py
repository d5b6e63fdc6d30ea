"""`python -m plait_kernels.check`: are the backends right on this machine? Needs only torch (and Triton).

Every case is compared with float64 by the rule of `bench_check`, run twice for equal bits, and its dropout
masks are compared with the formula; unwritten memory is filled with NaN. So are the passes between the
products, the loss and attention over pages. It prints one line for each case; the exit status is 1 if
anything is wrong.

What is known least comes first: Triton in bfloat16, the passes, then layers with dropout. The file is written
after each case, and the same command resumes from it if device, versions, commit and sources are the same.
`--seconds` limits a run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait_kernels import attention, passes, plain
from plait_kernels.attention import Capped
from plait_kernels.autotuning import kernel_errors, refused, taking, usual, with_fused
from plait_kernels.backends import BACKENDS
from plait_kernels.bank import GRADIENTS, Bank, Site
from plait_kernels.bench import environment, resumed, write
from plait_kernels.bench_check import check, rms
from plait_kernels.dropout import keep_mask
from plait_kernels.gated_mlp import Frozen, multi_lora_gated_mlp
from plait_kernels.linear import multi_lora_linear
from plait_kernels.loss import labelled_cross_entropy
from plait_kernels.paged import PagedRows, PageShape, Span, attend_by_products, attend_by_triton
from plait_kernels.routing import RoutedSegment, Routing
from plait_kernels.synthetic import Problem, Shape, counters_of, problem
from plait_kernels.tiles import Choice
from plait_kernels.triton_backend import TRITON

DTYPES = ("float32", "float16", "bfloat16")
RANKS = (1, 3, 16, 17, 100, 256)


@dataclass(frozen=True)
class Finding:
    """One backend or pass at one shape: its relative RMS errors, plain torch's, and the faults found."""

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
    """Everything about one backend at one shape, of Triton's with and without its fused products.

    The tiles are the usual ones: measuring them would take minutes for each shape.
    """
    start, candidates = usual(device, dtype)
    found = _examine(shape, backend, device, dtype, start)
    if backend != TRITON.name:
        return found
    fused = _examine(shape, backend, device, dtype, with_fused(start, candidates))
    errors = {name: max(error, fused.errors[name]) for name, error in found.errors.items()}
    wrong = (*found.wrong, *(f"{each} with fused products" for each in fused.wrong))
    return replace(found, errors=errors, wrong=wrong)


def _examine(shape: Shape, backend: str, device: torch.device, dtype: torch.dtype, tiles: Choice) -> Finding:
    made = problem(shape, device=device, dtype=dtype)
    with poisoned_memory(), taking(tiles):
        found = check(made, backend)
        first, second = _bits(made, backend), _bits(made, backend)
        wrong = [] if found.right else ["error above twice torch's"]
        if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
            wrong.append("two runs differ")
        if shape.dropout and dtype == torch.float32 and not _same_mask(made, backend):
            wrong.append("another dropout mask")
    return Finding(backend, str(dtype), shape, found.errors, found.torch_errors, tuple(wrong))


_PASS_SHAPE = Shape(37, 1000, (), ())


def examine_pass(shape: Shape, name: str, device: torch.device, dtype: torch.dtype) -> Finding:
    """A pass between the products, or the loss, in half precision: output and gradient of Triton's kernel.

    The truth is plain torch's of the same numbers in float32 and float64. The tiles are the usual ones, as in
    :func:`examine`.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, grad = (torch.randn(37, 1000, device=device, generator=generator).to(dtype) for _ in range(2))
    head = (torch.randn(1000, 1000, device=device, generator=generator) / 30).to(dtype)
    run = _PASSES[name]
    with poisoned_memory(), taking(usual(device, dtype)[0]):
        first, second = run(head, x, grad, TRITON.name), run(head, x, grad, TRITON.name)
    unfused_run = run(head, x, grad, "")
    truth = run(head.double(), x.double(), grad.double(), "")
    names = ("out", "dx")
    sizes = {key: rms(each) or 1.0 for key, each in zip(names, truth, strict=True)}
    errors, unfused = (
        {
            key: rms(each.double() - true) / sizes[key]
            for key, each, true in zip(names, some, truth, strict=True)
        }
        for some in (first, unfused_run)
    )
    wrong = [] if all(errors[key] <= 2 * unfused[key] for key in names) else ["error above twice torch's"]
    if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
        wrong.append("two runs differ")
    return Finding(name, str(dtype), shape, errors, unfused, tuple(wrong))


Both = tuple[Tensor, Tensor]


def _norm(weight: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    """The norm of x + grad, whose gradient adds that of the sum, x."""
    if backend:
        out, scales, total = passes.rms(x, weight[0], 1e-5, 0.0, grad)
        return out, passes.rms_back(grad, total, weight[0], scales, 0.0, x)
    out, scales = plain.rms(x + grad, weight[0], 1e-5, 0.0)
    return out, plain.rms_back(grad, x + grad, weight[0], scales, 0.0) + x


def _layer_norm(weight: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    """The LayerNorm of x + grad, likewise."""
    own, bias = weight[0], weight[1]
    if backend:
        out, scales, total = passes.rms(x, own, 1e-5, 0.0, grad, bias=bias, centred=True)
        return out, passes.rms_back(grad, total, own, scales, 0.0, x, centred=True)
    out, *found = plain.layer_norm(x + grad, own, bias, 1e-5, 0.0)
    return out, plain.layer_norm_back(grad, x + grad, own, 0.0, *found) + x


def _gelu(_: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    if backend:
        return passes.activated(x, plain.GELU), passes.activated_back(grad, x, plain.GELU)
    return plain.activation(x, plain.GELU), plain.activation_back(grad, x, plain.GELU)


def _gated(_: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    own, half = (passes if backend else plain), grad[:, :500].contiguous()
    return own.gated(x, plain.SILU), own.gated_back(half, x, plain.SILU)


def _mlp(head: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    """A gated MLP with two adapters, as one operation and as two layers."""
    sites = [Site("gate", 0, 1000, 500), Site("up", 1, 1000, 500), Site("down", 2, 500, 1000)]
    names, rows = tuple(site.name for site in sites), x.clone().requires_grad_()
    bank = Bank(sites, device=x.device, compute_dtype=x.dtype)
    for adapter, rank in (("one", 3), ("two", 24)):
        bank.attach(adapter, rank=rank, scale=2.0, dropout=0.1, seed=rank, sites=names)
        for a, b in bank.weights(adapter).values():
            a.copy_(head[:rank, : a.shape[1]])
            b.copy_(head[: b.shape[0], -rank:])
    bank.refresh()
    segments = [RoutedSegment("one", 1, 18), RoutedSegment("two", 18, 36)]
    routing = Routing.build(bank, segments, counters_of(37, x.device), training=True)
    pair, down = Frozen(head, None, names[:2]), Frozen(head[:, :500].contiguous(), None, names[2:])
    if backend:
        out = multi_lora_gated_mlp(rows, pair, down, plain.SILU, bank, routing, backend=backend)
        assert out is not None  # Triton runs here, and there are adapters
    else:
        y = multi_lora_linear(rows, pair.weight, None, pair.sites, bank, routing, backend="reference")
        hidden = plain.activation(y[:, :500], plain.SILU) * y[:, 500:]
        out = multi_lora_linear(hidden, down.weight, None, down.sites, bank, routing, backend="reference")
    torch.autograd.backward(out, grad)
    assert rows.grad is not None
    return out.detach(), rows.grad


def _rotated(tables: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    own, both = (passes if backend else plain), (x.clone(), grad.clone())
    cos, sin = tables[:37, :16].contiguous(), tables[37:74, :16].contiguous()
    for tensor, back in zip(both, (False, True), strict=True):
        own.rotate_(tensor.view(37, 50, 20), cos, sin, back=back)
    return both


def _loss(head: Tensor, x: Tensor, _: Tensor, backend: str) -> Both:
    rows, targets = x.clone().requires_grad_(), torch.arange(37, device=x.device)
    weights = torch.linspace(0.1, 1.0, 37, device=x.device)
    loss, nll = labelled_cross_entropy(rows, head, None, targets, weights, softcap=20.0, backend=backend)
    return nll, torch.autograd.grad(loss, rows)[0]


def _paged(pool: Tensor, x: Tensor, _: Tensor, backend: str) -> Both:
    """Attention over pages of 7 tokens, of a prompt and of single rows; capped and with a window, too."""
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()
    spans = [Span(0, 20, 0, prompt=True), *(Span(20 + n, 1, 57 * n, prompt=False) for n in range(17))]
    pages = [order[:3], *([order[n + k] for k in range(140)] for n in range(17))]
    rows, both = PagedRows(pages, spans, x.device), []
    for softcap, window in ((None, None), (2.0, 300)):
        shape = PageShape(7, 1, 4, 64, 3.0, softcap, window)
        both.append(x.new_empty(37, 256))
        (attend_by_triton if backend else attend_by_products)(both[-1], x, pool, rows, shape)
    return both[0], both[1]


def _capped(_: Tensor, x: Tensor, grad: Tensor, backend: str) -> Both:
    """Samples of 1, 29 and 7 tokens, 3 queries for each of 5 keys, all of 40 features."""
    rule, ends = Capped(15, 5, 40, 0.2, 20.0, 9), (0, 1, 30, 37)
    own = grad[:, :600].contiguous()
    if backend:
        table = torch.tensor(ends, dtype=torch.int32, device=x.device)
        out, sums = attention.forward(x, table, 29, rule)
        return out, attention.backward(own, x, table, 29, rule, out, sums)
    leaf = x.clone().requires_grad_()
    out = plain.attention(leaf, ends, rule)
    return out.detach(), torch.autograd.grad(out, leaf, own)[0]


_PASSES: dict[str, Callable[[Tensor, Tensor, Tensor, str], Both]] = {
    "norm": _norm,
    "LayerNorm": _layer_norm,
    "GELU": _gelu,
    "gated MLP": _gated,
    "MLP": _mlp,
    "rotation": _rotated,
    "loss": _loss,
    "paged": _paged,
    "softcap": _capped,
}


def _examined(shape: Shape, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[Finding, bool]:
    """What `examine` finds, and whether the device can be used after it; an error becomes a finding, so that
    the other cases still run."""
    try:
        return (examine if backend in BACKENDS else examine_pass)(shape, backend, device, dtype), True
    except kernel_errors() as error:
        usable = not isinstance(error, RuntimeError) or refused(error)
        return Finding(backend, str(dtype), shape, {}, {}, (str(error)[:500],)), usable


def _print(found: Finding) -> None:
    shape = found.shape
    ratios = [
        found.errors[name] / found.torch_errors[name] for name in found.errors if found.torch_errors[name]
    ]
    print(
        f"{found.backend:9s} {found.dtype:14s} {_counted(shape.tokens, 'token'):11s} "
        f"{_counted(len(shape.ranks), 'adapter'):12s} dropout {shape.dropout:.1f} | "
        f"error {max(ratios, default=0.0):.2f} of torch's |",
        ", ".join(found.wrong) or "right",
        flush=True,
    )


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine every backend; return 1 if something is wrong."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with it cuBLAS repeats its bits
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m plait_kernels.check", description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if cuda else "cpu"))
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--json", type=Path, help="write every figure to this file, and resume from it")
    options = parser.parse_args(arguments)
    begin, device = time.monotonic(), options.device
    result = resumed(options.json, {"environment": environment(device), "findings": []})
    findings = result["findings"]
    done = [(each["backend"], each["dtype"], each["shape"]) for each in findings]
    cases = [case for case in _cases(options) if (case[1], str(case[2]), _as_json(case[0])) not in done]
    for index, (shape, backend, dtype) in enumerate(cases):
        if time.monotonic() - begin > options.seconds:
            print(f"{len(cases) - index} cases are left: run again with the same file")
            break
        found, usable = _examined(shape, backend, device, dtype)
        _print(found)
        findings.append(_as_json(found))
        write(options.json, result)
        if not usable:
            print("the device cannot be used after this: run again with the same file for the other cases")
            break
    wrong = sum(bool(found["wrong"]) for found in findings)
    print(f"{len(findings)} cases, {wrong} wrong")
    write(options.json, result)
    return 1 if wrong else 0


def _as_json(value: Any) -> dict[str, Any]:
    """A dataclass as it is read from a file."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    return found


def _cases(options: argparse.Namespace) -> list[tuple[Shape, str, torch.dtype]]:
    """What is to be examined; what is known least comes first."""
    there = [name for name in BACKENDS if BACKENDS[name].runs(options.device, torch.float32)]
    found = [
        (shape, backend, dtype)
        for shape in shapes()
        for dtype in (getattr(torch, name) for name in options.dtypes or DTYPES)
        for backend in options.backends or there
        if options.dtypes or backend not in there or BACKENDS[backend].runs(options.device, dtype)
    ]
    halves = [dtype for dtype in (torch.bfloat16, torch.float16) if TRITON.runs(options.device, dtype)]
    if TRITON.name in (options.backends or there):
        found += [(_PASS_SHAPE, name, dtype) for name in _PASSES for dtype in halves]
    return sorted(found, key=_known)


def _known(case: tuple[Shape, str, torch.dtype]) -> tuple[bool, ...]:
    shape, backend, dtype = case
    unfused = backend not in (TRITON.name, *_PASSES)
    # The passes' few kernels are compiled within seconds.
    return unfused, dtype != torch.bfloat16, backend not in _PASSES, not shape.dropout


if __name__ == "__main__":
    raise SystemExit(main())
