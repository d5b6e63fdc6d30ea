"""The command itself: verbs, exit statuses, errors, completion, and what is not imported."""

import errno
import gc
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import Mock

import pytest

from plait import __version__
from plait.__main__ import words
from plait.cli import verbs as verb_module
from plait.cli.main import _interrupted, main
from plait.cli.verbs import OWN, find, verbs
from plait.core.errors import ConfigError
from plait.utils.paths import sweeps_dir
from plait.utils.progress import say

ROOT = Path(__file__).resolve().parents[2]


def other_verb(arguments: Sequence[str]) -> int:
    """Do something else.

    At length.
    """
    print("other", *arguments)
    return 7


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(f"plait {verb.name}" in printed for verb in OWN)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"plait {__version__}\n"


def test_an_unknown_verb_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swep"]) == 2
    said = capsys.readouterr().err
    assert "plait swep" in said
    assert all(verb.name in said for verb in OWN)


def test_every_own_verb_can_be_loaded() -> None:
    for verb in OWN:
        assert callable(verb.load())
        assert verb.describe() == verb.summary


def test_other_packages_add_verbs_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = EntryPoint("other", f"{__name__}:other_verb", "plait.verbs")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[other_verb.__module__])
    monkeypatch.setattr(verb_module, "entry_points", lambda group: [point] if group == "plait.verbs" else [])
    assert verbs()["other"].describe() == "Do something else."
    assert main(["other", "a", "b"]) == 7
    assert capsys.readouterr().out == "other a b\n"


def test_a_verb_of_another_package_does_not_hide_plaits_own(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("sweep", "elsewhere:main", "plait.verbs")
    monkeypatch.setattr(verb_module, "entry_points", lambda **_: [point])
    assert find("sweep").describe() == "search hyperparameters, training all adapters together"


def test_an_error_is_three_parts_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.batch_size=0"]) == 2
    said = capsys.readouterr().err
    assert said == "plait: train.batch_size=0\n  train.batch_size must be at least 1.\n  The default is 4.\n"


def test_the_traceback_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["train", "adapter.rank=0"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "/data/x"), "plait: /data/x: No space left on device\n"),
        (RecursionError("maximum recursion depth exceeded"), "plait: an input is nested too deeply\n"),
        (UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"), "plait: 'ascii' codec can't encode"),
        (RuntimeError("Could not determine home directory."), "Set HOME, or PLAIT_CACHE"),
        (ConfigError("x" * 9_000_000, "y" * 9_000_000), "characters) …"),
    ],
)
def test_errors_of_the_system_or_a_library_show_no_traceback(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr("plait.cli.app.run_sweep", fails)
    assert main(["train"]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed) < 10_000
    assert "Traceback" not in printed


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["sweep", "model=tiny"]) == 2
    assert "the working directory is gone" in capsys.readouterr().err


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("plait.cli.app.run_sweep", fails)
    with pytest.raises(RuntimeError, match="shapes"):
        main(["train"])


def test_an_output_of_ascii_ends_nothing() -> None:
    program = "from plait.cli import main\nmain.overview = lambda: 'Pareto → é'\nmain.main(['help'])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Pareto ? ?\n"


