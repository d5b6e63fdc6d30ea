"""mLoRA's three bubble formulas (§3.2.2), exact in the simulator for equal microbatches."""

from fractions import Fraction

import pytest

from plait_bench.mlora import gpipe, lorapp, simulated_gpipe, simulated_lorapp

STAGES = range(2, 9)
SPLITS = (1, 2, 3, 5, 8)  # none, and into fewer and more parts than there are stages


@pytest.mark.parametrize("stages", STAGES)
def test_interleaved_jobs_with_and_without_splitting(stages: int) -> None:
    for jobs in (*range(1, stages + 2), 12):  # fewer than stages, as many, and more
        assert lorapp(stages, jobs, 1) == max(Fraction(stages - jobs, stages), 0)  # (D − L) / D
        for split in SPLITS:
            assert simulated_lorapp(stages, jobs, split) == lorapp(stages, jobs, split), (jobs, split)


@pytest.mark.parametrize("stages", STAGES)
def test_gpipe(stages: int) -> None:
    for split in SPLITS:
        assert simulated_gpipe(stages, split) == gpipe(stages, split)


def test_the_seconds_of_a_forward_and_a_backward_do_not_matter() -> None:
    for forward, backward in ((1, 1), (3, 2), (1, 5)):
        for stages, jobs, split in ((4, 1, 1), (4, 3, 1), (4, 1, 4), (8, 2, 3), (3, 7, 2)):
            got = simulated_lorapp(stages, jobs, split, forward=forward, backward=backward)
            assert got == lorapp(stages, jobs, split)


def test_published_examples() -> None:
    assert lorapp(4, 4, 1) == 0  # four jobs fill four stages (§4.3)
    assert gpipe(4, 4) == Fraction(3, 7)
    assert lorapp(4, 1, 4) == gpipe(4, 4)  # one job alone gains nothing
