"""Time and memory models: exact recovery, published tables, special cases, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from memory_models import one_phase

from plait.core.errors import ConfigError, DataError, InputError
from plait.cost.fitting import fit_relative, fit_undisturbed
from plait.cost.memory import (
    MemoryCoefficients,
    MemoryModel,
    MemoryObservation,
    MemoryShape,
    Phase,
)
from plait.cost.profiles import cluster_profile
from plait.cost.replica import Configuration, ReplicaCost, even_split
from plait.cost.time import EMPTY, HeadTime, LayerTime, MicrobatchShape, TimeModel, fit_head, fit_layer
from plait.planner.packed import packed_seconds
from plait_bench.bucketed import BucketedCost
from plait_bench.inputs import shipped
from plait_bench.lengths import LengthGenerator, sigma_from_skewness
from plait_bench.lobra import fit_by_degree, read_layer_times, relative_errors

ROOT = Path(__file__).resolve().parents[2]
TABLE = shipped("lobra_layer_times.csv")
H100_TIMES = ROOT / "tests" / "golden" / "lorafusion_h100.json"
LAYER = {"tp": 1, "fixed": 1.0, "token": 1e-6}
CLUSTERS = ROOT / "conf" / "cluster"
PROFILES = sorted((ROOT / "conf" / "cluster").glob("*_*.yaml"))


# ---- time -------------------------------------------------------------------------------------------------


def test_layer_fit_recovers_its_own_coefficients() -> None:
    truth = LayerTime(2e-3, 5e-6, 1e-10)
    shapes = [MicrobatchShape.of([s] * b) for s in (128, 500, 3000) for b in (1, 3, 8)]
    found, fit = fit_layer((shape, truth.seconds(shape)) for shape in shapes)
    assert (found.fixed, found.token, found.square) == pytest.approx((2e-3, 5e-6, 1e-10))
    assert fit.max_absolute_error < 1e-9


def test_published_layer_times_are_predicted_within_five_percent() -> None:
    rows = read_layer_times(TABLE)
    options = yaml.safe_load((ROOT / "sweeps/lobra/time_model.yaml").read_text())["bench"]["options"]
    held = options["held_out"]
    assert len(rows) == 250
    assert len(set(held)) == len(held) == 75
    fits = fit_by_degree([row for index, row in enumerate(rows) if index not in set(held)])
    errors = relative_errors([rows[index] for index in held], {tp: layer for tp, (layer, _) in fits.items()})
    assert np.abs(errors).mean() <= 0.05


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("h100_llama31_8b", "Llama-3.1-8B"),
        ("h100_qwen25_32b", "Qwen2.5-32B"),
        ("h100_llama31_70b", "Llama-3.1-70B"),
    ],
)
def test_committed_h100_profiles_are_fits_of_the_published_times(name: str, model: str) -> None:
    table = json.loads(H100_TIMES.read_text())["models"][model]
    both, forward, head = (
        {int(tokens): float(seconds) for tokens, seconds in table[part].items()}
        for part in ("layer", "layer_forward", "ends")
    )
    time = cluster_profile(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())["options"]).time
    # The samples' lengths are not published, so that there is no term for their squares.
    layer, _ = fit_layer((MicrobatchShape(tokens, 0, tokens), seconds) for tokens, seconds in both.items())
    ends, _ = fit_head((MicrobatchShape(tokens, 0, tokens), seconds) for tokens, seconds in head.items())
    kept, kept_ends = time.layer_time(1), time.head_time(1)
    assert (kept.fixed, kept.token, kept.square) == pytest.approx((layer.fixed, layer.token, 0.0), rel=1e-5)
    assert (kept_ends.fixed, kept_ends.labelled) == pytest.approx((ends.fixed, ends.labelled), rel=1e-5)
    assert time.layers == table["layers"]
    assert time.forward_share == pytest.approx(
        np.mean([forward[tokens] / both[tokens] for tokens in both]), abs=1e-4
    )


def test_stages_add_up_and_the_last_pays_for_the_head() -> None:
    time = TimeModel(8, {1: LayerTime(1e-3, 1e-6)}, {1: HeadTime(2e-3, 3e-6)}, forward_share=0.4)
    shape = MicrobatchShape.of([100, 200], labelled=50)
    first, last = time.stage(shape, layers=5, last=False), time.stage(shape, layers=3, last=True)
    assert first.total + last.total == pytest.approx(time.microbatch(shape))
    assert first.total == pytest.approx(5 * (1e-3 + 300e-6))
    assert last.total == pytest.approx(3 * (1e-3 + 300e-6) + 2e-3 + 150e-6)
    assert first.forward == pytest.approx(0.4 * first.total)
    assert time.stage(EMPTY, layers=8, last=True).total == 0.0


def test_head_fit_sees_labelled_tokens_only() -> None:
    truth = HeadTime(1e-3, 4e-6)
    shapes = [MicrobatchShape.of([400], labelled=labelled) for labelled in (10, 100, 400)]
    found, _ = fit_head((shape, truth.seconds(shape)) for shape in shapes)
    assert (found.fixed, found.labelled) == pytest.approx((1e-3, 4e-6))


def test_a_missing_degree_names_the_existing_ones() -> None:
    time = TimeModel(8, {1: LayerTime(1e-3, 1e-6), 4: LayerTime(1e-3, 1e-6)})
    with pytest.raises(InputError, match="1, 4"):
        BucketedCost.of(Configuration(2, 1, 512), [256], time)


def test_replica_time_is_appendix_d_for_equal_stages() -> None:
    time = TimeModel(32, {2: LayerTime(2e-3, 3e-6, 1e-10)})
    cost = BucketedCost.of(Configuration(2, 4, 4096), [512, 1024, 4096], time)
    per_layer = {
        (b, s): 2e-3 + 3e-6 * b * s + 1e-10 * b * s * s for s in (512, 1024, 4096) for b in range(1, 9)
    }
    t = {key: 32 / 4 * seconds for key, seconds in per_layer.items()}
    expected = 2 * t[8, 512] + t[3, 512] + t[2, 1024] + t[1, 4096] + 3 * max(t[8, 512], t[1, 4096])
    assert cost.seconds([19, 2, 1]) == pytest.approx(expected)
    assert cost.seconds([0, 0, 0]) == 0.0
    small = BucketedCost.of(Configuration(2, 4, 1024), [512, 1024, 4096], time)
    assert small.seconds([1, 0, 1]) == float("inf")


def test_even_split_covers_all_layers() -> None:
    assert even_split(10, 4) == (3, 3, 2, 2)
    with pytest.raises(ConfigError, match="pp=5"):
        even_split(4, 5)


# ---- memory -----------------------------------------------------------------------------------------------


def _observe(truth: MemoryModel, shape: MemoryShape, static: float = 1e9) -> MemoryObservation:
    peaks = {
        name: static + MemoryModel({name: phase}, truth.logit_rows).dynamic(shape)
        for name, phase in truth.phases.items()
    }
    return MemoryObservation(shape, peaks, static)


def _shapes(count: int) -> list[MemoryShape]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        lengths = [int(length) for length in rng.integers(20, 600, int(rng.integers(1, 9)))]
        labelled = max(1, int(sum(lengths) * rng.uniform(0.01, 1.0)))
        found.append(MemoryShape.of(lengths, labelled=labelled, ranks=int(rng.integers(4, 65))))
    return found


def test_memory_fit_recovers_both_moments() -> None:
    truth = MemoryModel(
        {
            "loss": Phase(MemoryCoefficients(1e5, 3e5, 6e4, 500.0, 3e3, 6e5, 240.0)),
            "backward": Phase(MemoryCoefficients(7e5, 4e5, 7e4, 540.0, 0.0, 0.0, 240.0)),
        },
        logit_rows=300,
    )
    shapes = _shapes(24)
    model = MemoryModel.fitted([_observe(truth, shape) for shape in shapes[:12]], logit_rows=300)
    errors = model.errors([_observe(truth, shape) for shape in shapes[12:]])
    assert np.abs(errors).max() < 1e-6
    assert model.dynamic(MemoryShape(0, 0, 0, 0, 0)) == 0.0


def test_equation_five_is_the_special_case_of_equal_lengths() -> None:
    """mLoRA Eq. 5: β0 + β1·B·L + β2·B·L²."""
    b0, b1, b2 = 3e6, 2e5, 40.0
    points = [(b, length) for b in (1, 2, 4, 8) for length in (64, 128, 512)]
    observed = [
        MemoryObservation(
            MemoryShape.of([length] * b), {"whole": b0 + b1 * b * length + b2 * b * length**2}, 0.0
        )
        for b, length in points
    ]
    model = MemoryModel.fitted(observed)
    for b, length in ((3, 100), (16, 256), (1, 1000)):
        expected = b0 + b1 * b * length + b2 * b * length**2
        assert model.dynamic(MemoryShape.of([length] * b)) == pytest.approx(expected, rel=1e-6)


def test_margin_covers_what_was_seen_and_shrinks_with_observations() -> None:
    rng = np.random.default_rng(1)
    truth = one_phase(fixed=1e6, token=1e5)
    noisy = [
        MemoryObservation(
            each.shape, {"whole": each.static + each.dynamic * rng.uniform(0.98, 1.02)}, each.static
        )
        for each in (_observe(truth, shape) for shape in _shapes(60))
    ]
    few, many = MemoryModel.fitted(noisy[:8]), MemoryModel.fitted(noisy)
    for each in noisy[:8]:
        assert few.safe_peak(each.shape, static=each.static) >= each.peaks["whole"] * (1 - 1e-12)
    assert 0.01 < many.phases["whole"].margin < few.phases["whole"].margin
    assert len(many.observations) == 60


def test_pipeline_stages_hold_microbatches_in_flight() -> None:
    model = one_phase(token=100.0, labelled=7.0, margin=0.0)
    shape = MemoryShape.of([10, 10], labelled=5)
    peaks = [model.stage_peak(shape, static=1000.0, layer_split=(4, 4, 2), stage=stage) for stage in range(3)]
    assert peaks == pytest.approx([1000 + 3 * 0.4 * 2000, 1000 + 2 * 0.4 * 2000, 1000 + 0.2 * 2000 + 35])


@pytest.mark.parametrize("read", [0.1, 0.3, 0.6, 0.7, 1.0])
def test_inputs_that_never_change_say_nothing_of_adapters_on_other_linears(read: float) -> None:
    """Where all observations read the same share, the bytes are the tokens', whatever share comes then."""
    truth = one_phase(fixed=1e6, token=3e5, input=2e5)
    shapes = [replace(shape, inputs=read * shape.tokens) for shape in _shapes(24)]
    model = MemoryModel.fitted([_observe(truth, shape) for shape in shapes])
    same, none = shapes[5], replace(shapes[5], inputs=0.0)
    assert model.phases["whole"].coefficients.input == 0.0
    assert model.dynamic(none) == model.dynamic(same)
    assert model.dynamic(same) == pytest.approx(truth.dynamic(same), rel=1e-6)