def test_an_interrupt_while_nothing_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("plait.cli.app.run_sweep", interrupted)
    monkeypatch.setattr("plait.cli.resume.main", interrupted)
    assert main(["resume", "mine", "engine.threads=1"]) == 130
    assert "Interrupted. `plait resume mine engine.threads=1` resumes it." in capsys.readouterr().err
    assert main(["train"]) == 130
    assert "Interrupted before training began: start the same command again." in capsys.readouterr().err

    def recorded(*_: object) -> int:
        raise KeyboardInterrupt("my search")

    monkeypatch.setattr("plait.cli.app.run_sweep", recorded)
    assert main(["train", "tracking.root=my runs"]) == 130
    assert "`plait resume 'my search' 'tracking.root=my runs'` resumes it." in capsys.readouterr().err
    assert main(["train", "tracking.root=plait-runs"]) == 130  # as `plait resume` names the usual one
    assert "`plait resume 'my search'` resumes it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("plait ", ["sweep", "leaderboard"], ["adapter."]),
        ("plait sw", ["sweep"], []),
        ("plait sweep adapter.r", ["adapter.rank=", "adapter.rslora="], ["train"]),
        ("plait sweep model=", ["model=tiny", "model=smollm2-135m"], []),
        ("plait train train.lr", ["train.lr="], []),
        ("plait sweep +sweeps=q", ["+sweeps=quickstart"], []),
        ("plait ui ", ["mine"], ["sweep"]),
        ("plait control ", ["mine", "other"], ["sweep"]),
        ("plait leaderboard m", ["mine"], ["other"]),
        ("plait chat m", ["mine"], ["other"]),
        ("plait resume mine ", [], ["mine"]),
        ("plait bench lorafusion/b", ["lorafusion/bubble_ratio"], ["quickstart"]),
        ("plait bench quickstart adapter.r", ["adapter.rank="], ["quickstart"]),
        ("plait nonsense ", [], ["sweep"]),
    ],
)
def test_completion(
    line: str,
    offered: list[str],
    not_offered: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("mine", "other"):
        (tmp_path / "plait-runs" / "searches" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    words = capsys.readouterr().out.split()
    assert set(offered) <= set(words)
    assert not set(not_offered) & set(words)


def test_completion_is_installed_for_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("hydra_bash_completion plait")


def test_an_interrupted_search_is_named_however_it_was_begun() -> None:
    """Also one of sweeps/, by `plait bench NAME`."""
    for given in (["sweep"], ["bench", "quickstart"]):
        assert _interrupted(given, "mine") == "Interrupted. `plait resume mine` resumes it."
    assert _interrupted(["bench"], "") == _interrupted(["ui"], "") == "Interrupted."


HEAVY = ("torch", "transformers", "mlflow", "optuna")


def test_help_and_bad_configuration_import_nothing_heavy() -> None:
    """One process runs them all, as a start takes most of the time: none may import large libraries."""
    commands = {
        "--help": 0,
        "bench": 0,
        "sweep --help": 0,
        "plan --help": 0,
        "profile --help": 0,
        "train --help": 0,
        "control --help": 0,
        "control": 0,
        "resume": 0,
        "sweep --cfg job": 0,
        "leaderboard --help": 0,
        "sweep adapter.rnak=3": 2,
        "sweep adapter.rank=0,1": 2,
        "sweep model=a,b": 2,
        "sweep search.sampler=cmaes": 2,
        "sweep adapter.rank=4 train.lr=1": 2,
        "train adapter.rank=x": 2,
    }
    program = (
        "import sys\nfrom plait.cli.main import main\n"
        f"for words in {list(commands)!r}:\n"
        "    try:\n        status = main(words.split())\n"
        "    except SystemExit as end:\n        status = end.code\n"
        f"    print('END', words, status or 0, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    paths = [str(ROOT / name) for name in ("platform", "kernels", "dashboards")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {paths!r}\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("END")]
    assert ends == [f"END {words} {status} []" for words, status in commands.items()]


ENDS = """
import atexit, sys, threading, time
from plait.cli.main import main

class Module:
    def __del__(self):
        print("taken apart", flush=True)

kept = Module()
sys.argv = ["plait", *sys.argv[1:]]
status = main()
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
atexit.register(print, "handler")
sys.exit(status)
"""


@pytest.mark.parametrize(("word", "status"), [("--version", 0), ("nonsense", 2)])
def test_a_program_ends_after_its_threads_and_handlers_without_taking_modules_apart(
    word: str, status: int
) -> None:
    """With torch and MLflow, Python needs seconds for it after the last line."""
    paths = [str(ROOT / name) for name in ("platform", "kernels", "dashboards")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, word], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-2:] == ["thread", "handler"]
    assert "Traceback" not in done.stderr


def printing(words: str, output: int) -> tuple[int, str]:
    """The status and the errors of a command, given a descriptor for its output."""
    paths = [str(ROOT / name) for name in ("platform", "kernels", "dashboards")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTHONUNBUFFERED", None)  # which fails where it is printed
    command = [sys.executable, "-m", "plait", *words.split()]
    done = subprocess.run(
        command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("words", ["--help", "leaderboard --help"])
def test_output_that_a_full_disk_loses_is_an_error(words: str) -> None:
    """What waits in a buffer must not be lost silently."""
    with Path("/dev/full").open("wb") as full:
        status, said = printing(words, full.fileno())
    assert status == 2
    assert said.splitlines()[0] == "plait: the output: No space left on device"
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["--help", "leaderboard --help"])
def test_a_reader_that_has_left_ends_a_command_silently(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert printing(words, writer) == (141, "")
    os.close(writer)


def test_a_line_that_cannot_be_said_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a log of standard error fills its disk."""
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "full"))))
    say("Waiting ...")
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize(
    ("rest", "status"), [("--version >&-", 0), ("--version <&- >&- 2>&-", 0), ("nonsense 2>&-", 2)]
)
def test_a_program_may_start_with_closed_streams(rest: str, status: int) -> None:
    """As some supervisors start programs; Python then has None in their place."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m plait {rest}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


CLOSED = """
import subprocess, sys
from plait.utils.program import open_closed_streams

open_closed_streams()
print("\\udcff", sys.stdin.read())  # of a file's name that is no text
child = "import os; [os.fstat(number) for number in range(3)]"
raise SystemExit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def test_what_a_program_with_closed_streams_starts_has_open_ones() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED],
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from plait.cli.main import main; sys.exit(main(['sweep', '--help']))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


ENDLESS = """
import atexit, signal, sys, time
for each in (signal.SIGHUP, signal.SIGTERM):  # who runs the tests may ignore them
    signal.signal(each, signal.SIG_DFL)
from plait.cli import main as plait

def wait(*_):
    print("waiting", flush=True)
    time.sleep(60)

if sys.argv[1] == "at exit":
    plait._dispatch = lambda _: atexit.register(wait) and 130
else:
    plait._dispatch = wait
sys.argv[1:] = ["sweep"]
sys.exit(plait.main())
"""


@pytest.mark.parametrize(
    ("where", "number", "said"),
    [
        ("at start", signal.SIGTERM, "Interrupted before"),
        ("at start", signal.SIGHUP, "Interrupted before"),
        ("at exit", signal.SIGINT, ""),  # the second Ctrl-C: Python would show where it is at its own end
    ],
)
def test_signals_at_the_start_and_at_the_end_leave_no_traceback(
    where: str, number: signal.Signals, said: str
) -> None:
    command = [sys.executable, "-c", ENDLESS, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(number)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert errors.startswith(said)
    assert "Traceback" not in errors


INTERRUPTED = """
import signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "plait.cli.verbs":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
sys.argv = ["plait", "--version"]
"""


@pytest.mark.parametrize("how", ["installed", "module"])
def test_ctrl_c_while_the_program_is_imported_shows_no_traceback(how: str) -> None:
    begins = "import runpy; runpy.run_module('plait', run_name='__main__')"
    if how == "installed":
        target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["plait"]
        begins = "from {} import {} as main; main()".format(*target.split(":"))
    command = [sys.executable, "-c", f"{INTERRUPTED}{begins}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_that_python_drops_comes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dropping:
        def __del__(self) -> None:  # as a library's callback, from which nothing is raised
            signal.raise_signal(signal.SIGINT)

    def interrupted(*_: object) -> int:
        Dropping()
        time.sleep(60)
        return 0

    monkeypatch.setattr("plait.cli.app.run_sweep", interrupted)
    began = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    try:
        assert main(["train"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30
    assert capsys.readouterr().err == "Interrupted before training began: start the same command again.\n"


WHILE_TORCH_IS_IMPORTED = """
import sys
from plait.cli.main import main

class Interrupting:  # behind torch's caches, which say at exit how they were used
    def find_spec(self, name, path=None, target=None):
        if name == "torch._higher_order_ops.cond":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["sweep", "model=tiny"]
main()
"""


def test_ctrl_c_while_torch_is_imported_says_nothing_of_torch(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", WHILE_TORCH_IS_IMPORTED]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == "Interrupted before training began: start the same command again.\n"
    assert done.stdout.splitlines() == [
        "Checking the search ...",
        "Loading MLflow ...",
        "Loading torch and transformers ...",
    ]
    assert done.returncode == 130


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("train", "Train one adapter"),
        ("plan", "--timeline FILE"),
        ("profile", "--without-weights"),
        ("bench", "bench.options.KEY=VALUE"),
        ("sweep", "tag(log,interval"),
        ("control", "plait control NAME stop TRIAL"),
        ("resume", "plait resume NAME"),
        ("leaderboard", "--format {table,csv,json}"),
        ("export", "--to DIR"),
        ("ui", "--port"),
        ("generate", "--validation N"),
        ("serve", "PLAIT_SERVE_KEY"),
        ("chat", "/use NAME"),
    ],
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_each_verb_says_what_it_takes(
    verb: str, said: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([verb, flag])
    except SystemExit as end:
        status = int(end.code or 0)
    out = capsys.readouterr().out
    assert (status, said in out) == (0, True)
    if verb != "sweep":
        assert max(map(len, out.splitlines())) <= 100
        assert f"plait {verb}" in out


def test_help_of_one_benchmark_is_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tracking_scale", "--help"]) == 0
    assert capsys.readouterr().out == (sweeps_dir() / "tracking_scale.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", ""),
        ("adapter.rank=3", "train adapter.rank=3"),
        ("adapter.rank=3 --cfg job", "train adapter.rank=3 --cfg job"),
        ("-m adapter.rank=3,4", "sweep adapter.rank=3,4"),
        ("adapter.rank=3,4 --multirun", "sweep adapter.rank=3,4"),
        ("sweep adapter.rank=3,4", "sweep adapter.rank=3,4"),
        ("leaderboard -h", "leaderboard -h"),
        ("swep", "swep"),
        ("--version", "--version"),
        ("--help", "--help"),
        ("--hydra-help", "train --hydra-help"),
    ],
)
def test_the_module_accepts_verbs_or_hydra_arguments(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words(given.split()) == meant.split()
    trains = given != meant and "--" not in given.replace("--multirun", "")
    said = f"No verb is given: this is `plait {meant.split()[0]}`.\n" if trains else ""
    assert capsys.readouterr().err == said, "nobody trains for minutes without having asked for it"


def test_all_objects_are_gone_through_less_often_while_a_command_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr("plait.cli.main._dispatch", lambda _: found.append(gc.get_threshold()) or 0)
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        assert main(["sweep"]) == 0
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
    assert found == [(700, 10, 100)]
