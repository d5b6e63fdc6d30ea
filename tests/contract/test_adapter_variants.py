"""A variant that is added from outside trains, resumes and is exported as the built-in one does.

Two are added here without touching the package: LoRA with a frozen A, and DoRA. Both follow
``plait.adapters.variants.AdapterVariant`` and have no kernels of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_a import FrozenA
from laboratory import (
    LOSS_TOLERANCE,
    NARROW,
    TINY,
    Kept,
    Laboratory,
    assert_same,
    assert_same_bits,
    random_texts,
    stopping,
)
from peft import PeftModel
from peft_folders import stored_tensors
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from plait.adapters.lora import Lora
from plait.adapters.variants import VARIANTS, adapter_bytes, attach
from plait.cli.main import main
from plait.core.errors import ConfigError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait.distributed.replica_stage import ReplicaStage
from plait.engine.build import check_engine
from plait.models.base import BaseModel
from plait.models.load import load_model, transformers_model
from plait.models.targets import resolve_targets
from plait.search.checks import check_model
from plait_kernels import Bank, KernelError, SiteRows, TensorSpec
from plait_kernels.bank import GRADIENTS

STEPS = 5


class Dora(Lora):
    """h = b + m ∘ u / ‖W + s B A‖, u = x Wᵀ + s S Bᵀ, the norm of each row taken as constant (DoRA §4.3)."""

    name = "dora"
    fused = False
    saves = 3

    def tensors(self, in_features: int, out_features: int, rank: int) -> tuple[TensorSpec, ...]:
        return *super().tensors(in_features, out_features, rank), TensorSpec(
            "lora_magnitude_vector", (out_features,)
        )

    def initial(self, tensor: TensorSpec, seed: int, module: str, weight: Callable[[], Tensor], /) -> Tensor:
        if tensor.name == "lora_magnitude_vector":
            return weight().float().norm(dim=1)
        return super().initial(tensor, seed, module, weight)

    def forward(self, rows: SiteRows, out: Tensor) -> tuple[Tensor, ...]:
        a, b, magnitude = rows.tensors
        norm = (rows.weight + rows.scale * b @ a).norm(dim=1)
        s = rows.drop(rows.x) @ a.T
        u = linear(rows.x, rows.weight) + rows.scale * (s @ b.T)
        out.copy_(magnitude / norm * u)
        if rows.bias is not None:
            out += rows.bias
        return s, u, norm

    def backward(self, rows: SiteRows, saved: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None) -> None:
        (s, u, norm), (a, b, magnitude), (grad_a, grad_b, grad_m) = saved, rows.tensors, rows.gradients
        grad_m += (grad * u).sum(dim=0) / norm
        du = grad * (magnitude / norm)
        ds = rows.scale * du @ b
        grad_b += rows.scale * du.T @ s
        grad_a += ds.T @ rows.drop(rows.x)
        if dx is not None:
            dx += (du - grad) @ rows.weight + rows.drop(ds @ a)

    def peft_config(self, _spec: AdapterSpec, /) -> dict[str, Any]:
        return {"use_dora": True}


TASK = ("model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4", "engine.threads=1")


@pytest.fixture(params=[FrozenA, Dora], ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Iterator[Lora]:
    made: Lora = VARIANTS.add(request.param.name, request.param())
    yield made
    VARIANTS.remove(made.name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return load_model(TINY, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Undisturbed runs."""
    return Kept(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def lab(model: BaseModel, tmp_path: Path, kept: Kept) -> Laboratory:
    torch.set_num_threads(1)
    return Laboratory("llama", model, tmp_path, kept)


def jobs_of(variant: Lora, *, dropout: float = 0.0) -> list[JobSpec]:
    """Two jobs of the variant, unlike each other, and two of plain LoRA."""

    def job(name: str, kind: str, rank: int, targets: Any, **train: Any) -> JobSpec:
        adapter = AdapterSpec(rank, dropout=dropout, target_modules=targets, variant=kind)
        spec = TrainSpec(lr=2e-3, steps=STEPS, batch_size=3, **train)
        return JobSpec(name, adapter, spec, random_texts(spec.seed, 5, 40))

    return [
        job("first", variant.name, 5, "all-linear", seed=1, weight_decay=0.1),
        job("plain", "lora", 5, "all-linear", seed=1, weight_decay=0.1),
        job("second", variant.name, 3, NARROW["llama"], seed=2, lora_plus_ratio=8.0, clip_norm=0.05),
        job("other", "lora", 8, NARROW["llama"], seed=3),
    ]


@pytest.mark.parametrize(("kernels", "dropout"), [("reference", 0.0), ("grouped", 0.1)])
def test_it_trains_together_with_plain_lora_as_alone(
    variant: Lora, lab: Laboratory, kernels: str, dropout: float
) -> None:
    jobs = jobs_of(variant, dropout=dropout)
    joint = lab.undisturbed(jobs, kernels=kernels)
    for job in jobs:
        assert_same(joint, lab.run([job], kernels=kernels), [job])
    assert joint.losses("first") != pytest.approx(joint.losses("plain"), rel=LOSS_TOLERANCE)
    assert joint.losses("first")[0] == pytest.approx(joint.losses("plain")[0], rel=LOSS_TOLERANCE)


def test_untrained_tensors_keep_every_bit(variant: Lora, lab: Laboratory) -> None:
    """Weight decay and clipping reach what trains, and nothing else."""
    jobs = jobs_of(variant)
    joint = lab.undisturbed(jobs, kernels="reference")
    for job in jobs:
        kept = [spec.trains for spec in VARIANTS.get(job.adapter.variant).tensors(4, 4, 2)]
        for site, begun in joint.start[job.name].items():
            for trains, before, after in zip(kept, begun, joint.end[job.name][site], strict=True):
                assert torch.equal(before, after) is not trains


def test_its_folder_is_the_same_model_in_peft(variant: Lora, lab: Laboratory, tmp_path: Path) -> None:
    jobs = jobs_of(variant)
    joint = lab.undisturbed(jobs, kernels="reference")
    for job in (jobs[0], jobs[2]):
        folder = joint.ended(job.name).adapter
        assert folder is not None
        plain = transformers_model(TINY, cache=tmp_path)
        peft = PeftModel.from_pretrained(plain, folder)
        loss, labelled = 0.0, 0
        split = lab.data(job).validation
        for index in range(len(split.lengths)):
            own = slice(int(split.offsets[index]), int(split.offsets[index + 1]))
            tokens, labels = torch.tensor(split.tokens[own]).long(), torch.tensor(split.labels[own])
            with torch.no_grad():
                logits = peft(tokens.unsqueeze(0), use_cache=False).logits[0, :-1]
            chosen = labels[1:]
            loss += float(cross_entropy(logits[chosen], tokens[1:][chosen], reduction="sum"))
            labelled += int(chosen.sum())
        assert joint.evaluations(job.name)[-1] == pytest.approx(loss / labelled, rel=1e-5)
        stored = stored_tensors(folder)
        for site, ours in joint.end[job.name].items():
            names = [tensor.name for tensor in VARIANTS.get(job.adapter.variant).tensors(1, 1, 1)]
            theirs = [stored[site].pop(name) for name in names]
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert not any(stored.values())


def test_it_resumes_bit_for_bit(variant: Lora, lab: Laboratory) -> None:
    jobs = jobs_of(variant, dropout=0.1)
    whole = lab.undisturbed(jobs)
    first = lab.run(jobs, kernels="grouped", between=stopping(3))
    rest = lab.run(jobs, kernels="grouped", resume_from=first.checkpoints)
    assert [len(first.losses(job.name)) for job in jobs] == [3] * len(jobs)
    assert_same_bits(first.before(rest), whole, jobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_memory_is_predicted_exactly(variant: Lora, model: BaseModel, dtype: torch.dtype) -> None:
    spec = AdapterSpec(5, variant=variant.name, target_modules="all-linear")
    sites = resolve_targets(spec.target_modules, model.linears)
    bank = Bank(model.sites, device="cpu", compute_dtype=dtype)
    attach(bank, "one", spec, sites, seed=0, weight_of=model.frozen_weight)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in bank.block("one").tensors()
        if tensor.is_floating_point()
    }
    predicted = adapter_bytes(spec, model.linears, dtype.itemsize)
    assert predicted == sum(held.values())
    plain = adapter_bytes(replace(spec, variant="lora"), model.linears, dtype.itemsize)
    assert (predicted < plain) is (variant.name == "frozen_a")


def test_replicas_in_stages_count_the_norm_of_all_its_gradients(variant: Lora, model: BaseModel) -> None:
    spec = AdapterSpec(5, variant=variant.name, target_modules="all-linear")
    sites = resolve_targets(spec.target_modules, model.linears)
    bank = Bank(model.sites, device="cpu", compute_dtype=torch.float32)
    attach(bank, "one", spec, sites, seed=0, weight_of=model.frozen_weight)
    block = bank.block("one")
    block.state[GRADIENTS] = 1.0
    stage = object.__new__(ReplicaStage)
    stage._model = model
    trained = sum(each.numel() for site in bank.sites for each in block.at(site, GRADIENTS))
    counted = sum(each.sum() for site in bank.sites for each in stage._counted(block, site))
    assert counted == trained > 0


def test_unsupported_variants_are_refused_before_a_model_loads(variant: Lora) -> None:
    jobs = jobs_of(variant)
    settings = RunSettings(engine=EngineSettings(kernels="grouped", device="cpu"))
    with pytest.raises(ConfigError, match=f"adapter.variant={variant.name}") as refusal:
        check_engine(settings, jobs)
    assert "reference, or auto" in str(refusal.value)
    check_engine(settings, [job for job in jobs if job.adapter.variant == "lora"])
    for kernels in ("auto", "reference"):
        check_engine(replace(settings, engine=replace(settings.engine, kernels=kernels)), jobs)
    with pytest.raises(ConfigError, match=r"engine\.kernels=fast") as refusal:
        check_engine(replace(settings, engine=replace(settings.engine, kernels="fast")), jobs)
    assert "auto, grouped, reference" in str(refusal.value)


@pytest.mark.parametrize("variant", [Dora], ids=["dora"], indirect=True)
def test_a_search_chooses_among_variants(
    variant: Lora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    command = ["sweep", *TASK, "train.steps=3", f"adapter.variant=lora,{variant.name}", "search.sampler=grid"]
    assert main([*command, "engine.kernels=grouped"]) == 2
    assert f"adapter.variant={variant.name}" in capsys.readouterr().err
    assert main(command) == 0
    assert f"adapter.variant={variant.name}" in capsys.readouterr().out
    written = [json.loads(file.read_text()) for file in tmp_path.rglob("adapter_config.json")]
    assert {config.get("use_dora", False) for config in written} == {False, True}


def test_an_unknown_variant_is_refused_with_the_choices(variant: Lora) -> None:
    job = JobSpec("one", AdapterSpec(variant="lorra"))
    with pytest.raises(ConfigError, match=r"adapter\.variant=lorra") as refusal:
        check_model(ModelSettings(kind="hf", id="not/there"), [job])
    assert f"{', '.join(sorted(['lora', variant.name]))}" in str(refusal.value)


def test_a_variant_that_claims_the_kernels_of_plain_lora_has_its_tensors(model: BaseModel) -> None:
    class Claims(FrozenA):
        fused = True

    class Nothing(FrozenA):
        def tensors(self, in_features: int, out_features: int, rank: int) -> tuple[TensorSpec, ...]:
            return tuple(
                replace(each, trains=False) for each in super().tensors(in_features, out_features, rank)
            )

    bank = Bank(model.sites, device="cpu", compute_dtype=torch.float32)
    options: dict[str, Any] = {
        "rank": 2,
        "scale": 1.0,
        "dropout": 0.0,
        "seed": 0,
        "sites": [bank.sites[0].name],
    }
    with pytest.raises(KernelError, match="fused"):
        bank.attach("one", variant=Claims(), **options)
    with pytest.raises(KernelError, match="at least one"):
        bank.attach("one", variant=Nothing(), **options)
    assert not bank.blocks
