"""The in-process worker: runs microbatches, optimiser steps and generation on one device."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from plait.core.errors import CheckpointError, ShortStageError
from plait.core.jobs import JobSpec
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
    ObservedPeak,
    OutOfMemory,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    StepDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Microbatch, Segment
from plait.core.samples import Split, TokenisedData
from plait.core.settings import EngineSettings
from plait.core.spans import ReplicaSpans, SpanKind
from plait.cost.peaks import PhasePeaks
from plait.engine.adapter_store import AdapterStore
from plait.engine.asked import Asked, AskedStep, mark, on_its_way
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import choose_kernels, device_bytes, device_kind, prepare_tiles, usual_threads
from plait.engine.memory import SAMPLED_EVERY, PeakObserver, PeakSampler, attempt, release_unused
from plait.engine.microbatches import LoadedMicrobatch, gather
from plait.engine.recorded import RecordedTraining
from plait.engine.schedules import Round, rounds
from plait.engine.span_recorder import Part, SpanRecorder, work_of
from plait.engine.worker import ActivationShape, HeldPart, WorkerFacts
from plait.models.base import BaseModel
from plait.models.slices import local_linears
from plait.serve.cells import BankAdapters
from plait.serve.engine import Engine, needed_tokens
from plait.serve.requests import Completion, Request, Sampling
from plait_kernels import AdapterStep, AskedSteps, Bank, ask_steps
from plait_kernels.bank import GRADIENTS, WEIGHTS, Block
from plait_kernels.steps import StepResult
from plait_kernels.uploads import table


class Peers(Protocol):
    """Other workers with the same adapters: they get the same schedules, with microbatches of their own."""

    def add_up(self, gradients: Tensor, job: str, step: int) -> None:
        """Begin to put the sum over all of them into this vector of a job; all do so in one order."""

    def fill(self, vectors: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Take each part of these vectors from the worker whose number it has."""

    def finish(self, *, short: bool) -> bool:
        """Wait for the sums that were begun; whether one of them is ``short`` of memory."""


