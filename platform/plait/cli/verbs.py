"""The command's verbs: Plait's own, and those that other packages add in the entry-point group plait.verbs.

Plait's own are also known without entry points, so that a checkout works before it is installed. Their help
is plain text, so that nothing is composed or imported for it; `plait sweep --help` is Hydra's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points

from plait.core.errors import ConfigError, choices
from plait.utils.spelling import did_you_mean

GROUP = "plait.verbs"
HELP = ("-h", "--help")
Main = Callable[[Sequence[str]], int]

_SETTINGS = """Arguments
  KEY=VALUE               a setting; `plait sweep --help` lists them all
  GROUP=NAME              a whole group: model=tiny, data=file
"""
_HYDRA = """  --cfg job               show the composed settings and exit
  --hydra-help            Hydra's own flags
"""
_CLUSTERS = """a100_40g_llama2_7b, a800_80g_lobra_70b,
                          a800_80g_lobra_32b, h100_llama31_8b, h100_qwen25_32b,
                          h100_llama31_70b, or your own in conf/cluster/"""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        target: "module:function"; the function takes the arguments and returns the exit status.
        summary: one line for the list of verbs; "" means the first line of the function's docstring.
        hydra: whether its arguments are Hydra's, for shell completion.
        text: text of --help; "" if the verb or Hydra has its own.
        flags: of a verb that composes a search, its own flags and whether a value follows each; the function
            takes the verb's name and these first.
    """

    name: str
    target: str
    summary: str = ""
    hydra: bool = False
    text: str = ""
    flags: Mapping[str, bool] | None = None

    def load(self) -> Main:
        """Import the function."""
        module, _, function = self.target.partition(":")
        main: Callable[..., int] = getattr(importlib.import_module(module), function)
        return main if self.flags is None else partial(main, self.name, self.flags)

    def describe(self) -> str:
        """The summary, or the first line of the function's docstring."""
        return self.summary or (self.load().__doc__ or "").strip().split("\n")[0]

    def help_for(self, arguments: Sequence[str]) -> str:
        """The help text if the arguments ask for it; else ""."""
        wanted = self.name != "bench" or (arguments[:1] and arguments[0] in HELP)  # else of one benchmark
        return self.text if wanted and set(arguments) & set(HELP) else ""


