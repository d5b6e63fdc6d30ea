"""The choice of tiles: what was measured to be fastest, kept in a file; and the tiles of every candidate."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from plait_kernels import KernelError, Selection, autotuning, choose_backend, triton_backend
from plait_kernels.autotuning import prepare, tune, usual
from plait_kernels.backends import BACKENDS
from plait_kernels.selection import fastest
from plait_kernels.synthetic import Shape, problem
from plait_kernels.tiles import CANDIDATES, DEFAULT, DEFAULT_MEMORY, HOPPER, Choice, Tiles, load, save


def test_each_stage_takes_its_fastest_and_leaves_the_others():
    wanted = {"down": CANDIDATES["down"][3][1], "up": CANDIDATES["up"][2][1]}
    asked = []

    def measure(option, stage):
        asked.append(stage)
        if stage == "down":
            return 1.0 if option.down == wanted["down"] else 2.0
        if stage == "up":
            return 1.0 if option.fused_forward == wanted["up"] else math.inf
        return 3.0

    found = tune(measure)
    assert found == replace(DEFAULT, down=wanted["down"], fused_forward=wanted["up"])
    assert set(asked) == set(CANDIDATES)


def test_the_fastest_must_run_with_adapters_of_every_width(monkeypatch):
    """On compute capability 10.0, 256 x 128 of dS and dB need 220 KiB of 227 at rank 16, 240 at rank 32."""
    fast, next_one = (Tiles(256, columns=128, splits=4, warps=8), Tiles(128, columns=128, splits=4, warps=8))
    seconds = {fast: 1.0, next_one: 2.0}

    def on_device(shape, *_):
        wide = max(shape.ranks) > 16
        return lambda chosen, _stage: (
            math.inf if wide and chosen.up_gradient == fast else seconds.get(chosen.up_gradient, 3.0)
        )

    monkeypatch.setattr(autotuning, "_on_device", on_device)
    shape = Shape(8192, 64, (64,), (16,) * 8, 0.1)
    found = autotuning._measured(shape, torch.device("cuda"), torch.bfloat16, DEFAULT, CANDIDATES)
    assert found.up_gradient == next_one


def test_where_no_tile_runs_at_every_width_the_fastest_is_taken():
    fast = CANDIDATES["down"][1][1]
    found = tune(lambda chosen, _: 1.0 if chosen.down == fast else 2.0, fits=lambda *_: False)
    assert found == replace(DEFAULT, down=fast)


def test_choices_are_kept_in_a_file(tmp_path):
    path = tmp_path / "folder" / "tuned.json"
    first, second = DEFAULT, Choice(down=Tiles(16), fused_backward=Tiles(32, 64))
    save(path, "first", first)
    save(path, "second", second)
    assert load(path) == {"first": first, "second": second}
    assert {found.name for found in path.parent.iterdir()} == {"tuned.json", "tuned.lock"}


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "tuned.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: save(path, str(number), Choice(down=Tiles(number))), range(40)))
    assert load(path) == {str(number): Choice(down=Tiles(number)) for number in range(40)}


def test_what_another_release_wrote_stays(tmp_path):
    """Two releases with one cache folder would else measure all tiles again and again."""
    path = tmp_path / "tuned.json"
    others = {"theirs": {"down": {"rows": 16, "clusters": 2}}}
    path.write_text(json.dumps(others))
    save(path, "ours", DEFAULT)
    assert load(path) == {"ours": DEFAULT}
    assert json.loads(path.read_text())["theirs"] == others["theirs"]


@pytest.mark.parametrize("content", [None, "", "{", '{"a": {"unknown": 1}}', '{"a": 3}', "[1]"])
def test_a_file_that_cannot_be_read_counts_as_empty(tmp_path, content):
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_text(content)
    assert load(path) == {}


@pytest.mark.parametrize("fused", [False, True], ids=["epilogues", "one product"])
def test_other_tiles_give_the_same_result(make_layer, monkeypatch, fused):
    if not triton_backend.available(torch.device("cpu")):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")
    small = Choice(
        down=Tiles(16, depth=16, splits=3),
        up=Tiles(16, columns=16),
        up_gradient=Tiles(16, columns=16, splits=2),
        down_gradient=Tiles(16, columns=16, splits=2),
        dx=Tiles(16, columns=32),
        fused_forward=Tiles(32, columns=16, depth=32) if fused else None,
        fused_backward=Tiles(16, columns=32, depth=16) if fused else None,
    )
    layer = make_layer(ranks=[3, 20], lengths=[37, 20], dropout=[0.2, 0.0], gap=5)
    monkeypatch.setattr(triton_backend, "choice", lambda *_: small)
    layer.assert_accurate(layer.run("triton"))


def test_tiles_are_measured_once_for_a_layer_and_taken_from_a_plan(monkeypatch):
    """Whatever the microbatch is, since an adapter's bits depend on them."""
    asked, first, second = [], Choice(down=Tiles(16)), Choice(down=Tiles(999))

    def found(widths, *_):
        asked.append(widths)
        return first

    monkeypatch.setattr(autotuning, "_known", {})
    monkeypatch.setattr(autotuning, "_found", found)
    device, dtype, said = torch.device("cuda"), torch.bfloat16, []
    layers = [(64, (32, 16)), (64, (64,)), (64, (32, 16))]
    kept = prepare(layers, device, dtype, tokens=100, say=said.append)
    assert asked == layers[:2]
    assert len(said) == 2
    monkeypatch.setattr(autotuning, "_known", {})
    changed = kept.replace('"rows": 16', '"rows": 999')
    assert prepare(layers, device, dtype, tokens=5000, recorded=changed) == changed
    assert set(autotuning._known.values()) == {second}
    assert asked == layers[:2]
    assert prepare(layers, device, dtype, tokens=100, recorded='{"64>64": {"old": 1}}') == changed


