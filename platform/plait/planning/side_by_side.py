"""The same jobs without Plait, as one would run them: each alone on a replica of its own, side by side."""

from __future__ import annotations

from plait.core.plans import Replica
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration, even_split
from plait.planning.workload import Workload
from plait.simulate.events import simulate
from plait.simulate.forecast import PlanOptions, job_by_job


def side_by_side(workload: Workload, profile: ClusterProfile) -> float:
    """Device-seconds of all jobs, each on the kind of replica on which it takes the fewest.

    A job's global batches are packed by themselves and each step is waited for. No device is counted that has
    no job: a cluster whose devices the replicas do not fill to the end takes more.

    Args:
        profile: its configurations fit into the cluster and its memory.
    """
    return sum(
        min(
            _device_seconds(workload, job.name, profile, each)
            for each in profile.configurations
            if each.max_tokens >= workload.longest[job.name]
        )
        for job in workload.jobs
    )


def _device_seconds(
    workload: Workload, name: str, profile: ClusterProfile, configuration: Configuration
) -> float:
    split = even_split(profile.time.layers, configuration.pp)
    replica = Replica(0, configuration.tp, configuration.pp, split, ())
    options = PlanOptions(
        capacities={0: configuration.max_tokens},
        labelled_share=workload.labelled_share,
        hidden_size=0 if profile.shape is None else profile.shape["hidden_size"],
        bandwidths={0: profile.devices.link(configuration.devices)},
    )
    (phase,) = workload.phases([name])
    run = simulate(job_by_job(phase.batches, [replica], profile.time, options))
    return configuration.devices * phase.scale * run.makespan
