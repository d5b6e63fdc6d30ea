"""One optimiser call for many adapters against torch's AdamW for each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait_kernels import (
    AdapterStep,
    Bank,
    KernelError,
    Site,
    adamw_step,
    ask_steps,
    joint_adamw,
    triton_backend,
)
from plait_kernels.counting import counted

STEPS = {
    "plain": AdapterStep("plain", 1, 1e-2, 1e-2),
    "clipped": AdapterStep("clipped", 1, 1e-3, 1e-3, clip_norm=0.3),
    "decayed": AdapterStep("decayed", 1, 2e-3, 2e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "plus": AdapterStep("plus", 1, 1e-3, 1.6e-2, clip_norm=1e9),
}


@pytest.fixture(params=["", "triton"], ids=["each", "joint"])
def backend(request):
    """One adapter after the other by torch, and all in one launch."""
    if request.param and not triton_backend.available(torch.device("cpu")):
        pytest.skip("Triton's interpreter is off")
    return request.param


def _bank(dtype=torch.float32):
    bank = Bank([Site("q", 0, 13, 7), Site("v", 1, 13, 5)], device="cpu", compute_dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for rank, name in enumerate(STEPS, start=2):
        bank.attach(name, rank=rank, scale=1.0, dropout=0.0, seed=0, sites=["q", "v"] if rank % 2 else ["v"])
        for pair in bank.weights(name).values():
            for weight in pair:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    bank.refresh()
    return bank


def _set_gradients(bank, seed):
    generator = torch.Generator().manual_seed(seed)
    for name in bank.blocks:
        for pair in bank.gradients(name).values():
            for gradient in pair:
                gradient.copy_(torch.randn(gradient.shape, generator=generator))


def _torch_optimisers(bank):
    made = {}
    for name, step in STEPS.items():
        a, b = ([p[i].clone().requires_grad_() for p in bank.weights(name).values()] for i in (0, 1))
        groups = [{"params": a, "lr": step.lr_a}, {"params": b, "lr": step.lr_b}]
        made[name] = torch.optim.AdamW(groups, betas=step.betas, eps=step.eps, weight_decay=step.weight_decay)
    return made


def _parameters(optimiser):
    return [p for group in optimiser.param_groups for p in group["params"]]


def test_adamw_equals_torch_over_several_steps(backend):
    bank = _bank()
    optimisers = _torch_optimisers(bank)
    for count in range(1, 6):
        _set_gradients(bank, count)
        norms = {}
        for name, optimiser in optimisers.items():
            gradients = bank.gradients(name).values()
            ordered = [pair[i].clone() for i in (0, 1) for pair in gradients]
            for parameter, gradient in zip(_parameters(optimiser), ordered, strict=True):
                parameter.grad = gradient
            limit = STEPS[name].clip_norm
            norms[name] = torch.nn.utils.clip_grad_norm_(
                _parameters(optimiser), float("inf") if limit is None else limit
            )
            optimiser.step()
        results = adamw_step(bank, [replace(step, step=count) for step in STEPS.values()], backend=backend)
        assert [result.adapter for result in results] == list(STEPS)
        for result in results:
            assert result.grad_norm == pytest.approx(float(norms[result.adapter]), rel=1e-5)
            assert not result.skipped
    for name, optimiser in optimisers.items():
        ours = [pair[i] for i in (0, 1) for pair in bank.weights(name).values()]
        for weight, parameter in zip(ours, _parameters(optimiser), strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)
        assert bank.block(name).state[1].count_nonzero() == 0


def test_only_the_named_adapters_move_and_their_copies_follow(backend):
    dtype = torch.float16 if backend else torch.bfloat16  # which the interpreter lacks
    bank = _bank(dtype)
    _set_gradients(bank, 1)
    before = {name: block.state.clone() for name, block in bank.blocks.items()}
    adamw_step(bank, [STEPS["plus"]], backend=backend)
    for name, block in bank.blocks.items():
        assert torch.equal(block.state, before[name]) == (name != "plus")
        assert torch.equal(block.copy, block.state[0].to(dtype))
        assert block.state[1].any() == (name != "plus")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_its_own_step_alone(bad, backend):
    bank, other = _bank(), _bank()
    for each in (bank, other):
        _set_gradients(each, 1)
    bank.gradients("clipped")["q"][1][2, 0] = bad
    before = bank.block("clipped").state[[0, 2, 3]].clone()
    results = adamw_step(bank, list(STEPS.values()), backend=backend)
    adamw_step(other, list(STEPS.values()), backend=backend)
    assert [result.skipped for result in results] == [name == "clipped" for name in STEPS]
    assert torch.equal(bank.block("clipped").state[[0, 2, 3]], before)
    assert bank.block("clipped").state[1].count_nonzero() == 0
    for name in STEPS:
        if name != "clipped":
            assert torch.equal(bank.block(name).state, other.block(name).state)


@pytest.mark.parametrize("given", [False, True])
def test_the_scale_of_losses_changes_no_bit(given, backend):
    plain, scaled = _bank(), _bank()
    scaled.loss_scale = 1024.0
    for count in (1, 2):
        results = []
        for bank in (plain, scaled):
            _set_gradients(bank, count)
            for block in bank.blocks.values():
                block.state[1] *= bank.loss_scale
            norms = [float(block.state[1].norm()) for block in bank.blocks.values()] if given else None
            steps = [replace(step, step=count) for step in STEPS.values()]
            results.append(adamw_step(bank, steps, norms=norms, backend=backend))
        assert results[0] == results[1]
        for name in STEPS:
            assert torch.equal(plain.block(name).state, scaled.block(name).state)


def test_a_gradient_of_zero_is_no_failure(backend):
    bank = _bank()
    (result,) = adamw_step(bank, [STEPS["clipped"]], backend=backend)
    assert (result.grad_norm, result.skipped) == (0.0, False)


@pytest.mark.parametrize(
    "steps",
    [
        [STEPS["plain"], STEPS["plain"]],
        [replace(STEPS["plain"], step=0)],
        [replace(STEPS["plain"], adapter="?")],
    ],
    ids=["twice", "step 0", "unknown"],
)
def test_wrong_steps_are_refused_before_anything_moves(steps):
    bank = _bank()
    _set_gradients(bank, 1)
    before = bank.block("plain").state.clone()
    with pytest.raises(KernelError):
        adamw_step(bank, steps)
    assert torch.equal(bank.block("plain").state, before)


def test_bits_of_a_step_do_not_depend_on_who_else_is_stepped(monkeypatch):
    """Several chunks each; the longest adapter must not change the order of another's sums."""
    if not triton_backend.available(torch.device("cpu")):
        pytest.skip("Triton's interpreter is off")
    monkeypatch.setattr(joint_adamw, "_BLOCK", 16)
    monkeypatch.setattr(joint_adamw, "_WIDTH", 2)
    together, alone = _bank(), _bank()
    for bank in (together, alone):
        _set_gradients(bank, 1)
    results = adamw_step(together, list(STEPS.values()), backend="triton")
    for result in results:
        assert adamw_step(alone, [STEPS[result.adapter]], backend="triton") == [result]
        assert torch.equal(together.block(result.adapter).state, alone.block(result.adapter).state)


