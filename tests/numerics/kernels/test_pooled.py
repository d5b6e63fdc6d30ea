"""Adapters in a pool: every way to compute their rows against float64, with ranks and sites mixed."""

from __future__ import annotations

import pytest
import torch

from plait_kernels import KernelError, Site, triton_backend
from plait_kernels.pooled import (
    AdapterPool,
    PooledAdapter,
    PooledRows,
    add_by_products,
    add_by_triton,
    place_vectors,
    places,
    pooled_library,
    pooled_linear,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SITES = (Site("q", 0, 37, 53), Site("k", 1, 37, 8), Site("other", 2, 5, 5), Site("v", 3, 37, 300))
NAMES = ("q", "k", "v")
RANKS = ((1, NAMES), (64, ("q", "v")), (5, ("k",)), (3, ("other",)), (17, NAMES))


class Pooled:
    """Adapters scattered over a pool of poisoned memory, and rows of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        noise = torch.Generator().manual_seed(3)
        self.weights: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
        adapters = []
        self.needed = sum(rank * 2 * len(names) for rank, names in RANKS)
        storage = torch.full((400 * self.needed,), torch.nan, dtype=dtype)
        places = torch.randperm(self.needed, generator=noise).tolist()
        for number, (rank, names) in enumerate(RANKS):
            offsets = torch.full((len(SITES), 2, rank), -1)
            own = {}
            for index, site in enumerate(SITES):
                if site.name not in names:
                    continue
                a = torch.randn(rank, site.in_features, generator=noise).to(dtype)
                b = torch.randn(site.out_features, rank, generator=noise).to(dtype)
                own[site.name] = (a, b)
                for side, rows in enumerate((a, b.T)):
                    for k, row in enumerate(rows):
                        offsets[index, side, k] = at = 400 * places.pop() + number
                        storage[at : at + len(row)] = row
            self.weights.append(own)
            adapters.append(PooledAdapter(rank, 0.5 + number, frozenset(names), offsets.to(DEVICE)))
        self.pool = AdapterPool(SITES, (storage.to(DEVICE),) * len(SITES))
        self.x = torch.randn(9, 37, generator=noise).to(dtype).to(DEVICE)
        self.weight = torch.randn(361, 37, generator=noise).to(dtype).to(DEVICE)
        self.owners = {0: 4, 2: 1, 3: 1, 4: 0, 5: 2, 7: 3}  # row: adapter; the others have none
        self.adapters = adapters

    def rows(self) -> PooledRows:
        return PooledRows(self.pool, tuple((row, self.adapters[at]) for row, at in self.owners.items()), ())

    def spans(self) -> list[tuple[int, int, PooledAdapter]]:
        return [(row, row + 1, self.adapters[at]) for row, at in self.owners.items()]

    def truth(self) -> torch.Tensor:
        out = self.x.double().cpu() @ self.weight.double().cpu().T
        starts = {"q": 0, "k": 53, "v": 61}
        for row, at in self.owners.items():
            for name, (a, b) in self.weights[at].items():
                if name in starts:
                    own = self.adapters[at].scale * (b.double() @ (a.double() @ self.x[row].double().cpu()))
                    out[row, starts[name] : starts[name] + len(b)] += own
        return out


def check(found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((found.double().cpu() - truth).norm() / truth.norm())
    assert error <= {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_rows_with_their_own_adapters(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Pooled(dtype)
    if compiled:
        assert DEVICE.type != "cpu" or pooled_library() is not None
    else:
        monkeypatch.setattr("plait_kernels.pooled._by_compiled", lambda *_: False)
    found = pooled_linear(made.x, made.weight, None, NAMES, made.rows())
    check(found, made.truth(), dtype)
    plain = torch.nn.functional.linear(made.x, made.weight)
    without = [row for row in range(9) if row not in made.owners or made.owners[row] == 3]
    assert torch.equal(found[without], plain[without])
    assert torch.equal(pooled_linear(made.x, made.weight, None, NAMES, made.rows()), found)


def test_a_prompt_s_rows_are_those_that_they_are_alone() -> None:
    made = Pooled(torch.float32)
    whole = made.x @ made.weight.T
    alone = whole.clone()
    add_by_products(whole, made.x, NAMES, made.pool, [(1, 7, made.adapters[4])])
    add_by_products(
        alone, made.x, NAMES, made.pool, [(row, row + 1, made.adapters[4]) for row in range(1, 7)]
    )
    check(whole, alone.double(), torch.float32)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled code is a CPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 7, 8, 13, 127, 128])
def test_prompts_by_compiled_code_are_their_rows_alone(count: int, dtype: torch.dtype) -> None:
    made = Pooled(dtype)
    x = torch.randn(count + 3, 37, generator=torch.Generator().manual_seed(5)).to(dtype)
    spans = ((1, 1 + count, made.adapters[4]), (1 + count, 3 + count, made.adapters[1]))
    together = PooledRows(made.pool, (), spans)
    alone = PooledRows(made.pool, tuple((row, each) for a, b, each in spans for row in range(a, b)), ())
    found = pooled_linear(x, made.weight, None, NAMES, together)
    rows = pooled_linear(x, made.weight, None, NAMES, alone)
    assert bool(together.long) == (count >= 128)
    assert torch.equal(found[:1], rows[:1])
    assert torch.equal(found[1 + count :], rows[1 + count :])
    if together.long:
        check(found, rows.double(), dtype)
    else:
        assert torch.equal(found, rows), "a row has the same bits, whatever lies beside it"
    truth = x.double() @ made.weight.double().T
    for first, stop, each in spans:
        for name, (a, b) in made.weights[made.adapters.index(each)].items():
            start = {"q": 0, "k": 53, "v": 61}[name]
            own = each.scale * (x[first:stop].double() @ a.double().T @ b.double().T)
            truth[first:stop, start : start + len(b)] += own
    check(found, truth, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_by_triton(dtype: torch.dtype) -> None:
    if not triton_backend.available(DEVICE):
        pytest.skip("Triton does not run here")
    made = Pooled(dtype)
    found = made.x @ made.weight.T
    add_by_triton(found, made.x, made.pool.storage[0], NAMES, made.rows())
    check(found, made.truth(), dtype)


def test_a_layer_that_no_adapter_targets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pooled(torch.float32)
    without_k, only_k = made.adapters[1], made.adapters[2]
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("plait_kernels.pooled._add_pooled", lambda *given: asked.append(given[2]))
    for single, spans in ((((0, without_k),), ()), ((), ((0, 4, without_k),))):
        rows = PooledRows(made.pool, single, spans)
        found = pooled_linear(made.x, made.weight[53:61], None, ("k",), rows)
        assert torch.equal(found, torch.nn.functional.linear(made.x, made.weight[53:61]))
    assert not asked
    pooled_linear(made.x, made.weight, None, NAMES, PooledRows(made.pool, ((0, only_k), (1, without_k)), ()))
    assert asked == [NAMES]


def test_an_unknown_site_is_refused() -> None:
    made = Pooled(torch.float32)
    with pytest.raises(KernelError, match="nobody"):
        pooled_linear(made.x, made.weight, None, ("nobody",), made.rows())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled code is a CPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_written_where_the_tables_say_and_nowhere_else(dtype: torch.dtype) -> None:
    made = Pooled(dtype)
    wanted = made.pool.storage[0].clone()
    made.pool.storage[0].fill_(torch.nan)
    assert places(made.pool.storage[0])
    for adapter, weights in zip(made.adapters, made.weights, strict=True):
        place_vectors(made.pool, adapter, weights)
    assert torch.equal(made.pool.storage[0].nan_to_num(9.0), wanted.nan_to_num(9.0))
    given = torch.bfloat16 if dtype == torch.float32 else torch.float32
    for number, (adapter, weights) in enumerate(zip(made.adapters, made.weights, strict=True)):
        noise = torch.Generator().manual_seed(number)
        other = {
            name: tuple((side + torch.randn(side.shape, generator=noise)).to(given) for side in own)
            for name, own in weights.items()
        }
        place_vectors(made.pool, adapter, other)
        for name, (a, b) in other.items():
            table = adapter.offsets[made.pool.index[name]]
            for k in range(adapter.rank):
                for side, vector in ((0, a[k]), (1, b[:, k])):
                    at = int(table[side, k])
                    found = made.pool.storage[0][at : at + len(vector)]
                    assert torch.equal(found, vector.to(dtype)), "rounded as torch rounds"
    weights = {name: (a.T, b) for name, (a, b) in made.weights[0].items()}
    with pytest.raises(KernelError, match=r"A is \(1, 37\), B \(53, 1\)"):
        place_vectors(made.pool, made.adapters[0], weights)
    with pytest.raises(KernelError, match="compiled code"):
        place_vectors(AdapterPool(SITES, (torch.zeros(9).half(),) * 4), made.adapters[0], {})


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled code is a CPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 3], ids=["whole lines", "no whole lines"])
def test_vectors_of_any_size_are_written_as_torch_rounds(
    dtype: torch.dtype, given: torch.dtype, shift: int
) -> None:
    noise = torch.Generator().manual_seed(7)
    odd = torch.tensor([0.0, 0.0, -torch.inf, torch.inf, -0.0, 1e-40, -torch.nan, 3.4e38, 1.00390625])
    odd[:2] = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)  # NaN, too
    for rank, size in ((1, 32), (8, 64), (15, 31), (16, 100), (17, 96), (40, 160)):
        offsets = torch.arange(2 * rank).view(1, 2, rank) * 192 + shift
        storage = torch.full((2 * rank * 192 + 64,), torch.nan, dtype=dtype)
        begin = -storage.data_ptr() // storage.element_size() % 32  # without a shift vectors begin a line
        storage = storage[begin:]
        a = torch.randn(rank, size, generator=noise)
        b = torch.randn(size + 8, rank, generator=noise)
        for side in (a, b):
            side.view(-1)[torch.randint(side.numel(), (9,), generator=noise)] = odd
        a, b = a.to(given), b.to(given)
        pool = AdapterPool((Site("q", 0, size, size + 8),), (storage,))
        place_vectors(pool, PooledAdapter(rank, 1.0, frozenset("q"), offsets), {"q": (a, b)})
        wanted = torch.full_like(storage, torch.nan)
        for k in range(rank):
            for side, vector in enumerate((a[k], b[:, k])):
                first = int(offsets[0, side, k])
                wanted[first : first + len(vector)] = vector.to(dtype)
        assert torch.equal(storage.nan_to_num(9.0), wanted.nan_to_num(9.0)), "and nothing else is written"
