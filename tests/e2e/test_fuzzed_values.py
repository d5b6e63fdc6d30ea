"""Wrong values of any kind: never a traceback, never a long wait, and nothing left behind by what is refused.

``PLAIT_FUZZ=1200`` draws commands for twenty minutes; without it a few must do.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked
from omegaconf import OmegaConf

from plait.utils.paths import conf_dir

SECONDS = float(os.environ.get("PLAIT_FUZZ", "0"))
FIRST = int(os.environ.get("PLAIT_FUZZ_SEED", "0"))
FEW = 4  # commands without PLAIT_FUZZ
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
    null true '' abc 'ünïcödé漢字🙂' '%s%n' 'a/b' '..' '.' '~nosuchuser' '${nope}' '${oc.env:HOME}' 'a=b'
    'a,b' "it's" '-x' '--help' NaN None True '[1,2]' '1'
    """,
    *("' '", "'\\n'", "'\u202e\u0000'", "'\x1b[31m'", "a" * 300, "'" + "é" * 200 + "'", "'a b'"),
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
    empty binary link 'file\tx' bad.csv bad.parquet
    """
)
ADDRESSES = words(
    """
    postgresql://u:secret@127.0.0.1:1/x http://u:secret@127.0.0.1:1 sqlite:///missing/x.db sqlite:///file
    redis://127.0.0.1:1 mssql://u:secret@h/x http:// :// file:///dev/null databricks x://y
    """
)
KINDS = (NUMBERS, TEXTS, NESTED, SWEEPS, PATHS, ADDRESSES)


def keys(config: Path) -> Iterator[str]:
    """Every key of the defaults that a command can set."""
    root = OmegaConf.load(config / "config.yaml")
    for default in root.defaults:
        if default == "_self_":
            continue
        ((group, name),) = default.items()
        if group.startswith("override"):
            continue
        yield group
        values = OmegaConf.to_container(OmegaConf.load(config / group / f"{name}.yaml"))
        assert isinstance(values, dict)
        yield from (f"{group}.{key}" for key in values if key != "defaults")
    yield from (
        "mode",
        "bench.run",
        "search/stopping",
        "hydra.sweep.dir",
        "hydra.sweep.subdir",
        "hydra/sweeper/sampler",
    )
    yield from (
        "search.stopping.rungs",
        "search.stopping.every",
        "search.stopping.metric",
        "nonsense",
        "adapter.nonsense",
    )


KEYS = tuple(keys(conf_dir()))


def draw(seed: int) -> list[str]:
    """A command with one to three values that are probably wrong."""
    chance = random.Random(seed)
    verb = chance.choice(["sweep", "sweep", "sweep", "train", "plan"])
    words = [verb, *BEGINNING]
    if chance.random() < 0.2:
        words += ["data=file", f"data.path={chance.choice(PATHS)}", "~data.task"]
    if verb == "sweep" and chance.random() < 0.7:
        words.append("adapter.rank=1,2")
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        plus = chance.choice(["", "", "", "", "", "", "+", "++", "~"])
        words.append(f"{plus}{chance.choice(KEYS)}={chance.choice(chance.choice(KINDS))}")
    return words


FILES = {
    "file": b"a user's text",
    "bad.json": b"{" * 5000,
    "bad.jsonl": b'{"a": 1}\nnot json\n',
    "bad.csv": b'prompt,completion\n"open,\n1,2,3\n',
    "bad.parquet": b"PAR1 and no footer",
    "empty": b"",
    "binary": bytes(range(256)) * 20,
}


def furnish(folder: Path, empty_store: Path) -> None:
    """What the paths among the values lead to."""
    (folder / "plait-runs").mkdir(parents=True)
    shutil.copy(empty_store, folder / "plait-runs")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("/dev/null")
    (folder / "closed").mkdir(mode=0o000)


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {"sweep.log", "operations"}


def contents(folder: Path) -> dict[str, bytes]:
    """The user's own files."""
    return {
        name: (folder / name).read_bytes() for name in ("file", "bad.json", "bad.jsonl", "empty", "binary")
    }


def complaint(seed: int, folder: Path, empty_store: Path) -> str:
    """What is wrong with how a drawn command ended; empty if nothing is."""
    furnish(folder, empty_store)
    before, owned = listing(folder), contents(folder)
    search = Forked(draw(seed), folder, environment={"HOME": str(folder / "folder")})
    end = time.monotonic() + 300
    stopped = False
    while (status := search.status()) is None:
        if search.lived > SLOW and not stopped:
            if "step" not in search.output:
                search.kill()
                return f"did nothing for {SLOW:g} s"
            search.signal(signal.SIGINT)
            stopped = True
        if search.lived > 2 * SLOW or time.monotonic() > end:
            search.kill()
            return "did not end after Ctrl-C" if stopped else "hangs"
        time.sleep(0.01)
    output = search.output
    if "Traceback (most recent call last)" in output:
        return "a traceback"
    if "secret" in output:
        return "shows a password"
    if status not in (0, 2, 3, 130):
        return f"ended with status {status}"
    if contents(folder) != owned:
        return "changed a user's file"
    if status == 2 and (left := listing(folder) - before):
        return f"was refused and left {sorted(left)[:5]}"
    if len(output) > 20_000:
        return f"printed {len(output)} characters"
    return ""


@pytest.mark.timeout(SECONDS + 600)
def test_wrong_values_are_refused_or_do_no_harm(tmp_path: Path, empty_store: Path) -> None:
    wrong = []
    seed, end = FIRST, time.monotonic() + SECONDS
    while seed < FIRST + FEW or time.monotonic() < end:
        folder = tmp_path / str(seed)
        if said := complaint(seed, folder, empty_store):
            log = (folder / "sweep.log").read_text(errors="replace")
            wrong.append(f"{seed}: {said}: {' '.join(draw(seed))[:600]}\n{log[-1500:]}")
            print(wrong[-1], flush=True)
        (folder / "closed").chmod(0o700)
        shutil.rmtree(folder)
        seed += 1
    print(f"{seed - FIRST} commands, {len(wrong)} complaints")
    assert not wrong, "\n\n".join(wrong)
