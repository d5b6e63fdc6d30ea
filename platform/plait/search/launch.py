"""One search in this process, from its study to the last line: builds the engine, trains and reports.

The seam between them: only this module joins engine, study, tracking and screen. ``start`` imports it once
the command is checked, because torch and MLflow are slow to import.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.core.errors import StorageError
from plait.core.jobs import DataSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import Notice
from plait.core.plans import Plan
from plait.core.settings import AUTO, RunSettings, TrackingSettings
from plait.core.space import as_written
from plait.engine.build import PLAN_FILE, build_coordinator, write_plan
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.deployments import written
from plait.search.checks import DTYPE, Prepared, load_model_code, prepare
from plait.search.locks import WORKERS
from plait.search.objective import unusual_directions
from plait.search.orders import Orders
from plait.search.ownership import process_id
from plait.search.points import too_few_points
from plait.search.prior import describe_prior
from plait.search.recorded import RecordedCommand, recorded_command, write_command
from plait.search.results import (
    TRY_ALL,
    SearchEnd,
    describe_given_up,
    describe_result,
    failure_limit,
    write_result,
)
from plait.search.run import Interrupts, SearchLoop, View
from plait.search.rungs import describe_metric, describe_rungs
from plait.search.stopper import Stopper, budgets_of, make_stopper
from plait.search.stopping import rungs_within
from plait.search.storage import JOURNAL, from_anywhere
from plait.search.study import StudyTrials
from plait.search.trials import SearchCommand, Trial
from plait.tracking.connection import AwayError
from plait.tracking.event_log import logs_folder
from plait.tracking.facts import DataFacts, SearchFacts, data_facts
from plait.tracking.figures import Figures
from plait.tracking.leaderboard import Leaderboard, orphan
from plait.tracking.location import locate, sqlite_in, store_elsewhere
from plait.tracking.processes import ProcessRow, ProcessWatch, remove_left
from plait.tracking.search_run import conclude, left_unsent, send_left
from plait.tracking.tracker import Peers, Tracker
from plait.utils.addresses import redact
from plait.utils.paths import command_on, search_folder, user_path

if TYPE_CHECKING:
    from plait.distributed.launch import Launcher

LOOK_SECONDS = 5.0  # interval of checks for what other processes added to the search


class Screen(Protocol):
    """Shows a search to its user; the search itself does not import a terminal."""

    def say(self, text: str) -> None:
        """Show one line."""

    def watch(self, board: Leaderboard, processes: Callable[[], Sequence[ProcessRow]]) -> View:
        """The view of a search that trains from now on, on these processes if there are several."""

    def announce(self) -> None:
        """Answer the first Ctrl-C, in the signal handler."""

    def summarise(self, board: Leaderboard, facts: Mapping[str, Any]) -> None:
        """Show the result of the search."""


def prepare_search(command: SearchCommand, name: str, screen: Screen) -> Prepared:
    """What is checked and loaded before the model, saying so; errors as for ``prepare``."""
    load_model_code(screen.say)
    screen.say("Tokenising the data, or reading it from the cache ...")
    return prepare(command, name)


def _remember(command: SearchCommand, name: str, *, finished: bool = False, concluded: bool = False) -> None:
    """Store the command with the search, for `plait resume`."""
    folder = search_folder(command.settings.tracking.root, name)
    store = store_elsewhere(command.settings.tracking)
    storage = from_anywhere(command.settings.search.storage)
    recorded = RecordedCommand(
        name, command.verb, command.overrides, str(Path.cwd()), finished, store, storage, concluded
    )
    write_command(folder, recorded)


def another_store(recorded: RecordedCommand, tracking: TrackingSettings) -> list[str]:
    """What to say if a resuming search was recorded in another store before."""
    now = store_elsewhere(tracking)
    if now == recorded.store:
        return []
    before, after = (redact(each or sqlite_in(tracking.root.absolute())) for each in (recorded.store, now))
    return [
        f"This search has been recorded in {before} so far and will be recorded in {after} from now on; "
        "ended trials, and the first part of each curve, are in the old store alone. Use "
        f"tracking.uri={before} to keep it in one place."
    ]


def another_host(before: str, tracking: TrackingSettings) -> list[str]:
    """What to say if a search that this folder of runs does not know was recorded in another store
    ``before``: each would have a part of it. A SQLite file in the folder is this host's own, whatever its
    path."""
    now = str(locate(tracking))
    if not before or (now == before and store_elsewhere(tracking) is not None):
        return []
    return [
        f"This search is recorded in {before} by a process with another folder of runs; what is trained here "
        f"is recorded in {now}. Unless both are one store, neither has the whole search: give all processes "
        "the address of one MLflow server (tracking.uri)."
    ]


def without_store(away: AwayError, settings: RunSettings, name: str) -> str:
    """What to say if a search resumes without its store."""
    folder = logs_folder(user_path(settings.tracking.root).absolute(), name)
    return f"{away.value}. Records are buffered in {folder} and sent when it answers."


def catch_up(
    settings: RunSettings, source: StudyTrials, results: Sequence[JobResult]
) -> tuple[list[str], bool]:
    """Complete the search's run, if a process was killed after the last trial or could not reach the store.

    Returns:
        What could not be done, in words, and whether the run is complete now.

    Raises:
        StorageError: the store refuses.
    """
    tracking = settings.tracking
    recorded = recorded_command(tracking.root, source.name)
    if recorded is not None and recorded.concluded and not left_unsent(tracking, source.name):
        return [], True
    try:
        if notices := send_left(tracking, source.name):
            return notices, False
        with source.shared.holding("run"):
            run_id = conclude(tracking, source.name, source.token, results)
            if run_id is None:
                return [], True
            figures = Figures(tracking, run_id, settings.search.storage)
            figures.publish(final=True)
    except AwayError as error:
        unsent = left_unsent(tracking, source.name)
        later = f"{error.value}. When it answers, run the same command again to complete the search's run."
        return unsent or [later], False
    return [figures.trouble] if figures.trouble else [], True


class Launch:
    """One search in this process, from its study to the last line.

    Args:
        run_id: MLflow's id of the search's run, if it was recorded in this store before; else "".
        away: the error, if the store does not answer now.
    """

    def __init__(
        self,
        command: SearchCommand,
        source: StudyTrials,
        screen: Screen,
        interrupts: Interrupts,
        processes: Launcher | None,
        *,
        run_id: str = "",
        away: AwayError | None = None,
    ) -> None:
        self._command = command
        self._processes = processes
        self._settings = command.settings
        self._source = source
        self._screen = screen
        self._run_id, self._away = run_id, away
        self._interrupts = interrupts

    @cached_property
    def _recorded(self) -> RecordedCommand | None:
        """The command that was recorded before this one."""
        return recorded_command(self._command.settings.tracking.root, self._source.name)

    def go(self, prepared: Prepared | None) -> SearchEnd:
        """Train the remaining trials.

        Args:
            prepared: what was prepared for a search that has not begun.
        """
        source, settings = self._source, self._settings
        recorded = self._recorded
        if recorded is None and prepared is not None:
            _remember(self._command, source.name)  # from here on it can be resumed
        if recorded is None and not self._trained_here:
            self._say(*another_host(source.recorded_in, settings.tracking))
        elif recorded is not None and not settings.search.fresh:
            self._say(*another_store(recorded, settings.tracking))
        self._say(self._study_lost())
        total, over = source.total, source.over
        to_resume, others = source.claims.to_resume(), source.claims.others
        line = f"Search {source.name}, tracked in {locate(settings.tracking)}"
        if to_resume or 0 < over < total:
            line += f"; {over} of {total} trials ended; resuming {to_resume}"
        if others:
            line += f"; other workers train {others}, this one the rest"
        few = too_few_points(settings.search, self._command.space)
        self._say(line, few, describe_prior(settings.search, len(source.prior)) if source.prior else "")
        why = "" if over >= total else failure_limit(source.failed, total, settings.search)
        if over >= total or (why and not to_resume and not others):
            return self._nothing_to_train(SearchEnd(tuple(source.finished()), why=why))
        if self._away is not None:
            self._say(without_store(self._away, settings, source.name))
        return self._train_all(prepared or prepare_search(self._as_begun(), source.name, self._screen))

    @property
    def _trained_here(self) -> bool:
        return (search_folder(self._settings.tracking.root, self._source.name) / PLAN_FILE).exists()

    def _study_lost(self) -> str:
        """What to say if the search has trained, and its study is a new one; "" otherwise."""
        settings, name = self._settings, self._source.name
        if not self._trained_here or settings.search.fresh or self._source.material:
            return ""
        where = redact(settings.search.storage or str(user_path(settings.tracking.root) / JOURNAL))
        return (
            f"{name} has trained before, but its study is not in {where}: it begins again. Its former runs "
            "stay in MLflow."
        )

    def _as_begun(self) -> SearchCommand:
        """The command with the model's dtype that the search began with, on any host, if the command leaves
        it open."""
        model, dtype = self._settings.model, self._source.material.get(DTYPE)
        if model.dtype != AUTO or dtype is None:
            return self._command
        settings = replace(self._settings, model=replace(model, dtype=dtype))
        return replace(self._command, settings=settings)

    def _nothing_to_train(self, done: SearchEnd) -> SearchEnd:
        """End a search that has nothing left to train: report it."""
        source, search = self._source, self._settings.search
        notices, concluded = catch_up(self._settings, source, done.finished)
        self._say(*notices)
        if done.why:
            _remember(self._command, source.name, concluded=concluded)
            said = [describe_given_up(done.why, source.name)]
        elif self._finish(concluded):
            shows = self._command_on("leaderboard")
            said = describe_result(done, search, source.name, shows, exhausted=source.exhausted)
        else:
            said = []
        write_result(done, search, self._command.directory)
        self._say(*said)
        return done

    def _train_all(self, prepared: Prepared) -> SearchEnd:
        """Compare what was prepared with the study, and train to the end of the search."""
        source, search = self._source, self._settings.search
        source.check_material(prepared.material)
        self._say(*prepared.said)
        self._settings = prepared.settings
        self._say(*unusual_directions(search))
        budgets = budgets_of(self._command.probes, prepared.data.catalogue)
        stopper = make_stopper(search, budgets, source.rungs)
        if stopper is not None:
            rungs = rungs_within(search.stopping, budgets, stopper.unit)
            said = describe_rungs(search.stopping, budgets, stopper.unit, rungs)
            self._say(describe_metric(search), *said)
        _remember(self._command, source.name)
        result, concluded = self._run(prepared, stopper)
        if not result.interrupted and not result.ended_by:
            self._finish(concluded)
        return result

    def _finish(self, concluded: bool) -> bool:
        """Store that the search is finished, and return True, unless a trial was added while its results were
        written."""
        source = self._source
        if source.over < source.total:
            self._say(f"A trial was added at the end: `{self._command_on('resume')}` trains it.")
            return False
        _remember(self._command, source.name, finished=True, concluded=concluded)
        source.withdraw_orders()  # those that came as late
        return True

    def _run(self, prepared: Prepared, stopper: Stopper | None) -> tuple[SearchEnd, bool]:
        """Train, record and report; also returns whether the search's run is complete now."""
        settings, source, data, many = self._settings, self._source, prepared.data, self._processes
        folder = search_folder(settings.tracking.root, source.name)
        tracker = Tracker(settings.tracking, peers=self._peers, writes_curves=source.claims.writes_curves)
        watch = ProcessWatch(folder, lambda: tracker.board)
        if many is not None:
            many.watch, many.say = (lambda: watch.show()), self._say
            remove_left(folder, {process_id(file) for file in (folder / WORKERS).iterdir()})
        self._say(_loading(settings))
        with tracker, closing(watch):
            coordinator = build_coordinator(
                settings,
                data.catalogue,
                folder,
                source.checkpoints_folder,
                tracker.commit,
                None if many is None else watch.following(partial(many.fleet, folder / "processes")),
                (lambda: False) if many is None else many.grown,
                None if many is None else many.prefer,
            )
            self._say(_describe_engine(coordinator.plan()))
            run_id = self._start(tracker)
            self._say(
                f"View with: {self._view(tracker)}", "Training; the first lines follow the first step ..."
            )
            tracker.use_data(self._data_facts(data.catalogue))
            tracker.record("data.json", data.facts)
            tracker.record("lengths.json", data.lengths)
            # The choices, in case this ends early.
            tracker.record(PLAN_FILE, self._write_plan(folder, coordinator.plan()))
            with Figures(settings.tracking, run_id, settings.search.storage) as figures:
                result = self._train(coordinator, tracker, stopper, watch)
                was_away = tracker.unreachable
            tracker.record(PLAN_FILE, self._write_plan(folder, coordinator.plan()))
            tracker.end_search(JobState.PAUSED if result.interrupted else JobState.FINISHED, result.why)
        if was_away and not tracker.notices:
            self._say(f"{tracker.location} answers again; all records were sent.")
        write_result(result, settings.search, self._command.directory)
        # After an interrupt there is no time, and a store that lacks points has no figures yet.
        whole = not result.interrupted and not tracker.notices
        concluded = whole and self._conclude(tracker, figures)
        self._report(result, tracker, figures.trouble, "" if many is None else coordinator.account)
        self._say(*tracker.notices)
        return result, concluded

    def _write_plan(self, folder: Path, plan: Plan) -> str:
        """Store the plan with the replicas that were chosen, if they were left open, and the layers of each
        stage, if they are not merely balanced; return its JSON."""
        cluster = self._settings.cluster
        if cluster.layer_split != self._command.settings.cluster.layer_split:
            plan = replace(
                plan, choices={**plan.choices, "layer_split": as_written(cluster.layer_split)[1:-1]}
            )
        if self._command.settings.cluster.to_choose:
            plan = replace(plan, choices={**plan.choices, "deployment": written(cluster)})
        return write_plan(folder, plan)

    def _start(self, tracker: Tracker) -> str:
        """Make the search's run, or resume it, one process at a time; returns MLflow's id of it."""
        source = self._source
        with source.shared.holding("run"):
            run_id = tracker.start_search(self._facts(), self._run_id)
            source.link(run_id, str(tracker.location))
        if tracker.away is not None and self._away is None:  # since this process began
            self._say(without_store(tracker.away, self._settings, source.name))
        return run_id

    def _train(
        self, coordinator: Coordinator, tracker: Tracker, stopper: Stopper | None, watch: ProcessWatch
    ) -> SearchEnd:
        with self._screen.watch(tracker.board, watch.rows) as view, self._interrupts as interrupts:
            watch.show = view.refresh
            if self._processes is not None:
                self._processes.stopping = lambda: interrupts.requested
                self._processes.say = lambda text: view.handle(Notice(text))
            attend = Attend(
                self._source,
                tracker.board,
                lambda text: view.handle(Notice(text)),
                self._source.orders.poll,
                lambda: tracker.unreachable,
                str(tracker.location),
                watch.keep,
            )
            attend.take_ended()  # the loop may end before its first iteration
            end = SearchLoop(
                self._source,
                self._command.make_job,
                coordinator,
                tracker,
                self._settings.search,
                stop=lambda: interrupts.requested,
                stopper=stopper,
                read_orders=attend,
                view=view,
                lift=self._command_on("control", "resume"),
                say_dead=attend.say_dead,
            ).run()
            attend.watch_store()  # so that what was said last is how the store is now
            return end

    def _conclude(self, tracker: Tracker, figures: Figures) -> bool:
        """Record the summary of the whole search, if no other process trains; return whether it was recorded.
        Done by one process at a time, so that the last one includes the others' jobs."""
        try:
            with self._source.shared.holding("run"):
                if not self._peers().training:
                    tracker.conclude(self._source.finished())
                    figures.publish(final=True)
                    return True
        except StorageError as error:
            tracker.notices.append(error.value)
        return False

    def _peers(self) -> Peers:
        """What the study knows about the search's processes. Until it says that no others train, they are
        assumed to, so that this process ends nothing of theirs."""
        training, ended, orphaned = True, set[str](), set[str]()
        with suppress(StorageError):
            training = self._source.claims.others > 0  # first: what ends meanwhile counts as ended
            ended = {item.job for item in self._source.finished()}
            orphaned = self._source.claims.orphaned
        return Peers(training, ended, orphaned)

    def _facts(self) -> SearchFacts:
        return SearchFacts(
            name=self._source.name,
            settings=self._settings,
            config=self._command.config,
            command=self._command.command,
            overrides=self._command.overrides,
            study=self._source.token,
            searched=tuple(each.name for each in self._command.space.dimensions),
        )

    def _data_facts(self, catalogue: DataCatalogue) -> dict[DataSpec, DataFacts]:
        specs = dict.fromkeys(job.data for job in self._command.probes)
        return {spec: data_facts(spec, catalogue.of(spec)) for spec in specs}

    def _view(self, tracker: Tracker) -> str:
        """Where to see the search: an address, or the command that serves it."""
        tracking = self._settings.tracking
        words = [f"tracking.uri={tracking.uri}"] if tracking.uri else []
        if tracking.experiment != TrackingSettings().experiment:
            words.append(f"tracking.experiment={tracking.experiment}")
        return tracker.page or redact(self._command_on("ui", *words))

    def _command_on(self, verb: str, *words: str) -> str:
        return command_on(self._settings.tracking.root, verb, self._source.name, *words)

    def _report(self, result: SearchEnd, tracker: Tracker, trouble: str, account: str) -> None:
        facts = {"tracked in": str(tracker.location), "view with": self._view(tracker)}
        if account:
            facts["checkpoints"] = account
        if trouble:
            facts["figures"] = f"not written: {trouble}"
        if result.why:
            facts["ended early"] = result.why
        if result.interrupted or result.ended_by:
            lifted = [TRY_ALL] if result.ended_by == "failing" else []
            under = ", under the launcher" if self._command.place else ""
            facts["resume with"] = f"{self._command_on('resume', *lifted)}{under}"
        if result.ended_by == "paused":
            facts["end the pause with"] = self._command_on("control", "resume")
        self._screen.summarise(tracker.board, facts)

    def _say(self, *lines: str) -> None:
        for line in filter(None, lines):
            self._screen.say(line)


