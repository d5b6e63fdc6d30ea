"""Compile what the Triton backend would launch on a GPU that need not be there; one JSON object per binary.

Triton's own launch path runs, with the arguments, alignment and constants that a device would see, up to the
binary that ptxas writes; only the launch itself is left out. Run by test_kernels_compile.py in a process of
its own, since Triton's interpreter is on in the tests':
`all|sample|passes|gated|paged|pooled|attention=CAPABILITY[,…] ...`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from plait_kernels import (
    AdapterStep,
    Bank,
    Routing,
    Site,
    attention,
    gated_mlp,
    joint_adamw,
    loss,
    paged,
    passes,
)
from plait_kernels.absent import AbsentDevice
from plait_kernels.attention import Capped
from plait_kernels.layer import layer_call
from plait_kernels.plain import GELU, GELU_TANH, SILU
from plait_kernels.pooled import AdapterPool, PooledAdapter, PooledRows, add_by_triton
from plait_kernels.synthetic import Shape, counters_of, even_segments, problem
from plait_kernels.tables import site_table
from plait_kernels.tiles import CANDIDATES, DEFAULT, HOPPER, SMALL, SMALL_CANDIDATES, Choice
from plait_kernels.triton_launch import Launcher

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CASE = ("dtype", "ranks", "dropout", "outputs", "bias")
SAMPLE = [(torch.bfloat16, (3, 100), 0.1, (64, 32), True)]
ALL = [
    *(
        (torch.bfloat16, ranks, dropout, (64, 32), True)
        for ranks in ((16, 16), (32, 17), (4, 128), (3, 100))
        for dropout in (0.0, 0.1)
    ),
    (torch.float16, (3, 100), 0.1, (48, 9), False),
    (torch.float16, (16, 16), 0.0, (64,), False),
    (torch.float32, (3, 100), 0.1, (64, 32), True),
    (torch.float32, (16, 16), 0.0, (48, 9), False),
]

PAGED = [
    *((torch.bfloat16, size) for size in (64, 128, 256)),
    *((torch.float32, size) for size in (128, 256)),
]


def registers(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of it that had to go to memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]) + int(found[3])


def describe(name: str, tiles: str, compiled: object, case: dict[str, object]) -> dict[str, object]:
    """What the test asks of one binary."""
    ptx = compiled.asm["ptx"]
    count, spilled = registers(compiled.asm["cubin"])
    return {
        "kernel": name,
        "tiles": tiles,
        "case": {key: str(value) for key, value in case.items()},
        "shared": compiled.metadata.shared,
        "registers": count,
        "spilled": spilled,
        "tensor_cores": len(re.findall(r"\bwgmma\.mma_async|\bmma\.sync|\btcgen05\.mma", ptx)),
        "wide": len(re.findall(r"ld\.global\.v[24]\.b(?:32|64)|cp\.async\.c[ag]|cp\.async\.bulk", ptx)),
        "narrow": len(re.findall(r"ld\.global\.b(?:8|16)\b", ptx)),
        "atomics": sorted(set(re.findall(r"\b(?:atom|red)\.\S+", ptx))),
    }


def choices(dtype: torch.dtype, every: bool) -> Iterator[tuple[str, str, Choice]]:
    """(stage or all, name, choice) of the untuned tiles and what the tuner may take: all, or the last."""
    small = dtype == torch.float32
    start = SMALL if small else DEFAULT
    yield "all", "untuned", start
    if not small:
        yield "all", "small", SMALL
    if dtype == torch.bfloat16:
        yield "all", "tuned", HOPPER
    for stage, found in (SMALL_CANDIDATES if small else CANDIDATES).items():
        for field, tiles in found if every else dict(found).items():
            yield stage, "tuned", replace(start, **{field: tiles})


def launch(case: dict[str, object], every: bool) -> None:
    """Every launch that the backend would make in one case."""
    shape = Shape(96, 64, case["outputs"], case["ranks"], case["dropout"])
    made = problem(shape, device="cpu", dtype=case["dtype"])
    call = layer_call(made.bank, made.routing, made.sites, made.weight.shape[0])
    bias = made.weight.new_zeros(made.weight.shape[0]) if case["bias"] else None
    for stage, name, chosen in choices(case["dtype"], every):
        case["tiles"] = name
        x, weight, grad = made.x.detach(), made.weight, made.grad
        own = Launcher(call, x, weight, chosen)
        s, kept = own.down(call, x)
        run = {
            "down": partial(own.down, call, x),
            "up": partial(own.up, call, x, s, weight, bias),
            "up_gradient": partial(own.up_gradient, call, grad, s),
            "down_gradient": partial(own.down_gradient, call, x, s, kept),
            "dx": partial(own.dx, call, grad, s, kept, weight),
        }
        for own_stage, own_run in run.items():
            if stage in ("all", own_stage):
                own_run()


def launch_passes(dtype: torch.dtype) -> None:
    """The passes between the products at the sizes of Llama-3.1-8B, and a norm of the widest rows."""
    for features in (4096, passes.WIDEST):
        x, weight = torch.zeros(2, features, dtype=dtype), torch.zeros(features, dtype=dtype)
        for other in (None, x):
            _, scales, total = passes.rms(x, weight, 1e-5, 0.0, other)
            passes.rms_back(x, total, weight, scales, 0.0, other)
            _, scales, total = passes.rms(x, weight, 1e-5, 0.0, other, bias=weight, centred=True)
            passes.rms_back(x, total, weight, scales, 0.0, other, centred=True)
    x = torch.zeros(4, 2 * 14336, dtype=dtype)
    for kind in (SILU, GELU_TANH):
        passes.gated_back(passes.gated(x, kind), x, kind)
    for kind in (GELU_TANH, GELU):
        passes.activated_back(x, passes.activated(x, kind), kind)
    table = torch.zeros(4, 128, dtype=dtype)
    passes.rotate_(torch.zeros(4, 48 * 128, dtype=dtype).view(4, 48, 128)[:, :40], table, table)


def launch_gated(case: dict[str, object]) -> None:
    """A gated MLP's passes with adapters of few and of many ranks, with and without dropout."""
    bf, half, exact = torch.bfloat16, torch.float16, torch.float32
    for dtype, ranks, p in ((bf, (16,), 0.0), (bf, (16,), 0.1), (half, (3, 100), 0.1), (exact, (16,), 0.1)):
        case |= {"dtype": dtype, "ranks": ranks, "dropout": p}
        bank = Bank(
            [Site("gate", 0, 64, 128), Site("up", 1, 64, 128), Site("down", 2, 128, 64)],
            device="cpu",
            compute_dtype=dtype,
        )
        for index, rank in enumerate(ranks):
            bank.attach(str(index), rank=rank, scale=1.0, dropout=p, seed=0, sites=["gate", "up", "down"])
        segments, counters = even_segments(96, list(bank.blocks)), counters_of(96, "cpu")
        routing = Routing.build(bank, segments, counters, training=True)
        pair, down = torch.zeros(256, 64, dtype=dtype), torch.zeros(64, 128, dtype=dtype)
        x, hidden, y = (torch.zeros(96, width, dtype=dtype) for width in (64, 128, 256))
        first = layer_call(bank, routing, ("gate", "up"), 256)
        second = layer_call(bank, routing, ("down",), 64)
        own, after = Launcher(first, x, pair, DEFAULT), Launcher(second, hidden, down, DEFAULT)
        found = gated_mlp._made(own, after, routing, SILU)
        s, ds = torch.zeros(own.packed, dtype=dtype), torch.zeros(after.packed, dtype=dtype)
        bits, sites = torch.zeros(after.bits, dtype=torch.uint8), (site_table(first), site_table(second))
        found.forward(y, hidden, s, sites[0])
        found.backward(hidden, y, y, s, sites[0], ds, bits, sites[1])


