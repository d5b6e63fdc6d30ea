"""What leaves for the tracking store: kept in the spool first, then sent by the writer; curves thinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from plait.core.lifecycle import STORED_AS, JobState
from plait.core.messages import JobProgress
from plait.core.settings import TrackingSettings
from plait.tracking import names
from plait.tracking.encoding import Head
from plait.tracking.operations import EndRun, LogFile, LogPoints, Operation, SetTags
from plait.tracking.spool import Spool, free_spools, open_spool, spool_files
from plait.tracking.thinning import Curve, grown_stride, is_kept
from plait.tracking.values import finite, not_finite, progress_values
from plait.tracking.writer import Sender, Writer, first_line
from plait.utils.files import write_text
from plait.utils.paths import search_folder

Now = Callable[[], int]


class Outgoing:
    """Hands operations to spool and writer, in the thread that trains: nothing here waits for the store.

    Args:
        spool: of this process.
        sender: carries the writer's requests out.
        flush_seconds, points: as in ``TrackingSettings``.
        now: milliseconds since 1970.

    Every method raises StorageError where the spool cannot be written.
    """

    def __init__(self, spool: Spool, sender: Sender, flush_seconds: float, points: int, now: Now) -> None:
        self._spool = spool
        self._most = points
        self._now = now
        self._curves: dict[str, Curve] = {}
        self.shared = False  # other processes worked on this search, too
        self.writer = Writer(sender, spool, flush_seconds)

    def put(self, operation: Operation) -> None:
        """Send an operation in due course."""
        self.writer.put(operation)

    def adopt(self) -> None:
        """Take over what other workers of the search that have ended left unsent."""
        head, mine = self._spool.head, self._spool.path
        if head is not None:
            self.shared |= self.others_write()
            for left in free_spools(mine.parent, head.parent_id):
                self._spool.take_over(left)

    def others_write(self) -> bool:
        """Whether other processes of this host work on the search."""
        head, mine = self._spool.head, self._spool.path
        return head is not None and any(path != mine for path in spool_files(mine.parent, head.parent_id))

    @property
    def behind(self) -> bool:
        """Whether the store lacks anything that ended processes left."""
        return self._spool.behind

    def knows(self, run: str) -> bool:
        """Whether the spool has points of a run, so that it knows which are written."""
        return self._spool.written.last(run, names.TRAIN_LOSS) is not None

    # ---- points ----------------------------------------------------------------------------------------

    def begin_curve(self, run: str, steps: int) -> None:
        """A job of so many steps trains from now on, fresh or again."""
        if run not in self._curves:
            self._curves[run] = Curve.of(run, steps, self._most, self._spool.written.held(run))

    def progress(self, event: JobProgress) -> None:
        """A step of a job: written where its curve keeps it, or where it has values that are not finite."""
        values = progress_values(event)
        kept = finite(values)
        point = LogPoints(event.job, event.step, self._now(), kept)
        curve = self._curves.get(event.job)
        if len(kept) < len(values):
            self._not_finite(event.job, event.step, values)
        elif curve is not None and not curve.take(point):
            return
        if kept:
            self.put(point)

    def end_curve(self, run: str, steps: int = 0) -> None:
        """The job is over for good: its newest and its best step are written too, of one that did not train
        in this process as well. ``steps``: of the job, where they are known."""
        held = self._spool.written.held(run)
        if run not in self._curves and held is not None and held.last is not None and not steps:
            self.put(held.last)  # whether its best is written depends on the steps
            return
        self.begin_curve(run, steps)
        for point in self._curves.pop(run).remainder():
            self.put(point)

    def last_step(self, run: str) -> int:
        """The newest step of a run that the spool knows of; 0 where it knows none."""
        written, held = self._spool.written.last(run, names.TRAIN_LOSS), self._spool.written.held(run)
        return max(written or 0, held.last.step if held is not None and held.last is not None else 0)

    def forget(self, run: str) -> None:
        """The job goes on elsewhere: what was held back of its curve is written there."""
        self._curves.pop(run, None)

    def wants_totals(self, step: int) -> bool:
        """Whether a point of the search's own curves is written."""
        return is_kept(step, grown_stride(step, self._most))

    def points(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """Values of a run at a step, whatever its curve; those that are not finite are told in a tag."""
        if kept := finite(values):
            self.put(LogPoints(run, step, self._now(), kept))
        if len(kept) < len(values):
            self._not_finite(run, step, values)

    def _not_finite(self, run: str, step: int, values: Mapping[str, float]) -> None:
        self.tags(run, {names.TAG_DIVERGED: f"step {step}: {not_finite(values)}"})

    def amend(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """Values of a step that stand in place of those that it has, once."""
        written = {key: value for key, value in values.items() if self._spool.written.last(run, key) == step}
        self.points(run, step, {key: value for key, value in values.items() if key not in written})
        if kept := finite(written):
            self.put(LogPoints(run, step, self._now(), kept, late=True))

    # ---- the rest --------------------------------------------------------------------------------------

    def tags(self, run: str, tags: Mapping[str, str]) -> None:
        """Set or replace tags of a run."""
        self.put(SetTags(run, tuple(tags.items())))

    def table(self, run: str, path: str, text: str) -> None:
        """Write a text artifact anew that grows with the search: the spool has but its newest form."""
        file = self._spool.beside(path)
        try:
            write_text(file, text)
        except OSError as error:
            raise self._spool.full(error) from error
        self.put(LogFile(run, file, path))

    def set_state(self, run: str, state: JobState, reason: str) -> None:
        """Set the state of a run that trains no more, or not now, in our words and in MLflow's."""
        self.tags(run, {names.TAG_STATE: state, names.TAG_REASON: reason})
        self.put(EndRun(run, STORED_AS[state].mlflow, self._now()))

    def commit(self) -> None:
        """Return when all that was put so far is on the disk, with what is held back of the live curves."""
        for curve in self._curves.values():
            if (held := curve.held()) is not None:
                self._spool.note(held)
                curve.noted = True
        self._spool.commit()

    def flush(self) -> list[str]:
        """Wait until the store has everything, as ``Writer.flush``; what it did not take, in words."""
        self.writer.flush()
        return self._troubles()

    def close(self, patience: float | None, *, done: bool) -> list[str]:
        """Send what is left as ``Writer.close``, and let go of the spool.

        Args:
            patience: seconds; None waits as long as the store takes what it gets.
            done: the search is over: a spool that is empty is of no use any more.

        Returns:
            what the store did not take, in words.
        """
        ended = self.writer.close(patience)
        troubles = self._troubles()
        if ended and done and not self._spool.waiting:
            self._spool.remove()
        elif ended:
            self._spool.close()
        return troubles

    def _troubles(self) -> list[str]:
        troubles = []
        if self._spool.waiting:
            troubles.append(unsent(self._spool, self.writer.error))
        if refused := self.writer.take_refused():
            troubles.append(f"{len(refused)} records were refused; the first: {refused[0]}")
        return troubles


def open_outgoing(folder: Path, head: Head, sender: Sender, settings: TrackingSettings, now: Now) -> Outgoing:
    """The way out of a process, with what ended processes of its search left unsent in the folder before
    everything of its own."""
    for left in free_spools(folder):  # those of searches begun anew are of no use once they are sent
        other = left.head is not None and left.head.parent_id != head.parent_id
        left.remove() if other and not left.waiting else left.close()
    out = Outgoing(open_spool(folder, head), sender, settings.flush_seconds, settings.points, now)
    out.adopt()
    return out


def unsent(spool: Spool, error: BaseException | None) -> str:
    """What a spool has that the store has not, where it lies and how it is sent."""
    store = spool.head.store if spool.head is not None else "the store"
    cause = f" ({said})" if error is not None and (said := first_line(error)) else ""
    return (
        f"{spool.waiting} records ({spool.waiting_points} metric values) are not in {store} yet{cause}. "
        f"They are kept in {spool.path}; the same command sends them when the store answers."
    )


def spool_folder(root: Path, search: str) -> Path:
    """Where the spools of a search lie."""
    return search_folder(root, search) / "spool"
