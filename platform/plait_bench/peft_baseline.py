"""The baseline of the comparisons: transformers + PEFT, one adapter after another, as it is usually run.

Padded batches, the model's own loss over all logits normalised by the labelled tokens of the global batch,
adapters in float32 over dense weights in the model's dtype, gradient accumulation, clipping, fused AdamW and
a learning-rate schedule. Samples, their order, initial weights and rates are the ones that Plait uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from plait.core.jobs import JobSpec
from plait.core.samples import Sample, Split
from plait.core.settings import RunSettings
from plait.engine.steps import DataOrder, learning_rate, training_batch
from plait.models.load import load_tokeniser, transformers_model
from plait.models.quiet import quiet
from plait.utils.paths import cache_dir

IGNORED = -100  # the label that transformers leaves out of its loss

InitialWeights = Mapping[str, tuple[Tensor, Tensor]]  # site name: A (rank, in), B (out, rank)


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """One adapter's training.

    Attributes:
        losses: of each optimiser step: mean over the labelled tokens of its global batch.
        tokens: real tokens that went through.
        positions: tokens and padding.
        seconds: of the training loop, from the first batch to the last optimiser step.
    """

    job: str
    losses: tuple[float, ...]
    tokens: int
    positions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Samples of one accumulation turn, padded on the right to the longest: (samples, longest)."""

    token_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], pad: int) -> PaddedBatch:
        """Pad ``samples`` with the token ``pad``, unlabelled and unattended."""
        shape = len(samples), max(len(sample.tokens) for sample in samples)
        token_ids = torch.full(shape, pad)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED)
        for row, sample in enumerate(samples):
            tokens = torch.from_numpy(sample.tokens).long()
            chosen = torch.from_numpy(sample.labels)
            token_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
            labels[row, : len(tokens)] = torch.where(chosen, tokens, IGNORED)
        return cls(token_ids, attention_mask, labels)


class PeftBaseline:
    """Trains one adapter after another on one transformers model.

    Args:
        model: dense weights, as ``plait.models.load.transformers_model`` gives it.
        pad: token to pad with.
    """

    def __init__(self, model: PreTrainedModel, pad: int) -> None:
        self._model = model
        self._pad = pad

    @classmethod
    def load(cls, settings: RunSettings) -> PeftBaseline:
        """The run's model, loaded."""
        tokeniser = load_tokeniser(settings.model, cache=cache_dir())
        pad = tokeniser.eos_token_id if tokeniser.pad_token_id is None else tokeniser.pad_token_id
        return cls(transformers_model(settings.model, cache=cache_dir()), pad)

    def describe(self) -> str:
        """What this side computes, in a sentence."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        attention = self._model.config._attn_implementation
        return (
            f"PEFT's side, as PEFT is commonly used: dense weights in {dtype}, adapters in float32, "
            f"{attention} attention over padded batches, logits and loss at every position, fused AdamW. "
            "Plait packs without padding and computes logits at labelled tokens only."
        )

    def warm_up(self, job: JobSpec, split: Split) -> None:
        """One forward and backward pass that changes nothing, so that no first call is timed."""
        with _Adapter(self._model, job, None) as adapter:
            batches, labelled = self._batches(job, split, 1)
            self._turn(adapter.model, next(batches), labelled)

    def train(self, job: JobSpec, split: Split, initial: InitialWeights) -> BaselineRun:
        """Train the adapter of ``job`` to the end of its budget; making and removing it is not timed."""
        with self.training(job, split, initial) as training:
            started = perf_counter()
            losses = tuple(training.step() for _ in range(training.steps))
            seconds = perf_counter() - started
        return BaselineRun(job.name, losses, training.tokens, training.positions, seconds)

    @contextmanager
    def training(self, job: JobSpec, split: Split, initial: InitialWeights | None) -> Iterator[Training]:
        """The adapter of ``job`` on the model, to be trained step by step; removed afterwards.

        Args:
            initial: its weights; None: PEFT's own.
        """
        with _Adapter(self._model, job, initial) as adapter:
            yield Training(self, adapter, job, split)

    @torch.no_grad()
    def evaluate(self, model: PeftModel, split: Split, batch_size: int) -> float:
        """Mean loss over the labelled tokens of ``split``, without dropout, in padded batches."""
        labelled = int(split.labelled.sum())
        model.eval()
        total = 0.0
        for start in range(0, len(split), batch_size):
            samples = [split[index] for index in range(start, min(start + batch_size, len(split)))]
            total += float(self._loss(model, PaddedBatch.of(samples, self._pad), labelled))
        model.train()
        return total

    def _batches(self, job: JobSpec, split: Split, step: int) -> tuple[Iterator[PaddedBatch], int]:
        """The turns of one optimiser step, and the labelled tokens of all of them."""
        order = DataOrder.over(job.train, split)
        samples = [split[index] for index in training_batch(job, order, split, step).samples]
        labelled = sum(int(sample.labels.sum()) for sample in samples)
        size = job.train.batch_size
        turns = (samples[start : start + size] for start in range(0, len(samples), size))
        return (PaddedBatch.of(turn, self._pad) for turn in turns), labelled

    def _turn(self, model: PeftModel, batch: PaddedBatch, labelled: int) -> float:
        """Forward and backward of one turn; its share of the global batch's loss."""
        loss = self._loss(model, batch, labelled)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _loss(self, model: PeftModel, batch: PaddedBatch, labelled: int) -> Tensor:
        out = model(
            input_ids=batch.token_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            num_items_in_batch=labelled,
            use_cache=False,
        )
        return cast(Tensor, out.loss)