def test_on_a_cpu_nothing_is_measured(make_layer, monkeypatch):
    layer = make_layer(ranks=[6], lengths=[5])
    monkeypatch.setattr(autotuning, "tune", None)
    assert autotuning.choice(None, layer.x) == DEFAULT
    chosen = choose_backend("cpu", dtype=torch.bfloat16)
    assert (chosen.backend, chosen.seconds) == ("grouped", {})


@pytest.mark.parametrize(("triton_seconds", "chosen"), [(1.0, "triton"), (3.0, "grouped")])
def test_the_backend_that_takes_least_is_chosen(triton_seconds, chosen):
    times = {"grouped": 2.0, "triton": triton_seconds}
    assert fastest(("grouped", "triton"), times.__getitem__) == Selection(chosen, times)


def test_a_backend_that_cannot_run_after_all_is_left_out():
    def measure(backend):
        if backend == "triton":
            raise KernelError("stage 'down': none of its 13 tile sizes runs on this device")
        return 2.0

    with pytest.warns(RuntimeWarning, match="'triton' is left out: stage 'down'"):
        assert fastest(("grouped", "triton"), measure) == Selection("grouped", {"grouped": 2.0})


def test_on_a_gpu_triton_is_chosen_without_measuring(monkeypatch):
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], candidate=lambda _: True))
    assert choose_backend("cuda", dtype=torch.bfloat16) == Selection("triton", {})
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], candidate=lambda _: False))
    assert choose_backend("cuda", dtype=torch.bfloat16) == Selection("grouped", {})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Triton Error [CUDA]: invalid argument"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: too many resources requested for launch"), True),
        (RuntimeError("Triton Error [CUDA]: the launch timed out and was terminated"), False),
        (RuntimeError("Triton Error [CUDA]: operation not supported on global/shared address space"), False),
        (RuntimeError("Triton Error [CUDA]: invalid program counter"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("PassManager::run failed"), True),
        (torch.AcceleratorError("CUDA error: invalid argument"), False),
    ],
)
def test_a_fault_is_never_taken_for_a_refusal(error, expected):
    assert autotuning.refused(error) == expected


def test_in_float32_no_program_sums_many_rows_for_a_gradient():
    """On an H100 sums of 512 rows had 1.3 times the error that is allowed."""
    start, candidates = usual(torch.device("cuda"), torch.float32)
    assert (start.down_gradient.rows * start.down_gradient.splits, start.up_gradient.rows) == (32, 32)
    assert "down_gradient" not in candidates
    assert {tiles.rows for _, tiles in candidates["up_gradient"]} == {32}


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, HOPPER),
        ((9, 0), torch.float16, DEFAULT),
        ((8, 0), torch.bfloat16, DEFAULT),
        ((10, 0), torch.bfloat16, DEFAULT),
    ],
)
def test_tiles_that_were_fastest_on_a_device_are_usual_on_its_kind(monkeypatch, capability, dtype, expected):
    monkeypatch.setattr(autotuning, "_shared_memory", lambda _device: DEFAULT_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    start, candidates = usual(torch.device("cuda"), dtype)
    assert start == expected
    for stage, found in CANDIDATES.items():  # the tuner has the same choice everywhere
        tried = [(stage, getattr(start, stage)), *candidates[stage]]
        assert len(set(tried)) == len(tried)
        assert set(tried) == {(stage, getattr(DEFAULT, stage)), *found}


def test_in_float32_memory_is_computed_with_the_tiles_of_a_device():
    """Each program's partial sums of dA take memory, and those tiles need many programs."""
    made = problem(Shape(4096, 256, (32,), (4, 8), 0.1), device="meta", dtype=torch.float32)
    made.run("triton").backward(made.grad)
    (memory,) = (found for key, found in made.routing.tables.items() if key[0] == "memory")
    assert memory["partial"].numel() == sum(2048 // 32 * rank for rank in (4, 8)) * 256


def test_fused_products_are_tried_where_they_may_be_faster(monkeypatch):
    for capability, fused in (((9, 0), False), ((8, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        tried = autotuning._promising(CANDIDATES, torch.device("cuda"))
        assert tried.keys() == CANDIDATES.keys()
        names = {name for found in tried.values() for name, _ in found}
        assert names >= {"down", "up", "up_gradient", "down_gradient", "dx"}
        assert ({"fused_forward", "fused_backward"} <= names) == fused


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tuning_on_a_device_leaves_the_gradients_alone(make_layer, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAIT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("PLAIT_KERNELS_TUNE", raising=False)
    layer = make_layer(ranks=[6, 3], lengths=[300, 40], widths=[64, 32], in_features=64, device="cuda")
    layer.assert_accurate(layer.run("triton"))
    assert len(load(tmp_path / "tuned.json")) == 1
