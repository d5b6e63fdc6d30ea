"""The pool's pages: each is free or has one owner, whatever joins, ends and is cancelled."""

from hypothesis import given
from hypothesis import strategies as st

from plait.serve.scheduler import Demand, Scheduler

PAGE = 4


def check(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    owned = [page for pages in pool.owned.values() for page in pages]
    assert sorted([*pool.free, *owned]) == list(range(pool.pages))
    assert list(scheduler.running) == list(pool.owned)


# A request of so many tokens arrives; the one with this place among those left is removed; or one admits.
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 20)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("admit"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(MOVES, st.integers(1, 12), st.integers(1, 6), st.integers(1, 60))
def test_free_and_owned_pages_are_all_pages_and_none_twice(
    moves: list[tuple[str, int, int]], pages: int, most: int, prompts: int
) -> None:
    scheduler = Scheduler(pages, PAGE, most_prompt_tokens=prompts, most=most)
    demands: dict[int, Demand] = {}
    admitted: list[int] = []
    for number, (move, first, second) in enumerate(moves):
        if move == "add" and first + second <= pages * PAGE:
            demands[number] = Demand(number, first, first + second)
            scheduler.add(demands[number])
        elif move == "remove" and demands:
            removed = sorted(demands)[first % len(demands)]
            del demands[removed]
            scheduler.remove(removed)
            assert removed not in scheduler.pool.owned
        elif move == "admit":
            new = scheduler.admit()
            admitted += new
            assert len(new) <= 1 or sum(demands[each].prompt for each in new) <= prompts
        check(scheduler)
        assert len(scheduler.running) <= most
        assert set(scheduler.running) <= set(demands)
        assert scheduler.waiting == len(demands) - len(scheduler.running)
        for each in scheduler.running:
            assert len(scheduler.pool.owned[each]) == -(-demands[each].tokens // PAGE)
    assert admitted == sorted(admitted), "in order of arrival"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_every_request_runs_in_the_end(sizes: list[int]) -> None:
    scheduler = Scheduler(5, PAGE, most_prompt_tokens=8, most=3)
    for number, size in enumerate(sizes):
        scheduler.add(Demand(number, size, size))
    ended: list[int] = []
    while scheduler.waiting or scheduler.running:
        scheduler.admit()
        assert scheduler.running, "the head of the queue fits into an empty pool"
        first = next(iter(scheduler.running))
        scheduler.remove(first)
        ended.append(first)
        check(scheduler)
    assert ended == list(range(len(sizes)))
    assert len(scheduler.pool.free) == 5
