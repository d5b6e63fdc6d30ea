"""The weights of a job's best evaluation, which ``train.keep=best`` exports in place of the last ones.

The coordinator says when an evaluation is the best so far, the worker holds a copy beside the bank. What is
trained is not touched, so losses and states are those of ``train.keep=last``; a state holds the copy too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plait.adapters.variants import named_tensors
from plait.core.errors import CheckpointError
from plait_kernels import Bank

PREFIX = "best."  # of the copies' names in a state


class BestWeights:
    """Copies of adapters' weights, in main memory.

    Args:
        bank: holds the weights that are trained.
    """

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._kept: dict[str, dict[str, Tensor]] = {}

    def keep(self, job: str) -> None:
        """Take a copy of a job's weights as they are now."""
        self._kept[job] = {name: tensor.to("cpu", copy=True) for name, tensor in self._weights(job).items()}

    def drop(self, job: str) -> None:
        """Forget a job's copy, if there is one."""
        self._kept.pop(job, None)

    def state(self, job: str) -> dict[str, Tensor]:
        """What a job's saved state holds of it: nothing where there is no copy."""
        return {PREFIX + name: tensor for name, tensor in self._kept.get(job, {}).items()}

    def restore(self, job: str, found: Mapping[str, Tensor], *, expected: bool) -> dict[str, Tensor]:
        """Take a job's copy from the tensors of a state; the others are given back.

        Raises:
            CheckpointError: a copy is ``expected``, and is not there or of other shapes; or is not, and is.
        """
        copies = {name.removeprefix(PREFIX): found[name] for name in found if name.startswith(PREFIX)}
        shapes = {name: tensor.shape for name, tensor in self._weights(job).items()}
        if {name: tensor.shape for name, tensor in copies.items()} != (shapes if expected else {}):
            raise CheckpointError(f"the saved state of {job}: its best weights are not those of the adapter")
        if copies:
            self._kept[job] = copies
        return {name: tensor for name, tensor in found.items() if not name.startswith(PREFIX)}

    @contextmanager
    def in_place(self, jobs: Sequence[str]) -> Iterator[None]:
        """Put the copies that these jobs have into the bank, and what was trained back afterwards."""
        kept = [job for job in jobs if job in self._kept]
        trained = {job: {name: each.clone() for name, each in self._weights(job).items()} for job in kept}
        try:
            self._fill({job: self._kept[job] for job in kept})
            yield
        finally:
            self._fill(trained)

    def _fill(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        with torch.no_grad():
            for job, tensors in weights.items():
                for name, tensor in self._weights(job).items():
                    tensor.copy_(tensors[name])
        self._bank.refresh(list(weights))

    def _weights(self, job: str) -> dict[str, Tensor]:
        return named_tensors(self._bank, job)
