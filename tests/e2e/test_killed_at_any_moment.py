"""kill -9: the same command resumes the search, and the result is as if nothing had happened.

``PLAIT_FAULTS=50`` kills a search fifty times; without it a few kills must do.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forked import Forked, HeldHostSearch, HostSearch
from mlflow_server import MlflowServer
from optuna.trial import TrialState
from twins import compare, runs_of, study_of

KILLS = int(os.environ.get("PLAIT_FAULTS", "5"))
SEED = 20261121
STEPS = 32
TRIALS = 8
FOUR = ("search.trials=4", "train.steps=16", "train.eval_every=4")
KILLED = -9
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processor time by /proc")


def whole_life(arguments: Sequence[str], folder: Path) -> Forked:
    """A search that lives to its end."""
    search = Forked(arguments, folder)
    assert search.end() == 0, search.output
    return search


def killed(search: Forked, when: Callable[[], bool]) -> bool:
    """Kill a search at a moment, unless it is killed or ends by itself before; whether it was killed."""
    search.until(lambda: search.status() is not None or when())
    status = search.status()
    if status is None:
        status = search.kill()
    assert status in (0, KILLED), search.output
    return status == KILLED


def printed(search: Forked, text: str) -> Callable[[], bool]:
    """Whether it has printed a text."""
    return lambda: text in search.output


def lived(search: Forked, seconds: float) -> Callable[[], bool]:
    """Whether it has used so many seconds of the processor."""
    return lambda: search.lived >= seconds


def command(*more: str) -> list[str]:
    return [
        "sweep", "model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4",
        "train.batch_size=2", f"train.steps={STEPS}", "train.eval_every=8", "adapter.dropout=0.1",
        "adapter.rank=1,2,3,4", "train.lr=1e-3,3e-3", "search.sampler=grid", f"search.trials={TRIALS}",
        "search.parallel=2", "search.name=mine", "engine.checkpoint_steps=3", "engine.threads=1",
        "tracking.points=100000", *more,
    ]  # fmt: skip


def window(start: float, training: float, kills: int) -> float:
    """How long after its start a life may be killed at the latest, so that about ``kills`` of them take the
    search through most of its training: each gets on by half of what it is given beyond its start."""
    share = 1.6 * training / kills
    return start + (share + math.sqrt(share * share + 4 * share * start)) / 2


@pytest.mark.slow
@pytest.mark.timeout(3600 if KILLS > 5 else 300)
def test_a_search_that_is_killed_again_and_again_ends_as_one_that_is_not(
    place: Callable[[str], Path],
) -> None:
    """In turn at random moments of its processor time, while it starts, trains, saves, tells or ends, and
    right before a random one of its operations on the disk, between which its promises lie."""
    arguments = command("search/stopping=successive_halving", "search.stopping.cohort=4")
    whole, broken = place("whole"), place("broken")

    def lives(last: int | None = None) -> Forked:
        return Forked(arguments, broken, last=last)

    complete = whole_life(arguments, whole).lived
    operations = int((whole / "operations").read_text())
    most = max(operations // 8, 2 * operations // KILLS)
    first = lives()
    assert killed(first, printed(first, "trial-0000 started")), first.output
    start = first.lived
    latest = window(start, complete - start, KILLS)
    draw = random.Random(SEED)
    moments: list[float] = []
    while len(moments) < KILLS:
        life = lives(draw.randint(1, most) if len(moments) % 2 else None)
        if killed(life, lived(life, draw.uniform(0.0, latest) if life.last is None else math.inf)):
            moments.append(life.lived)
    assert lives().end() == 0
    count = compare(broken, whole)
    log = (broken / "sweep.log").read_text()
    print(
        f"{len(moments)} kills, half of them before one of the first {most} operations on the disk of "
        f"{operations}, between {min(moments):.2f} and {max(moments):.2f} s of processor time (start "
        f"{start:.2f} s, undisturbed {complete:.2f} s); gone on from a state "
        f"{log.count('resumes from step')} times; {count} points of {TRIALS} trials equal within 1e-5"
    )
    assert {trial.state for trial in study_of(broken)} == {TrialState.COMPLETE, TrialState.PRUNED}


@pytest.mark.slow
def test_a_first_start_that_is_killed_while_the_store_is_made(tmp_path: Path) -> None:
    """MLflow makes its tables in dozens of steps: killed in the midst of them, the same command resumes
    it."""
    (tmp_path / "plait-runs").mkdir()
    arguments = command("search.trials=2", "train.steps=2")
    draft = tmp_path / "plait-runs" / ".mlflow.db.new"
    first = Forked(arguments, tmp_path)
    assert killed(first, lambda: draft.exists() and draft.stat().st_size >= 60_000), first.output
    assert not (tmp_path / "plait-runs" / "mlflow.db").exists()
    whole_life(arguments, tmp_path)
    _, runs, _ = runs_of(tmp_path)
    assert [run.info.status for run in runs.values()] == ["FINISHED"] * 2
    assert sorted(path.name for path in (tmp_path / "plait-runs").glob("*mlflow.db*")) == ["mlflow.db"]


# In which phase a kill is to fall, by what is printed last before it.
PHASES = {
    "the study is open": "tracked in",
    "a trial trains": "trial-0001 started",
    "a trial was evaluated": "trial-0000 step 4",
    "a trial is over and may not be told": "trial-0000 finished",
    "the next one starts": "trial-0002 started",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, empty_store: Path, plait_cache: Path) -> Path:
    """The folder of a search of four trials that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "plait-runs").mkdir()
    shutil.copy(empty_store, folder / "plait-runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIT_CACHE", str(plait_cache))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        whole_life(command(*FOUR), folder)
    return folder


