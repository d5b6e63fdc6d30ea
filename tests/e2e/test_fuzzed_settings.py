"""Wrong values of any kind: never a traceback, never a long wait, and nothing left behind by what is refused.

``PLAIT_FUZZ_SECONDS=1200`` draws commands for twenty minutes; without it one of each verb must do. The seed
of a complaint, as ``PLAIT_FUZZ_SEED``, repeats its command first.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from forked import Forked
from omegaconf import OmegaConf
from watched import WITHIN, WRITES, Watched

from plait.core.errors import EXIT_INTERRUPTED
from plait.utils.paths import conf_dir

SECONDS = float(os.environ.get("PLAIT_FUZZ_SECONDS", "0"))
FIRST = int(os.environ.get("PLAIT_FUZZ_SEED", "0"))
FEW = 13  # commands without PLAIT_FUZZ_SECONDS: one of each verb
SLOW = 10.0  # seconds of the processor until a command is refused or trains
BEGINNING = (
    *("model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4", "train.batch_size=2"),
    *("train.steps=2", "search.trials=2", "engine.threads=1"),
)


def words(text: str, *more: str) -> tuple[str, ...]:
    """The words of a text, and values that hold blanks or are long."""
    return (*text.split(), *more)


NUMBERS = words(
    """
    nan inf -inf 0 -1 1 2 0.5 -0.0 1e400 1e-400 1e30 -1e30 3.7 99999999999999999999 2147483648
    9223372036854775808 1_000 0x10 1e3
    """,
    "9" * 5000,
)
TEXTS = words(
    """
    null true '' abc 'ünïcödé漢字🙂' '%s%n' 'a/b' '..' '.' '~nosuchuser' '${nope}' '${oc.env:HOME}' '${model}'
    '${adapter.rank}' '${' ${now:%Y} 'a=b' 'a,b' "it's" '-x' '--help' NaN None True '[1,2]' '1'
    """,
    *("' '", "'\\n'", "'\u202e\u0000'", "'\x1b[31m'", "'\udc80'", "a" * 300, "'" + "é" * 200 + "'", "'a b'"),
)
NESTED = words(
    "[] {} [1,2] [[[1]]] {a:1} {a:{b:{c:1}}} [null] [''] [nan] {1:2} [a,b,a]",
    "[" * 60 + "]" * 60,
)
SWEEPS = words(
    """
    1,2 choice() choice(1) choice(1,a,null) interval(0,1) interval(1,0) interval(-1,1) interval(nan,1)
    interval(0,inf) range(0,10,0) range(0,1000000000) tag(log,interval(0,1)) tag(log,interval(1e-4,1e-3))
    tag(x,1,2) sort(3,1,2) shuffle(1,2) glob(*) int(3) str(1)
    """
)
PATHS = words(
    """
    missing missing/deeper file file/below folder loop closed /dev/null ./folder/../folder bad.json bad.jsonl
    empty binary link 'file\tx' bad.csv bad.parquet ../outside ../here/../outside/deeper
    """,
    *("'a b/c d'", "'漢字/é 🙂'", "'x\0y'", "x" * 5000, "x/" * 3000),
)
ADDRESSES = words(
    """
    postgresql://u:secret@127.0.0.1:1/x http://u:secret@127.0.0.1:1 sqlite:///missing/x.db sqlite:///file
    redis://127.0.0.1:1 mssql://u:secret@h/x http:// :// file:///dev/null databricks x://y
    """
)
KINDS = (NUMBERS, TEXTS, NESTED, SWEEPS, PATHS, ADDRESSES)


def keys(config: Path) -> Iterator[str]:
    """Every group of conf/ and every key of every choice in it, also where another choice is chosen."""
    for file in sorted(config.rglob("*.yaml")):
        group = file.parent.relative_to(config).as_posix()
        values = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(values, dict)
        if group.startswith("hydra"):
            continue
        if group == ".":
            yield from (key for key in values if key not in ("defaults", "hydra"))
            continue
        yield group
        yield from (f"{group.replace('/', '.')}.{key}" for key in values if key != "defaults")
    yield from ("bench.run", "bench.options.nonsense", "nonsense", "adapter.nonsense")
    yield from ("hydra.sweep.dir", "hydra.sweep.subdir", "hydra/sweeper/sampler")


KEYS = tuple(dict.fromkeys(keys(conf_dir())))

# The first of each verb are drawn by default; more searches are among those that follow.
VERBS = words(
    """
    sweep plan data train bench resume control leaderboard export generate launch serve profile
    sweep train sweep launch sweep plan
    """
)
FLAGS = {
    "plan": words("--json --devices=1,x --devices=nan --timeline=missing/x.json --timeline=x.nonsense"),
    "data": words("--json"),
    "bench": words("--json --details --papers=x"),
    "profile": words("--json --without-weights"),
}
OPTIONS = {  # of the verbs that read a finished search
    "control": words("--json --warm --wait --root"),
    "leaderboard": words("--format --uri --root --experiment"),
    "export": words("--to --trial --form --uri --root --experiment"),
    "generate": words(
        """
        --prompt --file --validation --trial --best --no-base --max-new-tokens --temperature --top-p --seed
        --stop --chat --plain --json --table --uri --root --experiment
        """
    ),
    "serve": words(
        "--trial --max-new-tokens --queue --pool-tokens --wait --adapters --model --uri --root --experiment"
    ),
    "launch": words("--nodes --tasks-per-node --gpus-per-task --cpus-per-task --time --partition --to"),
}
ALONE = words("--json --table --warm --no-base --chat --plain")  # options without a value
ORDERS = words("status pause resume stop kill clone add extend priority nonsense")
BENCHMARKS = words("lorafusion/bubble_ratio mlora/bubble_ratio lobra/worked_example mlora/memory_model")
REFUSED = words("--port=0 --port=-1 --port=65536 --port=nan --host=0.0.0.0 --queue=0 --pool-tokens=-1 --x")


def value(chance: random.Random) -> str:
    return chance.choice(chance.choice(KINDS))


def plain(chance: random.Random) -> str:
    """A value without the quotes that Hydra takes off."""
    return value(chance).strip("'")


def settings(chance: random.Random, most: int = 3) -> list[str]:
    """One to three settings that are probably wrong."""
    found = []
    for _ in range(chance.choice([1, 1, 1, *range(1, most + 1)])):
        plus = chance.choice(["", "", "", "", "", "", "+", "++", "~"])
        found.append(f"{plus}{chance.choice(KEYS)}={value(chance)}")
    return found


def search(verb: str, chance: random.Random) -> list[str]:
    """What `plait sweep` and the verbs with its arguments are given."""
    found = [*BEGINNING]
    drawn = chance.random()
    if drawn < 0.2:
        found += ["data=file", f"data.path={chance.choice(PATHS)}", "~data.task"]
    elif drawn < 0.3:
        found += ["data=mixture", f"data.sources=[{{path: {value(chance)}, weight: {value(chance)}}}]"]
        found += ["~data.task"]
    elif drawn < 0.4 and verb in ("plan", "profile"):
        found.append("cluster=h100_llama31_8b")
    if verb in ("sweep", "plan", "launch") and chance.random() < 0.7:
        found.append("adapter.rank=1,2")
    if verb == "profile":
        found.append("engine.capacity=64")
    return found + settings(chance) + chance.choices(FLAGS.get(verb, ("search.seed=1",)), k=1)


def options(verb: str, chance: random.Random) -> list[str]:
    """Options of a verb that reads, with values that are probably wrong."""
    found = []
    for option in chance.choices(OPTIONS[verb], k=chance.choice([1, 1, 2])):
        # A file named as the place of the output is overwritten, as the user asked.
        given = chance.choice(("missing/deeper", "new", "closed/x", "x\0y", "漢/字", "/dev/null/x"))
        drawn = plain(chance)
        found += [option] if option in ALONE else [option, given if option == "--to" else drawn]
    return found


def draw(seed: int) -> list[str]:
    """A command with values that are probably wrong."""
    chance = random.Random(seed)
    verb = VERBS[seed % len(VERBS)]
    name = "mine" if chance.random() < 0.8 else plain(chance)
    match verb:
        case "bench":
            name = plain(chance) if chance.random() < 0.2 else chance.choice(BENCHMARKS)
            extra = f"bench.options.{chance.choice(['x', 'stages', 'seed', 'gpus'])}={value(chance)}"
            return [verb, name, *settings(chance, 1), extra, *chance.choices(FLAGS[verb], k=1)]
        case "resume":
            return [verb, name, *settings(chance, 2)]
        case "control":
            rest = chance.choice([["0"], [plain(chance)], settings(chance), ["1", *settings(chance)]])
            return [verb, name, chance.choice(ORDERS), *rest, *options(verb, chance)]
        case "launch":
            return [verb, "slurm", *search(verb, chance)[:-1], *options(verb, chance)]
        case "leaderboard":
            return [verb, name, *options(verb, chance)]
        case "export":
            return [verb, name, "--to", "new", *options(verb, chance)]
        case "generate":
            return [verb, name, "--prompt", "1 + 1", "--max-new-tokens", "2", *options(verb, chance)]
        case "serve":
            return [verb, name, *options(verb, chance), chance.choice(REFUSED)]
    return [verb, *search(verb, chance)]


FILES = {
    "file": b"a user's text",
    "bad.json": b"{" * 5000,
    "bad.jsonl": b'{"a": 1}\nnot json\n',
    "bad.csv": b'prompt,completion\n"open,\n1,2,3\n',
    "bad.parquet": b"PAR1 and no footer",
    "empty": b"",
    "binary": bytes(range(256)) * 20,
}


OWN = ("sweep.log", "operations", WRITES)


def furnish(folder: Path, runs: Path) -> None:
    """What the paths among the values lead to, and the finished search."""
    shutil.copytree(runs, folder / "plait-runs")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("/dev/null")
    (folder / "closed").mkdir(mode=0o000)


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {*OWN}


def contents(folder: Path) -> dict[str, bytes]:
    """The user's own files."""
    return {name: (folder / name).read_bytes() for name in FILES}


