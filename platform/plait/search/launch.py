"""From a composed command to a result: check everything, open the study, build the engine, run, report.

`plait train` takes the same path: a study with an empty space and one trial.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import optuna

from plait.core.errors import ConfigError, StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobState
from plait.core.messages import Event, ModelFitted, Notice
from plait.core.settings import ClusterSettings, RunSettings, TrackingSettings
from plait.engine.build import (
    PLAN_FILE,
    LoadedData,
    build_coordinator,
    check_engine,
    free_memory,
    open_data,
    settle_engine,
    stored_profile,
    write_plan,
)
from plait.engine.coordinator import Coordinator
from plait.search.attend import Attend
from plait.search.checks import check_jobs, check_memory, check_model
from plait.search.command import SearchCommand
from plait.search.identity import Identity, identify
from plait.search.objective import check_kept, check_measured
from plait.search.orders import Orders
from plait.search.points import too_few_points
from plait.search.recorded import URI, RecordedCommand, recorded_command, write_command
from plait.search.results import (
    TRY_ALL,
    SearchResult,
    describe_given_up,
    describe_result,
    failure_limit,
    write_result,
)
from plait.search.run import Interrupts, SearchLoop
from plait.search.stopper import Stopper, make_stopper, shortest_budget
from plait.search.stopping import check_stopping, rung_steps
from plait.search.storage import Patience, existing_storage, from_anywhere, open_storage, quiet
from plait.search.study import StudyTrials
from plait.search.suggest import check_options
from plait.search.tracked import Tracked, ask_store, catch_up, tracked_run, without_store
from plait.search.warm_start import check_prior, describe_prior
from plait.tracking import AwayError, Begun, SearchFacts, Tracker, locate
from plait.tracking.figures import Figures
from plait.tracking.leaderboard import Leaderboard
from plait.tracking.location import VARIABLE, sqlite_in, store_elsewhere
from plait.utils.addresses import redact
from plait.utils.paths import search_folder


class View(Protocol):
    """What shows a search while it trains."""

    def __enter__(self) -> Self:
        """Begin to show it."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any, /) -> None:
        """Show its end."""

    def handle(self, event: Event) -> None:
        """Show what an event changed."""

    def lose(self, job: str) -> None:
        """Another process trains the job from here on."""

    def note(self, text: str) -> None:
        """One line about the search."""

    def beside(self, call: Callable[[], Orders], /) -> Callable[[], Orders]:
        """``call``, with a drawing before it where one is due."""


class Screen(Protocol):
    """What a person sees of a search: the search knows no terminal."""

    def say(self, text: str) -> None:
        """One line."""

    def watch(self, board: Leaderboard) -> View:
        """The view of a search that trains from now on."""

    def announce(self) -> None:
        """Answer the first Ctrl-C, inside the signal's handler."""

    def summarise(self, board: Leaderboard, facts: Mapping[str, Any]) -> None:
        """What the search came to."""


class SearchRecorder:
    """The tracker and the view as one."""

    def __init__(self, tracker: Tracker, view: View) -> None:
        self._tracker = tracker
        self._view = view

    def start_job(self, job: JobSpec, trial: int) -> None:
        """A job is about to be submitted."""
        self._tracker.start_job(job, trial)

    def handle(self, event: Event) -> None:
        """Something happened in the engine."""
        if isinstance(event, Notice):
            self._view.note(event.text)
            return
        self._tracker.handle(event)
        if not isinstance(event, ModelFitted):
            self._view.handle(event)

    def lose(self, job: str) -> None:
        """Another process trains the job from here on: nothing more is written of it."""
        self._tracker.lose(job)
        self._view.lose(job)

    def commit(self) -> None:
        """Return when all that was handed over survives a crash."""
        self._tracker.commit()

    def run_id(self, job: str) -> str:
        """MLflow's id of the job's run; "" while it is not known."""
        return self._tracker.run_id(job)


def run_search(command: SearchCommand, screen: Screen) -> int:
    """Run a search, or resume it; the exit status (DESIGN §1).

    Raises:
        InputError: anything that is wrong, before the model loads wherever it can be known by then.
    """
    settings = command.settings
    _check(command)
    away = ask_store(settings)
    identity = identify(command.space, command.base, settings)
    name = settings.search.name or identity.name
    began, tracked = _began(command, name, away)
    # Of a search that has never begun no study and no folder is left behind by bad input.
    ready = _prepare(command, name) if settings.search.fresh or not began else None
    interrupts = Interrupts(screen.announce)
    patience = Patience(screen.say, lambda: interrupts.requested)
    source = _open_study(command, identity, patience)
    try:
        return _go(command, source, screen, tracked, interrupts, ready)
    finally:
        source.close()


