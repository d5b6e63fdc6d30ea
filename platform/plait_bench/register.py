"""In which module each benchmark is: what the entry point names.

A benchmark's module is imported when it runs, since some import torch, transformers and PEFT, which takes
seconds.
"""

from __future__ import annotations

from plait.utils.benchmarks import PAPERS, RUNNERS
from plait_bench.benchmarks import BENCHMARKS

MODULES = {
    "dropout_cost": ("dropout_cost",),
    "gpu_counts": ("gpu_counts",),
    "gpu_graphs": ("gpu_graphs",),
    "gpu_step": ("gpu_step",),
    "joint_vs_peft": ("joint_vs_peft",),
    "length_figures": ("lengths",),
    "lobra": ("lobra/deploy", "lobra/ablation", "lobra/time_model"),
    "lobra_measured": ("lobra/measured",),
    "lobra_scaling": ("lobra/scaling",),
    "lobra_steps": (
        "lobra/worked_example",
        "lobra/end_to_end",
        "lobra/buckets",
        "lobra/case_study",
        "lobra/sequential_plans",
        "lobra/two_stage",
    ),
    "lobra_tables": ("lobra/throughput", "lobra/homogeneous", "lobra/critical_path"),
    "lorafusion": ("lorafusion/bubble_ratio", "lorafusion/packing_gain", "lorafusion/scheduler_time"),
    "lorafusion_kernels": ("lorafusion/kernels",),
    "lorafusion_measured": ("lorafusion/breakdown_measured",),
    "lorafusion_steps": (
        "lorafusion/breakdown",
        "lorafusion/end_to_end",
        "lorafusion/profiler",
        "lorafusion/scaling",
        "lorafusion/padding",
    ),
    "mlora": ("mlora/bubble_ratio", "mlora/memory_model", "mlora/memory_points"),
    "mlora_measured": ("mlora/batch_lora", "mlora/launches", "mlora/graph_pruning"),
    "mlora_pipelines": ("mlora/pipelines", "mlora/communication"),
    "pipeline_orders": ("mlora/pipeline_orders",),
    "planning_time": ("lobra/planning_time",),
    "quantised_base": ("quantised_base",),
    "record_curves": ("record_curves",),
    "replay": ("replay/stopping",),
    "replicas": ("replicas",),
    "search_vs_sequential": ("search_vs_sequential",),
    "slora": ("slora/communication", "slora/pool", "slora/admission"),
    "slora_adapters": ("slora/adapters",),
    "slora_measured": ("slora/kernels", "slora/merged"),
    "slora_throughput": ("slora/throughput",),
    "tensor_measured": ("mlora/tensor_measured",),
    "tracking_scale": ("tracking_scale",),
    "traffic": ("lorafusion/traffic",),
}

for _module, _names in MODULES.items():
    for _name in _names:
        BENCHMARKS.add_later(_name, f"plait_bench.{_module}")
for _mode in ("bench", "simulate"):
    RUNNERS.add_later(_mode, "plait_bench.run")
RUNNERS.add_later(PAPERS, "plait_bench.papers")
