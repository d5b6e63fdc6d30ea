"""Runs as LoRAFusion's artifact measures them: of 100 microbatches each, filling and draining included.

So it runs what is never drained in between: its own schedule and mLoRA's. The idle share is over the whole
run, tokens a second are from the end of the 25th microbatch to that of the 97th
(lorafusion/pipeline_parallel/multi_lora_schedule.py of CentML/lorafusion). Here they are means over the runs
that follow each other in a schedule, each of which begins with an empty pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from plait.simulate.events import OneFOneB, Pipeline, simulate
from plait.simulate.report import Bubble, measure

LENGTH = 100  # microbatches of a run, no-ops included
FIRST, LAST = 24, LENGTH - 4  # the microbatches between whose ends tokens a second are measured


def runs_of(pipeline: Pipeline) -> list[Pipeline]:
    """The runs of a schedule in 1F1B order that is never drained; any other, or a shorter one, is one run."""
    whole = pipeline.order == OneFOneB([len(pipeline.works)])
    starts = range(0, len(pipeline.works) - LENGTH + 1 if whole else 0, LENGTH)
    return [_run(pipeline, slice(at, at + LENGTH)) for at in starts] or [pipeline]


def _run(pipeline: Pipeline, part: slice) -> Pipeline:
    works = pipeline.works[part]
    return replace(
        pipeline,
        works=works,
        seconds=[own[part] for own in pipeline.seconds],
        order=OneFOneB([len(works)]),
        transfer=pipeline.transfer[part],
    )


def idle_in_runs(pipeline: Pipeline) -> Bubble:
    """Idle shares, mean over the runs."""
    found = [measure({0: each})[0].bubble for each in runs_of(pipeline)]
    return Bubble(
        total=mean(each.total for each in found),
        fill_and_drain=mean(each.fill_and_drain for each in found),
        imbalance=mean(each.imbalance for each in found),
        raggedness=mean(each.raggedness for each in found),
    )


def rate_in_runs(pipeline: Pipeline) -> float:
    """Tokens a second, mean over the runs; of a schedule that is one run, over the whole."""
    return mean(map(_rate, runs_of(pipeline)))


def _rate(run: Pipeline) -> float:
    if len(run.works) != LENGTH:
        return measure({0: run})[0].tokens_per_second
    ends = _ends(run)
    return sum(work.tokens for work in run.works[FIRST + 1 : LAST + 1]) / (ends[LAST] - ends[FIRST])


def _ends(run: Pipeline) -> Sequence[float]:
    """When the last stage has done each microbatch's backward."""
    last = run.stages - 1
    backward = [span for span in simulate({0: run}).spans if span.stage == last and span.kind == "backward"]
    return [span.end for span in sorted(backward, key=lambda span: span.work)]
