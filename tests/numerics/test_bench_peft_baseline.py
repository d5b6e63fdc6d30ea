"""The PEFT baseline of the benchmark trains as the definition says: against a loop over single samples."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.samples import Sample, Split
from plait.core.settings import ModelSettings
from plait.engine.steps import DataOrder, learning_rate, training_batch
from plait.models.load import transformers_model
from plait_bench.peft_baseline import IGNORED, PaddedBatch, PeftBaseline, lora_weights

SETTINGS = ModelSettings(kind="tiny", dtype="float32")
ADAPTER = AdapterSpec(rank=3, alpha=5.0, target_modules=("q_proj", "v_proj", "down_proj"))
TRAIN = TrainSpec(
    lr=1e-2, lora_plus_ratio=2.0, schedule="linear", warmup_steps=2, weight_decay=0.1, clip_norm=0.05,
    batch_size=2, accumulation=2, steps=5,
)  # fmt: skip
JOB = JobSpec("job", ADAPTER, TRAIN)


def make_split(seed=0, count=9):
    random = np.random.default_rng(seed)
    samples = []
    for length in random.integers(4, 20, count):
        labels = np.arange(length) >= random.integers(1, length)
        samples.append(Sample(random.integers(3, 200, length).astype(np.int32), labels))
    return Split.of(samples)


def make_initial(model):
    generator = torch.Generator().manual_seed(1)
    peft = get_peft_model(
        model, LoraConfig(r=3, target_modules=list(ADAPTER.target_modules), task_type="CAUSAL_LM")
    )
    initial = {
        name: tuple(torch.randn(part.shape, generator=generator) * 0.2 for part in pair)
        for name, pair in lora_weights(peft).items()
    }
    peft.unload()
    return initial


def reference_losses(model, split, initial):
    """Merged weights, one sample at a time, AdamW from its formula."""
    sites = {name: model.get_submodule(name).weight for name in initial}
    frozen = {name: weight.detach().clone() for name, weight in sites.items()}
    weights = [tensor.clone().requires_grad_() for pair in initial.values() for tensor in pair]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    order = DataOrder.of(TRAIN, len(split))
    losses = []
    for step in range(1, order.steps + 1):
        batch = training_batch(JOB, order, split, step)
        merged = {
            f"{name}.weight": frozen[name] + (5.0 / 3) * weights[2 * i + 1] @ weights[2 * i]
            for i, name in enumerate(initial)
        }
        total = torch.zeros(())
        for index in batch.samples:
            sample = split[index]
            tokens = torch.from_numpy(sample.tokens).long()
            logits = torch.func.functional_call(model, merged, (tokens[None],), {"use_cache": False}).logits[
                0
            ]
            nll = -logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            total = total + nll[torch.from_numpy(sample.labels)[1:]].sum() * batch.loss_weight
        losses.append(float(total.detach()))
        gradients = torch.autograd.grad(total, weights)
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
        rate = learning_rate(TRAIN, step, order.steps)
        with torch.no_grad():
            for place, (weight, gradient, (first, second)) in enumerate(
                zip(weights, gradients, moments, strict=True)
            ):
                gradient = gradient * torch.clamp(0.05 / (norm + 1e-6), max=1.0)
                lr = rate * (2.0 if place % 2 else 1.0)
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.999).add_(gradient**2, alpha=0.001)
                weight.mul_(1 - lr * 0.1)
                weight -= lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return losses


def test_losses_of_every_step_are_those_of_single_samples(tmp_path):
    model = transformers_model(SETTINGS, cache=tmp_path).requires_grad_(False)
    split = make_split()
    initial = make_initial(model)
    run = PeftBaseline(model, pad=0).train(JOB, split, initial)
    assert len(run.losses) == 5
    assert run.losses == pytest.approx(reference_losses(model, split, initial), rel=1e-5)
    assert run.losses[0] != pytest.approx(run.losses[-1], rel=1e-3)


def test_the_model_is_left_as_it_was_and_runs_repeat(tmp_path):
    model = transformers_model(SETTINGS, cache=tmp_path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    split, initial, baseline = make_split(), make_initial(model), PeftBaseline(model, pad=0)
    baseline.warm_up(JOB, split)
    runs = [baseline.train(JOB, split, initial) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_real_tokens_leave_padding_out(tmp_path):
    split = make_split()
    run = PeftBaseline(transformers_model(SETTINGS, cache=tmp_path), pad=0).train(
        JOB, split, make_initial(transformers_model(SETTINGS, cache=tmp_path))
    )
    order = DataOrder.of(TRAIN, len(split))
    batches = [training_batch(JOB, order, split, step) for step in range(1, 6)]
    assert run.tokens == sum(sum(batch.lengths) for batch in batches)
    assert run.positions == sum(
        2 * max(batch.lengths[start : start + 2]) for batch in batches for start in (0, 2)
    )


def test_padding_is_neither_attended_nor_labelled():
    samples = [Sample(np.array([5, 6, 7], np.int32), np.array([False, False, True]))]
    samples.append(Sample(np.array([8], np.int32), np.array([False])))
    batch = PaddedBatch.of(samples, pad=2)
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, 2, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.labels.tolist() == [[IGNORED, IGNORED, 7], [IGNORED] * 3]


def test_other_target_modules_than_peft_finds_are_refused(tmp_path):
    model = transformers_model(SETTINGS, cache=tmp_path)
    initial = make_initial(model)
    initial.popitem()
    with pytest.raises(ValueError, match="down_proj"):
        PeftBaseline(model, pad=0).train(JOB, make_split(), initial)