def test_a_stage_steps_by_norms_over_all_stages_adapters_that_have_no_layer_there_too(backend):
    """As a pipeline's stage: norms are given, and some adapters' sites are all elsewhere."""

    def stage():
        bank = _bank(torch.float16)
        bank.attach("elsewhere", rank=2, scale=1.0, dropout=0.0, seed=0, sites=[], partly=True)
        _set_gradients(bank, 1)
        return bank

    found, expected = stage(), stage()
    steps = [AdapterStep("elsewhere", 1, 1e-2, 1e-2), *STEPS.values()]
    norms = [1.0] * len(steps)
    results = adamw_step(found, steps, norms=norms, backend=backend)
    assert results == adamw_step(expected, steps, norms=norms)
    for name in STEPS:
        one, other = found.block(name), expected.block(name)
        torch.testing.assert_close(one.state, other.state, rtol=1e-6, atol=1e-8)
        assert not one.state[1].any()
        assert torch.equal(one.copy, one.state[0].half())


def test_a_step_is_three_launches_and_one_wait_whatever_the_adapters():
    bank = Bank([Site("q", 0, 640, 320)], device="meta", compute_dtype=torch.bfloat16)
    for index in range(20):
        bank.attach(str(index), rank=8 + index, scale=1.0, dropout=0.0, seed=0, sites=["q"])
    steps = [AdapterStep(name, 1, 1e-3, 1e-3) for name in bank.blocks]
    with counted() as counts:
        adamw_step(bank, steps, backend="triton")
    assert (counts.launches, counts.waits) == (3, 1)


def test_steps_are_asked_for_without_a_wait():
    bank = Bank([Site("q", 0, 640, 320)], device="meta", compute_dtype=torch.bfloat16)
    for index in range(20):
        bank.attach(str(index), rank=8 + index, scale=1.0, dropout=0.0, seed=0, sites=["q"])
    steps = [AdapterStep(name, 1, 1e-3, 1e-3, clip_norm=0.5) for name in bank.blocks]
    with counted() as counts:
        asked = ask_steps(bank, steps, backend="triton")
        assert (counts.launches, counts.waits) == (3, 0)
        assert len(asked.results()) == 20
    assert counts.waits == 1
