"""What a step asks of a GPU, counted without one, at a small size."""

from __future__ import annotations

import pytest

from plait.core.settings import RunSettings
from plait_bench.figures import Report
from plait_bench.gpu_counts import _attention_bytes, gpu_counts

OPTIONS = {
    "layers": 1,
    "adapters": 3,
    "length": 20,
    "rank": 8,
    "dropout": 0.1,
    "labelled": 0.5,
    "repeats": 1,
}


@pytest.fixture(scope="module")
def report() -> Report:
    return gpu_counts(RunSettings(), [], OPTIONS)


def ours(report: Report, name: str) -> float:
    return next(figure.ours for figure in report.figures if figure.name == name)


def test_a_layer_s_call_keeps_to_its_launches(report: Report) -> None:
    calls = [figure for figure in report.figures if figure.name.endswith("ward: launches")]
    assert len(calls) == 8 + 2
    assert all(figure.within for figure in calls[:8])


def test_every_part_of_a_step_is_counted(report: Report) -> None:
    for part in ("forward", "backward", "optimiser"):
        assert ours(report, f"step, {part}: launches") > 0
    assert ours(report, "step: waits of the host") >= 1
    assert ours(report, "microbatch: host time") > 0


def test_an_iteration_of_generation_waits_once_and_moves_little_beside_its_keys(report: Report) -> None:
    assert ours(report, "iteration: launches") > 0
    assert ours(report, "iteration: waits of the host") == 1
    moved = next(figure for figure in report.figures if figure.name.startswith("iteration: attention"))
    assert moved.within
    one, both = (_attention_bytes(keys) for keys in (256, 257))
    assert one[0] == one[1]
    assert both[0] > both[1]


def test_tables_of_a_microbatch_are_sent_at_once_before_its_first_kernel(report: Report) -> None:
    notes = {figure.name: figure.note for figure in report.figures}
    assert notes["step, forward: launches"].startswith("2 uploads, 0 waits")  # with the ends of the samples
    assert notes["step, backward: launches"].startswith("0 uploads, 0 waits")