class LocalWorker:
    """A :class:`~plait.engine.worker.Worker` in this process, on one device.

    Args:
        recorder: of the process's spans; None: one of its own.
        peers: what it adds up gradients with; None: it trains alone.
        part: its number and the count of peers, if each keeps the moments of a part of every adapter.
        tiles: of the kernels, as its facts had them when the search was started; "": measured where needed.
    """

    def __init__(
        self,
        model: BaseModel,
        data: DataCatalogue,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.perf_counter,
        recorder: SpanRecorder | None = None,
        peers: Peers | None = None,
        part: tuple[int, int] = (0, 1),
        tiles: str = "",
    ) -> None:
        torch.set_num_threads(settings.threads or usual_threads())
        self.adapters = AdapterStore(model, part)
        self.bank = self.adapters.bank
        self._backend = choose_kernels(settings.kernels, model.device, model.dtype)
        model.install(backend=self._backend)
        self._tiles = prepare_tiles(model, self._backend, settings.capacity_or_usual, tiles)
        self._model = model
        self._data = data
        self._checkpointing = settings.checkpointing
        self._capacity, self._graph_tokens = settings.capacity_or_usual, settings.graph_tokens
        self._clock = clock
        self._recorder = recorder or SpanRecorder()
        self._peers = peers
        self._observer = PeakObserver(model.device, self._static)
        self._sampler = PeakSampler(every=1 if model.device.type == "cuda" else SAMPLED_EVERY)
        self._jobs: dict[str, JobSpec] = {}
        self._failed: set[str] = set()  # jobs that do not step any more
        self._recorded = self._recording(settings)

    def _recording(self, settings: EngineSettings) -> RecordedTraining | None:
        """What replays small microbatches, if that is wanted."""
        model = self._model
        parted = model.shards is not None or model.slicing is not None or model.device.type != "cuda"
        if not settings.graph_tokens or parted or self._backend != "triton" or self._checkpointing:
            return None
        compute = partial(self._compute, peaks=PhasePeaks(), training=True)
        return RecordedTraining(self.bank, compute, most=settings.graph_tokens, longest=model.max_length)

    @property
    def facts(self) -> WorkerFacts:
        """Its model and its device."""
        model = self._model
        shape = ActivationShape.of(
            model,
            weight_bytes=model.weight_bytes,
            element_bytes=model.dtype.itemsize,
            made_bytes=max((group.made_bytes for group in model.groups), default=0),
            gathered_bytes=0 if model.shards is None else model.shards.gathered_bytes,
        )
        memory_bytes = device_bytes(model.device)
        slices = 1 if model.slicing is None else model.slicing.count
        held = HeldPart(
            model.own,
            shape.weight_bytes,
            memory_bytes,
            shape.made_bytes,
            slices,
            shape.gathered_bytes,
            local_linears(model.linears, model.slices) if model.slices else (),
        )
        return WorkerFacts(
            shape,
            model.linears,
            max_length=model.max_length,
            memory_bytes=memory_bytes,
            chosen={
                "kernels": self._backend,
                "device": str(model.device),
                "dtype": str(model.dtype).removeprefix("torch."),
            }
            | ({"threads": str(torch.get_num_threads())} if model.device.type == "cpu" else {})
            | ({"tiles": self._tiles} if self._tiles else {})
            | {"graph_tokens": str(self._graph_tokens)},
            inputs=model.inputs,
            outside=model.outside,
            devices=(str(model.device),),
            kinds=(device_kind(model.device.type),),
            model=model.identity.digest,
            held=((held,),),
        )

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        """Carry out one command to its end.

        Raises:
            StorageError: a checkpoint or an adapter cannot be written.
        """
        with self._recorder.request():
            return self._execute(command)

    def take_spans(self) -> Sequence[ReplicaSpans]:
        """What it did since the last call."""
        device = str(self._model.device)
        return [ReplicaSpans(0, socket.gethostname(), os.getpid(), device, self._recorder.take())]

    def _execute(self, command: Command) -> Sequence[WorkerEvent]:
        match command:
            case Attach():
                return [self._attach(command)]
            case Detach(job):
                del self._jobs[job]
                self._failed.discard(job)
                self.adapters.detach(job)
                return []
            case RunSchedule(items):
                return self._run_schedule(items)
            case Evaluate(microbatches):
                return self._evaluate(microbatches)
            case KeepWeights(jobs):
                for job in jobs:
                    self.adapters.keep(job)
                return []
            case Generate():
                return self._generate(command)
            case SaveCheckpoint(job, directory, cursor):
                started = self._clock()
                self.gather_moments(job)
                try:
                    self.adapters.save(job, directory, cursor)
                finally:
                    self.bank.block(job).whole = None
                self._recorder.lap("checkpoint", ((job, cursor.step),))
                return [Saved(job, self._clock() - started)]
            case Export(job, directory, kept_step):
                started = self._clock()
                self.adapters.export(job, directory, kept_step)
                self._recorder.lap("adapter", ((job, kept_step or 0),))
                return [Saved(job, self._clock() - started)]

    # ---- jobs -----------------------------------------------------------------------------------------

    def _attach(self, command: Attach) -> WorkerEvent:
        """Attach a job; if memory runs out, nothing of it is left."""
        started = self._clock()
        name = command.job.name
        event, detail = attempt(lambda: self._try_attach(command, started))
        if event is not None:
            return event
        self._jobs.pop(name, None)
        self.adapters.detach(name)
        self._release()
        return OutOfMemory(detail or "", self._clock() - started)

    def _try_attach(self, command: Attach, started: float) -> WorkerEvent:
        job = command.job
        self._jobs[job.name] = job
        data = self._data.of(job.data).digest
        try:
            found = self.adapters.attach(job, data, command.resume_from, command.warm_from)
        except CheckpointError as error:
            return JobFailed(job.name, 0, str(error), self._clock() - started)
        resumes = f"this checkpoint is skipped; the job resumes from step {found.cursor.step}"
        notices = tuple(f"{trouble}: {resumes}" for trouble in found.troubles)
        self._recorder.lap("attach", ((job.name, found.cursor.step),))
        return Attached(job.name, found.cursor, found.directory, notices, self._clock() - started)

    def _data_of(self, job: str) -> TokenisedData:
        return self._data.of(self._jobs[job].data)

    def _split_of(self, segment: Segment) -> Split:
        data = self._data_of(segment.job)
        return data.train if segment.split == "train" else data.validation

    def _static(self) -> Iterator[Tensor]:
        """Static tensors: weights and adapters."""
        yield from self._model.tensors()
        yield from self.adapters.tensors()

    # ---- training -------------------------------------------------------------------------------------

    def _run_schedule(self, items: Sequence[Microbatch | StepJob]) -> list[WorkerEvent]:
        """Round by round; if memory runs out, here or in a peer, the rest is left and so are gradients."""
        events: list[WorkerEvent] = []
        for each in rounds(items):
            for job in self._failed.intersection(step.job for step in each.steps):
                self.bank.block(job).state[GRADIENTS].fill_(math.nan)  # so that no peer steps it either
            new, short = self._run_round(each)
            events += new
            stepped = (event for event in new if isinstance(event, StepDone))
            self._failed |= {event.job for event in stepped if not math.isfinite(event.grad_norm)}
            if short:
                self.bank.zero_gradients()
                break
        return events

    def _run_round(self, turn: Round) -> tuple[list[WorkerEvent], bool]:
        """A round with its steps, and whether memory ran out, here or in a peer.

        The host waits for its device once, for losses and norms; the peers' gradients come in meanwhile.
        """
        started, work = self._clock(), _work(turn.steps)
        asked, own = self._ask_round(turn)
        short, waited = self._finish(own is not None)
        passed, ended = self._clock() - started, self._recorder.clock()
        stepped = self._ask_steps(turn.steps) if turn.steps and not short else None
        ends = [each.end for each in (*asked, stepped) if each is not None]
        if ends:
            ends[-1].wait()
        parts, after = self._parts(asked, "microbatch"), []
        if stepped is not None:
            after.append(Part("step", work, stepped.start.seconds_to(stepped.end)))
        if self._peers is not None:
            busy = asked[0].start.seconds_to(asked[-1].end) if asked else 0.0
            waited = min(waited, max(0.0, passed - busy))  # of the rest the device was still busy
            self._recorder.share(parts, end=ended - waited)
            self._recorder.share([Part("exchange", work, waited)], end=ended)
            parts = []
        self._recorder.share([*parts, *after])
        events = [event for each in asked for event in each.events(training=True)]
        events += [] if own is None else [own]
        if short and self._peers is not None:
            events.append(OutOfMemory("", waited))
        if stepped is not None:
            seconds = waited + stepped.start.seconds_to(stepped.end)
            events += self._stepped(work, stepped.steps.results(), seconds)
        return events, short

    def _ask_round(self, turn: Round) -> tuple[list[Asked], OutOfMemory | None]:
        """All microbatches, or those before the one that memory runs out for. A job's gradients are added to
        the peers' as soon as they are complete, for all jobs at last: so peers expect it."""
        ready = turn.complete()
        observed = self._sampler.wanted(self._jobs, [each.tokens for each in turn.microbatches])
        asked: list[Asked] = []
        short: OutOfMemory | None = None
        self._add_up(turn, ready[0])
        for microbatch, jobs in zip(turn.microbatches, ready[1:], strict=True):
            one = None if short else self._ask(microbatch, training=True, observed=observed)
            if isinstance(one, OutOfMemory):
                short = one
            elif one is not None:
                asked.append(one)
            if short is None:
                self._spoil(asked, jobs)
            self._add_up(turn, jobs)
        return asked, short

    def _spoil(self, asked: Sequence[Asked], jobs: Collection[str]) -> None:
        """Make the gradients of those of these jobs whose loss is not finite so too, without looking: neither
        they nor their peers step."""
        segments = [segment.job for each in asked for segment in each.microbatch.segments]
        found = [job for job in dict.fromkeys(segments) if job in jobs and self.bank.block(job).state.numel()]
        if not found:
            return
        places = {job: place for place, job in enumerate(found)}
        rows = table([places.get(job, len(found)) for job in segments], self._model.device)
        losses = torch.cat([each.own_sums for each in asked])
        nothing = losses.new_zeros(len(found) + 1).index_add_(0, rows, losses * 0.0)  # or not a number
        gradients = [self.bank.block(job).state[GRADIENTS][:1] for job in found]
        torch._foreach_add_(gradients, list(nothing.float()[:-1].unsqueeze(1)))

    def _finish(self, short: bool) -> tuple[bool, float]:
        """Wait for the sums of the peers; whether memory ran out somewhere, and the seconds."""
        if self._peers is None:
            return short, 0.0
        started = self._clock()
        short = self._peers.finish(short=short)
        return short, self._clock() - started

    def _add_up(self, turn: Round, jobs: Sequence[str]) -> None:
        steps = dict(_work(turn.steps))
        if self._peers is not None:
            for job in jobs:
                self._peers.add_up(self.bank.block(job).state[GRADIENTS], job, steps[job])

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> list[WorkerEvent]:
        """The events of microbatches that train nothing; where memory runs out, the last says so."""
        asked: list[Asked] = []
        short: OutOfMemory | None = None
        for microbatch in microbatches:
            one = self._ask(microbatch, training=False, observed=False)
            if isinstance(one, OutOfMemory):
                short = one
                break
            asked += [] if one is None else [one]
        if asked:
            asked[-1].end.wait()  # once for all of them
        events = [event for each in asked for event in each.events(training=False)]
        self._recorder.share(self._parts(asked, "evaluation"))
        return [*events, *(() if short is None else (short,))]

    def _ask(self, microbatch: Microbatch, *, training: bool, observed: bool) -> Asked | OutOfMemory | None:
        """One microbatch; None if there is nothing in it for this process but to help others.

        Raises:
            ShortStageError: memory ran out, and others need what this process has of the base model.
        """
        if not microbatch.segments and self._model.shards is not None:
            self._model.shards.idle(training=training)
            return None
        started = self._clock()
        new, detail = attempt(partial(self._run, microbatch, training=training, observed=observed))
        if new is None:
            self._refuse_if_shared(detail)
            self._release()
            return OutOfMemory(detail or "", self._clock() - started)
        return new

    def _parts(self, asked: Sequence[Asked], kind: SpanKind) -> list[Part]:
        return [
            Part(kind, work_of(each.microbatch), each.start.seconds_to(each.end), each.microbatch.tokens)
            for each in asked
        ]

    def _release(self) -> None:
        """Make room."""
        if self._recorded is not None:
            self._recorded.forget()
        release_unused(self._model.device)

    def _refuse_if_shared(self, detail: str | None) -> None:
        if self._model.shards is not None:
            raise ShortStageError(
                f"a process ran out of memory: {detail}",
                "The others wait for its part of the base model (cluster.shard_base).",
                "Lower engine.capacity or planner.max_jobs, or set engine.checkpointing.",
            )

    def _run(self, microbatch: Microbatch, *, training: bool, observed: bool) -> Asked:
        """Ask for forward and, when training, backward; gradients are summed in the bank."""
        device = self._model.device
        start = mark(device, self._clock)
        gathered = gather(microbatch, self._split_of)
        found = None if self._recorded is None or not training else self._recorded.run(gathered)
        with self._observer.watch(observed and found is None) as peaks:
            if found is None:
                again = training and self._checkpointing
                loaded = gathered.loaded(self.bank, training=training, checkpointing=again)
                found = loaded, self._compute(loaded, peaks, training=training)
        loaded, nll = found
        own_sums = loaded.sums(nll)
        sums = on_its_way(own_sums)
        observations = (ObservedPeak(peaks.static, tuple(peaks.phases.items())),) if peaks.phases else ()
        end = mark(device, self._clock)
        return Asked(microbatch, loaded.counts, sums, own_sums, observations, start, end)

    def _compute(self, loaded: LoadedMicrobatch, peaks: PhasePeaks, *, training: bool) -> Tensor:
        """Forward and, when training, backward; the loss of each labelled row."""
        with torch.set_grad_enabled(training):
            loss, nll = self._forward(loaded, peaks)
        if training and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        peaks.end("backward")
        return nll.detach()

    def _forward(self, loaded: LoadedMicrobatch, peaks: PhasePeaks) -> tuple[Tensor, Tensor]:
        """Weighted loss of the microbatch, and the loss of each labelled row; the head sees only labelled
        rows."""
        hidden = self._model.hidden(loaded.context)
        peaks.end("forward")
        found = self._model.loss(hidden, loaded.rows, loaded.targets, loaded.weights)
        peaks.end("loss")
        return found

    def _ask_steps(self, steps: Sequence[StepJob]) -> AskedStep:
        """One call of the optimiser for all these jobs."""
        start = mark(self._model.device, self._clock)
        each = [self._adapter_step(step) for step in steps]
        asked = ask_steps(self.bank, each, self._complete, backend=self._backend)
        if isinstance(asked.norms, Tensor):
            asked = AskedSteps(asked.adapters, on_its_way(asked.norms))
        return AskedStep(asked, start, mark(self._model.device, self._clock))

    def _stepped(
        self, steps: Sequence[tuple[str, int]], results: Sequence[StepResult], seconds: float
    ) -> list[StepDone]:
        """What came of one call of the optimiser. Its time is shared out by the size of what each job has
        here; evenly if none has anything, as on a stage without its layers."""
        sizes = [self.bank.block(job).state.numel() for job, _ in steps]
        parts = sizes if any(sizes) else [1] * len(steps)
        return [
            StepDone(job, step, result.grad_norm, seconds * part / sum(parts))
            for (job, step), result, part in zip(steps, results, parts, strict=True)
        ]

    def _complete(self, stepped: Sequence[Block]) -> None:
        """Take the weights that peers have stepped."""
        parts = [(block.state[WEIGHTS], block.parts) for block in stepped if len(block.parts) > 1]
        if parts and self._peers is not None:
            self._peers.fill(parts)

    def gather_moments(self, job: str) -> None:
        """Gather all moments of a job, with all peers, if each has those of a part."""
        block = self.bank.block(job)
        block.spread()
        if block.whole is not None and self._peers is not None:
            self._peers.fill([(row, block.parts) for row in block.whole])

    def _adapter_step(self, step: StepJob) -> AdapterStep:
        train = self._jobs[step.job].train
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

    def _generate(self, command: Generate) -> list[WorkerEvent]:
        """Generate the answers of all jobs together; the time is divided by tokens."""
        started = self._clock()
        splits = {each.job: self._data_of(each.job).validation for each in command.jobs}
        with self.adapters.at_best([each.job for each in command.jobs if command.best]):
            answers = answer(command, splits, self._model, self.bank, capacity=self._capacity)
        seconds = self._clock() - started
        whole = sum(each.tokens for each in answers.values())
        self._recorder.lap("generation", tuple((each.job, 0) for each in command.jobs), tokens=whole)
        events: list[WorkerEvent] = []
        for each in command.jobs:
            own = answers[each.job]
            spent = seconds * (own.tokens / whole if whole else 1 / len(answers))
            if own.trouble:
                events.append(JobFailed(each.job, 0, own.trouble, spent))
            else:
                events.append(Generated(each.job, each.samples, own.texts, spent))
        return events