def _check(command: SearchCommand) -> None:
    """What is wrong with the settings: no data set is tokenised for it, and nothing is written."""
    settings, jobs = command.settings, command.probes
    check_here(settings.cluster)
    check_stopping(settings.search)
    check_options(settings.search, command.space)
    check_jobs(jobs)
    check_measured(settings.search, dict.fromkeys(job.data for job in jobs))
    check_kept(settings.search, jobs)
    if budgets := [job.train.steps for job in jobs if job.train.steps is not None]:
        rung_steps(settings.search.stopping, min(budgets))
    check_engine(settings, jobs)


def _began(command: SearchCommand, name: str, away: AwayError | None) -> tuple[bool, Tracked]:
    """Whether the search has a study, or one of its processes got as far as training; and its run.

    Raises:
        StorageError: the storage does not answer, or cannot be made; or as ``tracked_run``.
        SearchError: a search that is to begin cannot learn from ``search.prior``.
    """
    quiet()
    search, root = command.settings.search, command.settings.tracking.root
    storage = existing_storage(search.storage, root)
    began = storage is not None and name in optuna.get_all_study_names(storage)
    if search.prior is not None and (search.fresh or not began):
        earlier = storage if search.prior_storage is None else existing_storage(search.prior_storage, root)
        check_prior(name, search, command.space, earlier)
    tracked = tracked_run(storage, name, command.settings, away)
    return began or recorded_command(root, name) is not None, tracked


@dataclass(frozen=True, slots=True)
class _Ready:
    """What is known and loaded before the model.

    Attributes:
        model: its digest.
        settings: that the engine can run with.
        said: what is to be said of them.
    """

    model: str
    data: LoadedData
    settings: RunSettings
    said: Sequence[str]


def _prepare(command: SearchCommand, name: str) -> _Ready:
    """Load the data, and check the jobs against model and memory.

    Raises:
        InputError: they cannot be trained.
    """
    settings, probes = command.settings, command.probes
    shape = check_model(settings.model, probes)
    data = open_data(settings, shape.max_length, probes)
    folder = search_folder(settings.tracking.root, name)
    settings, said = settle_engine(settings, shape, data.catalogue, probes, folder)
    profile = stored_profile(settings, shape.digest)
    check_memory(settings, shape, data.catalogue, probes, free_memory(settings), profile)
    rung_steps(settings.search.stopping, shortest_budget(probes, data.catalogue))
    return _Ready(shape.digest, data, settings, said)


def _go(
    command: SearchCommand,
    source: StudyTrials,
    screen: Screen,
    tracked: Tracked,
    interrupts: Interrupts,
    ready: _Ready | None,
) -> int:
    settings = command.settings
    recorded = recorded_command(settings.tracking.root, source.name)
    if recorded is None and ready is not None:
        _remember(command, source.name)  # from here on it can be resumed
    elif recorded is not None and not settings.search.fresh:
        _tell(screen, another_store(recorded, settings.tracking))
    done = SearchResult(tuple(source.finished()))
    over, to_resume, others = source.over, source.to_resume, source.others
    line = f"Search {source.name}, tracked in {locate(settings.tracking)}"
    if to_resume or 0 < over < source.total:
        line += f"; {over} of {source.total} trials ended; resuming {to_resume}"
    if others:
        line += f"; other workers train {others}, this one trains the rest"
    few = too_few_points(settings.search, command.space)
    before = describe_prior(settings.search, len(source.prior)) if source.prior else None
    _tell(screen, [said for said in (line, few, before) if said])
    why = "" if over >= source.total else failure_limit(source.failed, source.total, settings.search)
    if over >= source.total or (why and not to_resume and not others):
        return _nothing_to_train(command, source, screen, replace(done, why=why))
    if tracked.away is not None:
        _tell(screen, [without_store(tracked.away, settings, source.name)])
    ready = ready or _prepare(command, source.name)
    source.check_material({"model": ready.model} | material_of(ready.data, command.probes))
    _tell(screen, ready.said)
    stopper = make_stopper(
        settings.search, shortest_budget(command.probes, ready.data.catalogue), source.rungs
    )
    _remember(command, source.name)
    launch = _Launch(replace(command, settings=ready.settings), source, stopper, screen, tracked, interrupts)
    result = launch.run(ready.data)
    if not result.interrupted and not result.ended_by:
        _remember(command, source.name, finished=True, concluded=launch.concluded)
        source.withdraw_orders()  # those that came while the last results were written
    return result.exit_status


