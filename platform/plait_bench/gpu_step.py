"""A whole training step of an 8B model with random weights on a GPU: joint, frozen alone, PEFT one by one.

What is known least comes first, and the file is written after each part, so that a run that is stopped
keeps what it has; the same command resumes from there if device, versions, commit and options are the same.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.probes import Probe, ProbeOptions, ProbeSegment, device_context, probe_loss, probe_routing
from plait.engine.devices import choose_device, choose_kernels, prepare_tiles
from plait.models.lora import LinearGroup
from plait.utils.files import write_text
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count
from plait_bench.random_model import LlamaSizes, described, dtype_on
from plait_kernels import AdapterStep, Bank, adamw_step
from plait_kernels.bench import environment
from plait_kernels.timing import Taken, taken

PARTS = ("joint", "frozen", "apart", "peft")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class JointOptions(LlamaSizes):
    """A model and its adapters.

    Attributes:
        adapters: adapters on all linear layers, all of ``rank`` with ``dropout``.
        length: tokens of the longest sample.
        labelled: share of the tokens that are labelled, in Plait's loss.
        capacity: most tokens of a microbatch.
        repeats: how often something is timed.
    """

    adapters: Count
    length: Count
    rank: Count
    dropout: float
    labelled: float
    capacity: Count
    repeats: Count


@dataclass(frozen=True, slots=True)
class StepOptions(JointOptions):
    """Options of ``gpu_step``, all samples being of ``length`` tokens; PEFT's loss covers all tokens.

    Attributes:
        file: where each part's seconds are kept.
        samples: of an adapter's step.
        alone: samples of a microbatch of PEFT's.
    """

    file: str
    samples: Count = 1
    alone: Count = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.adapters * self.samples * self.length


@benchmark("gpu_step", StepOptions)
def gpu_step(settings: RunSettings, _jobs: Sequence[JobSpec], asked: StepOptions) -> Report:
    """Seconds of a step of all adapters, of the frozen model alone, and of PEFT's steps one after another.

    Raises:
        ConfigError: a device that is not there.
    """
    device = choose_device(settings.engine.device)
    dtype = dtype_on(device)
    file = Path(asked.file)
    kept = _kept(file, {"environment": environment(device), "options": asdict(asked)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if not {"joint", "frozen", "apart"} <= kept["parts"].keys():
            side = _PlaitSide(asked, settings.engine.kernels, device, dtype)
            _measure(file, kept, "joint", partial(side.times, side.joint_step))
            _measure(file, kept, "frozen", partial(side.times, side.frozen_step))
            with patch.object(LinearGroup, "gated_mlp", lambda *_: None):
                _measure(file, kept, "apart", partial(side.times, side.joint_step))
            del side
            free(device)
        _measure(file, kept, "peft", partial(_peft_times, asked, device, dtype))
    return Report("gpu/step", _figures(asked, kept["parts"]), _assumptions(asked, device, dtype))


def _kept(file: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """What the file has of the same run; else a new run."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    same = all(found.get(key) == value for key, value in identity.items())
    return found if same else {**identity, "parts": {}}


def _measure(file: Path, kept: dict[str, Any], part: str, run: Callable[[], list[Taken]]) -> None:
    if part not in kept["parts"]:
        times = run()
        kept["parts"][part] = {
            "device": median(each.device for each in times),
            "host": median(each.host for each in times),
        }
        write_text(file, json.dumps(kept, indent=1) + "\n")