@pytest.mark.slow
def test_kills_in_each_phase(place: Callable[[str], Path], whole: Path) -> None:
    """Of a search whose trials wait for nobody, resumed by name alone."""
    broken, arguments = place("broken"), command(*FOUR)
    for phase, last in PHASES.items():
        search = Forked(arguments, broken)
        if not killed(search, printed(search, last)):  # it had started before the kill that came first
            assert (phase, search.status()) == ("the next one starts", 0), search.output
        arguments = ["resume", "mine"]
    whole_life(["resume", "mine"], broken)
    assert compare(broken, whole) > 4 * 16


@pytest.mark.slow
def test_two_workers_share_the_trials_and_one_adopts_those_of_the_other(
    place: Callable[[str], Path], whole: Path
) -> None:
    """No trial is trained twice, there is one run for the search, and what the killed one had goes on."""
    shared = place("shared")
    workers = [Forked(command(*FOUR), shared, log) for log in ("one", "two")]
    assert killed(workers[0], printed(workers[0], "step 12: eval loss")), workers[0].output
    status = workers[1].end()
    said = {name: (shared / name).read_text() for name in ("one", "two")}
    assert status == 0, said
    started = {
        name: {word for line in text.splitlines() if " started (" in line for word in line.split()[:1]}
        for name, text in said.items()
    }
    assert len(started["one"]) == 2, said
    assert not started["one"] & started["two"], said
    assert started["one"] | started["two"] == {f"trial-{number:04d}" for number in range(4)}
    assert [line.split()[0] for line in said["two"].splitlines() if "resumes from step" in line] == sorted(
        started["one"]
    ), said
    assert re.search(
        r"^process \d+ on \S+ is dead: its trials \d \(from step \d+\), \d ", said["two"], re.M
    ), said
    compare(shared, whole)


@pytest.mark.slow
@pytest.mark.postgres
def test_hosts_that_share_no_folder_lose_and_double_no_point(
    place: Callable[[str], Path], new_database: Callable[[], str], server: MlflowServer
) -> None:
    """With the study in PostgreSQL and the runs behind an MLflow server; the host that writes the search's
    own curves is killed, and the other trains its trials again. What the killed one left in its folder comes
    last."""
    study = new_database()
    whole, hosts = place("whole"), [place("one"), place("other")]
    short = (*FOUR, "train.steps=8")
    whole_life(command(*short), whole)
    shared = command(*short, f"search.storage={study}", f"tracking.uri={server.url}")
    one = HeldHostSearch(shared, hosts[0])
    steps = hosts[0] / "plait-runs" / "searches" / "mine" / "group_steps.jsonl"
    one.until(lambda: steps.exists() and steps.read_text().count("\n") >= 3)
    other = HostSearch(shared, hosts[1])
    other.until("started")
    assert one.kill() == KILLED
    assert other.end() == 0, other.output
    assert "on one is dead" in other.output
    again = HostSearch(shared, hosts[0])
    assert again.end() == 0, "it sends what the killed one could not send"
    compare(hosts[1], whole, elsewhere=(study, server.url))
