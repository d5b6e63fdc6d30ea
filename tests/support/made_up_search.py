"""A search whose losses are made up, written by the tracker, the table of group steps and the study as a real
one is: for pages and figures, whose work does not depend on where the numbers come from."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import GroupStep, JobAdmitted, JobEvaluated, JobProgress
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.search.storage import open_storage
from plait.tracking.facts import SearchFacts
from plait.tracking.tracker import Tracker

TOGETHER, CAPACITY = 16, 2048
RANKS, DROPOUTS = (4, 8, 16, 32, 64), (0.0, 0.05, 0.1)
SPACE = {
    "adapter.rank": CategoricalDistribution(RANKS),
    "adapter.dropout": CategoricalDistribution(DROPOUTS),
    "train.lr": FloatDistribution(1e-5, 5e-3, log=True),
}
FIGURES = [  # what a report of such a search shows
    "curves-train-loss",
    "curves-eval-loss",
    "leaderboard",
    "parallel-coordinates",
    "importance",
    "pareto",
    "device-seconds",
    "packing",
    "predictions",
]
STATE = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(slots=True)
class _Live:
    trial: int
    job: JobSpec
    floor: float  # where its loss goes
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reports: dict[int, float] = field(default_factory=dict)

    def loss(self, steps: int) -> float:
        return self.floor + 1.2 * math.exp(-5 * self.step / steps)


def make_up(settings: TrackingSettings, name: str, jobs: int, steps: int) -> None:
    """Write a search of ``jobs`` adapters of ``steps`` steps; the same for the same arguments."""
    chance = random.Random(f"{name} {jobs} {steps}")
    waiting = deque(_draw(trial, steps, chance) for trial in range(jobs))
    storage = open_storage(None, settings.root)
    study = optuna.create_study(study_name=name, storage=storage)
    run = RunSettings(tracking=settings, search=SearchSettings(name=name, trials=jobs))
    told: dict[int, Any] = {}
    live: list[_Live] = []
    with Tracker(settings) as tracker:
        tracker.start_search(SearchFacts(name, run))
        iteration = 0
        while waiting or live:
            while waiting and len(live) < TOGETHER:
                live.append(waiting.popleft())
                tracker.start_job(live[-1].job, live[-1].trial)
                tracker.handle(JobAdmitted(live[-1].job, 0, steps, "g0"))
            iteration += 1
            _group_step(live, iteration, steps, tracker, chance)
            for item in list(live):
                if (state := _end(item, steps)) is not None:
                    told[item.trial] = _told(item, state, steps)
                    _judge(item, state, steps, tracker)
                    live.remove(item)
    study.add_trials([told[trial] for trial in sorted(told)])


def _draw(trial: int, steps: int, chance: random.Random) -> _Live:
    lr = 10 ** chance.uniform(-4.9, -2.4)
    adapter = AdapterSpec(rank=chance.choice(RANKS), dropout=chance.choice(DROPOUTS))
    far = abs(math.log10(lr) + 3.3)
    floor = 0.85 + 0.15 * far - 0.01 * math.log2(adapter.rank) + chance.gauss(0, 0.01)
    return _Live(trial, JobSpec(f"trial-{trial:04d}", adapter, TrainSpec(lr=lr, steps=steps)), floor)


def _group_step(
    live: list[_Live], iteration: int, steps: int, tracker: Tracker, chance: random.Random
) -> GroupStep:
    tokens = [chance.randint(200, 800) for _ in live]
    total = sum(tokens)
    seconds = total / 1400 * chance.uniform(0.95, 1.1)
    for item, own in zip(live, tokens, strict=True):
        item.step += 1
        item.tokens += own
        item.seconds += seconds * own / total
        loss = item.loss(steps) + chance.gauss(0, 0.03)
        rate = item.job.train.lr
        tracker.handle(
            JobProgress(item.job.name, item.step, loss, 1.0, rate, item.tokens, item.seconds, own / seconds)
        )
        if item.step % max(steps // 4, 1) == 0:
            item.reports[item.step] = item.loss(steps)
            tracker.handle(JobEvaluated(item.job.name, item.step, item.loss(steps), 1000))
    fitted = iteration > 5
    event = GroupStep(
        "g0",
        iteration,
        tuple(item.job.name for item in live),
        math.ceil(total / CAPACITY),
        total,
        seconds,
        2 * 10**9 + 90_000 * total,
        CAPACITY,
        job_tokens=tuple(tokens),
        predicted_seconds=total / 1400 if fitted else None,
        predicted_bytes=2 * 10**9 + (91_000 if fitted else 1_500_000) * total,
        bytes_by_rule=not fitted,
    )
    tracker.handle(event)
    return event


def _end(item: _Live, steps: int) -> str | None:
    if item.trial % 83 == 5 and item.step == max(steps // 5, 1):
        return "failed"
    if item.step == steps:
        return "finished"
    return "pruned" if item.step == max(steps // 4, 1) and item.floor > 0.9 else None


def _judge(item: _Live, state: str, steps: int, tracker: Tracker) -> None:
    objective = None if state == "failed" else item.loss(steps)
    reason = {"failed": "loss is nan", "pruned": f"rung at step {item.step}: not among the best"}.get(
        state, ""
    )
    values = () if objective is None else (objective,)
    measured = (item.step, reason, objective, item.tokens, item.seconds, item.seconds)
    tracker.handle(JobResult(item.job.name, JobState(state), *measured, values=values))


def _told(item: _Live, state: str, steps: int) -> Any:
    values = {
        "adapter.rank": item.job.adapter.rank,
        "adapter.dropout": item.job.adapter.dropout,
        "train.lr": item.job.train.lr,
    }
    return create_trial(
        state=STATE[state],
        params=values,
        distributions=dict(SPACE),
        value=item.loss(steps) if state == "finished" else None,
        intermediate_values=item.reports,
    )