def _nothing_to_train(command: SearchCommand, source: StudyTrials, screen: Screen, done: SearchResult) -> int:
    """What is left of a search that is finished, or gave up: say so."""
    notices, concluded = catch_up(command.settings, source, done.finished)
    _tell(screen, notices)
    _remember(command, source.name, finished=not done.why, concluded=concluded)
    if not done.why:
        source.withdraw_orders()  # those that came just before its last process was killed
    write_result(done, command.settings.search, command.directory)
    if done.why:
        _tell(screen, [describe_given_up(done.why, source.name)])
    else:
        search, exhausted = command.settings.search, source.exhausted
        _tell(screen, describe_result(done, search, source.name, exhausted=exhausted))
    return done.exit_status


def run_training(command: SearchCommand, screen: Screen) -> int:
    """Train the command's one job; the exit status.

    Raises:
        InputError: as :func:`run_search`.
    """
    settings = command.settings
    identity = identify(command.space, command.base, settings)
    name = settings.search.name or f"train-{hashlib.sha256(identity.problem_json.encode()).hexdigest()[:12]}"
    one = replace(
        settings.search,
        name=name,
        trials=1,
        parallel=1,
        sampler="random",
        sampler_options={},
        enqueue=(),
        prior=None,
    )
    return run_search(replace(command, settings=replace(settings, search=one), verb="train"), screen)


def _open_study(command: SearchCommand, identity: Identity, patience: Patience) -> StudyTrials:
    search, root = command.settings.search, command.settings.tracking.root
    earlier = search.prior_storage
    return StudyTrials(
        search,
        command.space,
        identity,
        open_storage(search.storage, root),
        folder=lambda name: search_folder(root, name),
        patience=patience,
        prior_storage=None if earlier is None else existing_storage(earlier, root),
    )


def material_of(data: LoadedData, jobs: Sequence[JobSpec]) -> dict[str, str]:
    """What the jobs train on, by what it was asked for as: digests of the content."""
    specs = dict.fromkeys(job.data for job in jobs)
    return {f"data {spec.source} {spec.options}": data.catalogue.of(spec).digest for spec in specs}


def _remember(command: SearchCommand, name: str, *, finished: bool = False, concluded: bool = False) -> None:
    """Keep the command with the search, for `plait resume`."""
    folder = search_folder(command.settings.tracking.root, name)
    store = store_elsewhere(command.settings.tracking)
    storage = from_anywhere(command.settings.search.storage)
    recorded = RecordedCommand(
        name, command.verb, command.overrides, str(Path.cwd()), finished, store, storage, concluded
    )
    write_command(folder, recorded)


def another_store(recorded: RecordedCommand, tracking: TrackingSettings) -> list[str]:
    """What to say where a search that resumes was recorded in another store before."""
    now = store_elsewhere(tracking)
    if now == recorded.store:
        return []
    before, after = (redact(each or sqlite_in(tracking.root.absolute())) for each in (recorded.store, now))
    return [
        f"This search has been recorded in {before} so far and will be recorded in {after} from now on; the "
        f"first part of each curve stays in the old store. Use tracking.uri={before} to keep it in one place."
    ]


def _chosen(choices: Mapping[str, Any]) -> str:
    """What the engine runs with, as far as it was left open or measured."""
    return "Engine: {device}, kernels {kernels}, microbatches of up to {capacity} tokens".format(**choices)


def check_here(cluster: ClusterSettings) -> None:
    """Refuse to train on a cluster that is only described.

    Raises:
        ConfigError: it is not this machine.
    """
    if cluster.kind != "local":
        raise ConfigError(
            f"cluster: {cluster.options.get('name', cluster.kind)}",
            "Plait trains on this machine only (cluster=local).",
            "Leave out cluster, or run `plait plan` with the same arguments to see what would run on "
            "that cluster.",
        )


def going_on(command: tuple[str, ...], *, gave_up: bool = False) -> tuple[str, ...]:
    """The command line that resumes a search: the same, without ``fresh``, and whatever fails where too much
    did."""
    left = {"search.fresh", TRY_ALL.partition("=")[0]} if gave_up else {"search.fresh"}
    words = tuple(word for word in command if word.lstrip("+").partition("=")[0] not in left)
    return (*words, TRY_ALL) if gave_up else words


def _tell(screen: Screen, notices: Sequence[str]) -> None:
    for line in notices:
        screen.say(line)


