"""When states are saved, in which order things become durable, and which states are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import StorageError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.messages import Command, Cursor, SaveCheckpoint
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import EngineSettings
from plait.engine.admission import Demand
from plait.engine.checkpoints import HEADER, Checkpointer, checkpoint_name, checkpoints, prune
from plait.engine.jobs import LiveJob
from plait.engine.steps import DataOrder

SPLIT = Split.of([Sample(np.ones(4, np.int32), np.ones(4, np.bool_))])
STEPS = 40


def live(name: str = "a", step: int = 0) -> LiveJob:
    spec = JobSpec(name, train=TrainSpec(steps=STEPS))
    data = TokenisedData("digest", SPLIT, SPLIT)
    order = DataOrder.of(spec.train, 1)
    return LiveJob(spec, data, order, Demand(1, 4), 0, 0.0, cursor=Cursor(step))


@dataclass
class Desk:
    """A schedule with its surroundings: notes the order of commits and states."""

    folder: Path
    settings: EngineSettings
    now: float = 0.0
    log: list[str] = field(default_factory=list)
    full: bool = False

    def __post_init__(self) -> None:
        self.saving = Checkpointer(
            self.settings, self.folder, self._send, lambda: self.now, lambda: self.log.append("commit")
        )

    def _send(self, command: Command) -> None:
        assert isinstance(command, SaveCheckpoint)
        if self.full:
            raise StorageError(f"{command.directory}: No space left on device")
        command.directory.mkdir(parents=True)
        (command.directory / HEADER).touch()
        self.log.append(f"{command.job}@{command.cursor.step}")

    @property
    def saved(self) -> list[str]:
        return [each for each in self.log if each != "commit"]

    def walk(self, job: LiveJob, steps: int, seconds: Callable[[int], float] = lambda _: 1.0) -> list[str]:
        said: list[str] = []
        for _ in range(steps):
            self.now += seconds(job.step)
            job.advance(1, 1.0, 1.0, 1.0)
            said += [each.text for each in self.saving.save_due([job])]
        return said


def desk(folder: Path, *, steps: int | None = None, minutes: float | None = None, keep: int = 2) -> Desk:
    return Desk(
        folder,
        EngineSettings(checkpoint_steps=steps, checkpoint_minutes=minutes, checkpoint_keep=keep),
    )


def test_checkpoints_are_due_at_multiples_of_the_steps_but_not_at_the_end(tmp_path: Path) -> None:
    made = desk(tmp_path, steps=8)
    job = live()
    made.saving.admitted(job)
    made.walk(job, STEPS)
    assert made.saved == ["a@8", "a@16", "a@24", "a@32"]
    assert [path.name for path in checkpoints(tmp_path / "a")] == ["step-00000032", "step-00000024"]


def test_records_are_durable_before_the_checkpoint_is_published(tmp_path: Path) -> None:
    made = desk(tmp_path, steps=1)
    jobs = [live("a", 3), live("b", 5)]
    made.saving.save_due(jobs)
    assert made.log == ["commit", "a@3", "b@5"]
    made.saving.save_due(jobs)
    assert made.log == ["commit", "a@3", "b@5"]  # neither has moved


def test_checkpoints_are_due_some_minutes_after_the_last_one(tmp_path: Path) -> None:
    made = desk(tmp_path, minutes=0.5)
    job = live(step=7)
    made.saving.admitted(job)
    made.walk(job, 20, lambda _: 12.0)
    assert made.saved == [f"a@{step}" for step in (10, 13, 16, 19, 22, 25)]


def test_a_job_that_resumes_counts_from_its_checkpoint(tmp_path: Path) -> None:
    made = desk(tmp_path, steps=10)
    job = live(step=17)
    made.saving.admitted(job, Path("elsewhere"))
    made.walk(job, 6)
    assert made.saved == ["a@20"]


def test_an_interruption_saves_what_has_moved_and_finds_the_rest(tmp_path: Path) -> None:
    made = desk(tmp_path, steps=5)
    moved, still, fresh = live("moved"), live("still", 4), live("fresh")
    made.saving.admitted(moved)
    made.saving.admitted(still, tmp_path / "elsewhere")
    made.saving.admitted(fresh)
    made.walk(moved, 7)
    found, notices = made.saving.save([moved, still, fresh])
    assert found == {
        "moved": tmp_path / "moved" / checkpoint_name(7),
        "still": tmp_path / "elsewhere",
    }
    assert (made.saved, notices) == (["moved@5", "moved@7"], [])


def test_a_full_disk_stops_no_job_and_is_reported_once_for_each_attempt(tmp_path: Path) -> None:
    made = desk(tmp_path, steps=5)
    job = live()
    made.saving.admitted(job)
    made.walk(job, 6)
    made.full = True
    said = made.walk(job, 10)
    assert [text.partition(": could not save ")[2] for text in said] == [
        "a at step 10 (last saved at step 5)",
        "a at step 15 (last saved at step 5)",
    ]
    assert all("No space left" in text for text in said)
    others = [live(name, 20) for name in "bc"]
    (notice,) = made.saving.save(others)[1]  # one line for all that fail alike
    assert notice.text == (
        f"{tmp_path}: No space left on device: could not save b at step 20 (not saved yet), "
        "c at step 20 (not saved yet)"
    )
    made.full = False
    assert made.walk(job, 5) == []
    assert made.saved == ["a@5", "a@20"]
    assert [path.name for path in checkpoints(tmp_path / "a")] == ["step-00000020", "step-00000005"]


@given(
    present=st.sets(st.integers(1, 30), min_size=1),
    keep=st.integers(1, 4),
    data=st.data(),
)
def test_the_newest_up_to_the_present_step_are_kept(
    tmp_path_factory: pytest.TempPathFactory, present: set[int], keep: int, data: st.DataObject
) -> None:
    """What is newer was damaged and passed over; what a killed process began goes too."""
    newest = data.draw(st.sampled_from(sorted(present)))
    folder = tmp_path_factory.mktemp("states")
    for step in present:
        (folder / checkpoint_name(step)).mkdir()
    (folder / ".step-00000031.partial-1").mkdir()
    prune(folder, keep, newest=newest)
    left = sorted((step for step in present if step <= newest), reverse=True)[:keep]
    assert checkpoints(folder) == [folder / checkpoint_name(step) for step in left]
    assert not list(folder.glob(".*"))


def test_no_checkpoints_are_written_without_a_folder() -> None:
    assert checkpoints(Path("nowhere")) == []


def test_a_checkpoint_s_own_path_is_taken_too(tmp_path: Path) -> None:
    (tmp_path / checkpoint_name(3)).mkdir()
    (tmp_path / checkpoint_name(3) / HEADER).touch()
    assert checkpoints(tmp_path / checkpoint_name(3)) == [tmp_path / checkpoint_name(3)]
