"""`plait eval`: lm-eval's tasks for a search's adapters, all together."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.cli.generate import BASE, POOL_TOKENS, add_adapters, fetched_adapters, load_base
from plait.cli.parser import Parser, check_least
from plait.cli.results import store_parser, store_settings
from plait.core.errors import EXIT_DONE, EXIT_FAILED_JOBS, ConfigError, PlaitError, StorageError
from plait.utils.paths import as_path
from plait.utils.progress import say

if TYPE_CHECKING:
    from plait.core.settings import TrackingSettings
    from plait.tracking.leaderboard import JobRecord
    from plait.tracking.results import SearchResult

Results = Mapping[str, Mapping[str, float]]  # by task and metric
STANDARD_ERROR = "_stderr"


def main(arguments: Sequence[str]) -> int:
    """Run lm-eval's tasks for a search's adapters, all together."""
    known = _parser().parse_args(arguments)
    tasks = [name.strip() for name in known.tasks.split(",") if name.strip()]
    check_least(known, limit=1, shots=0, pool_tokens=2)
    if known.include is not None and not known.include.is_dir():
        raise ConfigError(f"--include {known.include}", "It must be a folder that contains tasks.")
    if not tasks:
        raise ConfigError(f"--tasks {known.tasks!r}", "It names tasks of lm-eval, separated by commas.")
    settings = store_settings(known)
    say("Loading torch, lm-eval and MLflow ...")
    from plait.serve.harness import evaluate, load_tasks
    from plait.tracking.results import load_search, trained
    from plait.tracking.trained import base_model, own_template, recorded_config

    search = load_search(settings, known.name)
    records = trained(search, known.trial)
    template = own_template(recorded_config(search, settings)) if known.chat else None
    loaded = load_tasks(tasks, known.include, shots=known.shots, limit=known.limit, chat=known.chat)
    folders = fetched_adapters(search, records, settings)
    model = base_model(search, settings)
    model_alone = replace(model, max_length=None)  # it is a limit for training
    base, adapters = load_base(model_alone, {}, template=template)
    trials = {record.name: record for record in records}
    add_adapters(adapters, folders)
    failed = len(adapters.names) < len(records)
    asked = [*([] if known.no_base else [None]), *adapters.names]
    from plait.serve.engine import Engine

    longest = known.pool_tokens or max(POOL_TOKENS, model.max_length or 0)
    engine = Engine(base, adapters, pool_tokens=longest, smallest_pages=True)
    table: list[tuple[str, Results]] = []
    unrecorded: list[tuple[JobRecord, Results]] = []
    for adapter, found in evaluate(base, engine, loaded, asked, longest):
        name = BASE if adapter is None else f"trial {trials[adapter].trial}"
        if isinstance(found, PlaitError):
            print(f"{name}: {found}", file=sys.stderr)
            failed = True
            continue
        if known.json:
            print(json.dumps({"trial": None if adapter is None else trials[adapter].trial, "results": found}))
        table.append((name, found))
        if adapter is not None:
            unrecorded.append((trials[adapter], found))
    if not known.json:
        _show(table)
    failed |= not _recorded(settings, search, unrecorded)
    return EXIT_FAILED_JOBS if failed else EXIT_DONE


def _parser() -> Parser:
    parser = store_parser("eval", "Run lm-eval's tasks for a search's adapters, all together.")
    add = parser.add_argument
    add("name", nargs="?", help="name of the search; default: the newest")
    add("--tasks", required=True, metavar="A,B", help="tasks or groups of lm-eval, or their YAML files")
    add("--include", type=as_path, metavar="FOLDER", help="a folder of further tasks")
    add("--limit", type=int, metavar="N", help="the first N rows of each task; default: all")
    add("--shots", type=int, metavar="N", help="examples before each prompt; default: as the task says")
    add("--chat", action="store_true", help="prompts are messages in the chat template")
    parser.add_trials()
    add("--no-base", action="store_true", help="without the base model")
    add(
        "--pool-tokens",
        type=int,
        metavar="N",
        help=f"most tokens of all running requests; longer prompts are cut; default: {POOL_TOKENS:,}",
    )
    add("--json", action="store_true", help="one line of JSON for each adapter")
    return parser


def _recorded(
    settings: TrackingSettings, search: SearchResult, results: Sequence[tuple[JobRecord, Results]]
) -> bool:
    """Log the results of trials, which have been shown, to their runs; whether the store took all."""
    from plait.tracking.results import record_values

    taken = True
    for record, found in results:
        try:
            record_values(settings, search, record, _metrics(found))
        except StorageError as error:
            print(f"trial {record.trial}: its results are not in the store: {error}", file=sys.stderr)
            taken = False
    return taken


def _metrics(found: Results) -> dict[str, float]:
    """The metrics of a trial's run, under names that MLflow takes."""
    return {
        re.sub(r"[^\w\-. /]", "_", f"eval/{task}/{metric}"): value
        for task, own in found.items()
        for metric, value in own.items()
        if STANDARD_ERROR not in metric
    }


def _show(table: Sequence[tuple[str, Results]]) -> None:
    """Print one line for each metric and adapter, with its standard error."""
    columns = {
        (task, metric): None
        for _, found in table
        for task, own in found.items()
        for metric in own
        if STANDARD_ERROR not in metric
    }
    for task, metric in columns:
        print(f"{task}: {metric}")
        for name, found in table:
            value = found.get(task, {}).get(metric)
            if value is None:
                continue
            kind, _, filtered = metric.partition("/")
            error = found[task].get(f"{kind}{STANDARD_ERROR}" + (f"/{filtered}" if filtered else ""))
            print(f"  {name:<12} {value:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
