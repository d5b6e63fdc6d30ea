"""Validation losses of several jobs in joint forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.messages import Command, Evaluate, JobEvaluated, KeepWeights
from plait.core.plans import GlobalBatch, Microbatch
from plait.engine.ledger import Outcome
from plait.engine.live import LiveJob


def check_keep(job: JobSpec, *, validation: bool, at_rungs: bool = False) -> None:
    """Whether a job's best evaluation can be kept: there is one before its end.

    Args:
        job: to be trained.
        validation: whether it has validation samples.
        at_rungs: whether it is evaluated at rungs.

    Raises:
        ConfigError: ``train.keep=best`` without evaluations.
    """
    if job.train.keep != "best":
        return
    rule = "The best evaluation is that of the lowest validation loss."
    if not validation:
        raise ConfigError(
            "train.keep=best with data.validation=0", rule, "Give data.validation=0.1, or train.keep=last."
        )
    if job.train.eval_every == 0 and not at_rungs:
        raise ConfigError(
            "train.keep=best with train.eval_every=0",
            f"{rule} There is only one, after the last step.",
            "Give train.eval_every=10, or train.keep=last.",
        )


def evaluate(
    due: Sequence[LiveJob],
    send: Callable[[Command], Outcome],
    pack: Callable[[Sequence[GlobalBatch]], tuple[Microbatch, ...]],
) -> tuple[list[JobEvaluated], dict[str, str]]:
    """Evaluate jobs together; where memory runs out, in two parts. Jobs that keep
    their best weights keep those of an evaluation that is the best so far.

    Args:
        due: jobs with validation samples.
        send: carries a command out.
        pack: makes microbatches.

    Returns:
        What was measured, and why the other jobs failed, by name.
    """
    if not due:
        return [], {}
    outcome = send(Evaluate(pack([job.validation_batch() for job in due])))
    if outcome.out_of_memory is not None:
        if len(due) == 1:
            return [], {due[0].name: f"out of memory while it was evaluated alone: {outcome.out_of_memory}"}
        half = len(due) // 2
        first, failed = evaluate(due[:half], send, pack)
        others, failed_too = evaluate(due[half:], send, pack)
        return [*first, *others], failed | failed_too
    measured: list[JobEvaluated] = []
    best: list[str] = []
    for job in due:
        if job.name not in outcome.failures:
            tally = outcome.tallies[job.name]
            best += [job.name] if job.evaluate(tally.mean) else []
            measured.append(JobEvaluated(job.name, job.step, tally.mean, tally.tokens))
    if best:
        send(KeepWeights(tuple(best)))
    return measured, outcome.failures