def free(device: torch.device) -> None:
    """Give a device's memory back that nothing names any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# ---- Plait ------------------------------------------------------------------------------------------------


class JointModel:
    """The model as blocks, and a bank with all adapters."""

    def __init__(self, asked: JointOptions, kernels: str, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.model = asked.base(asked.length, device, dtype)
        self.options = ProbeOptions(dtype, targets=TARGETS, backend=choose_kernels(kernels, device, dtype))
        self.model.install(backend=self.options.backend)
        prepare_tiles(self.model, self.options.backend, asked.capacity, "")
        self.bank = Bank(self.model.sites, device=device, compute_dtype=dtype)
        names = [site.name for site in self.model.sites]
        for index in range(asked.adapters):
            self.bank.attach(
                str(index), rank=asked.rank, scale=1.0, dropout=asked.dropout, seed=index, sites=names
            )
            for a, _ in self.bank.weights(str(index)).values():
                nn.init.kaiming_uniform_(a, a=5**0.5)
        self.bank.refresh()


class _PlaitSide(JointModel):
    """Steps of all adapters together, and of the model alone."""

    def __init__(self, asked: StepOptions, kernels: str, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(asked, kernels, device, dtype)
        self.asked = asked

    def times(self, step: Callable[[], None]) -> list[Taken]:
        """What each repeat of a step takes."""
        return taken(step, self.device, warmup=1, repeats=self.asked.repeats)

    def joint_step(self) -> None:
        """All microbatches of a step, and the optimiser's step of all adapters."""
        for probe, first in self._probes():
            routing = probe_routing(probe, self.bank, first)
            context = device_context(self.model, probe, routing, self.options)
            torch.autograd.backward(probe_loss(self.model, probe, self.model.hidden(context)))
        steps = [AdapterStep(name, 1, 1e-4, 1e-4) for name in self.bank.blocks]
        adamw_step(self.bank, steps, backend=self.options.backend)

    def frozen_step(self) -> None:
        """The same tokens through the model without adapters, with the gradient of its input."""
        for probe, _ in self._probes():
            context = device_context(self.model, probe, None, self.options)
            hidden = self.model.hidden(context, self.model.embed(context).detach().requires_grad_())
            torch.autograd.backward(probe_loss(self.model, probe, hidden))

    def _probes(self) -> list[tuple[Probe, int]]:
        """The step's microbatches, each with the number of its first adapter."""
        asked, each = self.asked, max(1, self.asked.capacity // self.asked.length)
        owners = [index for index in range(asked.adapters) for _ in range(asked.samples)]
        found = []
        for start in range(0, len(owners), each):
            own = owners[start : start + each]
            segments = tuple(
                ProbeSegment(asked.rank, (asked.length,) * count) for count in Counter(own).values()
            )
            found.append((Probe(segments, max(1, int(asked.labelled * asked.length * len(own)))), own[0]))
        return found


# ---- PEFT -------------------------------------------------------------------------------------------------


def _peft_times(asked: StepOptions, device: torch.device, dtype: torch.dtype) -> list[Taken]:
    """A step of one adapter with PEFT, as often as there are adapters: they have the same sizes."""
    model: Any = asked.model(asked.length, device, dtype)
    model.set_attn_implementation("sdpa")  # causal and without a mask: torch's flash kernels on a GPU
    lora = LoraConfig(
        r=asked.rank, lora_alpha=asked.rank, lora_dropout=asked.dropout, target_modules=list(TARGETS)
    )
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.zeros(asked.samples, asked.length, dtype=torch.int64, device=device)

    def step() -> None:
        for own in torch.split(ids, asked.alone):
            loss: Tensor = adapted(input_ids=own, labels=own, use_cache=False).loss
            torch.autograd.backward(loss * len(own) / len(ids))
        optimiser.step()
        optimiser.zero_grad()

    found = taken(step, device, warmup=2, repeats=max(3, asked.repeats))
    return [Taken(asked.adapters * each.device, asked.adapters * each.host, each.queued) for each in found]


# ---- the report -------------------------------------------------------------------------------------------


def _figures(asked: StepOptions, parts: Mapping[str, Mapping[str, float]]) -> tuple[Figure, ...]:
    joint, frozen, apart, peft = (parts[part] for part in PARTS)
    speed = asked.tokens / joint["device"]
    names = {
        "joint": "joint step",
        "frozen": "frozen model alone",
        "apart": "joint step, each layer by itself",
        "peft": "PEFT, one adapter after another",
    }
    hosts = [
        Figure(f"{names[part]}: host", parts[part]["host"], "s", "measured", note="until all was asked for")
        for part in PARTS
    ]
    return (
        Figure(
            "joint step",
            *(joint["device"], "s", "measured"),
            Baseline(frozen["device"], "frozen model alone", at_most=1.5),
        ),
        Figure(
            "joint: tokens a second",
            *(speed, "tokens/s", "measured"),
            Baseline(asked.tokens / peft["device"], "PEFT, one adapter after another", at_least=1.0),
        ),
        Figure(
            names["apart"],
            *(apart["device"], "s", "measured"),
            note=f"no gated MLP as one operation: {apart['device'] / joint['device']:.3f} times as long",
        ),
        Figure("joint over PEFT", peft["device"] / joint["device"], "×", "measured", note="their speeds"),
        *hosts,
    )


def _assumptions(asked: StepOptions, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    return (
        f"{described(device, dtype)}; seconds of the device, medians of {asked.repeats} steps",
        f"PEFT: one step of one adapter, times {asked.adapters}, {asked.alone} of {asked.samples} samples "
        "at a time; sdpa, dropout by torch, loss of all tokens",
    )
