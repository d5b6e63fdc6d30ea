"""`plait launch slurm`: writes a batch script that runs a search on several hosts.

A seam: loaded only for this verb.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from plait.cli.parser import Parser
from plait.config.build import key_of
from plait.core.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, choices
from plait.core.settings import TrackingSettings
from plait.search.recorded import given, known_command
from plait.utils.files import OWNER_ONLY, disk_errors, write_text
from plait.utils.paths import as_path, user_path
from plait.utils.spelling import did_you_mean

SYSTEMS = ("slurm",)
LAUNCHED = ("cluster.processes", "cluster.per_host")  # srun says how many there are
SAVE_SECONDS = 120  # before the end of its time the search is asked to save and end
KILLED_RESTARTS = 3  # of a job; after so many one in which a task was killed is not queued again
NO_LIMIT = ("UNLIMITED", "INFINITE")  # words of Slurm
LEAST_MINUTES = 5  # the signal may come a minute earlier; in less time hardly anything trains
SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name={job}
{options}
#SBATCH --output={name}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{seconds}
# Written by `plait launch slurm`. Each task of srun runs the same command: the first coordinates, all train.
# A job that is preempted or reaches its time limit is queued again and resumes, as is one, at first, in which
# a task was killed: if the search has ended all the same, the next run prints its result.
set -uo pipefail
cd {directory} || exit 1
PLAIT_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # lets the tasks find each other, and no one else
export PLAIT_KEY
srun --kill-on-bad-exit=0 --wait=0{cores} {command}
status=$?
killed=$((status > 128 && ${{SLURM_RESTART_COUNT:-0}} < {restarts}))
if [ "$status" -eq {interrupted} ] || [ "$killed" -eq 1 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
"""


def main(arguments: Sequence[str]) -> int:
    """Write the script and say what to do with it."""
    known = _parser().parse_intermixed_args(arguments)
    if known.system not in SYSTEMS:
        meant = did_you_mean(known.system, SYSTEMS, before="plait launch ")
        raise ConfigError(
            f"plait launch {known.system}",
            "Plait cannot write a script for this system.",
            f"{meant}Available: {choices(SYSTEMS)}. torchrun and DeepSpeed need none: docs/cluster.md.",
        )
    words, directory = _command(known.words)
    name = re.sub(r"[^\w.-]", "_", _checked(words))
    path = known.to or Path(f"{name}.sbatch")
    with disk_errors(path, "The script cannot be written there."):
        write_text(path, _script(name, words, directory, known), mode=OWNER_ONLY)
    print(f"{path}: nodes {known.nodes}, processes {known.nodes * known.tasks_per_node}")
    if known.time is None:
        print(
            "Without --time, the job gets the partition's default limit; with a shorter one, for example "
            "--time 4:00:00, it may start earlier."
        )
    print(
        f"{SAVE_SECONDS} s before its time limit, the search saves everything; the job is then queued again."
    )
    print(f"Submit it with: sbatch {shlex.quote(str(path))}")
    print(f"Its output goes to {name}-JOB.log in the folder in which you submit it (JOB: its number).")
    print(f"{directory} must be on a file system that all nodes share.")
    return EXIT_DONE


def _parser() -> Parser:
    parser = Parser(
        prog="plait launch",
        usage="plait launch slurm [options] NAME | KEY=VALUE ...",
        description="Write a batch script that runs a search on several hosts. Give the name of a search to "
        "resume, or the settings that `plait sweep` would take.",
    )
    parser.add_argument("system", metavar="slurm", help="the system that runs batch scripts")
    parser.add_argument("words", nargs="*", metavar="NAME | KEY=VALUE", help="the search")
    parser.add_argument("--nodes", type=_count, default=1, help="default: 1")
    parser.add_argument("--tasks-per-node", type=_count, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--gpus-per-task", type=_number, default=1, metavar="N", help="default: 1; 0 on nodes without GPUs"
    )
    parser.add_argument("--cpus-per-task", type=_count, metavar="N", help="default: the partition's")
    parser.add_argument(
        "--time", type=_limit, metavar="LIMIT", help="[DAYS-]HOURS:MINUTES:SECONDS; default: the partition's"
    )
    parser.add_argument("--partition", type=_word, metavar="NAME", help="default: the cluster's")
    parser.add_argument("--to", type=as_path, metavar="FILE", help="default: NAME.sbatch")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if (found := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return found


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} has characters that Slurm does not accept")
    return text


def _limit(text: str) -> str:
    """A limit as Slurm reads it, which leaves time to train before the search is asked to save."""
    if text.upper() in NO_LIMIT:
        return text
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no limit of Slurm's: write [DAYS-]HOURS:MINUTES:SECONDS, minutes, or {NO_LIMIT[0]}"
        )
    days, dash, clock = text.rpartition("-")
    parts = [int(each) for each in clock.split(":")]  # a single one is minutes, after days hours
    hours, minutes = [*parts, 0][:2] if dash or len(parts) == 3 else [0, parts[0]]
    if (int(days or 0) * 24 + hours) * 60 + minutes < LEAST_MINUTES:
        raise argparse.ArgumentTypeError(
            f"{text} is less than {LEAST_MINUTES} minutes; {SAVE_SECONDS} s before it the search saves and "
            "is queued again, so it would hardly train"
        )
    return text


def _command(words: Sequence[str]) -> tuple[list[str], Path]:
    """The command of a search that is to run, and its folder.

    Raises:
        SearchError: no search has the name.
        ConfigError: there are several names, or neither a name nor settings.
    """
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(names) > 1:
        raise ConfigError(shlex.join(names), "A script runs one search.", "Settings are KEY=VALUE.")
    for word in overrides:
        if key_of(word) in LAUNCHED:
            raise ConfigError(word, "srun starts the processes.", "Use --nodes and --tasks-per-node instead.")
    if not names:
        return ["sweep", *overrides], Path.cwd()
    root = user_path(given(overrides, "tracking.root") or TrackingSettings().root).absolute()
    recorded = known_command(root, names[0])
    arguments = recorded.words([f"tracking.root={root}", *overrides])
    return [word for word in arguments if key_of(word) not in LAUNCHED], Path(recorded.directory)


def _checked(words: Sequence[str]) -> str:
    """Compose the search, so that what is wrong with it is said before it waits in a queue; its name.

    Raises:
        PlaitError: as `plait sweep`.
    """
    from plait.cli.app import compose
    from plait.cli.sweeping import search_command
    from plait.search.identity import identify

    search = compose(words[1:])
    command, _ = search_command(search.config, search.loader, search.arguments, ("plait", *words))
    settings = command.settings
    return settings.search.name or identify(command.space, command.base, settings).name


def _script(name: str, words: Sequence[str], directory: Path, known: argparse.Namespace) -> str:
    options = {
        "nodes": known.nodes,
        "ntasks-per-node": known.tasks_per_node,
        "gpus-per-task": known.gpus_per_task or None,
        "cpus-per-task": known.cpus_per_task,
        "time": known.time,
        "partition": known.partition,
    }
    return SCRIPT.format(
        job=f"plait-{name}",
        options="\n".join(f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None),
        name=name,
        seconds=SAVE_SECONDS,
        # Since Slurm 22.05 srun does not know what sbatch was given.
        cores=f" --cpus-per-task={known.cpus_per_task}" if known.cpus_per_task else "",
        directory=shlex.quote(str(directory)),
        command=shlex.join([sys.executable, "-m", "plait", *words]),
        interrupted=EXIT_INTERRUPTED,
        restarts=KILLED_RESTARTS,
    )