def test_a_fit_forgets_its_oldest_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cost.memory.KEPT_OBSERVATIONS", 8)
    old, new = (one_phase(token=token) for token in (1e5, 4e5))
    shapes = _shapes(16)
    observed = [_observe(old, shape) for shape in shapes[:8]] + [_observe(new, shape) for shape in shapes[8:]]
    model = MemoryModel.fitted(observed)
    assert model.observations == tuple(observed[8:])
    assert model.dynamic(shapes[0]) == pytest.approx(new.dynamic(shapes[0]), rel=1e-6)


# ---- bad input --------------------------------------------------------------------------------------------


def test_fit_refuses_what_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="no observations"):
        fit_layer([])
    with pytest.raises(InputError, match="row 1"):
        fit_relative([[1.0], [1.0]], [1.0, 0.0], ("fixed",))
    with pytest.raises(InputError, match="tokens=-3"):
        fit_relative([[-3.0]], [1.0], ("tokens",))
    with pytest.raises(InputError, match="above the static"):
        MemoryModel.fitted([MemoryObservation(MemoryShape.of([4]), {"whole": 5.0}, 5.0)])


@pytest.mark.parametrize("entry", ["", "-1", "nan", "fast"])
def test_table_with_a_bad_entry_names_line_and_column(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(f"tp,seq_len,mbs,time\n1,128,1,3.0\n1,128,2,{entry}\n")
    with pytest.raises(DataError, match="line 3: time"):
        read_layer_times(path)
    with pytest.raises(DataError, match="nowhere"):
        read_layer_times(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_described_clusters_load_and_name_their_source(path: Path) -> None:
    options = yaml.safe_load(path.read_text())["options"]
    profile = cluster_profile(options)
    assert profile.name == path.stem
    assert profile.source
    for table in profile.tables:
        assert cluster_profile(options | {"max_tokens": table}).configurations
    with pytest.raises(ConfigError, match="must be one of"):
        cluster_profile(options | {"max_tokens": "guess"})
    assert profile.shape is not None
    hidden = profile.shape["hidden_size"]
    profile.check_model("fine-tuned", layers=profile.time.layers, hidden_size=hidden)
    for layers, size in ((profile.time.layers + 1, hidden), (profile.time.layers, hidden // 2)):
        with pytest.raises(ConfigError, match="is of"):
            profile.check_model("another-model", layers=layers, hidden_size=size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": None}, "cluster.options.time=null"),
        ({"time": {"layers": 32, "layer": [{"tp": 1, "fixed": -1.0, "token": 1e-6}]}}, "at least 0"),
        ({"time": {"layers": 32, "layer": [{"tp": 1, "fixed": "slow", "token": 1e-6}]}}, "must be a number"),
        ({"time": {"layers": 32, "layer": [{"fixed": 1.0, "token": 1e-6}]}}, r"layer\[0\].tp is not set"),
        ({"time": {"layers": 32, "layer": [LAYER | {"speed": 1e-6}]}}, "layer.0..speed"),
        ({"max_tokens_tables": {"appendix": [[1, 1]]}}, r"appendix\[0\] must be a list of 3"),
        ({"max_tokens_tables": {"appendix": [[1, 1, None]]}}, r"appendix\[0\]\[2\]=null"),
        ({"max_tokens_tables": {"appendix": [[1, 1, -2048]]}}, "max_tokens=-2048"),
        ({"shape": {"hidden_size": 64}}, "shape has no intermediate_size"),
        ({"shape": [1]}, "shape=.1."),
        ({"speed": 3}, "options.speed"),
        ({"time": "x"}, "time='x'"),
        ({"time": {"layers": 32, "layer": [LAYER], "forward_shar": 0.3}}, "forward_shar"),
        ({"time": {"layers": 32}}, "time has no layer"),
        ({"time": {"layers": 32, "layer": []}}, "non-empty"),
        ({"time": {"layers": 31.5, "layer": [LAYER]}}, "whole number"),
        ({"time": {"layers": math.inf, "layer": [LAYER]}}, "whole number"),
        ({"time": {"layers": 32, "layer": LAYER}}, "layer must be a list"),
        ({"time": {"layers": 32, "layer": 5}}, "layer must be a list"),
        ({"time": {"layers": 32, "layer": [1, 2]}}, r"layer\[0\]=1"),
        ({"time": {"layers": 32, "layer": [LAYER, LAYER]}}, r"layer\[1\].tp=1"),
        ({"time": {"layers": 32, "layer": [LAYER | {"tp": 1.5}]}}, "tp=1.5"),
        ({"time": {"layers": 32, "layer": [LAYER | {"token": math.inf}]}}, "finite"),
        ({"max_tokens_tables": [[1, 1, 3]]}, "max_tokens_tables="),
        ({"max_tokens_tables": {"appendix": None}}, "appendix must be a list"),
        ({"max_tokens_tables": {"appendix": []}}, "each kind of replica"),
        ({"max_tokens_tables": {"appendix": [[1, 1, 8], [1, 1, 9]]}}, "tp=1, pp=1 twice"),
        ({"restart_seconds": -1}, "restart_seconds"),
        ({"restart_seconds": math.nan}, "finite"),
        ({"device": "A100"}, "device='A100'"),
    ],
)
def test_profile_with_a_bad_entry_says_which(change: dict[str, object], message: str) -> None:
    options = yaml.safe_load(PROFILES[0].read_text())["options"]
    with pytest.raises(ConfigError, match=message):
        cluster_profile(options | change)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory_gib", math.inf, "finite"),
        ("memory_gib", math.nan, "finite"),
        ("memory_gib", 10**400, "finite"),
        ("memory_gib", 0, "above 0"),
        ("count", 3.7, "whole number"),
        ("count", 0, "above 0"),
        ("count", True, "whole number"),
        ("per_node", "eight", "whole number"),
        ("between_nodes_gb_per_s", "fast", "must be a number"),
        ("between_nodes_gb_per_s", -5, "above 0"),
        ("within_node_gb_per_s", None, "must be a number"),
        ("speed", 3, "device.speed"),
    ],
)
def test_a_bad_entry_of_a_described_device_is_named(key: str, value: object, message: str) -> None:
    options = yaml.safe_load(PROFILES[0].read_text())["options"]
    with pytest.raises(ConfigError, match=message) as caught:
        cluster_profile(options | {"device": options["device"] | {key: value}})
    assert f"cluster.options.device.{key}" in str(caught.value)


# ---- assumed lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["lognormal", "gamma"])
def test_sigma_gives_the_skewness_asked_for(family: str) -> None:
    sigma = sigma_from_skewness(family, 1.5)  # type: ignore[arg-type]
    drawn = LengthGenerator(family, 5000.0, sigma, clip=10**9, seed=1).draw(200_000)  # type: ignore[arg-type]
    centred = drawn - drawn.mean()
    assert drawn.mean() == pytest.approx(5000.0, rel=0.01)
    assert (centred**3).mean() / (centred**2).mean() ** 1.5 == pytest.approx(1.5, rel=0.1)


def test_random_numbers_repeat_and_streams_differ() -> None:
    generator = LengthGenerator("lognormal", 300.0, 0.8, clip=1024, seed=3)
    assert (generator.draw(50, stream="a") == generator.draw(50, stream="a")).all()
    assert (generator.draw(50, stream="a") != generator.draw(50, stream="b")).any()
    assert generator.draw(1000).max() <= 1024
    with pytest.raises(ConfigError, match="family"):
        LengthGenerator("uniform", 3.0, 1.0)  # type: ignore[arg-type]


def test_checkpointing_takes_each_layers_forward_pass_once_more() -> None:
    plain = TimeModel(4, {1: LayerTime(2e-3, 1e-5, 1e-9)}, {1: HeadTime(1e-3, 1e-6)}, forward_share=0.4)
    again = plain.recomputing()
    shape = MicrobatchShape.of([100, 50])
    before = plain.stage(shape, layers=3, last=False)
    after = again.stage(shape, layers=3, last=False)
    assert after.forward == pytest.approx(before.forward)
    assert after.backward == pytest.approx(before.backward + before.forward)
    head = plain.stage(shape, layers=0, last=True)
    assert again.stage(shape, layers=0, last=True).total == pytest.approx(head.total)


@pytest.mark.parametrize("configuration", [(1, 1, 4096), (1, 4, 4096), (1, 4, 512), (1, 2, 1024)])
def test_seconds_with_more_sequences_are_those_of_the_rows_with_them(
    configuration: tuple[int, int, int],
) -> None:
    time = TimeModel(8, {1: LayerTime(2e-3, 1e-5, 1e-9)}, {1: HeadTime(1e-3, 1e-6)})
    cost = BucketedCost.of(Configuration(*configuration), (600, 1000, 3000), time)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (5, 3)) * (np.arange(3) < cost.supported)
    buckets = np.array([0, 1, 2, 0])
    more = rng.integers(0, 4, (4, 5))
    found = cost.seconds_with(counts, buckets, more)
    for m, bucket in enumerate(buckets):
        rows = counts.copy()
        rows[:, bucket] += more[m]
        np.testing.assert_allclose(found[m], cost.seconds_many(rows), rtol=1e-12)


