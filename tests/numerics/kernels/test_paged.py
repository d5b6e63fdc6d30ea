"""Attention over pages by Triton: against float64 on poisoned memory, with the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait_kernels import launching, triton_backend
from plait_kernels.paged import (
    CHUNK,
    PagedRows,
    PageShape,
    Span,
    attend_by_products,
    attend_by_triton,
    store_by_triton,
    store_rows,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if not triton_backend.available(DEVICE):
    pytest.skip("Triton does not run here", allow_module_level=True)
# tokens of a page, key heads, query heads of each, features, scale, softcap, window
SHAPES = [
    PageShape(16, 2, 3, 64, 0.125),
    PageShape(17, 1, 5, 80, 0.1, window=7),
    PageShape(23, 3, 1, 96, 0.2, softcap=2.0),
    PageShape(64, 1, 2, 256, 0.06, softcap=30.0, window=70),
    PageShape(33, 1, 20, 5, 0.4, window=CHUNK + 3),
]
# earlier tokens, rows, whether they are a prompt's
REQUESTS = [
    (0, 1, True),
    (5, 1, False),
    (2 * CHUNK + 44, 1, False),
    (0, 37, True),
    (48, 3, True),
    (299, 1, False),
]


class Stored:
    """Requests whose pages lie anywhere among poisoned ones; the last two share their first 48 tokens."""

    def __init__(self, shape: PageShape, dtype: torch.dtype, requests=REQUESTS, seed: int = 5) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.shape, self.requests, self.dtype = shape, requests, dtype
        self.made: Any = PagedRows
        counts = [-(-(start + rows) // shape.tokens) for start, rows, _ in requests]
        order = torch.randperm(sum(counts) + 5, generator=noise).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        if len(requests) > 1:
            self.tables[-1][: 48 // shape.tokens] = self.tables[-2][: 48 // shape.tokens]
        token = 2 * shape.shared * shape.size
        self.pool = torch.full((len(order) + sum(counts), shape.tokens * token + 16), torch.nan, dtype=dtype)
        pages = self.pool[:, :-16].view(-1, shape.tokens, 2, shape.shared, shape.size)
        written = torch.Generator().manual_seed(1)  # the same keys and values, wherever pages lie
        for table, (start, rows, _) in zip(self.tables, requests, strict=True):
            for at in range(start + rows):
                values = torch.randn(pages.shape[2:], generator=written).to(dtype)
                pages[table[at // shape.tokens], at % shape.tokens] = values
        heads = shape.shared * shape.group
        total = sum(rows for _, rows, _ in requests)
        self.qkv = torch.randn(total, (heads + 2 * shape.shared) * shape.size, generator=written).to(dtype)
        self.pool, self.qkv = self.pool.to(DEVICE), self.qkv.to(DEVICE)

    def rows(self, chosen: list[int]) -> tuple[PagedRows, torch.Tensor]:
        """What is attended for the chosen requests, and their rows."""
        firsts = torch.tensor([0, *(rows for _, rows, _ in self.requests)]).cumsum(0).tolist()
        spans, first = [], 0
        for number in chosen:
            start, rows, prompt = self.requests[number]
            spans.append(Span(first, rows, start, prompt))
            first += rows
        qkv = torch.cat([self.qkv[firsts[number] : firsts[number + 1]] for number in chosen])
        return self.made([self.tables[number] for number in chosen], spans, DEVICE), qkv

    def attended(self, chosen: list[int], run=attend_by_triton, dtype=None) -> list[torch.Tensor]:
        """The results of the chosen requests' rows, run together; memory that is not written is poisoned."""
        rows, qkv = self.rows(chosen)
        dtype, width = dtype or self.dtype, self.shape.shared * self.shape.group * self.shape.size
        out = torch.full((len(qkv), width), torch.nan, dtype=dtype, device=DEVICE)
        run(out, qkv.to(dtype), self.pool.to(dtype), rows, self.shape)
        return list(out.split([self.requests[number][1] for number in chosen]))


def error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    both = torch.cat(truth)
    return float((torch.cat(found).double() - both).norm() / both.norm())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.size}x{shape.group}")
def test_rows_of_all_kinds_against_float64(shape: PageShape, dtype: torch.dtype) -> None:
    stored = Stored(shape, dtype)
    every = list(range(len(REQUESTS)))
    truth = stored.attended(every, attend_by_products, torch.float64)
    plain = stored.attended(every, attend_by_products)
    found = stored.attended(every)
    assert error(found, truth) <= 2 * error(plain, truth)
    for number in every:
        assert torch.equal(stored.attended([number])[0], found[number]), "the same bits alone"
    elsewhere = Stored(shape, dtype, seed=6)
    assert elsewhere.tables != stored.tables
    for own, other in zip(found, elsewhere.attended(every[::-1])[::-1], strict=True):
        assert torch.equal(own, other), "the same bits, wherever pages lie"