def _work(steps: Sequence[StepJob]) -> tuple[tuple[str, int], ...]:
    return tuple((each.job, each.step) for each in steps)


@dataclass(frozen=True, slots=True)
class Answers:
    """One job's answers, in the order of the requested samples, and the tokens processed for them.

    ``trouble`` says why there are none.
    """

    texts: tuple[str, ...]
    tokens: int
    trouble: str = ""


def answer(
    command: Generate, splits: Mapping[str, Split], model: BaseModel, bank: Bank, *, capacity: int
) -> dict[str, Answers]:
    """Generate answers by job. If memory runs out, fewer prompts are processed at a time, down to one. If a
    single prompt of a job, or the pool for it, is too much, this job has no answers; the others do.
    """
    sampling = Sampling(command.max_new_tokens)
    requests = [
        Request(splits[each.job].prompt(sample), each.job, sampling)
        for each in command.jobs
        for sample in each.samples
    ]
    adapters = BankAdapters(bank)
    found: dict[int, Completion] = {}
    troubles: dict[str | None, str] = {}
    left, most, pool = list(range(len(requests))), len(requests), capacity
    while left:
        needed = {index: needed_tokens(requests[index], model.max_length) for index in left}
        longest = max(left, key=needed.__getitem__)
        size, short = max(pool, needed[longest]), [longest]
        engine, detail = attempt(
            partial(Engine, model, adapters, pool_tokens=size, most=most, most_prompt_tokens=capacity)
        )
        if engine is not None:
            names = {engine.add(requests[index]): index for index in left}
            _, detail = attempt(partial(_finish, engine, names, found))
            short = [names[number] for number in engine.running] or short
            left = [index for index in left if index not in found]
        if not left:
            break
        made = engine is not None
        del engine
        release_unused(model.device)
        if not made and pool > 0:
            pool = 0  # then one for the longest request alone
            continue
        most = len(short) // 2
        if most == 0:
            most, one = 1, requests[short[0]]
            troubles[one.adapter] = f"out of memory for a single prompt of {len(one.tokens)} tokens: {detail}"
            left = [index for index in left if requests[index].adapter != one.adapter]
    return _by_job(command, requests, found, troubles)


def _finish(engine: Engine, names: Mapping[int, int], found: dict[int, Completion]) -> bool:
    """Run all requests to their ends; those that have ended are in ``found`` even if memory runs out."""
    for update in engine.run():
        if update.ended is not None:
            found[names[update.request]] = update.ended
    return True


def _by_job(
    command: Generate,
    requests: Sequence[Request],
    found: Mapping[int, Completion],
    troubles: Mapping[str | None, str],
) -> dict[str, Answers]:
    made: dict[str, Answers] = {}
    start = 0
    for each in command.jobs:
        own = range(start, start + len(each.samples))
        start = own.stop
        pairs = [(requests[index], found[index]) for index in own if index in found]
        tokens = sum(len(request.tokens) + len(completion.tokens) for request, completion in pairs)
        trouble = troubles.get(each.job, "")
        if any(completion.reason == "not finite" for _, completion in pairs):
            trouble = trouble or "a logit of its answers is not finite"
        texts = () if trouble else tuple(completion.text for _, completion in pairs)
        made[each.job] = Answers(texts, tokens, trouble)
    return made