class _Launch:
    """One search in this process, from the loading of the model to the last line.

    Args:
        command: with settings that the engine can run with.
        source: of the trials.
        stopper: where trials are stopped early.
        screen: shows what is said.
        tracked: what is known of the search's run.
        interrupts: say whether the search is to end.

    Attributes:
        concluded: the search's run says all of the search.
    """

    def __init__(
        self,
        command: SearchCommand,
        source: StudyTrials,
        stopper: Stopper | None,
        screen: Screen,
        tracked: Tracked,
        interrupts: Interrupts,
    ) -> None:
        self._interrupts = interrupts
        self.concluded = False
        self._tracked = tracked
        self._command = command
        self._stopper = stopper
        self._settings = command.settings
        self._source = source
        self._screen = screen

    def run(self, data: LoadedData) -> SearchResult:
        folder = search_folder(self._settings.tracking.root, self._source.name)
        tracker = Tracker(
            self._settings.tracking, others=self._others, over=self._over, orphaned=self._orphaned
        )
        with tracker:
            coordinator = build_coordinator(
                self._settings, data.catalogue, folder, self._source.states_folder, tracker.commit
            )
            _tell(self._screen, [_chosen(coordinator.plan().choices)])
            with self._source.patience.holding(lambda: self._source.exclusive("run")):  # one for all
                rungs_of = None if self._stopper is None else self._stopper.rungs_of
                run_id = tracker.start_search(self._facts(), self._begun(), rungs_of)
                self._source.link(run_id, str(tracker.location))
            if tracker.away is not None and self._tracked.away is None:  # since this began
                _tell(self._screen, [without_store(tracker.away, self._settings, self._source.name)])
            tracker.record("data.json", data.facts)
            tracker.record("lengths.json", data.lengths)
            tracker.record(
                PLAN_FILE, write_plan(folder, coordinator.plan())
            )  # the choices, should this end early
            with Figures(self._settings.tracking, run_id, self._settings.search.storage) as figures:
                result = self._train(coordinator, tracker)
            tracker.record(PLAN_FILE, write_plan(folder, coordinator.plan()))
            tracker.end_search(JobState.PAUSED if result.interrupted else JobState.FINISHED, result.why)
        write_result(result, self._settings.search, self._command.directory)
        # Who interrupts wants to go, and a store that lacks points has no figures to show yet.
        if not result.interrupted and not tracker.notices:
            self._conclude(tracker, figures)
        self._report(result, tracker, figures.trouble)
        _tell(self._screen, tracker.notices)
        return result

    def _conclude(self, tracker: Tracker, figures: Figures) -> None:
        """What is said of the whole search: by one process at a time, so that the last one has the others'
        jobs, too, and not while others train."""
        try:
            with self._source.patience.holding(lambda: self._source.exclusive("run")):
                if not self._others():
                    tracker.conclude(self._source.finished())
                    self.concluded = True
                    figures.publish(final=True)
        except StorageError as error:
            tracker.notices.append(error.value)

    def _train(self, coordinator: Coordinator, tracker: Tracker) -> SearchResult:
        with self._screen.watch(tracker.board) as view, self._interrupts as interrupts:
            recorder = SearchRecorder(tracker, view)
            return SearchLoop(
                self._source,
                self._command.make_job,
                coordinator,
                recorder,
                self._settings.search,
                stop=lambda: interrupts.requested,
                stopper=self._stopper,
                read_orders=view.beside(self._attend(tracker, view.note)),
            ).run()

    def _attend(self, tracker: Tracker, say: Callable[[str], None]) -> Attend:
        store, orders = str(tracker.location), self._source.orders.poll
        return Attend(self._source, tracker.board, say, orders, lambda: tracker.unreachable, store)

    def _others(self) -> bool:
        """Whether other processes train trials of this search, as far as one can see."""
        try:
            return self._source.others > 0
        except StorageError:
            return False

    def _over(self) -> set[str]:
        """Names of the trials that are over, as far as one can see."""
        try:
            return {item.job for item in self._source.finished()}
        except StorageError:
            return set()

    def _orphaned(self) -> set[str]:
        """Names of the trials whose worker is dead, as far as one can see."""
        try:
            return self._source.orphaned
        except StorageError:
            return set()

    def _begun(self) -> Begun | None:
        run_id = self._tracked.run_id
        return Begun(run_id, self._source.finished()) if run_id else None

    def _facts(self) -> SearchFacts:
        return SearchFacts(
            name=self._source.name,
            settings=self._settings,
            config=self._command.config,
            command=self._command.command,
            overrides=self._command.overrides,
            fresh=self._settings.search.fresh,
            study=self._source.token,
        )

    def _report(self, result: SearchResult, tracker: Tracker, trouble: str) -> None:
        facts = {"tracked in": str(tracker.location), "pages": "plait ui"}
        if trouble:
            facts["figures"] = f"not written: {trouble}"
        if result.ended_by:
            facts["ended early"] = result.why
        if result.interrupted or result.ended_by:
            words = going_on(self._command.command, gave_up=result.ended_by == "failing")
            if self._settings.tracking.uri is None and VARIABLE in os.environ:
                words = (*words, f"{URI}={os.environ[VARIABLE]}")
            facts["resume with"] = redact(shlex.join(words))
        self._screen.summarise(tracker.board, facts)