def launch_loss(dtype: torch.dtype) -> None:
    """The cross-entropy of a few rows, with and without scale and softcap."""
    hidden, head = torch.zeros(4, 64, dtype=dtype), torch.zeros(128_256, 64, dtype=dtype)
    targets, weights = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    for softcap, scale in ((None, None), (30.0, 2.0)):
        for grad in (None, torch.zeros_like(hidden)):
            whole = loss.Head(head, None, softcap, scale)
            loss.fused_chunk(hidden, whole, targets, weights, slice(0, 4), torch.zeros(4), grad)


def launch_paged(dtype: torch.dtype, size: int) -> None:
    """Attention over pages: a prompt and single rows, of few and of many keys; and storing these."""
    shape = paged.PageShape(16, 8, 4, size, 0.1, 50.0 if size == 256 else None)
    pool = torch.zeros(50, 16 * 16 * size, dtype=dtype)
    qkv, out = torch.zeros(3, 48 * size, dtype=dtype), torch.zeros(3, 32 * size, dtype=dtype)
    for last in (20, 700):
        spans = [paged.Span(0, 1, last, prompt=False), paged.Span(1, 2, 0, prompt=True)]
        rows = paged.PagedRows([range(50), (1,)], spans, pool.device)
        paged.store_by_triton(qkv, pool, torch.zeros(3, 2, dtype=torch.int64), rows, shape)
        paged.attend_by_triton(out, qkv, pool, rows, shape)