def _loading(settings: RunSettings) -> str:
    from plait.engine.devices import choose_device

    if choose_device(settings.engine.device).type == "cpu":
        return "Loading the model ..."
    return "Loading the model; on a kind of GPU that is new, the kernels' tile sizes are measured ..."


def _describe_engine(plan: Plan) -> str:
    choices, replicas = plan.choices, len(plan.replicas)
    words = "Engine: {device}, {dtype}, kernels {kernels}, microbatches of up to {capacity} tokens"
    if choices["processes"] != 1:
        words += ", {processes} processes"
        if any(each.pp > 1 for each in plan.replicas):
            words += f" as the stages of {'a pipeline' if replicas == 1 else f'{replicas} pipelines'}"
        slices = max(each.tp for each in plan.replicas)
        words += f", {slices} with slices of the same layers" if slices > 1 else ""
        words += ", engine.threads={threads} each" if "threads" in choices else ""
    return words.format(**choices)


@dataclass(slots=True)
class Attend:
    """Called before every iteration: carries out the user's orders and updates the views from the study.

    Attributes:
        say: shows a line to the user.
        unreachable: why the tracking store does not answer; empty if it does.
        store: what it is called.
        keep: keeps for other terminals how the processes are doing.
        clock: seconds, rising.
    """

    source: StudyTrials
    board: Leaderboard
    say: Callable[[str], None]
    read_orders: Callable[[], Orders]
    unreachable: Callable[[], str] = str
    store: str = ""
    keep: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    _revision: int | None = None
    _next_look: float = -math.inf
    _away: bool | None = None  # None: not known yet

    def __call__(self) -> Orders:
        """The orders in force now."""
        self.say_dead()
        self.watch_store()
        self.keep()
        orders = self.read_orders()
        now = self.clock()
        if self.source.revision != self._revision or now >= self._next_look:  # each check reads all trials
            self._revision, self.board.trials = self.source.revision, self.source.total
            self._next_look = now + LOOK_SECONDS
            self.take_ended()
        return orders

    def say_dead(self) -> None:
        """Say which workers were found dead since the last call, and show their trials as orphaned."""
        for worker in self.source.claims.dead_workers():
            left = worker.trials.keys() - self.source.claims.own  # free trials are adopted immediately
            orphan(self.board.jobs.values(), {Trial(number).name for number in left})
            self.say(worker.describe())

    def take_ended(self) -> None:
        """Show the trials that other processes have ended: the store is asked for those of this host."""
        for result in self.source.finished():
            known = self.board.jobs.get(result.job)
            if result.trial not in self.source.claims.own and (known is None or not known.ended):
                self.board.take_result(result)

    def watch_store(self) -> None:
        """Report when the tracking store becomes unavailable, and when it is back."""
        why = self.unreachable()
        away, was = bool(why), self._away
        self._away = away
        if was is None or was == away:
            return
        self.say(
            f"{self.store} does not answer ({why}). Records are buffered on disk; training continues."
            if away
            else f"{self.store} answers again; buffered records are being sent."
        )
