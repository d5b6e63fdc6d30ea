"""The benchmark of orders: what it simulates, and where its stages wait for each other."""

from __future__ import annotations

import pytest

from plait.core.errors import ConfigError
from plait.planner.instructions import wrong_instructions
from plait_bench.pipeline_orders import Case, OrderOptions, case_of, pipeline_orders, with_collectives

ASKED = OrderOptions()


@pytest.mark.parametrize("adapters", [1, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_gpipe_waits_as_its_formula_says(stages: int, adapters: int) -> None:
    idle = (stages - 1) / (ASKED.microbatches + stages - 1)
    assert case_of("gpipe", stages, adapters, ASKED).waiting == pytest.approx(idle)


def test_more_adapters_fill_the_pipeline_of_plait_and_not_that_of_1f1b() -> None:
    plait, others = ([case_of(name, 4, n, ASKED).waiting for n in (1, 4)] for name in ("plait", "1f1b"))
    assert plait[1] < 0.25 * plait[0]
    assert others[1] == pytest.approx(others[0])


def test_with_collectives_each_stage_steps_before_it_takes_what_follows() -> None:
    case = case_of("plait", 3, 2, ASKED)
    found = with_collectives(case)
    for number, (plain, own) in enumerate(zip(case.lists, found.lists, strict=True)):
        assert sorted(plain) == sorted(own)
        assert steps(case, number) == steps(found, number)
        assert (plain == own) == (number == 0)
    assert any(
        "without its whole norm" in fault for fault in wrong_instructions(found.lists, case.microbatches)
    )


def steps(case: Case, number: int) -> list[object]:
    return [each for each in case.lists[number] if each.kind == "step"]


@pytest.mark.parametrize("wrong", [{"orders": ["zigzag"]}, {"stages": [0]}, {"steps": 0}])
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        pipeline_orders(None, (), wrong)  # type: ignore[arg-type]
