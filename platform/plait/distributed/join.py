"""What a launched process does that does not coordinate: it keeps a process of the run going until the run
ends.

A seam: the run's process is a child of this one, so that one that is killed, or whose link was closed since
another was lost, comes again by itself, whatever the launcher does. Imports no torch.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from plait.core.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, ProcessError
from plait.core.settings import ClusterSettings
from plait.distributed.places import Meeting, Place, read_meeting
from plait.distributed.start import AGAIN, start_process
from plait.engine.restarts import Restarts

LOOK_SECONDS = 0.2
REACH_SECONDS = 5.0  # for one attempt to reach the coordinator
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def join_run(place: Place, cluster: ClusterSettings) -> int:
    """Be process ``place.number`` of a run until its coordinator ends it; the exit status.

    Raises:
        ProcessError: the coordinator does not come or is gone, or the process died too often.
        ConfigError: hosts differ and share no key.
    """
    restarts = Restarts(cluster.restarts)
    with _signals() as asked:
        while (meeting := _meet(place, cluster, asked)) is not None:
            status = _live(place, meeting)
            if status in (EXIT_DONE, EXIT_BAD_INPUT):
                return status
            if status != AGAIN and not restarts.another():
                raise ProcessError(
                    f"process {place.number} ({socket.gethostname()}) ended with status {status}, for the "
                    f"{cluster.restarts + 1}th time within an hour",
                    f"It is restarted at most {cluster.restarts} times within an hour (cluster.restarts).",
                    "See what it printed.",
                )
    return EXIT_INTERRUPTED


def _live(place: Place, meeting: Meeting) -> int:
    """One life of the run's process; its exit status.

    It ends when the coordinator says so or is gone, also after a signal: the coordinator may still save, and
    needs it. How long that may take is the launcher's business.
    """
    child = start_process(meeting.address, meeting.key, place.number, None, place.local)
    try:
        while (status := child.poll()) is None:
            time.sleep(LOOK_SECONDS)
        return status
    finally:
        child.kill()
        child.wait()


def _meet(place: Place, cluster: ClusterSettings, asked: Sequence[int]) -> Meeting | None:
    """Wait until the coordinator can be reached; None once a signal came.

    Raises:
        ProcessError: it cannot.
    """
    end = time.monotonic() + cluster.join_seconds
    where, why = place.host, "has not said yet where it listens"
    while not asked:
        if (meeting := read_meeting(place, cluster)) is not None:
            where = ":".join(map(str, meeting.address))
            try:
                socket.create_connection(meeting.address, timeout=REACH_SECONDS).close()
            except OSError as error:
                why = f"does not answer ({error})"
            else:
                return meeting
        if time.monotonic() > end:
            raise ProcessError(
                f"process {place.number} ({socket.gethostname()}): the coordinator at {where} {why}",
                f"This process waited {cluster.join_seconds:.0f} s for it (cluster.join_seconds).",
                "If it runs, cluster.address and cluster.port must lead to it.",
            )
        time.sleep(LOOK_SECONDS)
    return None


@contextmanager
def _signals() -> Iterator[Sequence[int]]:
    """Inside, signals are noted: launchers send them to all, and the coordinator ends the run in order."""
    asked: list[int] = []
    before = {}
    with suppress(ValueError):  # not in the main thread
        before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
