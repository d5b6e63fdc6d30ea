"""The dropout mask: its bits, its share, its independence of packing, and its compiled form."""

from __future__ import annotations

import ctypes
import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from plait_kernels import RowCounters, compiled, dropout_mask, fast_dropout
from plait_kernels.dropout import drop_by, dropout_threshold, keep_mask, keep_scale, philox
from plait_kernels.synthetic import Shape, problem


def _counters(rows, **given):
    row = torch.arange(rows)
    fields = {"step": row * 0 + 3, "sample": row // 7, "draw": row * 0, "position": row % 7}
    return RowCounters(**{**fields, **given})


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The authors' own vectors for Philox4x32-7."""
    words = philox(key, tuple(torch.tensor(word) for word in counter))
    assert tuple(int(word) for word in words) == expected


def test_features_take_their_halves_in_order():
    counters = RowCounters(*(torch.tensor([value]) for value in (5, 6, 4097, 9)))
    counter = (5, 6, (1 << 20) | 9)
    for feature in (0, 7, 8, 21):
        call = tuple(torch.tensor(word) for word in (*counter, feature // 8))
        word = int(philox((11, 4), call)[feature % 8 // 2])
        half = word >> 16 if feature % 2 else word & 0xFFFF
        for p in ((half - 0.5) / 65536, (half + 1) / 65536):
            if 0 < p < 1:
                kept = dropout_mask(11, 4, counters, 24, p)[0, feature]
                assert bool(kept) == (half >= dropout_threshold(p))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_kept_share_is_right(p):
    rows, features = 400, 512
    mask = dropout_mask(1, 2, _counters(rows), features, p)
    deviation = (p * (1 - p) / (rows * features)) ** 0.5
    assert abs(mask.double().mean() - (1 - p)) < 4 * deviation
    for shares in (mask.double().mean(dim=0), mask.double().mean(dim=1)):
        count = mask.numel() / shares.numel()
        assert (shares - (1 - p)).abs().max() < 6 * (p * (1 - p) / count) ** 0.5


def test_masks_of_seeds_modules_steps_samples_draws_and_positions_differ():
    base = dropout_mask(1, 2, _counters(20), 64, 0.5)
    row = torch.arange(20)
    others = [
        dropout_mask(2, 2, _counters(20), 64, 0.5),
        dropout_mask(1, 3, _counters(20), 64, 0.5),
        dropout_mask(1, 2, _counters(20, step=row * 0 + 4), 64, 0.5),
        dropout_mask(1, 2, _counters(20, sample=row // 7 + 1), 64, 0.5),
        dropout_mask(1, 2, _counters(20, draw=row * 0 + 1), 64, 0.5),
        dropout_mask(1, 2, _counters(20, position=row % 7 + 1), 64, 0.5),
    ]
    for other in others:
        assert 0.4 < (base == other).double().mean() < 0.6
    assert torch.equal(base, dropout_mask(2**32 + 1, 2, _counters(20, draw=row * 0 + 4096), 64, 0.5))


@settings(max_examples=25)
@given(order=st.permutations(range(30)), features=st.integers(1, 40))
def test_the_mask_follows_its_row_whatever_the_order(order, features):
    counters = _counters(30)
    moved = RowCounters(*(getattr(counters, n)[order] for n in ("step", "sample", "draw", "position")))
    base = dropout_mask(4, 5, counters, 40, 0.3)
    assert torch.equal(dropout_mask(4, 5, moved, features, 0.3), base[order][:, :features])


def _library():
    library = fast_dropout.dropout_library()
    if library is None:
        pytest.skip("no C compiler")
    return library


def apply_dropout(x, seed, module, counters, threshold):
    return drop_by(keep_mask((seed, module), counters, x.shape[1], threshold), x, threshold)


@pytest.mark.parametrize("features", [1, 8, 255, 256, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_compiled_dropout_equals_the_formula(features, dtype):
    _library()
    generator = torch.Generator().manual_seed(0)
    words, seed, modules = _counters(13).words(), 2**32 - 3, [7, 2**31]
    x = torch.randn(13, features + 5, generator=generator).to(dtype)[:, :features]
    part = torch.randn(2, 13, features, generator=generator).to(dtype)
    total = torch.randn(13, features, generator=generator).to(dtype)
    threshold, before = dropout_threshold(0.3), total.double().clone()
    dropped = fast_dropout.drop(x, seed, modules, words, threshold, total=total, part=part, factor=0.7)
    expected = before
    for index, module in enumerate(modules):
        assert torch.equal(dropped[index], apply_dropout(x, seed, module, words, threshold))
        expected = expected + 0.7 * apply_dropout(part[index].double(), seed, module, words, threshold)
    torch.testing.assert_close(
        total.double(),
        expected,
        rtol=2 * torch.finfo(dtype).eps,
        atol=1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6,
    )


def test_bfloat16_rounds_to_even_and_keeps_not_a_number():
    _library()
    x = torch.tensor([[1.0, float("nan"), float("inf"), -0.0, 3.3e38, 1e-40, 257.0, 259.0]]).to(
        torch.bfloat16
    )
    words, threshold = _counters(1).words(), dropout_threshold(0.4)
    got = fast_dropout.drop(x, 1, [1], words, threshold)[0]
    torch.testing.assert_close(got, apply_dropout(x, 1, 1, words, threshold), rtol=0, atol=0, equal_nan=True)
    keep_all = fast_dropout.drop(x, 1, [1], words, 0)[0]
    torch.testing.assert_close(keep_all, x, rtol=0, atol=0, equal_nan=True)


def test_without_a_compiler_dropout_is_the_same_and_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    x, words = torch.randn(150, 20), _counters(150).words()
    expected = fast_dropout.drop(x, 1, [2, 3], words, 9000)
    fast_dropout.dropout_library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="Install gcc") as caught:
            got = [fast_dropout.drop(x, 1, [2, 3], words, 9000) for _ in range(2)]
        assert len(caught) == 1
    finally:
        fast_dropout.dropout_library.cache_clear()
    assert torch.equal(got[0], expected)
    assert torch.equal(got[1], expected)


def test_a_compiled_library_is_kept_and_used_again(tmp_path):
    _library()
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    folder = tmp_path / "cache"
    first = compiled.compile_library(source, folder)
    written = first.stat().st_mtime_ns
    assert compiled.compile_library(source, folder) == first
    assert first.stat().st_mtime_ns == written
    assert sorted(path.suffix for path in folder.iterdir()) == [".sha256", ".so"]


@pytest.mark.parametrize("spoilt", ["library", "checksum"])
def test_a_compiled_library_that_is_not_whole_is_compiled_again(tmp_path, spoilt):
    """As after a loss of power: to load a part of one would end the process by a signal."""
    _library()
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    built = compiled.compile_library(source, tmp_path / "cache")
    whole = built.read_bytes()
    cut = built if spoilt == "library" else built.with_suffix(".sha256")
    cut.write_bytes(cut.read_bytes()[:-20])
    assert compiled.compile_library(source, tmp_path / "cache") == built
    assert len(built.read_bytes()) == len(whole)
    assert ctypes.CDLL(str(built)).one() == 1


def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path):
    """With a checksum that fits, as in a folder that users share."""
    _library()
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    built = compiled.compile_library(source, tmp_path / "cache")
    built.write_bytes(foreign := built.read_bytes() + b"x")
    built.with_suffix(".sha256").write_text(hashlib.sha256(foreign).hexdigest())
    built.chmod(0o775)
    compiled.compile_library(source, tmp_path / "cache")
    assert built.read_bytes() != foreign
    assert built.stat().st_mode & 0o777 == 0o755


def test_keep_scale_undoes_the_rounded_share():
    assert keep_scale(dropout_threshold(0.5)) == 2.0
    assert dropout_threshold(0.9999999) == 65535


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fake_tensors_are_not_given_to_compiled_code(dtype):
    """Memory is predicted on tensors that have shapes and no memory."""
    with FakeTensorMode():
        made = problem(Shape(64, 32, (16, 16), (4, 8), 0.1), device="cpu", dtype=dtype)
        made.train("grouped")
        assert made.x.grad.shape == (64, 32)
