"""The benchmark's two sides train the same: every step's loss of six different adapters, in float32."""

import io
import warnings
from dataclasses import replace

import pytest

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait_bench.dropout_cost import dropout_cost
from plait_bench.joint_side import load_joint_side
from plait_bench.joint_vs_peft import joint_vs_peft, run_race
from plait_bench.peft_baseline import PeftBaseline
from plait_bench.progress import shown
from plait_bench.quantised_base import quantised_base

DATA = DataSpec.of("reasoning_gym", task="chain_sum", size=24, validation=0)
OTHER = DataSpec.of("reasoning_gym", task="gsm_symbolic", size=10, validation=0)
SETTINGS = RunSettings(
    model=ModelSettings(kind="tiny", dtype="float32"), engine=EngineSettings(capacity=512, device="cpu")
)


def make_jobs(steps):
    """Rank, alpha, scale, targets, rates, schedule, batch, accumulation, clip and data all differ.

    Rates are ones at which training is stable: at 1e-2 job c amplifies rounding until PEFT differs from
    PEFT by 2e-5 when it only splits its batches otherwise, and nothing can be told from such a job.
    """

    def job(name, adapter, data=DATA, **train):
        return JobSpec(name, adapter, TrainSpec(**({"steps": steps, "lr": 3e-3} | train)), data)

    return [
        job("a", AdapterSpec(rank=1), seed=1),
        job(
            "b",
            AdapterSpec(rank=3, alpha=7.0, target_modules="all-linear"),
            batch_size=2,
            clip_norm=0.1,
            seed=2,
        ),
        job(
            "c",
            AdapterSpec(rank=8, rslora=True, target_modules=("q_proj", "down_proj")),
            accumulation=2,
            lr=1e-3,
        ),
        job(
            "d",
            AdapterSpec(rank=64, target_modules=("q_proj", "o_proj", "up_proj")),
            schedule="cosine",
            warmup_steps=3,
            weight_decay=0.1,
            clip_norm=None,
        ),
        job("e", AdapterSpec(rank=5, target_modules=r".*\.1\..*(up|gate)_proj"), OTHER, lora_plus_ratio=4.0),
        job("f", AdapterSpec(rank=16, alpha=1.0), OTHER, batch_size=1, accumulation=3, schedule="linear"),
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))


@pytest.mark.slow
def test_every_steps_loss_is_pefts_within_rounding(tmp_path):
    jobs = make_jobs(steps=5)
    _, race = run_race(SETTINGS, jobs, tmp_path)
    for theirs in race.baseline:
        assert len(theirs.losses) == 5
        assert race.joint.losses[theirs.job] == pytest.approx(theirs.losses, rel=1e-5)
        assert theirs.losses[-1] != pytest.approx(theirs.losses[0], rel=1e-2)
    assert race.joint.tokens == sum(run.tokens for run in race.baseline)


def test_the_report_has_speed_memory_and_agreement():
    said = io.StringIO()
    with warnings.catch_warnings(), shown("joint_vs_peft", said):
        warnings.simplefilter("error", FutureWarning)
        report = joint_vs_peft(SETTINGS, make_jobs(steps=2)[:4], {"loss_tolerance": 1e-5, "limit_rounds": 2})
    for words in (
        "loading the model",
        "both sides in turns: 4 of 4 (d), about",
        "joint pass in turns: 3 of 3",
    ):
        assert words in said.getvalue()
    figures = {figure.name: figure for figure in report.figures}
    assert all(figure.how == "measured" for figure in figures.values())
    seconds = [figures[f"{side}: training"].ours for side in ("PEFT, one after another", "Plait, joint")]
    assert figures["speed, Plait over PEFT"].ours == pytest.approx(seconds[0] / seconds[1])
    assert figures["largest difference of a step's loss"].ours <= 1e-3  # percent
    assert figures["Plait: peak memory"].ours > 0
    assert figures["joint forward and backward"].target.value == figures["frozen model alone"].ours > 0
    assert "float32, adapters in float32, sdpa attention over padded batches" in report.assumptions[-1]


def test_sides_that_disagree_report_no_speed(monkeypatch):
    def other_order(self, job, split, step, real=PeftBaseline._batches):
        return real(self, replace(job, train=replace(job.train, seed=job.train.seed + 1)), split, step)

    monkeypatch.setattr(PeftBaseline, "_batches", other_order)
    with pytest.raises(PlaitError, match="losses differ by"):
        joint_vs_peft(SETTINGS, make_jobs(steps=2)[:2], {"loss_tolerance": 1e-5})


def test_a_benchmark_without_jobs_or_with_unknown_options_is_refused():
    with pytest.raises(ConfigError, match="no jobs"):
        joint_vs_peft(SETTINGS, [], {})
    with pytest.raises(ConfigError, match=r"loss_tolerance"):
        joint_vs_peft(SETTINGS, make_jobs(1), {"tolerance": 1})
    with pytest.raises(ConfigError, match=r"engine.device=cuda"):
        joint_vs_peft(replace(SETTINGS, engine=EngineSettings(device="cuda")), make_jobs(1), {})
    with pytest.raises(ConfigError, match=r"dropout=1\.0"):
        dropout_cost(SETTINGS, make_jobs(1), {"dropout": 1.0})


def test_measuring_leaves_the_worker_empty_and_its_fresh_weights_repeat(tmp_path):
    jobs = make_jobs(steps=2)[:2]
    side = load_joint_side(SETTINGS, jobs)
    side.warm_up(jobs[0])
    first = side.initial_weights(jobs[1], tmp_path / "first")
    second = side.initial_weights(jobs[1], tmp_path / "second")
    assert first.keys() == second.keys()
    assert all((first[site][0] == second[site][0]).all() for site in first)
    assert all(a.shape[0] == 3 and a.any() and not b.any() for a, b in first.values())


def test_the_cost_of_dropout_is_measured_on_both_sides():
    report = dropout_cost(SETTINGS, make_jobs(steps=2)[:3], {"dropout": 0.1, "steps": 3})
    without, with_dropout, cost = report.figures
    assert without.ours > 0
    assert with_dropout.ours > 0
    assert cost.unit == "% of a step"


def test_a_quantised_base_is_compared_with_the_dense_one():
    report = quantised_base(SETTINGS, make_jobs(steps=3)[:3], {"quantise": "nf4", "turns": 2})
    figures = {figure.name.removeprefix("nf4: "): figure for figure in report.figures}
    assert 0.1 < figures["base model"].target.difference(figures["base model"].ours) < 0.5
    loss = figures["mean loss of the later steps"]
    assert 0 < abs(loss.target.difference(loss.ours) - 1) < 0.02
    assert 0 < figures["largest difference of a job's later losses"].ours < 5
    assert figures["real tokens"].ours > 0
    assert figures["peak memory"].ours > 0
    with pytest.raises(ConfigError, match=r"bench\.options\.quantise='int4'"):
        quantised_base(SETTINGS, make_jobs(1), {"quantise": "int4"})
