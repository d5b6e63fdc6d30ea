"""The plan of one of LobRA's tasks alone: found by exchanges of replicas, for a made-up cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from plait.core.settings import ClusterSettings, RunSettings
from plait.cost.profiles import ClusterProfile
from plait_bench.inputs import read_profile
from plait_bench.lobra import Rows
from plait_bench.lobra_sequential import exchanges, fastest

ROOT = Path(__file__).resolve().parents[2]
WANTED: Rows = ((1, 1, 6), (2, 1, 1), (8, 1, 1))


@pytest.fixture(scope="module")
def profile() -> ClusterProfile:
    cluster = yaml.safe_load((ROOT / "conf/cluster/a100_40g_llama2_7b.yaml").read_text(encoding="utf-8"))
    return read_profile(replace(RunSettings(), cluster=ClusterSettings(**cluster)))


def far(rows: Rows, wanted: Rows = WANTED) -> float:
    """Devices of replicas that are in one plan and not in the other, and one second."""
    own, other = ({(tp, pp): count for tp, pp, count in plan} for plan in (rows, wanted))
    return 1.0 + sum(
        tp * pp * abs(own.get((tp, pp), 0) - other.get((tp, pp), 0)) for tp, pp in own.keys() | other.keys()
    )


def test_an_exchange_keeps_the_devices(profile: ClusterProfile) -> None:
    made = list(exchanges(profile, ((1, 1, 8), (8, 1, 1))))
    assert len(made) == len(set(made))
    assert {sum(tp * pp * count for tp, pp, count in rows) for rows in made} == {16}
    assert ((1, 1, 4), (4, 1, 1), (8, 1, 1)) in made
    assert ((1, 1, 16),) in made


def test_the_fastest_plan_is_found_from_one_that_is_far_from_it(profile: ClusterProfile) -> None:
    assert fastest(profile, [((2, 4, 2),)], 16384, far) == WANTED


def test_no_plan_is_taken_that_does_not_hold_the_longest_sequence(profile: ClusterProfile) -> None:
    found = fastest(profile, [((1, 1, 16),)], 8192, lambda rows: far(rows, ((1, 1, 16),)))
    assert {(tp, pp) for tp, pp, _ in found} & {(4, 1), (4, 2), (2, 4), (8, 1)}
    assert all(
        far(rows, ((1, 1, 16),)) >= far(found, ((1, 1, 16),))
        for rows in exchanges(profile, found)
        if rows != ((1, 1, 16),)
    )


def test_a_plan_for_more_devices_is_left_out(profile: ClusterProfile) -> None:
    few = replace(profile, devices=replace(profile.devices, count=8))
    found = fastest(few, [((8, 1, 2),)], 16384, lambda rows: -sum(tp * pp * count for tp, pp, count in rows))
    assert found == ((8, 1, 1),)
