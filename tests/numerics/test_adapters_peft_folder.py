"""An exported adapter is the same model in PEFT, for every family, with the weights as they are."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft_folders import stored_pairs
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.adapters import tensor_file
from plait.adapters import variants as adapters
from plait.adapters.facts import CONFIG, WEIGHTS
from plait.adapters.peft_folder import export_adapter, read_adapter
from plait.adapters.tensor_file import locate_tensors, read_parts, read_tensors
from plait.core.errors import ModelError, StorageError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model, transformers_model
from plait.models.targets import resolve_targets
from plait.models.tiny import FAMILIES
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

LENGTHS = (7, 13)
TARGETS: dict[str, tuple[str, ...] | str] = {
    "phi3": ("qkv_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense"),
    "gpt2": ("c_attn", "c_proj"),
    "llama": r".*\.[12]\.mlp\.(gate|up)_proj",
    "qwen3": "all-linear",
}


def settings_of(family: str) -> ModelSettings:
    return ModelSettings(kind="tiny", family=family, dtype="float32", seed=11)


def attach(base: BaseModel, name: str, spec: AdapterSpec, bank: Bank, seed: int) -> None:
    sites = resolve_targets(spec.target_modules, base.linears)
    adapters.attach(bank, name, spec, sites, seed=seed, weight_of=base.frozen_weight)
    generator = torch.Generator().manual_seed(seed)
    for _, b in bank.weights(name).values():  # as if it had been trained
        b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    bank.refresh([name])


def routing_of(bank: Bank, names: list[str]) -> Routing:
    offsets = [0]
    for length in LENGTHS:
        offsets.append(offsets[-1] + length)
    zero = torch.zeros(offsets[-1], dtype=torch.int64)
    segments = [
        RoutedSegment(name, low, high) for name, low, high in zip(names, offsets, offsets[1:], strict=False)
    ]
    return Routing.build(bank, segments, RowCounters(zero, zero, zero, zero), training=False)


def joint_logits(base: BaseModel, bank: Bank, names: list[str], tokens: Tensor) -> Tensor:
    context = MicrobatchContext.of(tokens, (0, LENGTHS[0], sum(LENGTHS)), routing=routing_of(bank, names))
    with torch.no_grad():
        return base.logits(context)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_two_exported_adapters_give_the_same_logits_in_peft(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    base.install(backend="reference")
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    targets = TARGETS.get(family, ("q_proj", "v_proj", "down_proj"))
    specs = {
        "first": AdapterSpec(rank=3, alpha=12.0, target_modules=targets),
        "second": AdapterSpec(rank=8, target_modules=targets, rslora=True),
    }
    tokens = torch.randint(3, base.vocabulary, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    for seed, (name, spec) in enumerate(specs.items()):
        attach(base, name, spec, bank, seed)
    found = joint_logits(base, bank, list(specs), tokens)
    for (name, spec), low, high in zip(
        specs.items(), (0, LENGTHS[0]), (LENGTHS[0], sum(LENGTHS)), strict=True
    ):
        folder = tmp_path / name
        export_adapter(folder, spec, bank.weights(name), base=base.identity.name, linears=base.linears)
        plain = transformers_model(settings_of(family), cache=tmp_path)
        plain.set_attn_implementation("eager")
        with torch.no_grad():
            without = plain(tokens[low:high].unsqueeze(0), use_cache=False).logits[0]
            expected = PeftModel.from_pretrained(plain, folder)(
                tokens[low:high].unsqueeze(0), use_cache=False
            ).logits[0]
        assert (expected - without).norm() > 1e-3 * without.norm(), "the adapter must do something"
        assert float((found[low:high] - expected).norm() / expected.norm()) < 1e-5
        torch.testing.assert_close(found[low:high], expected, rtol=1e-5, atol=2e-5)


def test_a_folder_holds_what_the_bank_holds(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    spec = AdapterSpec(rank=3, alpha=12.0, dropout=0.25, target_modules=("o_proj", "q_proj"))
    attach(base, "one", spec, bank, 4)
    export_adapter(
        tmp_path / "one", spec, bank.weights("one"), base="tiny", linears=base.linears, revision="v2"
    )
    read = LoraConfig.from_pretrained(str(tmp_path / "one"))
    assert (read.revision, read.base_model_name_or_path) == ("v2", "tiny")
    assert (read.r, read.lora_alpha, read.lora_dropout, read.use_rslora) == (3, 12.0, 0.25, False)
    assert read.target_modules == {"o_proj", "q_proj"}
    stored, weights = stored_pairs(tmp_path / "one"), bank.weights("one")
    assert stored.keys() == weights.keys()
    for module, pair in weights.items():
        assert all(torch.equal(kept, now) for kept, now in zip(stored[module], pair, strict=True))


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    """Checksums tell whether two runs gave the same; safetensors alone writes metadata in any order."""
    base = load_model(settings_of("llama"), cache=tmp_path)
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    spec = AdapterSpec(rank=2, target_modules=("q_proj",))
    attach(base, "one", spec, bank, seed=1)
    files = set()
    for _ in range(12):
        export_adapter(
            tmp_path / "one", spec, bank.weights("one"), base="tiny", linears=base.linears, kept_step=3
        )
        files.add((tmp_path / "one" / WEIGHTS).read_bytes())
    assert len(files) == 1
    assert len(load_file(tmp_path / "one" / WEIGHTS)) == 2 * len(bank.weights("one"))


def test_initial_weights_are_distributed_as_pefts_and_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    for name, targets in (("many", ("v_proj", "q_proj", "down_proj")), ("one", ("q_proj",))):
        spec = AdapterSpec(rank=8, target_modules=targets)
        sites = resolve_targets(spec.target_modules, base.linears)
        adapters.attach(bank, name, spec, sites, seed=9, weight_of=base.frozen_weight)
    many, one = bank.weights("many"), bank.weights("one")
    for module, (a, b) in one.items():
        assert torch.equal(a, many[module][0])
        assert not b.any()
    flat = torch.cat([a.flatten() for a, _ in one.values()])
    peft = get_peft_model(
        transformers_model(settings_of("llama"), cache=tmp_path), LoraConfig(r=8, target_modules=["q_proj"])
    )
    theirs = torch.cat([p.detach().flatten() for name, p in peft.named_parameters() if "lora_A" in name])
    assert flat.shape == theirs.shape
    assert float(flat.abs().max()) <= 64**-0.5
    assert float(flat.std()) == pytest.approx(float(theirs.std()), rel=0.05)
    assert len({float(a[0, 0]) for a, _ in one.values()}) == len(one)


def test_a_folder_is_loaded_as_it_was_exported_and_others_are_refused(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    spec = AdapterSpec(rank=3, alpha=12.0, dropout=0.25, target_modules=("o_proj", "q_proj"), rslora=True)
    attach(base, "one", spec, bank, 4)
    folder = tmp_path / "one"
    export_adapter(folder, spec, bank.weights("one"), base="tiny", linears=base.linears)
    sizes = {site.name: (site.in_features, site.out_features) for site in base.sites}
    found = read_adapter(folder, sizes)
    assert (found.rank, found.scale) == (3, bank.block("one").scale)
    weights = bank.weights("one")
    assert found.weights.keys() == weights.keys()
    for name, pair in found.weights.items():
        assert all(torch.equal(one, two) for one, two in zip(pair, weights[name], strict=True))
    config = json.loads((folder / CONFIG).read_text())
    for change, said in [
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 5}}, "rank_pattern"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 4}, "rank 4"),
        ({"r": "many"}, "ValueError"),
        ({"r": float("inf")}, "OverflowError"),
        ({"lora_alpha": 1e300}, "lora_alpha=1e"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
    ]:
        (folder / CONFIG).write_text(json.dumps(config | change))
        with pytest.raises((ModelError, StorageError), match=said):
            read_adapter(folder, sizes)
    (folder / CONFIG).write_text(json.dumps(config | {"init_lora_weights": "gaussian"}))
    assert read_adapter(folder, sizes).rank == 3
    tensors = read_tensors(folder / WEIGHTS)
    b = next(name for name in tensors if "lora_B" in name)
    for wrong in (
        {name: each for name, each in tensors.items() if name != b},
        tensors | {b.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(64)},
        tensors | {b: tensors[b].T.contiguous()},
        tensors | {b.replace("lora_B", "lora_A"): torch.ones(3, 9)},
    ):
        save_file(wrong, folder / WEIGHTS)
        with pytest.raises(ModelError, match="not those of a LoRA of rank 3"):
            read_adapter(folder, sizes)
    other = load_model(settings_of("gpt2"), cache=tmp_path)
    with pytest.raises(ModelError, match="is not a linear layer of the base model"):
        read_adapter(folder, {site.name: (site.in_features, site.out_features) for site in other.sites})
    with pytest.raises(StorageError, match=r"none(.|\n)*may be removed: it is then fetched again"):
        read_adapter(tmp_path / "none", sizes)


def test_memory_of_files_is_used_again_once_no_tensor_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "MEMORY", tensor_file._Memory())
    path = tmp_path / "tensors"
    made = [{"a": torch.full((1000, size), float(size))} for size in (9, 8, 7)]

    def read(number: int) -> torch.Tensor:
        save_file(made[number], path)
        return read_tensors(path)["a"]

    first = read(0)
    view, place = first[5:], first.data_ptr()
    del first
    second = read(1)
    assert torch.equal(view, made[0]["a"][5:]), "a view alone keeps its memory"
    assert second.data_ptr() != place
    del view
    third = read(2)
    assert third.data_ptr() == place
    assert torch.equal(third, made[2]["a"])
    assert torch.equal(second, made[1]["a"])


def test_a_file_s_tensors_are_the_library_s_and_what_is_not_its_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    made = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7, 2).bfloat16(),
        "c": torch.randn(5).half(),
        "d": torch.zeros(0, 4),
        "e": torch.tensor(2.0, dtype=torch.float64),
    }
    save_file(made, path, metadata={"format": "pt"})
    found, shapes = read_tensors(path), read_tensors(path, values=False)
    assert found.keys() == shapes.keys() == made.keys()
    for name, tensor in made.items():
        assert torch.equal(found[name], tensor)
        assert (shapes[name].shape, shapes[name].dtype) == (tensor.shape, tensor.dtype)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def written(**told: object) -> bytes:
        text = json.dumps(header | {"a": header["a"] | told}).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    path.write_bytes(written())  # of another length, so that nothing is aligned
    assert all(torch.equal(tensor, made[name]) for name, tensor in read_tensors(path).items())
    for broken in (
        b"",
        whole[:6],
        whole[: 8 + length // 2],
        whole[:-1],
        (1 << 60).to_bytes(8, "little") + whole[8:],
        (4).to_bytes(8, "little") + b"[{}]",
        written(shape=[-3, -5]),
        written(shape=[3, 6]),
        written(shape=[3, 5.0]),
        written(dtype="F9"),
        written(data_offsets=[-60, 0]),
        written(data_offsets=[0]),
        written(data_offsets=[len(whole), len(whole) + 60]),
        written(shape=None),
        written(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
        written(shape=[0, 2**61, 1], data_offsets=[0, 0]),
        written(shape=[2**70, 0], data_offsets=[0, 0]),
    ):
        path.write_bytes(broken)
        for values in (True, False):
            with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
                read_tensors(path, values=values)


@pytest.mark.parametrize("most", [1, 100, 1 << 20])
def test_parts_of_a_file_are_its_tensors(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PART_BYTES", most)
    path = tmp_path / "tensors"
    made = {f"t{size}": torch.randn(size, 3) for size in (4, 1, 30, 2, 2000, 7)} | {"none": torch.zeros(0, 2)}
    save_file(made, path)
    located = locate_tensors(path)
    assert located is not None
    assert located.dtype == torch.float32
    assert set(located.names) == made.keys() - {"none"}
    order = []
    for some, shift in read_parts(path, located.bounds):
        order += located.names[some]
        for name, (first, _) in zip(located.names[some], located.bounds[some], strict=True):
            wanted = made[name].numpy().tobytes()
            assert ctypes.string_at(int(first) + shift, len(wanted)) == wanted
    assert tuple(order) == located.names
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter"):
        list(read_parts(path, located.bounds))


def test_a_file_system_may_give_less_than_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made, read = tmp_path / "tensors", torch.randn(400), os.preadv
    save_file({"t": made}, path)
    located = locate_tensors(path)
    assert located is not None
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:700]], at))
    ((some, shift),) = read_parts(path, located.bounds)
    assert some == slice(0, 1)
    assert ctypes.string_at(int(located.bounds[0, 0]) + shift, 1600) == made.numpy().tobytes()


def test_tensors_that_overlap_or_have_several_dtypes_are_not_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    entry = {"dtype": "F32", "shape": [4]}
    for second, told in ((16, True), (8, False)):
        header = {
            "a": entry | {"data_offsets": [0, 16]},
            "b": entry | {"data_offsets": [second, second + 16]},
        }
        text = json.dumps(header).ljust(160).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
        assert (locate_tensors(path) is not None) == told
    save_file({"a": torch.ones(2), "b": torch.ones(2).half()}, path)
    assert locate_tensors(path) is None


@pytest.mark.parametrize("more", [{}, {"b": torch.ones(1, dtype=torch.uint8).view(torch.float8_e5m2)}])
def test_tensors_without_elements_are_read(tmp_path: Path, more: dict[str, Tensor]) -> None:
    path = tmp_path / "tensors"
    made = {"a": torch.zeros(0, 4), "c": torch.zeros(8, 0).bfloat16()} | more
    save_file(made, path)
    found = read_tensors(path)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in made.items()
    }
    assert read_tensors(path, values=False).keys() == made.keys()


def test_large_headers_are_not_kept(tmp_path: Path) -> None:
    """Sixty-four of them might have gigabytes."""
    path = tmp_path / "tensors"
    tensor_file._kept_entries.cache_clear()
    for count, kept in ((4000, 0), (448, 1)):
        save_file({f"layers.{number}.lora_A.weight": torch.zeros(1) for number in range(count)}, path)
        assert len(read_tensors(path, values=False)) == len(read_tensors(path)) == count
        assert tensor_file._kept_entries.cache_info().currsize == kept
