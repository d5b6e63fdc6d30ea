"""Output head and cross-entropy in chunks against float64 with all logits at once."""

from __future__ import annotations

import pytest
import torch

from plait_kernels import KernelError, labelled_cross_entropy, loss
from plait_kernels.triton_backend import available


def _case(rows=37, hidden=19, vocabulary=53, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(rows, hidden, generator=generator).to(dtype),
        "head_weight": torch.randn(hidden, vocabulary, generator=generator).to(dtype).T,
        "head_bias": torch.randn(vocabulary, generator=generator).to(dtype),
        "targets": torch.randint(0, vocabulary, (rows,), generator=generator),
        "weights": torch.rand(rows, generator=generator),
    }


def _needs_interpreter(backend):
    if backend and not available(torch.device("cpu")):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")


def _truth(case, softcap=None, scale=None):
    hidden = case["hidden"].double().requires_grad_()
    logits = torch.nn.functional.linear(hidden, case["head_weight"].double(), case["head_bias"].double())
    logits = logits * (scale or 1.0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    nll = torch.nn.functional.cross_entropy(logits, case["targets"], reduction="none")
    total = (case["weights"].double() * nll).sum()
    total.backward()
    return total.detach(), nll.detach(), hidden.grad


@pytest.mark.parametrize(("softcap", "scale"), [(None, None), (3.0, None), (None, 0.25), (2.0, 1.5)])
@pytest.mark.parametrize(
    ("chunk", "backend"), [(1, ""), (7, ""), (37, ""), (None, ""), (11, "triton"), (None, "triton")]
)
@pytest.mark.usefixtures("poisoned_memory")
def test_loss_and_gradient_are_exact(softcap, scale, chunk, backend):
    _needs_interpreter(backend)
    case = _case(rows=13 if backend else 37)
    total, nll, grad = _truth(case, softcap, scale)
    hidden = case.pop("hidden").requires_grad_()
    got, rows = labelled_cross_entropy(
        hidden, **case, softcap=softcap, scale=scale, chunk=chunk, backend=backend
    )
    (3 * got).backward()
    torch.testing.assert_close(got.double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.double(), nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), 3 * grad, rtol=1e-4, atol=1e-5)
    assert not rows.requires_grad


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.bfloat16, ""), (torch.float16, ""), (torch.float16, "triton")], ids=str
)
def test_low_precision_stays_within_twice_torchs_error(dtype, backend):
    _needs_interpreter(backend)
    case = _case(rows=200, dtype=dtype)
    _, _, truth = _truth(case)
    plain = case["hidden"].clone().requires_grad_()
    logits = torch.nn.functional.linear(plain, case["head_weight"], case["head_bias"]).float()
    nll = torch.nn.functional.cross_entropy(logits, case["targets"], reduction="none")
    (case["weights"] * nll).sum().backward()
    hidden = case.pop("hidden").requires_grad_()
    labelled_cross_entropy(hidden, **case, chunk=64, backend=backend)[0].backward()
    error, unfused = ((g.double() - truth).square().mean().sqrt() for g in (hidden.grad, plain.grad))
    assert error <= 2 * unfused


def test_all_logits_never_exist(monkeypatch):
    case, seen = _case(), []
    run = loss.linear

    def record(*args):
        seen.append(args[0].shape[0])
        return run(*args)

    monkeypatch.setattr(loss, "linear", record)
    labelled_cross_entropy(case.pop("hidden").requires_grad_(), **case, chunk=10)
    assert seen == [10, 10, 10, 7]


@pytest.mark.parametrize("backend", ["", "triton"])
def test_a_row_that_is_not_finite_hurts_itself_alone(backend):
    _needs_interpreter(backend)
    case = _case()
    hidden = case.pop("hidden")
    expected = hidden.clone().requires_grad_()
    labelled_cross_entropy(expected, **case, chunk=8, backend=backend)[0].backward()
    hidden[5] = float("nan")
    hidden.requires_grad_()
    got, rows = labelled_cross_entropy(hidden, **case, chunk=8, backend=backend)
    got.backward()
    others = torch.arange(37) != 5
    assert rows.isnan().nonzero().flatten().tolist() == [5]
    assert torch.equal(hidden.grad[others], expected.grad[others])


def test_rows_of_one_kind_do_not_depend_on_the_others():
    case = _case()
    _, nll = labelled_cross_entropy(**case, chunk=37)
    part = {
        key: value[10:20] if key in ("hidden", "targets", "weights") else value for key, value in case.items()
    }
    _, own = labelled_cross_entropy(**part, chunk=37)
    torch.testing.assert_close(own, nll[10:20], rtol=1e-6, atol=1e-6)


def test_no_rows_give_no_loss():
    case = _case(rows=0)
    hidden = case.pop("hidden").requires_grad_()
    got, rows = labelled_cross_entropy(hidden, **case)
    got.backward()
    assert float(got.detach()) == 0.0
    assert rows.shape == (0,)
    assert hidden.grad.shape == hidden.shape


def test_one_target_for_each_row():
    case = _case()
    case["targets"] = case["targets"][1:]
    with pytest.raises(KernelError, match="one target"):
        labelled_cross_entropy(**case)


@pytest.mark.parametrize("backend", ["", "triton"])
def test_one_weight_may_stand_for_all_rows(backend):
    _needs_interpreter(backend)
    case = _case(rows=5)
    whole = case | {"weights": torch.full((5,), 0.25)}
    apart = case | {
        "weights": torch.tensor(0.25).expand(5),
        "targets": torch.stack((case["targets"], case["targets"] + 1), dim=1)[:, 0],
    }
    found = labelled_cross_entropy(**apart, backend=backend)
    torch.testing.assert_close(found, labelled_cross_entropy(**whole))
