"""Validation losses of several jobs in joint forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.engine.ledger import Outcome
from plait.engine.live import LiveJob
from plait.engine.messages import Command, Evaluate, JobEvaluated
from plait.plans import GlobalBatch, Microbatch


def evaluate(
    due: Sequence[LiveJob],
    send: Callable[[Command], Outcome],
    pack: Callable[[Sequence[GlobalBatch]], tuple[Microbatch, ...]],
) -> tuple[list[JobEvaluated], dict[str, str]]:
    """Evaluate jobs together; where memory runs out, in two parts.

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
    measured = []
    for job in due:
        if job.name not in outcome.failures:
            tally = outcome.tallies[job.name]
            job.eval_loss, job.evaluated = tally.mean, job.step
            measured.append(JobEvaluated(job.name, job.step, tally.mean, tally.tokens))
    return measured, outcome.failures
