"""Rules on the recorded curves of a full SmolLM2 grid: what a pruned search finds, and for how much."""

import json
from pathlib import Path

import pytest
import yaml

from plait.bench.recorded_curves import read_curves
from plait.bench.replay_stopping import Options, find_curves, search_in_order
from plait.config_fields import build
from plait.settings import SearchSettings

SWEEP = Path(__file__).resolve().parents[2] / "sweeps/replay/stopping.yaml"
OPTIONS = build(Options, yaml.safe_load(SWEEP.read_text(encoding="utf-8"))["bench"]["options"], "options")
CURVES = find_curves(OPTIONS.curves)


@pytest.fixture(scope="module")
def recorded():
    return read_curves(CURVES)


def test_the_record_says_what_it_is_of(recorded):
    assert len(recorded.curves) == 24
    assert recorded.facts["commit"]
    assert not recorded.facts["changed since"]
    assert recorded.facts["model"] == {"kind": "smollm2", "dtype": "bfloat16"}
    assert CURVES.stat().st_size < 20_000
    assert "/" not in json.dumps(recorded.facts["machine"])


def test_the_full_grid_costs_what_its_trials_cost(recorded):
    found = search_in_order(recorded, SearchSettings(parallel=8), seed=1)
    assert (found.gap, found.share) == (pytest.approx(0), pytest.approx(100))


def test_a_pruned_search_finds_the_best_for_a_quarter_in_any_order(recorded):
    """Within 1 % of the full grid's best loss at a quarter of its device time or less."""
    rule = OPTIONS.rules["successive halving, eta 3"]
    outcomes = [
        search_in_order(recorded, SearchSettings(parallel=parallel, stopping=rule), seed)
        for parallel in (1, 8, 24)
        for seed in range(10)
    ]
    assert max(each.gap for each in outcomes) <= OPTIONS.within == 1.0
    assert max(each.share for each in outcomes) <= OPTIONS.share == 25.0
    assert len({each.replay.steps for each in outcomes}) == 1  # a cohort decides alike in any order
