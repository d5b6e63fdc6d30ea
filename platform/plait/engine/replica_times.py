"""What the spans of all replicas come to: on one clock, and summed over an iteration.

A seam: pure, so that it is tested with made-up spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from plait.core.spans import ReplicaSpans, ReplicaTime, Span

Exchange = tuple[tuple[tuple[str, int], ...], int]  # work, and how often it came before


def on_one_clock(replicas: Iterable[ReplicaSpans]) -> list[ReplicaSpans]:
    """Spans by the coordinator's clock. An exchange is waiting until the last replica takes part: nothing is
    summed before."""
    shifted = [
        replace(each, spans=tuple(_shifted(span, each.offset) for span in each.spans)) for each in replicas
    ]
    begun = [_exchanges(each.spans) for each in shifted]
    last = {
        key: max(own[key].start for own in begun if key in own)
        for key in {key for own in begun for key in own}
    }
    return [
        replace(each, spans=tuple(_split(each.spans, {id(span): last[key] for key, span in own.items()})))
        for each, own in zip(shifted, begun, strict=True)
    ]


def _shifted(span: Span, offset: float) -> Span:
    if offset == 0.0:
        return span
    start, end = span.start + offset, span.end + offset
    # Four times as fast as replace().
    return Span(span.kind, start, end, span.work, span.tokens, span.bytes, span.overlapping)


def _exchanges(spans: Sequence[Span]) -> dict[Exchange, Span]:
    seen: Counter[tuple[tuple[str, int], ...]] = Counter()
    found: dict[Exchange, Span] = {}
    for span in spans:
        if span.kind == "exchange" and not span.overlapping:
            found[span.work, seen[span.work]] = span
            seen[span.work] += 1
    return found


def _split(spans: Sequence[Span], complete: Mapping[int, float]) -> Iterable[Span]:
    """The spans, exchanges in two: until all took part, and the rest. ``complete``: when, by ``id``."""
    for span in spans:
        at = min(complete.get(id(span), span.start), span.end)
        if at <= span.start:
            yield span
        else:
            yield Span("waiting", span.start, at, span.work)
            yield replace(span, start=at)


def times_between(replicas: Iterable[ReplicaSpans], start: float, end: float) -> tuple[ReplicaTime, ...]:
    """What each replica did between two times of the coordinator's clock. A replica that is in no span any
    more has answered and waits."""
    return tuple(_time(each, start, end) for each in replicas)


def _time(replica: ReplicaSpans, start: float, end: float) -> ReplicaTime:
    inside = [span for span in replica.spans if span.end > start and span.start < end]
    busy = sum(
        min(span.end, end) - max(span.start, start)
        for span in inside
        if span.kind != "waiting" and not span.overlapping
    )
    return ReplicaTime(
        replica=replica.replica,
        busy_seconds=busy,
        waited_seconds=max(0.0, end - start - busy),
        tokens=sum(span.tokens for span in inside if span.kind == "microbatch"),
        received_bytes=sum(span.bytes for span in inside),
    )