@pytest.mark.parametrize("tokens", [16, 29, 64])
def test_every_length_of_a_context(tokens: int) -> None:
    shape = PageShape(tokens, 1, 2, 16, 0.3)
    lengths = [*range(70), 95, 96, 97, CHUNK - 1, CHUNK, CHUNK + 1, 299]
    requests = [(length, 1, False) for length in lengths]
    stored = Stored(shape, torch.float32, requests)
    every = list(range(len(requests)))
    truth = stored.attended(every, attend_by_products, torch.float64)
    for own, expected in zip(stored.attended(every), truth, strict=True):
        assert error([own], [expected]) <= 1e-6


def test_a_prompt_s_row_has_the_same_bits_whatever_rows_run_with_it() -> None:
    """As where its beginning is in the pool already, for which another request has run it."""
    shape = PageShape(16, 2, 3, 64, 0.125, window=200)
    whole = Stored(shape, torch.float16, [(0, 300, True)])
    found = whole.attended([0])[0]
    for begun in (16, 288, 299):
        whole.requests, kept = [(begun, 300 - begun, True)], whole.qkv
        whole.qkv = kept[begun:]
        assert torch.equal(whole.attended([0])[0], found[begun:])
        whole.qkv = kept


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_what_is_not_finite_stays_with_its_own_request() -> None:
    shape = SHAPES[0]
    stored = Stored(shape, torch.float32)
    chosen = [1, 2, 3]
    before = stored.attended(chosen)
    stored.qkv[1] = torch.inf  # of the second request
    after = stored.attended(chosen)
    assert not torch.isfinite(after[0]).any()
    assert torch.equal(torch.cat(after[1:]), torch.cat(before[1:]))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spoilt", ["keys", "values"])
def test_a_token_that_is_not_finite_reaches_no_row_before_it(spoilt: str, dtype: torch.dtype) -> None:
    shape = replace(SHAPES[1], shared=2, window=None)
    stored = Stored(shape, dtype, [(0, 37, True)])
    rows, qkv = stored.rows([0])
    tokens = torch.arange(37)
    table = torch.tensor(stored.tables[0])
    places = torch.stack((table[tokens // shape.tokens], tokens % shape.tokens), dim=1).to(DEVICE)

    def attended() -> torch.Tensor:
        by_torch, given = stored.pool.clone(), qkv.clone()
        store_by_triton(given, stored.pool, places, rows, shape)
        assert torch.equal(given, qkv)
        store_rows(given, by_torch, places, shape)
        assert torch.equal(stored.pool.nan_to_num(7.0), by_torch.nan_to_num(7.0))
        out = torch.empty(37, 10 * shape.size, dtype=dtype, device=DEVICE)
        attend_by_triton(out, qkv, stored.pool, rows, shape)
        return out.view(37, 2, -1)  # by key head

    whole = attended()
    assert torch.isfinite(whole).all()
    part = qkv.view(37, -1, shape.size)[20, 10 + 2 * (spoilt == "values") + 1]  # of the second key head
    part[3] = torch.inf
    changed = attended()
    assert torch.equal(changed[:20], whole[:20])
    assert torch.equal(changed[:, 0], whole[:, 0])
    assert not torch.isfinite(changed[20:, 1]).all(-1).any()


def test_layers_of_other_sizes_have_launches_of_their_own() -> None:
    """Rows are made once for all layers of an iteration, whose heads and windows may differ."""
    shape = SHAPES[0]
    every = list(range(len(REQUESTS)))
    layers = [
        Stored(each, torch.float32)
        for each in (shape, replace(shape, window=9), replace(shape, shared=3), replace(shape, size=16))
    ]
    rows, _ = layers[0].rows(every)
    for each in layers:
        alone = each.attended(every)
        each.made = lambda *_: rows
        assert all(map(torch.equal, each.attended(every), alone))
        _, qkv = each.rows(every)
        token = torch.arange(len(qkv), device=DEVICE)
        places = torch.stack((token % len(each.pool), token // len(each.pool)), dim=1)
        by_torch = each.pool.clone()
        store_by_triton(qkv, each.pool, places, rows, each.shape)
        store_rows(qkv, by_torch, places, each.shape)
        assert torch.equal(each.pool.nan_to_num(7.0), by_torch.nan_to_num(7.0))


def test_only_rows_with_several_chunks_take_the_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = launching.launch
    monkeypatch.setattr(
        launching,
        "launch",
        lambda kernel, grid, *given, **named: (
            launched.append((kernel.fn.__name__, grid)),
            launch(kernel, grid, *given, **named),
        )[1],
    )
    shape = replace(SHAPES[0], window=None)
    stored = Stored(shape, torch.float32)
    stored.attended([1, 5])
    assert launched == [("attend", (2, 2, 2)), ("join", (2, 6))]
    launched.clear()
    stored.attended([1, 3])
    assert launched == [("attend", (8, 2, 1)), ("attend", (1, 2, 1))], "five rows of three heads a tile"
    launched.clear()
    stored.shape = replace(shape, window=7)
    stored.attended([1, 5])
    assert launched == [("attend", (2, 2, 1))], "a window that lies in one chunk"
