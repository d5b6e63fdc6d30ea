"""The adapters of one worker: attaching, saving, keeping the best weights, exporting.

A seam: each kind of worker runs microbatches in its own way (:mod:`plait.engine.local_worker` on one device);
this module handles an adapter's tensors before and after, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from plait.adapters.peft_folder import export_adapter
from plait.adapters.slices import AdapterSlices
from plait.adapters.variants import PREFIX, attach, checkpoint_tensors, named_tensors
from plait.core.errors import CheckpointError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.messages import Cursor
from plait.engine.checkpoint_files import Found, Origin, newest_checkpoint, warm_start, write_checkpoint
from plait.models.base import BaseModel
from plait.models.targets import resolve_targets
from plait_kernels import Bank

BEST = "best."  # prefix of the best weights' names in a checkpoint
# Float16 has no numbers below 6e-8: without this factor, gradients of large batches are rounded away.
HALF_SCALE = 256.0


class AdapterStore:
    """Weights, gradients and moments of jobs in a bank, and copies of the weights of their best evaluations.

    ``train.keep=best`` exports such a copy in place of the last weights. The coordinator says when an
    evaluation is the best so far; the copy is in main memory. Training is not affected, so losses and
    checkpoints are those of ``train.keep=last``; a checkpoint also contains the copy.

    Args:
        layers: whose adapters it has; None: those that are in ``model``. Where these are not all, the rest
            of an adapter is in the stores of other stages.
    """

    def __init__(self, model: BaseModel, part: tuple[int, int] = (0, 1), layers: range | None = None) -> None:
        here = model.own if layers is None else layers
        self.bank = Bank(model.sites_of(here), device=model.device, compute_dtype=model.dtype, part=part)
        self.bank.loss_scale = HALF_SCALE if model.dtype == torch.float16 else 1.0
        self._partial = len(here) < model.layer_count
        self._slices = AdapterSlices(model.slices, model.slicing)
        self._model = model
        self._specs: dict[str, AdapterSpec] = {}
        self._origins: dict[str, Origin] = {}
        self._best: dict[str, dict[str, Tensor]] = {}

    def tensors(self) -> Iterator[Tensor]:
        """All tensors on the device."""
        for job in self._specs:
            yield from self.bank.block(job).tensors()

    def attach(
        self, job: JobSpec, data: str, resume_from: Path | None = None, warm_from: Path | None = None
    ) -> Found:
        """Attach a job, from its newest complete checkpoint or else fresh or with the weights of another job.

        Raises:
            CheckpointError: the checkpoint does not belong to this job, which is attached nevertheless.
        """
        self._specs[job.name] = job.adapter
        self._origins[job.name] = origin = Origin.of(job, model=self._model.identity.digest, data=data)
        self._place(job, self._model.frozen_weight)
        self.bank.block(job.name).spread()  # until all have their own part
        found = newest_checkpoint(resume_from, origin)
        if found.directory is not None:
            self._restore(job.name, found)
        elif warm_from is not None:
            warm_start(warm_from, named_tensors(self.bank, job.name), self._slices)
        self.bank.refresh([job.name])
        return found

    def outline(self, job: JobSpec) -> None:
        """Make room for a job's tensors, which come from another stage."""
        self._specs[job.name] = job.adapter
        sizes = {linear.name: (linear.out_features, linear.in_features) for linear in self._model.linears}
        self._place(job, lambda site: torch.zeros(sizes[site]))

    def _place(self, job: JobSpec, weight_of: Callable[[str], Tensor]) -> None:
        """Add a job's adapter to the bank, at those of its sites that are here."""
        targets = resolve_targets(job.adapter.target_modules, self._model.linears)
        attach(
            self.bank,
            job.name,
            job.adapter,
            [site for site in targets if site in self.bank.site_index],
            seed=job.train.seed,
            weight_of=weight_of,
            partly=self._partial,
            slices=self._slices,
        )

    def detach(self, job: str) -> None:
        """Detach a job, even one that was only partly attached."""
        self._specs.pop(job, None)
        self._origins.pop(job, None)
        self._best.pop(job, None)
        if job in self.bank.blocks:
            self.bank.detach(job)

    def save(self, job: str, directory: Path, cursor: Cursor, others: Sequence[AdapterStore] = ()) -> None:
        """Write a job's checkpoint, with the parts of it that ``others`` have.

        Raises:
            StorageError: it cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for store in (self, *others):
            tensors |= checkpoint_tensors(store.bank, job)
            tensors |= {BEST + name: tensor for name, tensor in store._best.get(job, {}).items()}
        whole = {name: self._slices.joined(name, each) for name, each in tensors.items()}
        if self._slices.writes:
            write_checkpoint(directory, self._origins[job], cursor, whole)

    def export(
        self, job: str, directory: Path, kept_step: int | None, others: Sequence[AdapterStore] = ()
    ) -> None:
        """Write a job's adapter as a PEFT folder: the best weights, of step ``kept_step``, if these are kept;
        with the parts of it that ``others`` have.

        Raises:
            StorageError: it cannot be written.
        """
        with ExitStack() as stack:
            weights: dict[str, tuple[Tensor, ...]] = {}
            for store in (self, *others):
                stack.enter_context(store.at_best([job]))
                weights |= self._whole_weights(store.bank, job)
            if self._slices.writes:
                export_adapter(
                    directory,
                    self._specs[job],
                    weights,
                    base=self._model.identity.name,
                    linears=self._model.linears,
                    revision=self._model.identity.revision,
                    kept_step=kept_step,
                    quantise=self._model.identity.quantise,
                )

    def _whole_weights(self, bank: Bank, job: str) -> dict[str, tuple[Tensor, ...]]:
        """The tensors of each site, joined with those of the processes that have the rest of them."""
        specs = bank.block(job).layout.specs
        return {
            site: tuple(
                self._slices.joined(f"{PREFIX}{site}.{spec.name}", tensor)
                for spec, tensor in zip(specs[site], own, strict=True)
            )
            for site, own in bank.weights(job).items()
        }

    def keep(self, job: str) -> None:
        """Copy a job's present weights as its best."""
        weights = named_tensors(self.bank, job)
        self._best[job] = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}

    def has_best(self, job: str) -> bool:
        """Whether the weights of a job's best evaluation are kept."""
        return job in self._best

    def whole(self, job: str, *, best: bool) -> list[Tensor]:
        """All tensors of a job, always in the same order: trained ones, frozen ones and, with ``best``, its
        best weights, which are the present ones if none are kept yet."""
        block = self.bank.block(job)
        if best and job not in self._best:
            self.keep(job)
        kept = self._best[job] if best else {}
        moments = [] if block.whole is None else [block.whole]
        return [block.state, *moments, block.frozen, *(kept[name] for name in sorted(kept))]

    @contextmanager
    def at_best(self, jobs: Sequence[str]) -> Iterator[None]:
        """Put these jobs' best weights into the bank within the context, and restore the trained ones
        afterwards."""
        kept = [job for job in jobs if job in self._best]
        trained = {job: _copied(named_tensors(self.bank, job)) for job in kept}
        try:
            self._fill({job: self._best[job] for job in kept})
            yield
        finally:
            self._fill(trained)

    def _restore(self, job: str, found: Found) -> None:
        """Fill a job's tensors from its checkpoint.

        Raises:
            CheckpointError: the tensors are not those of this adapter, or of its best weights.
        """
        trained = checkpoint_tensors(self.bank, job)
        own = {
            name: self._slices.own(name, each)
            for name, each in found.tensors.items()
            if not self._elsewhere(name, trained)
        }
        names = [name for name in own if name.startswith(BEST)]
        best = {name.removeprefix(BEST): own[name] for name in names}
        expected = _shapes(named_tensors(self.bank, job)) if found.cursor.best_step is not None else {}
        if _shapes(best) != expected:
            raise CheckpointError(f"{found.directory}: its best weights are not those of the adapter")
        if found.cursor.best_step is not None:
            self._best[job] = best  # empty on a stage without sites of the job; all stages have one, or none
        saved = {name: each for name, each in own.items() if name not in names}
        if _shapes(saved) != _shapes(trained):
            raise CheckpointError(f"{found.directory}: its tensors are not those of the adapter")
        for name, tensor in trained.items():
            tensor.copy_(saved[name])

    def _elsewhere(self, name: str, own: Mapping[str, Tensor]) -> bool:
        """Whether another store has this tensor of a checkpoint."""
        return self._partial and name.removeprefix(BEST) not in own

    def _fill(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        with torch.no_grad():
            for job, tensors in weights.items():
                for name, tensor in named_tensors(self.bank, job).items():
                    tensor.copy_(tensors[name])
        self.bank.refresh(list(weights))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
