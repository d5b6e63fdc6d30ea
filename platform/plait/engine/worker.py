"""The in-process worker: owns the base model and the bank of adapters, and carries out commands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from plait.adapters.peft_folder import export_adapter
from plait.adapters.variants import attach, checkpoint_tensors, named_tensors
from plait.core.errors import CheckpointError
from plait.core.messages import (
    Attach,
    Attached,
    Command,
    Detach,
    Evaluate,
    Export,
    Generate,
    Generated,
    JobFailed,
    KeepWeights,
    MicrobatchDone,
    OutOfMemory,
    RunMicrobatches,
    Saved,
    SaveState,
    StepDone,
    StepJob,
    StepJobs,
    WorkerEvent,
)
from plait.core.plans import Microbatch, Segment
from plait.core.samples import Split
from plait.core.settings import EngineSettings, RunSettings
from plait.engine.admission import WorkerFacts
from plait.engine.answers import answer
from plait.engine.best import BestWeights
from plait.engine.catalogue import DataCatalogue
from plait.engine.checkpoints import Found, Origin, newest_state, write_state
from plait.engine.devices import choose_device, choose_kernels
from plait.engine.limits import allowed_cores
from plait.engine.memory_estimate import ActivationShape
from plait.engine.microbatches import LoadedMicrobatch, load_microbatch
from plait.engine.out_of_memory import attempt, give_back
from plait.engine.peaks import SAMPLED_EVERY, PeakMeter, PeakObserver, PeakSampler, device_bytes
from plait.engine.warm import load_warm
from plait.models import BaseModel, check_rank, load_model
from plait.models.attention import KEEP_UP_TO
from plait_kernels import AdapterStep, Bank, adamw_step, labelled_cross_entropy
from plait_kernels.loss import CHUNK_LOGITS


class LocalWorker:
    """Carries out commands in this process, on one device.

    Args:
        model: the frozen base; its linear layers become adapter-aware.
        data: shared with the coordinator; found by digest.
        settings: backend, threads, checkpointing.
        clock: seconds, rising.
    """

    def __init__(
        self,
        model: BaseModel,
        data: DataCatalogue,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        threads = settings.threads or min(torch.get_num_threads(), allowed_cores() or torch.get_num_threads())
        torch.set_num_threads(threads)
        self.bank = Bank(model.sites, device=model.device, compute_dtype=model.dtype)
        self._best = BestWeights(self.bank)
        self._backend = choose_kernels(settings.kernels, model.device, model.dtype)
        model.install(backend=self._backend)
        self._model = model
        self._data = data
        self._checkpointing = settings.checkpointing
        self._capacity = settings.capacity_or_usual
        self._clock = clock
        self._observer = PeakObserver(model.device, self._static)
        self._sampler = PeakSampler(every=1 if model.device.type == "cuda" else SAMPLED_EVERY)
        self._jobs: dict[str, Attach] = {}

    @property
    def facts(self) -> WorkerFacts:
        """Its model and its device."""
        model = self._model
        shape = ActivationShape(
            layers=model.layer_count,
            hidden=model.hidden_size,
            heads=int(model.config.num_attention_heads),
            vocabulary=model.vocabulary,
            linear_features=sum(linear.in_features + linear.out_features for linear in model.linears),
            weight_bytes=model.weight_bytes,
            element_bytes=model.dtype.itemsize,
            logit_rows=max(1, CHUNK_LOGITS // model.vocabulary),
            keep_up_to=KEEP_UP_TO,
        )
        return WorkerFacts(
            shape,
            model.linears,
            max_length=model.max_length,
            memory_bytes=device_bytes(model.device),
            chosen={"kernels": self._backend, "device": str(model.device)},
            inputs=tuple((frozenset(group.names), group.sites[0].in_features) for group in model.groups),
        )

    def handle(self, command: Command) -> Sequence[WorkerEvent]:
        """Carry out one command to its end.

        Raises:
            StorageError: a state or adapter cannot be written.
        """
        match command:
            case Attach():
                return [self._attach(command)]
            case Detach():
                self.bank.detach(command.job)
                self._best.drop(command.job)
                del self._jobs[command.job]
                return []
            case RunMicrobatches():
                return self._run_all(command.microbatches, training=True)
            case Evaluate():
                return self._run_all(command.microbatches, training=False)
            case KeepWeights():
                for job in command.jobs:
                    self._best.keep(job)
                return []
            case StepJobs():
                return self._step(command.steps)
            case Generate():
                return self._generate(command)
            case SaveState():
                return [self._save(command)]
            case Export():
                return [self._export(command)]

    # ---- jobs come and go -----------------------------------------------------------------------------

    def _attach(self, command: Attach) -> WorkerEvent:
        """Take a job in; where memory runs out, nothing of it stays."""
        started = self._clock()
        event, detail = attempt(lambda: self._take_in(command, started))
        if event is not None:
            return event
        name = command.job.name
        self._jobs.pop(name, None)
        self._best.drop(name)
        if name in self.bank.blocks:
            self.bank.detach(name)
        give_back(self._model.device)
        return OutOfMemory(detail or "", self._clock() - started)

    def _take_in(self, command: Attach, started: float) -> WorkerEvent:
        job = command.job
        sites = check_rank(job.adapter, self._model.linears)
        weight_of = self._model.frozen_weight
        attach(self.bank, job.name, job.adapter, sites, seed=job.train.seed, weight_of=weight_of)
        self._jobs[job.name] = command
        try:
            found = self._restore(command)
            if found.directory is None and command.warm_from is not None:
                load_warm(command.warm_from, named_tensors(self.bank, job.name))
        except CheckpointError as error:
            return JobFailed(job.name, 0, str(error), self._clock() - started)
        self.bank.refresh([job.name])
        passed_over = f"passed over; it goes on from step {found.cursor.step}"
        notices = tuple(f"{trouble}: {passed_over}" for trouble in found.troubles)
        return Attached(job.name, found.cursor, found.directory, notices, self._clock() - started)

    def _origin(self, command: Attach) -> Origin:
        return Origin.of(command.job, model=self._model.config_digest, data=command.data)

    def _restore(self, command: Attach) -> Found:
        """Load the newest whole state that there is."""
        found = newest_state(command.resume_from, self._origin(command))
        if found.directory is not None:
            job = command.job.name
            state = checkpoint_tensors(self.bank, job)
            shapes = {name: tensor.shape for name, tensor in state.items()}
            saved = self._best.restore(job, found.tensors, expected=found.cursor.best_step is not None)
            if shapes != {name: tensor.shape for name, tensor in saved.items()}:
                raise CheckpointError(f"{found.directory}: its tensors are not those of the adapter")
            for name, tensor in state.items():
                tensor.copy_(saved[name])
        return found

    def _save(self, command: SaveState) -> WorkerEvent:
        started = self._clock()
        state = {name: tensor.cpu() for name, tensor in checkpoint_tensors(self.bank, command.job).items()}
        state |= self._best.state(command.job)
        write_state(command.directory, self._origin(self._jobs[command.job]), command.cursor, state)
        seconds = self._clock() - started
        return Saved(command.job, command.directory, command.cursor.step, exported=False, seconds=seconds)

    # ---- training -------------------------------------------------------------------------------------

    def _split_of(self, segment: Segment) -> Split:
        data = self._data[self._jobs[segment.job].data]
        return data.train if segment.split == "train" else data.validation

    def _run_all(self, microbatches: Sequence[Microbatch], *, training: bool) -> list[WorkerEvent]:
        """One after another; where memory runs out, nothing is left of what they began."""
        events: list[WorkerEvent] = []
        observed = training and self._sampler.wanted(self._jobs, [each.tokens for each in microbatches])
        started = self._clock()

        def run_all() -> None:
            nonlocal started, events
            for microbatch in microbatches:
                started = self._clock()
                events += self._run(microbatch, training=training, observed=observed)

        _, detail = attempt(run_all)
        if detail is None:
            return events
        self.bank.zero_gradients()
        give_back(self._model.device)
        return [*events, OutOfMemory(detail, self._clock() - started)]

    def _run(self, microbatch: Microbatch, *, training: bool, observed: bool) -> list[WorkerEvent]:
        """Forward, and backward when training; gradients add up in the bank."""
        started = self._clock()
        with self._observer.watch(observed) as meter:
            loaded = load_microbatch(
                microbatch,
                self._split_of,
                self.bank,
                training=training,
                checkpointing=training and self._checkpointing,
            )
            with torch.set_grad_enabled(training):
                loss, nll = self._forward(loaded, meter)
            if training and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            meter.end("backward")
        losses = loaded.losses(nll)  # waits for the device
        seconds = self._clock() - started
        done = MicrobatchDone(microbatch.index, losses, seconds, meter.observed, evaluation=not training)
        failed = [
            JobFailed(each.job, each.step, f"{'loss' if training else 'validation loss'} is {each.loss_sum}")
            for each in losses
            if not math.isfinite(each.loss_sum)
        ]
        return [done, *failed]

    def _static(self) -> Iterator[Tensor]:
        """Tensors that stay: weights and adapters."""
        yield from self._model.tensors()
        for name in self._jobs:
            yield from self.bank.block(name).tensors()

    def _forward(self, loaded: LoadedMicrobatch, meter: PeakMeter) -> tuple[Tensor, Tensor]:
        """Weighted loss of the microbatch and each labelled row's own; the head sees labelled rows only."""
        model = self._model
        hidden = model.embed(loaded.context)
        for index in range(model.layer_count):
            hidden = model.layer(index, hidden, loaded.context)
        meter.end("forward")
        head = model.head_parameters()
        loss, nll = labelled_cross_entropy(
            model.final_norm(hidden.index_select(0, loaded.rows)),
            head.weight,
            head.bias,
            loaded.targets,
            loaded.weights,
            softcap=head.softcap,
            scale=head.scale,
        )
        meter.end("loss")
        return loss, nll

    def _step(self, steps: Sequence[StepJob]) -> list[WorkerEvent]:
        """One call of the optimiser for all jobs that are due; its time is shared out by adapter size."""
        started = self._clock()
        results = adamw_step(self.bank, [self._adapter_step(step) for step in steps])
        seconds = self._clock() - started
        sizes = {step.job: self.bank.block(step.job).state.numel() for step in steps}
        own = {job: seconds * size / sum(sizes.values()) for job, size in sizes.items()}
        return [
            JobFailed(step.job, step.step, f"gradient norm is {result.grad_norm}", own[step.job])
            if result.skipped
            else StepDone(step.job, step.step, result.grad_norm, own[step.job])
            for step, result in zip(steps, results, strict=True)
        ]

    def _adapter_step(self, step: StepJob) -> AdapterStep:
        train = self._jobs[step.job].job.train
        return AdapterStep(
            adapter=step.job,
            step=step.step,
            lr_a=step.lr,
            lr_b=step.lr * train.lora_plus_ratio,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
        )

    # ---- results --------------------------------------------------------------------------------------

    def _export(self, command: Export) -> WorkerEvent:
        started = self._clock()
        with self._best.in_place([command.job]):
            export_adapter(
                command.directory,
                self._jobs[command.job].job.adapter,
                self.bank.weights(command.job),
                base=self._model.identity.name,
                linears=self._model.linears,
                revision=self._model.identity.revision,
                kept_step=command.kept_step,
            )
        return Saved(command.job, command.directory, 0, exported=True, seconds=self._clock() - started)

    def _generate(self, command: Generate) -> list[WorkerEvent]:
        """Answers of all jobs together; the time is shared out by tokens."""
        started = self._clock()
        splits = {each.job: self._data[self._jobs[each.job].data].validation for each in command.jobs}
        with self._best.in_place([each.job for each in command.jobs]):
            answers = answer(command, splits, self._model, self.bank, capacity=self._capacity)
        seconds = self._clock() - started
        whole = sum(each.tokens for each in answers.values())
        events: list[WorkerEvent] = []
        for each in command.jobs:
            own = answers[each.job]
            spent = seconds * (own.tokens / whole if whole else 1 / len(answers))
            if own.trouble:
                events.append(JobFailed(each.job, 0, own.trouble, spent))
            else:
                events.append(Generated(each.job, each.samples, own.texts, spent))
        return events


def local_worker(settings: RunSettings, data: DataCatalogue, *, cache: Path) -> LocalWorker:
    """Load the model and make a worker of this process.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the device is not there, or the kernels do not run on it.
    """
    model = load_model(settings.model, cache=cache, device=choose_device(settings.engine.device))
    return LocalWorker(model, data, settings.engine)
