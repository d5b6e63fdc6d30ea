"""The two-stage packer against brute force and greedy; its bounds, limits and repeatability."""

import math
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch
from plait.planner import packing_exact
from plait.planner.packing import first_fit_decreasing, padded
from plait.planner.packing_exact import (
    GREEDY,
    Packing,
    PackingLimits,
    emptiest,
    fits,
    pack_all,
    packed_batches,
    solve_packing,
)
from plait.planner.solver import Limit, Limits, Solution
from plait.planner.subset_sums import bins_bound, combine, fill_bound, least_fill, most_tokens, reachable_sums

Lengths = list[list[int]]


def brute_force(lengths: Lengths, capacity: int, tile: int) -> tuple[int, int]:
    """Fewest bins, then the least padded tokens of the least full bin, by trying every partition."""
    items = [(a, length) for a, own in enumerate(lengths) for length in own]
    best = (len(items) + 1, 0)

    def fill(tokens: dict[int, int]) -> int:
        return sum(-(-amount // tile) * tile for amount in tokens.values())

    def place(done: int, bins: list[dict[int, int]]) -> None:
        nonlocal best
        if len(bins) > best[0]:
            return
        if done == len(items):
            best = min(best, (len(bins), min(map(fill, bins))))
            return
        batch, length = items[done]
        for tokens in bins:
            before = tokens.get(batch, 0)
            tokens[batch] = before + length
            if fill(tokens) <= capacity:
                place(done + 1, bins)
            tokens[batch] = before
        place(done + 1, [*bins, {batch: length}])

    place(0, [])
    return best


def instance(rng: random.Random, samples: int) -> tuple[Lengths, int, int]:
    """Lengths by batch, capacity and tile; most need several bins and are not settled by greedy."""
    tile = rng.choice([1, 1, 4, 8])
    capacity = rng.randint(6, 12) * 8 + rng.randint(0, 7)
    longest = capacity // tile * tile * rng.choice([2, 3, 4]) // 4
    lengths: Lengths = [[] for _ in range(rng.randint(1, 3))]
    for _ in range(samples):
        rng.choice(lengths).append(rng.randint(max(1, longest // 5), longest))
    return [own for own in lengths if own], capacity, tile


def check(lengths: Lengths, capacity: int, tile: int, bins: object) -> None:
    assert isinstance(bins, tuple)
    places = sorted(item for members in bins for item in members)
    assert places == [(a, p) for a, own in enumerate(lengths) for p in range(len(own))]
    for members in bins:
        tokens = [sum(lengths[a][p] for a, p in members if a == batch) for batch in range(len(lengths))]
        assert sum(-(-amount // tile) * tile for amount in tokens) <= capacity


def proved(packing: Packing) -> bool:
    """Whether both stages are."""
    return len(packing.bins) == packing.bins_bound and packing.fill == packing.fill_bound


def test_small_instances_equal_brute_force() -> None:
    rng, methods = random.Random(11), set()
    for _ in range(300):
        lengths, capacity, tile = instance(rng, rng.randint(4, 8))
        packing = solve_packing(lengths, capacity=capacity, tile=tile)
        check(lengths, capacity, tile, packing.bins)
        assert (len(packing.bins), packing.fill) == brute_force(lengths, capacity, tile), (lengths, tile)
        assert proved(packing)
        assert packing.limit_hit is None
        methods.add(packing.method)
    assert methods == {"greedy", "subset sums", "milp"}  # the instances exercise every part


def test_never_worse_than_greedy_and_never_below_the_bounds() -> None:
    rng = random.Random(12)
    better = 0
    for _ in range(1000):
        lengths, capacity, tile = instance(rng, rng.randint(9, 24))
        limits = PackingLimits(rounds=2, exact_samples=0, nodes=0)
        packing = solve_packing(lengths, capacity=capacity, tile=tile, limits=limits)
        check(lengths, capacity, tile, packing.bins)
        greedy = first_fit_decreasing(lengths, capacity=capacity, tile=tile)
        ours = (len(packing.bins), packing.fill)
        theirs = (len(greedy), least_fill(greedy, lengths, tile))
        assert ours <= theirs
        assert packing.bins_bound <= len(packing.bins)
        assert packing.fill_bound <= packing.fill
        better += ours < theirs
    assert better > 250  # the instances leave something to gain


def test_solver_on_larger_instances_is_never_worse_and_repeats() -> None:
    rng = random.Random(13)
    for _ in range(4):
        lengths, capacity, tile = instance(rng, 20)
        limits = PackingLimits(rounds=0, exact_samples=0, nodes=5, gap=0.0)
        first = solve_packing(lengths, capacity=capacity, tile=tile, limits=limits)
        greedy = solve_packing(lengths, capacity=capacity, tile=tile, limits=GREEDY)
        assert (len(first.bins), first.fill) <= (len(greedy.bins), greedy.fill)
        assert first == solve_packing(lengths, capacity=capacity, tile=tile, limits=limits)


def test_a_reached_limit_is_reported_and_greedy_is_the_fallback() -> None:
    lengths = [[51, 49, 48, 47, 46, 35, 34, 33, 28, 27, 26, 25, 24, 23, 22, 21, 19, 17]]
    limits = PackingLimits(rounds=0, exact_samples=0, nodes=1, gap=0.0)
    packing = solve_packing(lengths, capacity=100, tile=1, limits=limits)
    greedy = solve_packing(lengths, capacity=100, tile=1, limits=GREEDY)
    assert (len(packing.bins), packing.fill) <= (len(greedy.bins), greedy.fill)
    assert proved(packing) or packing.limit_hit == "nodes"
    assert greedy.method == "greedy"


def test_the_least_full_microbatch_is_last() -> None:
    packing = solve_packing([[6, 6, 5, 4, 3]], capacity=10)
    fills = [sum([6, 6, 5, 4, 3][p] for _, p in members) for members in packing.bins]
    assert fills == [10, 9, 5]
    assert packing.fill == 5


def test_bounds_hold_on_every_small_instance() -> None:
    rng = random.Random(14)
    for _ in range(200):
        lengths, capacity, tile = instance(rng, rng.randint(3, 7))
        bins, fill = brute_force(lengths, capacity, tile)
        assert bins_bound(lengths, capacity=capacity, tile=tile) <= bins
        assert fill_bound(lengths, bins, capacity=capacity, tile=tile) <= fill


def test_long_samples_raise_the_bound_above_the_volume() -> None:
    # three samples above half of the capacity never share, whatever the volume says
    assert bins_bound([[6, 6, 6]], capacity=10) == 3
    assert bins_bound([[6, 6, 6, 4, 4, 4]], capacity=10) == 3
    assert bins_bound([[5, 5, 5]], capacity=10) == 2


def test_subset_sums_and_their_combination() -> None:
    sums = reachable_sums([3, 5], 10)
    assert [bit for bit in range(11) if sums >> bit & 1] == [0, 3, 5, 8]
    assert most_tokens(sums, 2, 4).tolist() == [0, 3, 8]
    other = reachable_sums([4], 8)
    assert combine(most_tokens(sums, 2, 4), most_tokens(other, 2, 4)).tolist() == [0, 4, 8]


def test_large_batches_and_capacities() -> None:
    rng = random.Random(16)
    lengths = [[rng.randint(1, 900) for _ in range(400)] for _ in range(2)]
    packing = solve_packing(lengths, capacity=8192, tile=1)
    check(lengths, 8192, 1, packing.bins)
    assert proved(packing)
    wide = solve_packing(lengths, capacity=100_000, tile=16)
    check(lengths, 100_000, 16, wide.bins)
    assert len(wide.bins) == wide.bins_bound
    one = solve_packing(lengths, capacity=1 << 20, tile=16)
    assert (len(one.bins), proved(one)) == (1, True)


def test_thousands_of_samples_are_not_packed_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling bins visits every sample for every bin, so its rounds are bounded by both."""
    calls = []
    monkeypatch.setattr(packing_exact, "fill_bins", lambda *_, **__: calls.append(1) or [])
    lengths = [random.Random(0).choices(range(10, 60), k=12_000)]
    packing = solve_packing(lengths, capacity=512)
    assert packing.method == "greedy"
    assert len(packing.bins) > 800
    assert not calls


def test_a_packing_says_how_far_it_may_be_from_the_optimum() -> None:
    turn = [global_batch("a", [51, 49, 48, 47, 46, 35, 34]), global_batch("b", [28, 27, 26, 25, 24, 23, 22])]
    packed = pack_all([turn], capacity=100, tile=8, limits=PackingLimits(rounds=0, exact_samples=0, nodes=0))
    assert packed[0].gap is not None
    assert packed[0].gap >= 0
    exact = pack_all([turn], capacity=100, tile=8, limits=PackingLimits(exact_samples=14))
    assert (exact[0].gap, exact[0].limit_hit) == (0, None)


def global_batch(job: str, lengths: list[int]) -> GlobalBatch:
    count = len(lengths)
    return GlobalBatch(job, 0, tuple(range(count)), (0,) * count, tuple(lengths), 1.0 / sum(lengths))


def test_microbatches_and_a_process_pool_give_the_same() -> None:
    rng = random.Random(15)
    turns = [
        [global_batch(f"j{a}", [rng.randint(1, 200) for _ in range(6)]) for a in range(2)] for _ in range(6)
    ]
    here = pack_all(turns, capacity=512, tile=16)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        there = pack_all(turns, capacity=512, tile=16, pool=pool)
    assert here == there
    packed = here[0].microbatches(replica=1)
    assert [(item.replica, item.index) for item in packed] == [(1, place) for place in range(len(packed))]
    assert all(item.padded(16) <= 512 for item in packed)


def test_empty_and_oversized_batches() -> None:
    assert packed_batches([], capacity=8).bins == ()
    with pytest.raises(CapacityError, match="sample 1 of job long"):
        packed_batches([global_batch("long", [3, 9])], capacity=8)
    assert padded(9, 8) == 16


def test_the_clock_stays_reported_when_another_limit_is_reached_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the clock keeps a plan from repeating: what strikes later must not hide it."""
    lengths = [[9, 8, 7, 6, 5], [9, 7, 5, 5, 3]]
    limits = PackingLimits(rounds=0, exact_samples=100)

    def ended(limit: Limit) -> Solution:
        return Solution("unknown", None, -math.inf, (), limit)

    monkeypatch.setattr(packing_exact, "fits", lambda *_, **__: (None, ended("time")))
    monkeypatch.setattr(packing_exact, "emptiest", lambda *_, **__: (None, ended("nodes")))
    monkeypatch.setattr(packing_exact, "bins_bound", lambda *_, **__: 1)
    assert solve_packing(lengths, capacity=20, limits=limits).limit_hit == "time"


@pytest.mark.parametrize("tile", [1, 4])
def test_an_empty_bin_is_removed(tile: int) -> None:
    lengths = [[5, 3], [4]]
    start = [[(0, 0)], [(0, 1)], [(1, 0)]]  # one bin holds them all
    bins, solution = emptiest(lengths, start, capacity=16, tile=tile, limits=Limits())
    assert bins is not None
    assert solution.status == "optimal"
    assert solution.objective == (3 if tile == 1 else 4)
    assert all(bins)
    loose, _ = fits(lengths, 3, capacity=16, tile=tile, limits=Limits())
    assert loose is not None
    assert all(loose)
