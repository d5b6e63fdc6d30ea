"""Starts a composed command: what can be checked without torch and MLflow is, before they are imported.

`plait train` takes the same path, as a study with an empty space and one trial. The seam to the command line.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.engine.build import settle_dtype
from plait.models.sources import check_files
from plait.search.checks import (
    ask_store,
    check_command,
    check_model,
    find_study,
    load_model_code,
    tracked_run,
)
from plait.search.identity import Identity, identify
from plait.search.recorded import recorded_command
from plait.search.results import SearchEnd
from plait.search.run import SECOND, Interrupts
from plait.search.storage import Patience, open_storage
from plait.search.study import StudyTrials
from plait.search.trials import SearchCommand
from plait.tracking.location import store_elsewhere
from plait.utils.paths import search_folder

if TYPE_CHECKING:
    from plait.distributed.launch import Launcher
    from plait.search.launch import Screen


def run_search(
    command: SearchCommand, screen: Screen, signals: Collection[signal.Signals] = tuple(SECOND)
) -> SearchEnd:
    """Run a search, or resume it.

    Args:
        signals: the signals that interrupt it; others are left to the program.

    Raises:
        InputError: anything that is wrong, raised before the model is loaded whenever possible.
        KeyboardInterrupt: before it trains; with its name if it can be resumed.
    """
    with _processes(command) as processes:
        check_command(command)
        identity = identify(command.space, command.base, command.settings)
        name = command.settings.search.name or identity.name
        with _named_if_resumable(command, name):
            tracking = command.settings.tracking
            new, ours = recorded_command(tracking.root, name) is None, store_elsewhere(tracking) is None
            if new:  # one that has ended is reported without its model
                check_files(command.settings.model)
            storage, began = find_study(command, name, identity)
            screen.say("Loading MLflow ...")
            from plait.search.launch import Launch, prepare_search

            if new and ours:  # before the store is made
                _check_model(command, screen)
            screen.say("Opening the tracking store ...")
            away = ask_store(command.settings)
            run_id = tracked_run(storage, name, command.settings, away)
            if new and not ours:  # a server answers or not within seconds, and a model may have to be fetched
                _check_model(command, screen)
            fresh = command.settings.search.fresh or not began
            prepared = prepare_search(command, name, screen) if fresh else None
            interrupts = Interrupts(screen.announce, signals)
            source = _open_study(command, identity, Patience(screen.say, lambda: interrupts.requested))
            with closing(source):
                launch = Launch(command, source, screen, interrupts, processes, run_id=run_id, away=away)
                end = launch.go(prepared)
            return replace(end, name=source.name)


def _check_model(command: SearchCommand, screen: Screen) -> None:
    load_model_code(screen.say)
    check_model(settle_dtype(command.settings).model, command.probes)


@contextmanager
def _named_if_resumable(command: SearchCommand, name: str) -> Iterator[None]:
    """Within the context, an interrupt has the search's name if `plait resume` knows it by now."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if recorded_command(command.settings.tracking.root, name) is None:
            raise
        raise KeyboardInterrupt(name) from interrupt


@contextmanager
def _processes(command: SearchCommand) -> Iterator[Launcher | None]:
    """The run's processes, if it has several: from now on they may come, while this one prepares.

    Raises:
        ConfigError: as ``Launcher``.
    """
    if command.settings.cluster.processes == 1:
        yield None
        return
    from plait.distributed.launch import Launcher

    launcher, linger = Launcher(command.settings.cluster, command.place), True
    try:
        yield launcher
    except KeyboardInterrupt:
        linger = False  # the user who interrupts this process handles the others
        raise
    finally:
        launcher.close(linger=linger)


def run_training(command: SearchCommand, screen: Screen) -> SearchEnd:
    """Train the command's one job.

    Raises:
        InputError: as for :func:`run_search`.
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
    return StudyTrials(
        search,
        command.space,
        identity,
        open_storage(search.storage, root),
        folder=lambda name: search_folder(root, name),
        patience=patience,
    )
