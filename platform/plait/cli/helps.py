"""What `plait VERB --help` prints for the verbs that take Hydra's arguments: text, so that nothing is
composed or imported for it. `plait sweep --help` is Hydra's own and lists every group and setting."""

from __future__ import annotations

from collections.abc import Sequence

HELP = ("-h", "--help")

_SETTINGS = """Arguments
  KEY=VALUE               a setting; `plait sweep --help` lists them all
  GROUP=NAME              a whole group: model=tiny, data=jsonl
"""
_SPACE = """  KEY=A,B                 several values; choice(...), range(...), interval(...) or
                          tag(log,interval(...)), as in `plait sweep`
"""
_HYDRA = """  --cfg job               show the settings as composed, and do nothing
  --hydra-help            Hydra's own flags
"""

_CLUSTERS = """a100_40g_llama2_7b, h100_llama31_8b, h100_qwen25_32b,
                          h100_llama31_70b, and yours in conf/cluster/"""

TEXTS = {
    "train": f"""plait train [KEY=VALUE ...]

Train one adapter, and keep it, its losses and its cost in MLflow. The same command goes
on with one that was interrupted; search.fresh=true begins anew.

{_SETTINGS}{_HYDRA}
Examples
  plait train                                 SmolLM2-135M, a built-in task, this machine
  plait train adapter.rank=8 train.lr=3e-4 train.steps=100
  plait train data=jsonl data.path=train.jsonl model=hf model.id=Qwen/Qwen2.5-0.5B
""",
    "plan": f"""plait plan [--json] [--timeline FILE] [KEY=VALUE ...]

Say what a search would take, and train nothing: which adapters train together, in how
many waves and microbatches, memory and seconds as far as they are known. It takes the
arguments of `plait sweep` and refuses what that would. Seconds on this machine come from
`plait profile`; a described cluster brings its own.

{_SETTINGS}{_SPACE}  cluster=NAME            a described cluster in place of this machine, simulated:
                          replicas, dispatch, packing, pipeline; there are
                          {_CLUSTERS}
  --json                  the plan as JSON
  --timeline FILE         the simulated run: a figure (.html), or a trace for Perfetto
                          (.json)
{_HYDRA}
Examples
  plait plan                                  the default search
  plait plan adapter.rank=8,16,32 search.trials=64
  plait plan cluster=h100_llama31_8b --timeline run.html
""",
    "profile": f"""plait profile [--json] [--without-weights] [KEY=VALUE ...]

Measure memory and seconds of the model on this machine over a small grid of microbatches,
fit them, choose the capacity, and keep all that for `plait sweep` and `plait plan`.
Nothing else should run meanwhile: seconds are measured.

{_SETTINGS}  engine.capacity=N       probe up to N tokens in a microbatch
  cluster=NAME            instead: compare the configurations of a described cluster, by
                          simulation; there are
                          {_CLUSTERS}
  --without-weights       compute memory from the model's configuration alone; no seconds
  --json                  the profile as JSON
{_HYDRA}
Examples
  plait profile                               SmolLM2-135M, this machine
  plait profile model=hf model.id=Qwen/Qwen2.5-0.5B --without-weights
  plait profile cluster=h100_llama31_70b
""",
    "bench": f"""plait bench [NAME [KEY=VALUE ...]]

List the named searches and benchmarks with how long each takes, or run one, to its end:
its figures stand beside those that were published. `plait bench NAME` is
`plait sweep +sweeps=NAME`. What it does meanwhile is written to standard error.

{_SETTINGS}  bench.options.KEY=VALUE an option of the benchmark; `plait bench NAME --help` shows
                          its file, with all of them
{_HYDRA}
Examples
  plait bench                                 the list
  plait bench lorafusion/bubble_ratio
  plait bench tracking_scale bench.options.adapters=50 bench.options.edge=10
""",
}


def help_for(verb: str, arguments: Sequence[str]) -> str | None:
    """The text that a verb's arguments ask for; None where they ask for none, or the verb or Hydra has its
    own."""
    if not set(arguments) & set(HELP):
        return None
    if verb == "bench" and not arguments[0].startswith("-"):  # of one benchmark
        return None
    return TEXTS.get(verb)
