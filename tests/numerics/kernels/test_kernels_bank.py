"""The bank: adapters come and go without moving the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from plait_kernels import AdapterStep, Bank, KernelError, Site, adamw_step

SITES = [Site("q", 0, 32, 16), Site("k", 1, 32, 8), Site("o", 2, 24, 16)]


def _bank(dtype=torch.bfloat16):
    return Bank(SITES, device="cpu", compute_dtype=dtype)


def _attach(bank, name, **changed):
    bank.attach(
        name, **{"rank": 4, "scale": 2.0, "dropout": 0.1, "seed": 3, "sites": ["q", "k", "o"], **changed}
    )


def test_views_have_each_sites_shapes_and_are_disjoint():
    bank = _bank()
    _attach(bank, "one", rank=5, sites=["o", "q"])
    for views in (bank.weights("one"), bank.gradients("one"), bank.moments("one")):
        assert list(views) == ["q", "o"]
    weights = bank.weights("one")
    assert [tuple(w.shape for w in weights[name]) for name in weights] == [
        ((5, 32), (16, 5)),
        ((5, 24), (16, 5)),
    ]
    tensors = [tensor for pair in weights.values() for tensor in pair]
    tensors += [tensor for pair in bank.gradients("one").values() for tensor in pair]
    tensors += [t for pairs in bank.moments("one").values() for pair in pairs for t in pair]
    for index, tensor in enumerate(tensors):
        assert tensor.dtype == torch.float32
        assert not tensor.any()
        tensor.fill_(index + 1)
    for index, tensor in enumerate(tensors):
        assert (tensor == index + 1).all()


def test_attaching_and_detaching_moves_no_other_adapter():
    bank = _bank()
    _attach(bank, "one")
    address = bank.weights("one")["q"][0].data_ptr()
    bank.weights("one")["q"][0].fill_(7.0)
    for index in range(50):
        _attach(bank, f"other{index}", rank=1 + index)
    for index in range(0, 50, 2):
        bank.detach(f"other{index}")
    assert bank.weights("one")["q"][0].data_ptr() == address
    assert (bank.weights("one")["q"][0] == 7.0).all()
    assert len(bank.blocks) == 26


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_follow_on_refresh(dtype):
    bank = _bank(dtype)
    _attach(bank, "one")
    _attach(bank, "two")
    for name in ("one", "two"):
        for a, b in bank.weights(name).values():
            a.fill_(1.5)
            b.fill_(2.5)
    bank.refresh(["one"])
    block, other = bank.block("one"), bank.block("two")
    assert (block.at(SITES[0], -1)[0] == 1.5).all()
    assert (block.at(SITES[0], -1)[1] == 2.5).all()
    assert block.copy.dtype == dtype
    if dtype == torch.bfloat16:
        assert not other.copy.any()


def test_neighbours_of_one_width_form_one_matrix():
    bank = _bank()
    _attach(bank, "one")
    for index, (a, _) in enumerate(bank.weights("one").values()):
        a.fill_(index)
    bank.refresh()
    stacked = bank.block("one").stacked_a(SITES[:2], -1)
    assert stacked.tolist() == [[0.0] * 32] * 4 + [[1.0] * 32] * 4
    assert bank.block("one").stacked_a(SITES[1:], -1) is None  # another width
    assert bank.block("one").stacked_a([SITES[1], SITES[0]], -1) is None  # another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kept_diagonal_of_b_follows_every_refresh(dtype):
    """`grouped` multiplies by it: a stale one trains on the weights of the first step forever."""
    bank = _bank(dtype)
    _attach(bank, "one")
    block = bank.block("one")
    placed = [(SITES[0], slice(8, 24)), (SITES[1], slice(30, 38))]  # with columns of no site between them
    for turn in range(3):
        for site, (_, b) in bank.weights("one").items():
            b.fill_(10.0 * turn + SITES[bank.site_index[site]].module + 1)
        bank.refresh(["one"])
        expected = torch.zeros(30, 8, dtype=dtype)
        expected[:16, :4], expected[22:, 4:] = 10 * turn + 1, 10 * turn + 2
        assert torch.equal(block.diagonal_b(placed), expected)


def test_forward_uses_the_weights_of_the_last_step(make_layer, place):
    device, backend = place
    layer = make_layer(ranks=[6], lengths=[21], absent=False, device=device)
    for step in (1, 2):
        layer.assert_accurate(layer.run(backend))
        adamw_step(layer.bank, [AdapterStep("a0", step, lr_a=0.05, lr_b=0.05)])
    layer.assert_accurate(layer.run(backend))


def test_zero_gradients_of_some_or_all():
    bank = _bank()
    for name in ("one", "two"):
        _attach(bank, name)
        bank.block(name).state.fill_(1.0)
    bank.zero_gradients(["two"])
    assert [bool(bank.block(name).state[1].any()) for name in ("one", "two")] == [True, False]
    bank.zero_gradients()
    assert not bank.block("one").state[1].any()
    assert (bank.block("one").state[[0, 2, 3]] == 1.0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 0}, "rank 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"sites": []}, "one or more"),
        ({"sites": ["x"]}, "the bank has q, k, o"),
        ({"adapter": "taken"}, "attached already"),
    ],
)
def test_a_wrong_adapter_is_refused(changed, message):
    bank = _bank()
    _attach(bank, "taken")
    name = changed.pop("adapter", "new")
    with pytest.raises(KernelError, match=message):
        _attach(bank, name, **changed)
    assert list(bank.blocks) == ["taken"]


def test_wrong_banks_and_names_are_refused():
    with pytest.raises(KernelError, match="twice"):
        Bank([SITES[0], SITES[0]], device="cpu", compute_dtype=torch.float32)
    with pytest.raises(KernelError, match="at least one"):
        Bank([Site("q", 0, 0, 1)], device="cpu", compute_dtype=torch.float32)
    with pytest.raises(KernelError, match="attached are none"):
        _bank().weights("nobody")


def test_the_package_imports_with_torch_alone():
    """Triton is met only if it is asked for; nothing of plait is."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, plait_kernels\n"
        "from plait_kernels.triton_backend import available\n"
        "assert not available(torch.device('cuda'))\n"
        "assert plait_kernels.choose_backend('cpu', dtype=torch.float32).backend == 'grouped'\n"
        "assert 'plait' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