def is_explained(output: str) -> bool:
    """Whether a refusal says the value and at least the rule (not all need a remedy), or is argparse's."""
    if "usage: " in output and "error: " in output:
        return True
    _, begins, error = f"\n{output}".rpartition("\nplait: ")
    said, _, rule = error.partition("\n")
    return bool(begins and said.strip() and any(line.startswith("  ") for line in rule.split("\n")))


@dataclass
class Fuzzed:
    """Commands in one folder, which is reset to a finished search before each."""

    folder: Path
    runs: Path  # a copy of that search's folder
    seconds: float = 0.0  # of the processor

    def complaint(self, seed: int) -> str:
        """What is wrong with how a drawn command ended; empty if nothing is."""
        if (closed := self.folder / "closed").is_dir():
            closed.chmod(0o700)
        shutil.rmtree(self.folder)
        furnish(self.folder, self.runs)
        before, owned = listing(self.folder), contents(self.folder)
        status, output, outside = self._run(draw(seed))
        prompts = [value for flag, value in pairwise(draw(seed)) if flag == "--prompt"]
        shown = output
        for prompt in prompts:  # `plait generate` repeats the user's own text
            shown = shown.replace(prompt, "")
        wrong = {
            "a traceback": "Traceback (most recent call last)" in output,
            "shows a password": "secret" in shown,
            f"ended with {status}": status not in (0, 2, 3),
            "changed a user's file": contents(self.folder) != owned,
            f"wrote {outside[:5]}": bool(outside),
            f"printed {len(output)} characters": len(output) > 20_000,
            "does not say what is wrong": status == 2 and not is_explained(output),
        }
        left = sorted(listing(self.folder) - before) if status == 2 else []
        wrong[f"was refused and left {left[:5]}"] = bool(left)
        return ", ".join(said for said, found in wrong.items() if found)

    def _run(self, command: list[str]) -> tuple[int | str, str, list[str]]:
        """How a command ends: status, or what it did not do; its output; what it wrote outside."""
        within = os.pathsep.join((str(self.folder.parent), os.environ["PLAIT_CACHE"]))
        variables = {"HOME": str(self.folder / "folder"), WITHIN: within}
        running = Watched(command, self.folder, environment=variables)
        end = time.monotonic() + 300
        stopped = False
        while (status := running.status()) is None:
            if running.lived > SLOW and not stopped:
                if "step" not in running.output:
                    running.kill()
                    return f"nothing done for {SLOW:g} s", running.output, []
                running.signal(signal.SIGINT)  # it trains, as long as it was asked to
                stopped = True
            if running.lived > 2 * SLOW or time.monotonic() > end:
                running.kill()
                return "no end", running.output, []
            time.sleep(0.01)
        self.seconds += running.lived
        if stopped and status == EXIT_INTERRUPTED:
            status = 0
        return status, running.output, running.written_outside()


