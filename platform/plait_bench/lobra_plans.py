"""Published deployments of LobRA and of equal replicas beside Plait's for the same workload and profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.core.samples import Int64
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import ReplicaCost
from plait.planner.buckets import dynamic_buckets, fixed_buckets
from plait.planner.deployment import GAP, Deployment, best_equal_replicas, deploy
from plait.planner.dispatch import dispatch, spread
from plait_bench.figures import Figure
from plait_bench.lobra import ALIGNED, SEVEN, Rows, costs_of, devices_of, expected_counts, limits, replicas

Shape = tuple[int, int]  # ⟨tp, pp⟩
TIE = 0.005  # seconds of plans that LobRA's planner does not tell apart: its solver's gap


def plan_figures(
    profile: ClusterProfile,
    known: Int64,
    theirs: Rows,
    case: str,
    label: str = "",
    *,
    gap: float = GAP,
    without_pipelines: bool = False,
    lacking: Sequence[Shape] = (),
) -> list[Figure]:
    """How far LobRA's published deployment is from Plait's for the steps ``known`` (steps, B): replicas, and
    seconds of a step dispatched alike.

    Where one sequence alone takes as long as the step, many deployments are the fastest ones.

    Args:
        case, label: the first and the last part of the figures' names.
        without_pipelines: whether Plait's plan of tensor parallelism alone is compared, too.
        lacking: configurations without which Plait's plan is compared, too.
    """
    buckets = dynamic_buckets(known.ravel(), interval=ALIGNED, required=limits(profile))
    counts = expected_counts(buckets.counts, known.shape[1])
    costs = costs_of(profile, buckets.lengths)
    kinds = replicas(costs, theirs)
    seconds = spread(kinds, counts, dispatch(kinds, counts)).makespan
    ours = deploy(costs, counts, devices_of(profile), gap=gap)
    ratio, unlike = seconds / ours.makespan, _unlike(ours, theirs)
    note = f"published {_shown(theirs)}, {seconds:.2f} s; Plait {ours}, {ours.makespan:.2f} s"
    longest = max(kind.cost.seconds([0] * (len(counts) - 1) + [1]) for kind in kinds if kind.cost.batch[-1])
    note += f"; one sequence of the longest bucket alone takes {longest:.2f} s"
    name, nearest = f"{case}: replicas unlike the published ones{label}", unlike if ratio > 1 + TIE else 0
    figures = [
        Figure(name, unlike, "", "computed", note=note),
        Figure(f"{name}; or none if that plan is as fast", nearest, "", "computed", note=note),
        Figure(f"{case}: published plan over Plait's{label}", ratio, "×", "simulated", note=note),
    ]
    if without_pipelines:
        whole = [cost for cost in costs if not cost.ramp]
        plan = deploy(whole, counts, devices_of(profile), gap=gap)
        note = f"{plan}, {plan.makespan:.2f} s"
        figures.append(Figure(f"{name}; without pipelines", _unlike(plan, theirs), "", "computed", note=note))
    if lacking:
        left = [cost for cost in costs if (cost.configuration.tp, cost.configuration.pp) not in lacking]
        plan = deploy(left, counts, devices_of(profile), gap=gap)
        without = f"{case} without " + ", ".join(f"⟨{tp},{pp}⟩" for tp, pp in lacking)
        name, ratio, note = f"{without}: replicas unlike{label}", seconds / plan.makespan, f"Plait {plan}"
        figures += [
            Figure(name, _unlike(plan, theirs), "", "computed", note=note),
            Figure(f"{without}: published plan over Plait's{label}", ratio, "×", "simulated", note=note),
        ]
    return figures


def fused_figure(profile: ClusterProfile, known: Int64, theirs: Rows, case: str, label: str = "") -> Figure:
    """Devices of a replica of the best equal replicas for the steps ``known``, beside Task-Fused's."""
    choice = EqualReplicas.of(profile, known, max(limits(profile)))
    name = f"{case}: Task-Fused, devices of a replica{label}"
    return choice.figure(name, choice.by_seconds(), f"published {_shown(theirs)}; Plait ")


def _unlike(plan: Deployment, theirs: Rows) -> int:
    """Replicas of each configuration that one has more than the other."""
    own = {(each.tp, each.pp): count for each, count in plan.shape}
    published = {(tp, pp): count for tp, pp, count in theirs}
    return sum(abs(own.get(each, 0) - published.get(each, 0)) for each in own.keys() | published.keys())


def _shown(rows: Rows) -> str:
    return ", ".join(f"⟨{tp},{pp}⟩×{count}" for tp, pp, count in rows)


@dataclass(frozen=True, slots=True)
class EqualReplicas:
    """A workload on equal replicas: sequences of each bucket, every configuration's cost, the longest
    sequence."""

    profile: ClusterProfile
    costs: list[ReplicaCost]
    counts: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, profile: ClusterProfile, known: Int64, longest: int | None = None) -> EqualReplicas:
        """The expected step of the steps ``known`` (steps, B) in the artifact's fixed buckets. One sequence
        has the longest length, as the artifact's planner makes sure."""
        drawn = known.ravel()
        most = min(longest or int(drawn.max()), max(limits(profile)))
        buckets = fixed_buckets(np.append(np.minimum(drawn, most), most), SEVEN)
        costs = costs_of(profile, buckets.lengths)
        return cls(profile, costs, expected_counts(buckets.counts, known.shape[1]), most)

    def by_seconds(self) -> Deployment:
        """The equal replicas with the shortest step."""
        return best_equal_replicas(self.costs, self.counts, devices_of(self.profile))

    def by_throughput(self) -> Deployment:
        """Those with the most tokens a device and second at the longest sequence (LobRA, appendix A)."""
        last = max(j for j, count in enumerate(self.counts) if count)
        able = [cost for cost in self.costs if cost.batch[last]]
        rates = [1 / float((cost.linear[:, last] * cost.configuration.devices).max()) for cost in able]
        best = able[int(np.argmax(rates))]
        return best_equal_replicas([best], self.counts, devices_of(self.profile))

    def figure(self, name: str, plan: Deployment, before: str = "") -> Figure:
        """Devices of one of the plan's replicas."""
        able = sum(each.max_tokens >= self.longest for each in self.profile.configurations)
        note = f"{before}{plan}; longest {self.longest} tokens, for {able} configuration{'s' * (able > 1)}"
        return Figure(name, plan.shape[0][0].devices, "devices", "computed", note=note)
