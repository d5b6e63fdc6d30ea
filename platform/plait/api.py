"""Plait from Python: run a search, look at its trials, load its adapters.

A seam: programs and notebooks use it through the names that ``plait`` exports. A search runs the code of
`plait sweep`, and is read with that of `plait leaderboard`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.errors import FULL_ERROR, ConfigError, PlaitError, SearchError, StorageError
from plait.core.lifecycle import JobState
from plait.core.settings import TrackingSettings
from plait.utils.counts import counted

# Other imports take seconds, and a notebook's completion imports this module for its names.
if TYPE_CHECKING:
    import pandas
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from plait.tracking.leaderboard import JobRecord
    from plait.tracking.results import SearchResult

Overrides = Sequence[str] | Mapping[str, object]
USUAL = TrackingSettings()

_running = threading.Lock()  # Hydra composes one configuration at a time in a process


def sweep(overrides: Overrides = ()) -> Result:
    """Run a search as `plait sweep` does, or resume it; progress is printed.

    Ctrl-C, or a notebook's interrupt button, ends it after the current step with everything saved. Outside
    the main thread, it can only be stopped with `plait control NAME stop`.

    Args:
        overrides: as on the command line, ``["model=tiny", "adapter.rank=4,8"]``, or by key, ``{"model":
            "tiny", "adapter.rank": [4, 8]}``. In a mapping, text is what follows the equals sign on the
            command line, and a list for a key of adapter, train or data has the values to try.

    Raises:
        Interrupted: it was interrupted; the same call resumes it.
        PlaitError: the errors that the command line would report.
    """
    with _errors_as_reported():
        words = override_words(overrides)
        if not _running.acquire(blocking=False):
            raise SearchError(
                "plait.sweep was called while a search is running",
                "A process runs one search at a time.",
                "Wait until it has ended, or start another process.",
            )
        try:
            return _run(words)
        finally:
            _running.release()


def open(
    name: str | None = None,
    *,
    root: str | Path = USUAL.root,
    uri: str | None = None,
    experiment: str = USUAL.experiment,
) -> Result:
    """Open a search that ran before or is running; the arguments say where it is recorded.

    Args:
        name: its name or the id of its MLflow run; None: the newest.
        root: its ``tracking.root``.
        uri: its ``tracking.uri``; None: MLFLOW_TRACKING_URI, else SQLite under ``root``.
        experiment: its ``tracking.experiment``.

    Raises:
        SearchError: the search does not exist.
        StorageError: the search cannot be read.
    """
    with _errors_as_reported():
        return _open(name, TrackingSettings(uri=uri, root=Path(root), experiment=experiment))


class Interrupted(KeyboardInterrupt):
    """A search was interrupted and everything was saved: the same call resumes it.

    Attributes:
        result: its result so far.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        from plait.tracking.results import opening

        found = self.result
        return (
            f"{found.name} was interrupted and has been saved. The same call resumes it; "
            f"{opening(found.name, found._settings)} opens what there is."
        )

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: no traceback, since nothing went wrong."""
        return [str(self)]


class Result:
    """A search as it was when it was opened: its trials, the best of them, their adapters.

    Attributes:
        name: name of the search.
        state: running, paused, finished or failed.
    """

    def __init__(self, found: SearchResult, settings: TrackingSettings) -> None:
        self.name = found.name
        self.state: JobState = found.state
        self._found = found
        self._settings = settings

    @property
    def best(self) -> JobRecord:
        """The finished trial with the best objective that satisfies all constraints.

        Raises:
            SearchError: no trial finished, or there are several objectives; these have a :attr:`front`.
        """
        from plait.tracking.results import chosen

        return chosen(self._found, None)

    @property
    def front(self) -> list[JobRecord]:
        """The Pareto front of several objectives; empty if there is only one."""
        return [record for record in self._found.records if record.on_front]

    @property
    def trials(self) -> pandas.DataFrame:
        """All trials by number, the best first: the columns of `plait leaderboard --format csv`."""
        import pandas

        from plait.tracking.leaderboard import columns

        names, rows = columns(self._found.records)
        plain = [[str(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        return pandas.DataFrame(plain, columns=names).set_index("trial")

    def adapter(self, trial: int | None = None) -> Adapter:
        """The adapter of a trial, or of the best one; the first call fetches it from the store.

        Raises:
            SearchError: there is no such trial, or it has no adapter.
            StorageError: the store does not answer, or the disk is full.
        """
        from plait.tracking.results import chosen
        from plait.tracking.trained import adapter_folder

        with _errors_as_reported():
            record = chosen(self._found, trial)
            folder = adapter_folder(self._found, record, self._settings)
            return Adapter(record.trial, folder, self._found, self._settings)

    def __repr__(self) -> str:
        trials = counted(len(self._found.records), "trial")
        best = self._found.best
        found = f", best trial {best.trial} with objective {best.objective:.6g}" if best else ""
        return f"<plait.Result {self.name!r}: {self.state}, {trials}{found}>"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A trained adapter: a folder in PEFT's format, which every function that takes a path accepts.

    Attributes:
        trial: its number in the search.
        folder: the folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
    """

    trial: int
    folder: Path
    _search: SearchResult = field(repr=False)
    _settings: TrackingSettings = field(repr=False)

    def __fspath__(self) -> str:
        return str(self.folder)

    def load(self) -> tuple[PeftModel, PreTrainedTokenizerBase]:
        """The base model with this adapter, loaded by PEFT, and its tokeniser. If the search was given a
        relative path of a model folder or file, it is looked for in the current folder.

        Raises:
            ModelError: the base model cannot be loaded.
            StorageError: the search's settings cannot be read from the store.
        """
        from peft import PeftModel

        from plait.models.load import load_tokeniser, transformers_model
        from plait.tracking.results import opening
        from plait.tracking.trained import base_model
        from plait.utils.paths import cache_dir

        if not self._search.run_id:
            again = opening(self._search.name, self._settings)
            raise StorageError(
                f"the base model of search {self._search.name!r}",
                "Its store, which has the model's settings, did not answer when the search was opened.",
                f"Open it again when the store answers: {again}. Its adapter: {self.folder}.",
            )
        settings = base_model(self._search, self._settings)
        base = transformers_model(settings, cache=cache_dir())
        tokeniser = load_tokeniser(settings, cache=cache_dir())
        return PeftModel.from_pretrained(base, str(self.folder)), tokeniser


