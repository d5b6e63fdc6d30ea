"""The pool's pages: each is free, owned or shared, whatever joins, ends and is cancelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.serve.driver import Pace
from plait.serve.scheduler import Demand, FreePages, Need, PagePool, Scheduler, Shared


def check(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    owned = [page for pages in pool.owned.values() for page in pages]
    shared = [page for each in pool.shared.values() for page in each.pages]
    assert sorted([*pool._free, *owned, *shared]) == list(range(pool.pages))
    assert list(scheduler.running) == list(pool.owned)


# A request of so many tokens arrives, which shares with others of its kind; the one with this place among
# those left is removed; or one admits, and what is shared is filled.
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 3), st.integers(0, 4)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("admit"), st.booleans(), st.just(0), st.just(0)),
    ),
    min_size=20,  # fewer make no pool full
    max_size=60,
)


def why_it_waits(scheduler: Scheduler, new: tuple[int, ...], demands: dict[int, Demand], prompts: int) -> str:
    """What keeps the head of the queue waiting after these were admitted; "" if nothing does."""
    (head,), pool = scheduler.ahead(1), scheduler.pool
    there = [need for need in head.needs if need.key in pool.shared]
    idle = sum(need.pages for need in there if not pool.shared[need.key].users)
    reasons = {
        "running": len(scheduler.running) == scheduler._most,
        "prompts": bool(new) and sum(demands[each].prompt for each in new) + head.prompt > prompts,
        "room": head.most - sum(need.pages for need in there) > pool.unused - idle,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@given(MOVES, st.integers(1, 12), st.integers(1, 6), st.integers(1, 60))
def test_each_page_is_free_owned_or_shared_and_none_twice(
    moves: list[tuple[str, int, int, int]], pages: int, most: int, prompts: int
) -> None:
    scheduler = Scheduler(pages, most_prompt_tokens=prompts, most=most)
    demands: dict[int, Demand] = {}
    admitted: list[int] = []
    for number, (move, first, second, kind) in enumerate(moves):
        if move == "add":
            needs = (Need(("adapter", kind), kind % 3 + 1), Need(("prompt", kind), 1))[: kind % 3]
            demand = Demand(number, first, second, needs)
            if demand.most <= pages:
                demands[number] = demand
                scheduler.add(demand)
        elif move == "remove" and demands:
            removed = sorted(demands)[first % len(demands)]
            del demands[removed]
            scheduler.remove(removed)
            assert removed not in scheduler.pool.owned
        elif move == "admit":
            before = list(scheduler.running)
            new = scheduler.admit()
            assert list(scheduler.running) == [*before, *new]
            assert not scheduler.waiting or why_it_waits(scheduler, new, demands, prompts)
            admitted += new
            assert len(new) <= 1 or sum(demands[each].prompt for each in new) <= prompts
            for each in scheduler.pool.shared.values():
                each.value = each.value or first or None
        check(scheduler)
        assert len(scheduler.running) <= most
        assert set(scheduler.running) <= set(demands)
        assert scheduler.waiting == len(demands) - len(scheduler.running)
        users: dict[object, int] = {}
        for each in scheduler.running:
            assert len(scheduler.pool.owned[each]) == demands[each].pages
            for need in demands[each].needs:
                users[need.key] = users.get(need.key, 0) + 1
                assert len(scheduler.pool.shared[need.key].pages) == need.pages
        for key, entry in scheduler.pool.shared.items():
            assert entry.users == users.get(key, 0)
            assert entry.users or entry.value is not None, "what was not filled does not stay"
    assert admitted == sorted(admitted), "in order of arrival"


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=20))
def test_every_request_runs_in_the_end(sizes: list[tuple[int, int]]) -> None:
    scheduler = Scheduler(5, most_prompt_tokens=8, most=3)
    for number, (size, kind) in enumerate(sizes):
        scheduler.add(Demand(number, size, size, (Need(("adapter", kind), 1),)))
    ended: list[int] = []
    while scheduler.waiting or scheduler.running:
        scheduler.admit()
        assert scheduler.running, "the head of the queue fits into an empty pool"
        for each in scheduler.pool.shared.values():
            each.value = True
        first = next(iter(scheduler.running))
        scheduler.remove(first)
        ended.append(first)
        check(scheduler)
    assert ended == list(range(len(sizes)))
    assert scheduler.pool.unused == 5


def test_pages_of_one_owner_follow_each_other_as_far_as_there_are_any() -> None:
    free = FreePages(20)
    owners = [free.take(count) for count in (4, 2, 5, 3, 6)]
    assert [page for own in owners for page in own] == list(range(20))
    for place in (4, 0, 2):
        free.give(owners[place])
    assert list(free) == [0, 1, 2, 3, 6, 7, 8, 9, 10, 14, 15, 16, 17, 18, 19]
    assert free.take(3) == (0, 1, 2), "of the shortest run that has room"
    assert free.take(1) == (3,)
    free.give(owners[1])
    assert free.take(9) == (4, 5, 6, 7, 8, 9, 10, 14, 15), "else of the longest ones"
    assert list(free) == [16, 17, 18, 19]
    assert len(free) == 4
    assert free.take(0) == ()


def test_unused_pages_are_counted_while_another_thread_changes_the_pool() -> None:
    pool = PagePool(6)

    class Changing(Shared):
        @property
        def users(self) -> int:  # type: ignore[override]
            pool.shared[("new", len(pool.shared))] = Shared(())
            return 0

        @users.setter
        def users(self, _: int) -> None:
            """As the constructor sets it."""

    pool.shared[("old",)] = Changing((0, 1))
    assert pool.unused == 8


def test_what_is_shared_stays_until_its_room_is_needed_the_least_recent_goes_first() -> None:
    pool = PagePool(6)
    for owner, key in enumerate("aba"):
        assert pool.take(owner, 0, (Need((key,), 2),))
        pool.shared[(key,)].value = key
        pool.release(owner)
    assert list(pool.shared) == [("b",), ("a",)]
    assert pool.take(9, 1, (Need(("c",), 2),))
    assert list(pool.shared) == [("a",), ("c",)], "b made room"
    assert pool.unused == 3
    assert not pool.take(10, 4)
    assert pool.take(10, 1)
    assert list(pool.shared) == [("a",), ("c",)], "nothing had to make room"
    assert pool.take(11, 2)
    assert list(pool.shared) == [("c",)], "what is used does not go"


def test_what_is_shared_and_not_filled_stays_with_the_last_who_needs_it() -> None:
    pool = PagePool(3)
    for owner in (1, 2):
        assert pool.take(owner, 0, (Need(("a",), 3),))
    pool.release(1)
    assert list(pool.shared) == [("a",)]
    pool.release(2)
    assert not pool.shared


def test_prompts_of_one_iteration_are_limited_unless_it_is_one() -> None:
    scheduler = Scheduler(9, most_prompt_tokens=8, most=9)
    for number, prompt in enumerate((9, 3, 5, 1)):
        scheduler.add(Demand(number, prompt, 1))
    assert [scheduler.admit() for _ in range(4)] == [(0,), (1, 2), (3,), ()]


def test_what_never_fits_is_refused() -> None:
    scheduler = Scheduler(4, most_prompt_tokens=8, most=1)
    scheduler.add(Demand(0, 1, 2, (Need(("a",), 2),)))
    with pytest.raises(ValueError, match="never fits into 4 pages"):
        scheduler.add(Demand(1, 1, 2, (Need(("a",), 3),)))


def test_the_pace_of_a_queue_says_how_long_the_next_one_waits() -> None:
    pace = Pace()
    assert pace.wait(1000) == 0, "nothing is known"
    for _ in range(3):
        pace.note(1.0, 1)
    assert pace.wait(1000) == 0, "too few have left"
    for _ in range(1000):
        pace.note(1.0, 2)
    assert pace.wait(0) == pytest.approx(0.5)
    assert pace.wait(9) == pytest.approx(5.0)
    for _ in range(200):
        pace.note(1.0, 0)
    assert pace.wait(9) == 0, "what was long ago says nothing"
