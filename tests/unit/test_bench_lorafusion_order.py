"""LoRAFusion's own groups, order and merging: nothing lost, steps kept apart, the last microbatch filled."""

from __future__ import annotations

from plait.core.plans import GlobalBatch
from plait.cost.time import LayerTime, TimeModel
from plait.planner.packing import PackedBatches
from plait.simulate.forecast import Machine
from plait.simulate.report import measure
from plait_bench.lorafusion_order import grouped, next_fit, ordered

CAPACITY, TILE = 8, 1
MACHINE = Machine(TimeModel(2, {1: LayerTime(0.0, 1.0, 0.0)}), (1, 1))


def batch(job: str, step: int, *lengths: int) -> GlobalBatch:
    samples = tuple(range(len(lengths)))
    return GlobalBatch(job, step, samples, (0,) * len(samples), lengths, 1.0 / sum(lengths))


def packed(*batches: GlobalBatch) -> PackedBatches:
    return next_fit(batches, capacity=CAPACITY, tile=TILE)


def works(turns: list[PackedBatches], *, merging: bool) -> list[int]:
    """Tokens of each microbatch, in their order."""
    pipeline = ordered(turns, MACHINE, capacity=CAPACITY, tile=TILE, merging=merging)
    measure({0: pipeline})  # it can be run
    return [work.tokens for work in pipeline.works]


def test_samples_fill_one_microbatch_after_another() -> None:
    assert packed(batch("a", 0, 5, 2, 4), batch("b", 0, 3, 6)).bins == (
        *(((0, 0), (0, 1)), ((0, 2), (1, 0)), ((1, 1),)),
    )


def test_the_last_microbatch_takes_the_shortest_samples_of_the_next_turns_last_one() -> None:
    turns = [packed(batch("a", 0, 8, 4)), packed(batch("b", 0, 8, 3, 2)), packed(batch("a", 1, 8, 4))]
    assert works(turns, merging=False) == [8, 4, 8, 5, 8, 4]
    assert works(turns, merging=True) == [8, 6, 8, 3, 8, 4]


def test_a_whole_microbatch_is_taken_where_it_fits() -> None:
    turns = [packed(batch("a", 0, 8, 4)), packed(batch("b", 0, 8, 1, 2)), packed(batch("a", 1, 8))]
    assert works(turns, merging=True) == [8, 7, 8, 8]


def test_a_turn_alone_between_two_of_a_job_is_not_emptied_and_no_ops_keep_steps_apart() -> None:
    turns = [packed(batch("a", step, 4)) for step in range(2)]
    assert works(turns, merging=True) == [4, 0, 4]


def test_more_pipelines_keep_steps_further_apart() -> None:
    turns = [packed(batch("a", step, 4)) for step in range(2)]
    pipeline = ordered(turns, MACHINE, capacity=CAPACITY, tile=TILE, merging=True, stages=4)
    assert [work.tokens for work in pipeline.works] == [4, 0, 0, 0, 4]


def test_a_microbatch_that_became_fuller_by_merging_moves_to_its_place() -> None:
    turns = [packed(batch("a", 0, 6, 3)), packed(batch("b", 0, 8, 4)), packed(batch("a", 1, 8))]
    assert works(turns, merging=False) == [6, 3, 8, 4, 8]
    assert works(turns, merging=True) == [7, 6, 8, 8]


def test_all_turns_get_their_no_ops_at_once() -> None:
    """Both second steps are a microbatch too near, so that the last one stands further off than it must."""
    turns = [packed(batch(job, step, 8)) for step in range(2) for job in "ab"]
    pipeline = ordered(turns, MACHINE, capacity=CAPACITY, tile=TILE, merging=False, stages=3)
    assert [work.tokens for work in pipeline.works] == [8, 8, 0, 8, 0, 8]


def test_the_longest_and_the_shortest_share_a_group_while_others_keep_their_steps_apart() -> None:
    """Each batch has 2, 3 and 4 microbatches of 8 tokens."""
    trace = {"short": [[4] * 4], "middle": [[6] * 4], "long": [[8] * 4]}
    assert grouped(trace, capacity=8, stages=4) == (("long", "short"), ("middle",))
    assert grouped(trace, capacity=8, stages=5) == (("long",), ("middle", "short"))
    assert grouped(trace, capacity=8, stages=6) == (("long",), ("middle",), ("short",))
    # No grouping keeps so many stages busy: each job alone, in the order given.
    assert grouped(trace, capacity=8, stages=7) == (("short",), ("middle",), ("long",))
    four = trace | {"other": [[7] * 4]}
    assert grouped(four, capacity=8, stages=4) == (("long", "short"), ("other", "middle"))
    assert grouped({"one": [[8]]}, capacity=8, stages=1) == (("one",),)


def test_batches_are_counted_a_quarter_of_a_deviation_short() -> None:
    """Four samples of 7 tokens in the mean have 4 microbatches of 9; if they spread by 4.6, 3."""
    pair = {"b": [[12] * 4], "c": [[2] * 4]}
    assert grouped({"a": [[7] * 4], **pair}, capacity=9, stages=5)[0] == ("b", "c")
    assert grouped({"a": [[3, 3, 11, 11]], **pair}, capacity=9, stages=5)[0] == ("b",)