def override_words(overrides: Overrides) -> list[str]:
    """Overrides as command-line arguments.

    Raises:
        ConfigError: they are neither a list of text nor a mapping, or a value cannot be written there.
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={_word(str(key), value)}" for key, value in overrides.items()]
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(
            f"plait.sweep({overrides!r})",
            "Overrides are a list of texts, KEY=VALUE, or a mapping from keys to values.",
            'For example plait.sweep(["model=tiny"]) or plait.sweep({"adapter.rank": [4, 8]}).',
        )
    return list(overrides)


def _word(key: str, value: object) -> str:
    """The text of a value after its key's equals sign."""
    from plait.config.build import JOB_GROUPS

    value = _plain(value)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, range)) and key.lstrip("+").split(".")[0] in JOB_GROUPS:
        return f"choice({','.join(_literal(key, each) for each in value)})"
    return _literal(key, value)


def _plain(value: object) -> object:
    """A NumPy number or array as a Python value; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _literal(key: str, value: object) -> str:
    """A value in Hydra's grammar."""
    from plait.search.recorded import quoted

    value = _plain(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return quoted(str(value))
    if isinstance(value, (list, tuple, range)):
        return f"[{','.join(_literal(key, each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{quoted(str(name))}:{_literal(key, each)}' for name, each in value.items())}}}"
    raise ConfigError(
        f"{key}={value!r}", "A value is text, a number, true or false, None, a path, a list or a mapping."
    )


@contextmanager
def _errors_as_reported() -> Iterator[None]:
    """Raise errors as the command line prints them, system errors included, without passwords. Their causes
    may contain some, so they are shown only with HYDRA_FULL_ERROR=1, as there."""
    try:
        yield
    except (PlaitError, OSError, RecursionError, UnicodeError, RuntimeError) as error:
        from plait.cli.main import refusal
        from plait.utils.addresses import redact

        reported = error if isinstance(error, PlaitError) else refusal(error)
        reported.args = tuple(redact(part) for part in (reported.value, reported.rule, reported.remedy))
        reported.value, reported.rule, reported.remedy = reported.args
        if os.environ.get(FULL_ERROR) == "1":
            raise reported from (reported.__cause__ if reported is error else error)
        raise reported from None


def _run(words: list[str]) -> Result:
    """Run the search of a command line, as Plait's Hydra application does."""
    from plait.cli.app import compose, explained
    from plait.cli.sweeping import search_command
    from plait.data.loading import check_jobs
    from plait.search.start import run_search
    from plait.terminal.console import SearchConsole
    from plait.terminal.view import Screen

    search = compose(words)
    with explained(search, words):
        command, composed = search_command(search.config, search.loader, search.arguments, search.command)
        if composed["mode"] != "train":
            mode = f"mode={composed['mode']}"
            raise ConfigError(mode, "plait.sweep trains a search.", "Use the command `plait` for it.")
        check_jobs(command.probes)
        end = run_search(command, Screen(SearchConsole()), signals=(signal.SIGINT,))
    tracking = command.settings.tracking
    result = _open(end.name, replace(tracking, root=tracking.root.absolute()))
    if end.interrupted:
        raise Interrupted(result)
    return result


def _open(name: str | None, settings: TrackingSettings) -> Result:
    from plait.cli.leaderboard import read_search

    return Result(read_search(settings, name), settings)
