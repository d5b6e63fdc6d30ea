"""How jobs ended, in a few words."""

from typing import Any

from plait.core.lifecycle import JobResult, JobState


def ended(
    state: str,
    value: float | None = None,
    reason: str = "",
    job: str = "",
    *,
    others: tuple[float, ...] = (),
    **more: Any,
) -> JobResult:
    """A result as the study knows it: nothing of it was measured here."""
    values = () if value is None else (value, *others)
    return JobResult(job, JobState(state), reason=reason, values=values, **more)