@pytest.fixture
def fuzzed(tmp_path: Path, empty_store: Path) -> Fuzzed:
    """A search of two trials called "mine", finished."""
    folder = tmp_path / "here"
    (folder / "plait-runs").mkdir(parents=True)
    shutil.copy(empty_store, folder / "plait-runs")
    finished = Forked(["sweep", *BEGINNING, "adapter.rank=1,2", "search.name=mine"], folder)
    assert finished.end() == 0, finished.output
    shutil.copytree(folder / "plait-runs", tmp_path / "kept")
    return Fuzzed(folder, tmp_path / "kept", finished.lived)


@pytest.mark.timeout(SECONDS + 600)
def test_wrong_values_are_refused_or_do_no_harm(fuzzed: Fuzzed) -> None:
    wrong = []
    seed, end = FIRST, time.monotonic() + SECONDS
    while seed < FIRST + FEW or time.monotonic() < end:
        if said := fuzzed.complaint(seed):
            log = (fuzzed.folder / "sweep.log").read_text(errors="replace")
            command = ascii(shlex.join(["plait", *draw(seed)]))
            wrong.append(f"PLAIT_FUZZ_SEED={seed}: {said}: {command[:900]}\n{ascii_lines(log[-1500:])}")
            print(wrong[-1], flush=True)
        seed += 1
    print(f"seeds {FIRST} to {seed - 1}: {seed - FIRST} commands, {len(wrong)} with complaints,")
    print(f"{fuzzed.seconds:.1f} s of the processor")
    assert not wrong, "\n\n".join(wrong)


def ascii_lines(text: str) -> str:
    """What a command printed, so that any terminal shows it."""
    return text.encode("ascii", "backslashreplace").decode()