OWN = (
    Verb(
        "sweep",
        "plait.cli.app:run_sweep",
        "search hyperparameters, training all adapters together",
        hydra=True,
        flags={},
    ),
    Verb(
        "plan",
        "plait.cli.app:run_sweep",
        "predict what a search would need, without training",
        hydra=True,
        flags={"--json": False, "--timeline": True, "--devices": True},
        text=f"""plait plan [--json] [--devices 1,2,4] [--timeline FILE] [KEY=VALUE ...]

Predict what a search would need, without training: which adapters train together, in how
many waves and microbatches, and how much memory and (if known) time they take. It takes the
same arguments as `plait sweep` and reports the same errors. For times on this machine, run
`plait profile` first; a described cluster has its own profile.

{_SETTINGS}  KEY=A,B                 several values; choice(...), range(...), interval(...) or
                          tag(log,interval(...)), as in `plait sweep`
  cluster=NAME            a described cluster instead of this machine, simulated:
                          replicas, dispatch, packing, pipeline. NAME is one of
                          {_CLUSTERS}
  planner.objective=NAME  device_seconds, money or time: what the choice of devices minimises
  --devices 1,2,4,8       seconds, device-seconds and money on each number of the cluster's devices;
                          for several kinds: A100:4,A100:4+A10:8
  --json                  the plan as JSON
  --timeline FILE.json    write the simulated run as a trace for Perfetto
{_HYDRA}
Examples
  plait plan                                  the default search
  plait plan adapter.rank=8,16,32 search.trials=64
  plait plan cluster=h100_llama31_8b --timeline run.json
  plait plan cluster=a100_40g_llama2_7b --devices 1,2,4,8 cluster.price_per_device_hour=1.5
""",
    ),
    Verb(
        "profile",
        "plait.cli.app:run_sweep",
        "measure a model's memory and time, for predictions",
        hydra=True,
        flags={"--json": False, "--without-weights": False},
        text=f"""plait profile [--json] [--without-weights] [KEY=VALUE ...]

Measure the model's memory and time on this machine over a small grid of microbatches, fit
both, choose the capacity, and store the profile for `plait sweep` and `plait plan`.
Do not run anything else at the same time, since time is measured.

{_SETTINGS}  engine.capacity=N       probe up to N tokens per microbatch
  --without-weights       compute only memory, from the model's configuration
  --json                  the profile as JSON
{_HYDRA}
Examples
  plait profile                               SmolLM2-135M, this machine
  plait profile model=hf model.id=Qwen/Qwen2.5-0.5B --without-weights
""",
    ),
    Verb(
        "data",
        "plait.cli.app:run_sweep",
        "show the text that a search would train on",
        hydra=True,
        flags={"--json": False},
        text=f"""plait data [--json] [KEY=VALUE ...]

Show what would be trained on: the text of the first three rows as the model gets it, with
what counts in the loss ("train") and what is only read ("read"); how long the samples are in
tokens; and how many rows are truncated or dropped. It takes the same arguments as
`plait sweep`. Only the model's tokeniser is loaded.

{_SETTINGS}  --json                  the same as JSON
{_HYDRA}
Examples
  plait data data=file data.path=train.jsonl
  plait data data=file data.path=chats.parquet data.assistant_only_loss=true
  plait data data=mixture 'data.sources=[{{path: a.jsonl, weight: 3}}, {{path: b.csv, weight: 1}}]'
""",
    ),
    Verb(
        "train",
        "plait.cli.app:run_sweep",
        "train one adapter",
        hydra=True,
        flags={},
        text=f"""plait train [KEY=VALUE ...]

Train one adapter and record its weights, losses and cost in MLflow. The same command resumes
an interrupted run; search.fresh=true starts again from the beginning.

{_SETTINGS}{_HYDRA}
Examples
  plait train                                 SmolLM2-135M, a built-in task, this machine
  plait train adapter.rank=8 train.lr=3e-4 train.steps=100
  plait train data=file data.path=train.jsonl model=hf model.id=Qwen/Qwen2.5-0.5B
""",
    ),
    Verb("resume", "plait.cli.resume:main", "resume a search that was killed or interrupted"),
    Verb(
        "bench",
        "plait.cli.app:run_bench",
        "list the named searches and benchmarks, or run one",
        hydra=True,
        text=f"""plait bench [NAME [--details] [--json] [KEY=VALUE ...]]

List the named searches and benchmarks and how long each takes, or run one and
print its main figures: the published value or a named baseline, ours, the
difference, what is allowed, and whether ours is within it. `plait bench NAME`
is `plait sweep +sweeps=NAME`. Progress goes to standard error.

{_SETTINGS}  --details               print all figures too, with notes and assumptions
  --json                  print the whole report, or the list, as JSON
  bench.options.KEY=VALUE an option of the benchmark; `plait bench NAME --help` shows
                          its file, with all of them
{_HYDRA}
Examples
  plait bench                                 the list
  plait bench lorafusion/bubble_ratio
  plait bench tracking_scale bench.options.adapters=50 bench.options.edge=10
  plait bench mine --config-dir conf          your own conf/sweeps/mine.yaml
""",
    ),
    Verb("control", "plait.cli.control:main", "pause, stop, extend or inspect a running search"),
    Verb("generate", "plait.cli.generate:main", "try a search's adapters on prompts, next to the base model"),
    Verb("eval", "plait.cli.evaluate:main", "run lm-eval's tasks for all of a search's adapters together"),
    Verb("chat", "plait.cli.chat:main", "talk to a search's adapters in the terminal"),
    Verb(
        "serve", "plait.cli.serve:main", "serve a search's or folders' adapters with an OpenAI-compatible API"
    ),
    Verb("ui", "plait.cli.results:ui", "open the results in MLflow"),
    Verb("leaderboard", "plait.cli.results:leaderboard", "print a search's adapters, best first"),
    Verb("trace", "plait.cli.trace:main", "write a timeline of what each process of a search did"),
    Verb(
        "launch",
        "plait.cli.launch:main",
        "write a batch script that runs a search on several hosts",
        hydra=True,
    ),
    Verb("forget", "plait.cli.results:forget", "delete a search: folder, study and MLflow runs"),
    Verb("export", "plait.cli.export:main", "export an adapter, also merged or for llama.cpp"),
)


def verbs() -> dict[str, Verb]:
    """All verbs by name: Plait's own first, then those of other packages, by name."""
    found = {verb.name: verb for verb in OWN}
    for point in sorted(entry_points(group=GROUP), key=lambda item: item.name):
        found.setdefault(point.name, Verb(point.name, point.value))
    return found


def find(name: str) -> Verb:
    """The verb with this name.

    Raises:
        ConfigError: there is none.
    """
    known = verbs()
    if name not in known:
        meant = did_you_mean(name, known, before="plait ")
        raise ConfigError(
            f"plait {name}", "There is no such command.", f"{meant}Available: {choices(known)}."
        )
    return known[name]