class Training:
    """One adapter's training so far.

    Attributes:
        steps: optimiser steps of the budget.
        done: of them, taken.
        tokens: real tokens that went through.
        positions: tokens and padding.
    """

    def __init__(self, baseline: PeftBaseline, adapter: _Adapter, job: JobSpec, split: Split) -> None:
        self._baseline = baseline
        self._adapter = adapter
        self._job = job
        self._split = split
        self.steps = DataOrder.over(job.train, split).steps
        self.done = self.tokens = self.positions = 0

    def step(self) -> float:
        """The next optimiser step; mean loss over the labelled tokens of its global batch."""
        self.done += 1
        batches, labelled = self._baseline._batches(self._job, self._split, self.done)
        total = 0.0
        for batch in batches:
            total += self._baseline._turn(self._adapter.model, batch, labelled)
            self.tokens += int(batch.attention_mask.sum())
            self.positions += batch.attention_mask.numel()
        self._adapter.step(learning_rate(self._job.train, self.done, self.steps))
        return total

    def evaluate(self, split: Split, batch_size: int) -> float:
        """Mean loss over the labelled tokens of another split."""
        return self._baseline.evaluate(self._adapter.model, split, batch_size)


class _Adapter:
    """A PEFT adapter on a model with its optimiser; removed when the block ends."""

    def __init__(self, model: PreTrainedModel, job: JobSpec, initial: InitialWeights | None) -> None:
        self._train = job.train
        spec = job.adapter
        alpha = 2 * spec.rank if spec.alpha is None else spec.alpha
        targets = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=cast(int, alpha),  # annotated so, but any number will do
            lora_dropout=spec.dropout,
            use_rslora=spec.rslora,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        with quiet():  # PEFT asks transformers for an attribute that is going to be renamed
            self.model = cast(PeftModel, get_peft_model(model, config))
        self.model.train()
        parts = lora_weights(self.model)
        if initial is not None:
            _copy(initial, parts)
        rates = (1.0, job.train.lora_plus_ratio)
        self._optimiser = torch.optim.AdamW(
            [
                {"params": [pair[side] for pair in parts.values()], "ratio": rates[side], "lr": job.train.lr}
                for side in (0, 1)
            ],
            betas=job.train.betas,
            eps=job.train.eps,
            weight_decay=job.train.weight_decay,
            fused=True,
        )
        self._parameters = [tensor for pair in parts.values() for tensor in pair]

    def step(self, rate: float) -> None:
        if self._train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._train.clip_norm)
        for group in self._optimiser.param_groups:
            group["lr"] = rate * group["ratio"]
        self._optimiser.step()
        self._optimiser.zero_grad()

    def __enter__(self) -> _Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.unload()


def lora_weights(model: PeftModel) -> dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """A and B of each site of a PEFT model, under the base model's module names."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            found[name] = (module.lora_A["default"].weight, module.lora_B["default"].weight)
    return found


@torch.no_grad()
def _copy(
    initial: InitialWeights, parts: Mapping[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]
) -> None:
    if initial.keys() != parts.keys():
        odd = sorted(initial.keys() ^ parts.keys())
        raise ValueError(f"Plait and PEFT disagree about the target modules: {odd[:4]}")
    for name, (a, b) in initial.items():
        parts[name][0].copy_(a)
        parts[name][1].copy_(b)
