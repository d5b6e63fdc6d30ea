"""Stages of a small float32 model with adapters, whose lists Plait's own loop carries out, or DeepSpeed.

What is DeepSpeed's: the pipeline's engine, which takes instructions from a schedule, and its passes forward
and backward. What is not: messages, norms and steps, because its engine sends tensors of one shape and steps
all jobs at once.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_pipeline import Window, in_windows, random_jobs, whole

from plait.core.plans import Microbatch
from plait.distributed.links import Links
from plait.distributed.stage_run import Messages, StageRun
from plait.planner.instructions import Key
from plait.simulate.orders import ORDERS

WIDTH, RANK, RATE = 8, 3, 0.05
Weights = dict[str, list[Tensor]]


def random_tensor(name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) / 3


class Layer(nn.Module):
    """A frozen linear layer with an adapter of each job, for the rows of the microbatch that it is given."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.anchor = nn.Parameter(torch.zeros(1))  # DeepSpeed's optimiser wants one
        self.base = random_tensor(f"base {number}", WIDTH, WIDTH)
        self.adapters: Weights = {}
        self.microbatch = Microbatch(0, 0, ())

    def adapter(self, job: str) -> list[Tensor]:
        if job not in self.adapters:
            made = (random_tensor(f"{job} {self.number} A", WIDTH, RANK), torch.zeros(RANK, WIDTH))
            self.adapters[job] = [each.requires_grad_() for each in made]
        return self.adapters[job]

    def forward(self, rows: Tensor) -> Tensor:
        found, begin = [], 0
        for each in self.microbatch.segments:
            own = rows[begin : begin + each.tokens]
            begin += each.tokens
            first, second = self.adapter(each.job)
            found.append(torch.tanh(own @ self.base + own @ first @ second))
        return torch.cat(found)


class LoraStage:
    """One stage, as :class:`~plait.distributed.stage_run.Stage`, with torch's passes."""

    def __init__(self, number: int, stages: int) -> None:
        self.messages = Messages(WIDTH, torch.float32, torch.device("cpu"))
        self.layer, self.last = Layer(number), number == stages - 1
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def carry_out(self, windows: Sequence[Window], links: Links) -> None:
        run = StageRun(self, links, self.layer.number)
        for window in windows:
            run.run(window.lists, window.microbatches)
        links.finish()

    def received(self) -> None:
        pass

    def sent(self) -> None:
        pass

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor | None:
        self.layer.microbatch = microbatch
        rows = embedded(microbatch) if entering is None else entering
        leaving = self.through(number, rows.requires_grad_())
        self._kept[number] = rows, leaving
        return None if self.last else leaving

    def backward(self, number: int, _microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        rows, leaving = self._kept.pop(number)
        self.back(number, leaving, gradient)
        return rows.grad if self.layer.number else None

    def through(self, number: int, rows: Tensor) -> Tensor:
        del number
        leaving: Tensor = self.layer(rows)
        return loss_of(leaving) if self.last else leaving

    def back(self, number: int, leaving: Tensor, gradient: Tensor | None) -> None:
        del number
        leaving.backward(gradient)  # type: ignore[no-untyped-call]

    def _gradients(self, job: str) -> list[Tensor]:
        return [
            torch.zeros_like(each) if each.grad is None else each.grad for each in self.layer.adapter(job)
        ]

    def squares(self, key: Key) -> float:
        return sum(float(each.double().square().sum()) for each in self._gradients(key[0]))

    def step(self, keys: Sequence[Key], norms: Sequence[float]) -> None:
        for (job, _), norm in zip(keys, norms, strict=True):
            for weight, gradient in zip(self.layer.adapter(job), self._gradients(job), strict=True):
                weight.data -= RATE * gradient / max(1.0, norm)
                weight.grad = None


def loss_of(rows: Tensor, _labels: object = None) -> Tensor:
    return (rows - 0.5).square().sum()


def embedded(microbatch: Microbatch) -> Tensor:
    parts = [
        random_tensor(f"sample {sample}", length, WIDTH)
        for own in microbatch.segments
        for sample, length in zip(own.samples, own.lengths, strict=True)
    ]
    return torch.cat(parts)


class DeepSpeedStage(LoraStage):
    """The same by DeepSpeed's engine."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__(number, stages)
        self._losses: dict[int, Tensor] = {}
        self._engine: Any = engine_of(self.layer, stages)

    def carry_out(self, windows: Sequence[Window], links: Links) -> None:
        from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

        run, stage, stages = (
            StageRun(self, links, self.layer.number),
            self.layer.number,
            len(windows[0].lists),
        )

        class Do(PipeInstruction):  # type: ignore[misc]
            """One of Plait's instructions."""

        class Listed(PipeSchedule):  # type: ignore[misc]
            """A window's list of this stage."""

            def __init__(self, window: Window) -> None:
                super().__init__(max(1, len(window.microbatches)), stages, stage)
                self._window = window

            def steps(self) -> Any:
                run.prepare(self._window.lists, self._window.microbatches)
                for each in self._window.lists[stage]:
                    yield [Do(each=each)]

            def num_pipe_buffers(self) -> int:
                return max(self._window.microbatches, default=0) + 1

        made = type(self._engine)
        made._INSTRUCTION_MAP = {Do: lambda _engine, each: run.do(each)}
        for window in windows:
            self._engine._exec_schedule(Listed(window))
        links.finish()

    def through(self, number: int, rows: Tensor) -> Tensor:
        engine = self._engine
        engine.pipe_buffers["inputs"][number] = rows
        engine._exec_forward_pass(number)
        self._losses[number] = engine.loss  # it keeps one
        found: Tensor = engine.loss if self.last else engine.pipe_buffers["outputs"][number]
        return found

    def back(self, number: int, leaving: Tensor, gradient: Tensor | None) -> None:
        del leaving
        engine = self._engine
        engine.loss, engine.grad_layer = self._losses.pop(number), gradient
        engine._exec_backward_pass(number)


def engine_of(layer: Layer, stages: int) -> Any:
    """DeepSpeed's pipeline engine over all processes, of which each has one layer."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(layer.number)}
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module = PipelineModule(
        [layer] * stages,
        num_stages=stages,
        loss_fn=loss_of,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        config={"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1},
    )
    engine._compute_loss = True
    engine.module.train()
    return engine


def plans(stages: int) -> dict[str, list[Window]]:
    """The same jobs in every order, then in windows that do not drain the pipeline."""
    batches = random_jobs(random.Random(11))
    found = {name: whole(name, batches, stages) for name in ORDERS}
    return found | {"windows": in_windows(random.Random(5), batches, stages)}


def run_both(number: int, stages: int, folder: str) -> None:
    """What one process does: every plan by both, and a file with the weights."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=stages)
    found: dict[tuple[str, str], Mapping[str, list[Tensor]]] = {}
    for kind in (LoraStage, DeepSpeedStage):
        stage = kind(number, stages)
        for name, windows in plans(stages).items():
            stage.layer.adapters = {}
            stage.carry_out(windows, Links(number, torch.device("cpu")))
            found[kind.__name__, name] = {
                job: [each.detach() for each in own] for job, own in stage.layer.adapters.items()
            }
    torch.save(found, Path(folder) / f"weights-{number}")
    dist.barrier()
    dist.destroy_process_group()