def test_measurements_that_something_disturbed_do_not_bend_a_fit() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.uniform(50, 500, 60)
    features = np.stack([np.ones(60), tokens], axis=1)
    seconds = (0.5 + 0.01 * tokens) * rng.uniform(0.98, 1.02, 60)
    seconds[::10] *= 30.0
    seconds[5::20] *= 3.0
    plain, robust = (fit(features, seconds, ("fixed", "token")) for fit in (fit_relative, fit_undisturbed))
    assert robust.coefficients == pytest.approx((0.5, 0.01), rel=0.05)
    assert plain.coefficients != pytest.approx((0.5, 0.01), rel=0.05)
    assert max(abs(error) for error in robust.errors) > 0.9  # of all, the disturbed ones as well


# ---- a sharded base ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [1e-4, 3e-3, 6e-3, 5e-2])
def test_a_layer_is_gathered_while_the_one_before_it_runs(gather: float) -> None:
    """The engine begins to gather a layer when the one before it begins to run; replayed layer by layer."""
    layers = 5
    time = TimeModel(
        layers, {1: LayerTime(1e-3, 1e-4)}, {1: HeadTime(2e-3)}, forward_share=0.4, gather=gather
    )
    shape = MicrobatchShape.of([30, 60])

    def replayed(run: float) -> float:
        there, end = gather, 0.0
        for _ in range(layers):
            begun = max(there, end)
            there, end = begun + gather, begun + run
        return end

    found = time.stage(shape, layers=layers, last=True)
    assert found.forward == pytest.approx(replayed(0.4 * 1e-2) + 2e-3 / 3)
    assert found.backward == pytest.approx(replayed(0.6 * 1e-2) + 2e-3 * 2 / 3)
    assert time.stage(MicrobatchShape.of([]), layers=layers, last=True).total == 0
    cost = ReplicaCost.of(Configuration(1, 1, 90), [30, 60], time)
    counts = np.array([4, 4])  # four microbatches of this shape
    assert cost.seconds(counts) == pytest.approx(4 * found.total)
    assert packed_seconds(cost, (4, 4)) == pytest.approx(4 * found.total)


def test_seconds_of_a_sharded_base_are_a_lower_bound_for_uneven_microbatches() -> None:
    time = TimeModel(5, {1: LayerTime(1e-3, 1e-4)}, {1: HeadTime(2e-3)}, forward_share=0.4, gather=4e-3)
    cost = ReplicaCost.of(Configuration(1, 1, 90), [30, 60], time)
    uneven = [[30], [60], [60, 30], [60]]
    each = sum(time.microbatch(MicrobatchShape.of(own)) for own in uneven)
    assert cost.seconds(np.array([2, 3])) <= each
    without = ReplicaCost.of(Configuration(1, 1, 90), [30, 60], replace(time, gather=0.0))
    assert cost.seconds(np.array([2, 3])) > without.seconds(np.array([2, 3]))