def launch_pooled(dtype: torch.dtype) -> None:
    """Two rows of adapters in a pool, at the sites of q, k and v."""
    names = ("q", "k", "v")
    sites = tuple(Site(name, 0, 64, width) for name, width in zip(names, (128, 32, 32), strict=True))
    pool = AdapterPool(sites, (torch.zeros(256, dtype=dtype),) * 3, align=16)
    adapter = PooledAdapter(20, 1.0, frozenset(names), torch.zeros(3, 2, 20, dtype=torch.int64))
    x, out = torch.zeros(2, 64, dtype=dtype), torch.zeros(2, 192, dtype=dtype)
    rows = PooledRows(pool, ((0, adapter), (1, adapter)), ())
    add_by_triton(out, x, pool.storage[0], names, rows)


def launch_attention(case: dict[str, object]) -> None:
    """Attention with a softcap of heads of every padded size, with and without a window."""
    cases = [(torch.bfloat16, 64, None), (torch.bfloat16, 80, 4096), (torch.bfloat16, 256, 4096)]
    for dtype, size, window in (*cases, (torch.float32, 256, 4096)):
        case |= {"dtype": dtype, "size": size}
        qkv, ends = torch.zeros(8, 8 * size, dtype=dtype), torch.zeros(2, dtype=torch.int32)
        rule = Capped(4, 2, size, size**-0.5, 50.0, window)
        out, sums = attention.forward(qkv, ends, 8, rule)
        attention.backward(out, qkv, ends, 8, rule, out, sums)


def launch_adamw(dtype: torch.dtype) -> None:
    """One step of one adapter."""
    bank = Bank([Site("q", 0, 64, 64)], device="cpu", compute_dtype=dtype)
    bank.attach("one", rank=16, scale=1.0, dropout=0.0, seed=0, sites=["q"])
    norms = joint_adamw.norms([bank.block("one")])
    joint_adamw.step_all([(AdapterStep("one", 1, 1e-3, 1e-3), bank.block("one"))], norms)


def launch_all(which: str, current: dict[str, object]) -> None:
    """Every launch of a set of cases; ``current`` says of which case."""
    for values in {"all": ALL, "sample": SAMPLE}.get(which, ()):
        current |= zip(CASE, values, strict=True)
        launch(current, which == "all")
    for dtype, size in PAGED if which == "paged" else ():
        current |= {"dtype": dtype, "size": size}
        launch_paged(dtype, size)
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if which == "pooled" else ():
        current |= {"dtype": dtype}
        launch_pooled(dtype)
    if which == "attention":
        launch_attention(current)
    if which == "gated":
        launch_gated(current)
    if which == "passes":
        current |= {"dtype": torch.bfloat16}
        launch_passes(torch.bfloat16)
        launch_loss(torch.bfloat16)
        launch_adamw(torch.bfloat16)


def main(which: str, capabilities: list[int]) -> None:
    """Compile a set of cases and print what came out, each binary once."""
    seen: set[int] = set()
    current: dict[str, object] = {}
    run = JITFunction.run

    def compile_only(self, *args, **options):
        compiled = run(self, *args, **{**options, "warmup": True})
        if id(compiled) not in seen:
            seen.add(id(compiled))
            sizes = " ".join(
                f"{key}={value}" for key, value in options.items() if key not in ("grid", "warmup")
            )
            found = describe(self.__name__, sizes, compiled, current)
            print(json.dumps({"of": which, "capability": capability, **found}), flush=True)
        return compiled

    JITFunction.run = compile_only
    for capability in capabilities:
        driver.set_active(AbsentDevice(capability))
        for kept in (
            passes._rms,
            passes._rms_back,
            passes._by_blocks,
            passes._rotate,
            attention._launch,
        ):
            kept.cache_clear()  # binaries of the device before
        current.clear()
        launch_all(which, current)
    JITFunction.run = run


if __name__ == "__main__":
    for word in sys.argv[1:]:
        which, _, capabilities = word.partition("=")
        main(which, [int(each) for each in capabilities.split(",")])
