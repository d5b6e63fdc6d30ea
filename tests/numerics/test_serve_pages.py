"""Attention over pages: by compiled code and by torch, against float64, whatever else lies in the pages."""

import ctypes
import itertools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from plait.core.errors import CapacityError
from plait.models.attention import AttentionRule, Heads
from plait.models.context import MicrobatchContext
from plait.models.elementwise import compiled
from plait.models.fuse import RotaryAttention
from plait.serve.pages import FEW, PagedCache, pool_memory
from plait_kernels import triton_backend
from plait_kernels.attention import WIDEST_HEAD

TOKENS = 4  # of a page
CASES = [
    (Heads(3, 3), 5, AttentionRule(0.3)),
    (Heads(9, 3), 64, AttentionRule(0.125)),
    (Heads(4, 1), 80, AttentionRule(0.1, window=7)),
    (Heads(4, 2), 16, AttentionRule(0.4, softcap=2.0)),
]


class Stored:
    """Requests with earlier tokens, whose pages lie among poisoned ones: (earlier tokens, new rows)."""

    def __init__(self, heads: Heads, size: int, dtype: torch.dtype, requests: list[tuple[int, int]]) -> None:
        noise = torch.Generator().manual_seed(5)
        self.heads, self.size, self.requests = heads, size, requests
        counts = [-(-(start + rows) // TOKENS) for start, rows in requests]
        order = torch.randperm(sum(counts) + 3, generator=noise).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        elements = TOKENS * 2 * heads.shared * size + 6
        self.pool = torch.full((len(order) + sum(counts), elements), torch.nan, dtype=dtype)
        self.rows = torch.randn(sum(rows for _, rows in requests), heads.total * size, generator=noise)
        self.rows = self.rows.to(dtype)
        self.earlier = [
            torch.randn(start, 2, heads.shared, size, generator=noise).to(dtype) for start, _ in requests
        ]
        pages = self.pool[:, :-6].view(-1, TOKENS, 2, heads.shared, size)
        for table, own in zip(self.tables, self.earlier, strict=True):
            for token, values in enumerate(own):
                pages[table[token // TOKENS], token % TOKENS] = values

    def attended(self, rule: AttentionRule, chosen: list[int], few: int) -> list[torch.Tensor]:
        """What the chosen requests' rows give together."""
        cache = PagedCache([self.pool.clone()], TOKENS)
        cache._few = few
        starts, lengths = zip(*(self.requests[number] for number in chosen), strict=True)
        tables, answered = [self.tables[number] for number in chosen], [rows == 1 for rows in lengths]
        placed = cache.placed(tables, starts, lengths, sum(map(bool, starts)), answered)
        firsts = torch.tensor([0, *(rows for _, rows in self.requests)]).cumsum(0).tolist()
        rows = torch.cat([self.rows[firsts[number] : firsts[number + 1]] for number in chosen])
        nothing = MicrobatchContext(torch.zeros(0), torch.zeros(0), (0,))
        return list(placed.attend(0, rows, self.heads, rule, nothing).split(list(lengths)))

    def truth(self, rule: AttentionRule) -> list[torch.Tensor]:
        found, first = [], 0
        for (start, rows), earlier in zip(self.requests, self.earlier, strict=True):
            x = self.rows[first : first + rows].double().view(rows, self.heads.total, self.size)
            first += rows
            new = x[:, self.heads.query :].view(rows, 2, self.heads.shared, self.size)
            keys, values = torch.cat([earlier.double(), new]).unbind(1)
            own = torch.empty(rows, self.heads.query, self.size, dtype=torch.float64)
            for row in range(rows):
                last = start + row + 1
                low = max(0, last - (rule.window or last))
                for head in range(self.heads.query):
                    shared = head // self.heads.group
                    scores = keys[low:last, shared] @ x[row, head] * rule.scale
                    if rule.softcap is not None:
                        scores = rule.softcap * torch.tanh(scores / rule.softcap)
                    own[row, head] = torch.softmax(scores, 0) @ values[low:last, shared]
            found.append(own.flatten(1))
        return found


REQUESTS = [(5, 1), (1, 2), (37, 1), (8, FEW), (3, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "rule"), CASES)
def test_rows_over_pages(heads: Heads, size: int, rule: AttentionRule, dtype: torch.dtype) -> None:
    stored = Stored(heads, size, dtype, REQUESTS)
    assert compiled("attend", stored.pool) is not None
    every = list(range(len(REQUESTS)))
    truth = stored.truth(rule)
    together = stored.attended(rule, every, FEW)
    for found in (together, stored.attended(rule, every, 1), stored.attended(rule, every, 0)):
        for own, expected in zip(found, truth, strict=True):
            error = float((own.double() - expected).norm() / expected.norm())
            assert error <= {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for number in every:
        assert torch.equal(stored.attended(rule, [number], FEW)[0], together[number]), "the same bits alone"


def test_what_is_not_finite_stays_with_its_own_rows() -> None:
    heads, rule = Heads(4, 2), AttentionRule(0.25)
    stored = Stored(heads, 16, torch.float32, REQUESTS)
    whole = stored.attended(rule, [0, 1, 2], FEW)
    stored.rows[0] = math.inf
    changed = stored.attended(rule, [0, 1, 2], FEW)
    assert not torch.isfinite(changed[0]).any()
    assert torch.equal(torch.cat(changed[1:]), torch.cat(whole[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("few", [0, 12], ids=["torch", "compiled"])
@pytest.mark.parametrize(
    "rule", [AttentionRule(0.25), AttentionRule(0.25, window=5), AttentionRule(0.25, softcap=2.0)]
)
def test_a_token_that_is_not_finite_reaches_no_row_before_it(
    rule: AttentionRule, few: int, dtype: torch.dtype
) -> None:
    """Weights of 0 would not hide its values, nor -inf added to its scores its keys."""
    keys, values, everything = slice(64, 96), slice(96, 128), slice(0, 128)
    for start, spoilt in itertools.product((0, 6), (keys, values, everything)):
        stored = Stored(Heads(4, 2), 16, dtype, [(start, 12)])
        few = 0 if compiled("attend", stored.pool) is None else few
        whole = stored.attended(rule, [0], few)[0]
        stored.rows[7, spoilt] = torch.inf
        changed = stored.attended(rule, [0], few)[0]
        assert torch.equal(changed[:7], whole[:7])
        assert torch.isfinite(changed[:7]).all()
        assert not torch.isfinite(changed[7:]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_rotated_by_their_rows_positions(dtype: torch.dtype) -> None:
    """Compiled code has no float64: that is rotated by torch."""
    noise = torch.Generator().manual_seed(2)
    heads, size = Heads(4, 2), 10
    qkv = torch.randn(7, heads.total * size, generator=noise).to(dtype)
    angles = torch.rand(7, 3, generator=noise).repeat(1, 2)  # 6 of 10 features are rotated
    tables = angles.cos().to(dtype).unsqueeze(0), angles.sin().to(dtype).unsqueeze(0)
    forward = RotaryAttention(None, None, heads, AttentionRule(1.0), 0)  # type: ignore[arg-type]
    given = qkv.clone()
    found = forward.rotated(given, tables)
    assert found.data_ptr() == given.data_ptr(), "in place"
    expected = forward.rotated(qkv.double(), tuple(table.double() for table in tables))  # type: ignore[arg-type]
    assert torch.allclose(found.double(), expected, atol={torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype])


def test_a_pool_that_does_not_fit_into_memory_is_refused() -> None:
    base = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)

    def made(pages: int, reserve: int | None = None) -> list[torch.Tensor]:
        return pool_memory(2, pages, 2**10, base, reserve=reserve)  # type: ignore[arg-type]

    for pages in (2**40, 2**60):  # more than addresses, and than a size has bits
        with pytest.raises(
            CapacityError, match=r"a pool of .* GiB.*\n.*cannot allocate that much.*\n.*fewer tokens"
        ):
            made(pages)
    with pytest.raises(
        CapacityError, match=r"a pool of 0\.01 GiB.*\n0\.01 GiB of memory are free.*\n.*fewer"
    ):
        made(2**10, 2**23 - 1)
    for reserve in (None, 2**23):
        layers = made(2**10, reserve)
        assert [layer.shape for layer in layers] == [(2**10, 2**10)] * 2
        assert not any(layer.any() for layer in layers)


# Blocks as layers of prompts take and free them, in a process whose heap nothing else has been in.
FREED = """
import ctypes, resource, torch
from types import SimpleNamespace
from plait.serve.pages import pool_memory

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
base = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
pool = pool_memory(1, 1, 1024, base, reserve=2**23)

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(12 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 12 << 20)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

counts = [new_pages() for _ in range(5)]
assert max(counts[2:]) < 1000 < counts[0], counts
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library"
)
def test_a_server_keeps_the_memory_that_iterations_free() -> None:
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not triton_backend.available(torch.device("cpu")), reason="Triton's interpreter is off")
def test_triton_takes_prompts_in_tiles_and_no_wider_heads_than_it_has_room_for() -> None:
    """Of a request that is no prompt's it looks at the first row alone to see how many keys there are."""
    pool = [torch.zeros(4, 64)]
    cache = PagedCache(pool, TOKENS, "triton", head=WIDEST_HEAD)
    placed = cache.placed([[0], [1, 2]], [3, 0], [1, 5], 1, [True, False])
    assert [(each.position, each.rows, each.prompt) for each in placed.rows.spans] == [
        (3, 1, False),
        (0, 5, True),
    ]
    assert not PagedCache(pool, TOKENS, "triton", head=WIDEST_HEAD + 1).by_triton
