"""Promise 1 on a quantised base model, and PEFT on the weights that it stands for."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from laboratory import TINY, Kept, Laboratory, assert_same, random_data, stopping
from peft_runs import assert_same_as_peft, peft_run
from safetensors.torch import load_file, save_file
from saved_models import saved

from plait.adapters.facts import WEIGHTS, quantised_base
from plait.core.errors import ConfigError, ModelError
from plait.core.lifecycle import JobState
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.cost.peaks import StorageCounter
from plait.engine.build import largest_made, worker_facts
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.models.context import MicrobatchContext
from plait.models.load import inspect_model, load_model, load_part
from plait.models.lora import LinearGroup
from plait.models.parts import Part
from plait.models.targets import read_together
from plait.serve.folders import FolderAdapters
from plait_kernels.quantised import Quantised

STEPS, PEFT_STEPS = 6, 8
MODES = ("int8", "nf4", "fp8")


def settings_of(mode: str) -> ModelSettings:
    return replace(TINY, quantise=mode)


@pytest.fixture(scope="module", params=MODES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    model = load_model(settings_of(request.param), cache=folder)
    return Laboratory("llama", model, folder, Kept(folder / "kept"))


def test_joint_equals_solo(lab: Laboratory) -> None:
    jobs = lab.group(dropout=0.1, steps=STEPS)[:3]
    joint = lab.undisturbed(jobs)
    for job in jobs[:2]:
        assert_same(joint, lab.run([job]), [job])


def test_joint_equals_peft_on_what_the_weights_stand_for(lab: Laboratory) -> None:
    jobs = lab.group(steps=PEFT_STEPS)[:3]
    joint = lab.undisturbed(jobs)
    for job in jobs:
        assert_same_as_peft(joint, peft_run(lab, job, joint.start[job.name]))


def test_losses_are_those_of_another_model(lab: Laboratory, tmp_path: Path) -> None:
    """Small differences to the dense model, but differences: the quantised weights are used."""
    dense = load_model(settings_of("none"), cache=tmp_path)
    jobs = lab.group(steps=STEPS)[:1]
    found = lab.run(jobs).losses(jobs[0].name)
    other = Laboratory("llama", dense, tmp_path).run(jobs).losses(jobs[0].name)
    off = max(abs(a - b) / b for a, b in zip(found, other, strict=True))
    assert 1e-4 < off < 0.1


def test_bytes_are_known_before_it_is_loaded(lab: Laboratory, tmp_path: Path) -> None:
    settings = settings_of(lab.model.identity.quantise)
    shape = inspect_model(settings, cache=tmp_path)
    known = worker_facts(RunSettings(model=settings), shape, 2**30).shape
    dense = worker_facts(RunSettings(model=settings_of("none")), shape, 2**30).shape
    # What is left: cos and sin's frequencies, which are not weights.
    assert 0 <= lab.model.weight_bytes - known.weight_bytes < 1000
    assert known.weight_bytes < 0.5 * dense.weight_bytes
    assert (known.made_bytes, dense.made_bytes) == (max(map(made_peak, lab.model.groups)), 0)
    cut = ClusterSettings(processes=2, pipeline=2)
    again = [  # of tied weights, which two stages have
        sum(each.weight_bytes for each in worker_facts(run, shape, 2**30).parts[0]) - whole.weight_bytes
        for run, whole in (
            (RunSettings(model=settings, cluster=cut), known),
            (RunSettings(model=settings_of("none"), cluster=cut), dense),
        )
    ]
    assert again[0] == pytest.approx(again[1], abs=2)
    facts = LocalWorker(lab.model, DataCatalogue(random_data), EngineSettings()).facts
    assert {facts.shape.made_bytes, facts.parts[0][0].made_bytes} == {known.made_bytes}


def test_layers_that_read_the_same_are_counted_together_whatever_their_names(tmp_path: Path) -> None:
    settings = replace(settings_of("nf4"), family="cohere")  # attention and MLP read the same norm
    model, shape = load_model(settings, cache=tmp_path), inspect_model(settings, cache=tmp_path)
    assert [[each.name for each in group] for group in shape.together] == [
        list(group.names) for group in model.groups
    ]
    by_names = [group for group in read_together(shape.linears).values() if len(group) > 1]
    made = worker_facts(RunSettings(model=settings), shape, 2**30).shape.made_bytes
    assert made == max(map(made_peak, model.groups)) > 1.2 * largest_made(by_names, 4, "nf4")


def made_peak(group: LinearGroup) -> int:
    """Measured bytes while a group's weight is made."""
    assert isinstance(group.weight, Quantised)
    with StorageCounter() as counter:
        group.weight.dense()  # the tables of codes
        before = counter.live
        counter.restart()
        group.weight.dense()
    return counter.peak - before


def test_a_base_is_another_if_it_is_quantised_otherwise(lab: Laboratory, tmp_path: Path) -> None:
    digests = {inspect_model(settings_of(mode), cache=tmp_path).digest for mode in ("none", *MODES)}
    assert len(digests) == 4
    assert lab.model.identity.digest in digests


def test_an_exported_adapter_names_its_base(
    lab: Laboratory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (job,) = lab.group(steps=2)[:1]
    history = lab.run([job])
    folder = history.ended(job.name).adapter
    assert folder is not None
    assert quantised_base(Path(folder)) == lab.model.identity.quantise
    assert FolderAdapters(lab.model, {"one": Path(folder)}).names == ("one",)
    assert capfd.readouterr().err == ""
    nameless = Path(copytree(folder, tmp_path / "nameless"))
    save_file(load_file(nameless / WEIGHTS), nameless / WEIGHTS)
    FolderAdapters(lab.model, {"one": nameless, "two": nameless})
    assert capfd.readouterr().err.count("does not say on which weights it was trained") == 1
    dense = load_model(settings_of("none"), cache=tmp_path)
    with pytest.raises(ModelError, match=r"trained with model\.quantise="):
        FolderAdapters(dense, {"one": Path(folder)})


def test_stages_read_by_parts_have_the_bits_of_the_whole_model(lab: Laboratory, tmp_path: Path) -> None:
    """And give its result."""
    mode = lab.model.identity.quantise
    settings = replace(saved(settings_of("none"), tmp_path), quantise=mode)
    whole = load_model(settings, cache=tmp_path)
    parts = [load_part(settings, Part(layers), cache=tmp_path) for layers in (range(0, 1), range(1, 4))]
    context = MicrobatchContext.of(torch.arange(10, 30), (0, 7, 20))
    expected = whole.hidden(context)
    assert torch.equal(parts[1].hidden(context, parts[0].hidden(context)), expected)
    groups = [group for part in parts for group in part.groups]
    for own, other in zip(groups, whole.groups, strict=True):
        assert own.names == other.names
        for left, right in zip(own.tensors(), other.tensors(), strict=True):
            assert torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))


def test_a_checkpoint_of_a_base_quantised_otherwise_is_refused(lab: Laboratory, tmp_path: Path) -> None:
    (job,) = lab.group(steps=2)[:1]
    dense = Laboratory("llama", load_model(settings_of("none"), cache=tmp_path), tmp_path)
    for first, then in ((lab, dense), (dense, lab)):
        stopped = first.run([job], between=stopping(1))
        state = stopped.ended(job.name).checkpoint
        assert first.run([job], resume_from={job.name: state}).losses(job.name)
        ended = then.run([job], resume_from={job.name: state}).ended(job.name)
        assert ended.state == JobState.FAILED
        assert "same adapter, data order, model and data" in ended.reason


@pytest.mark.parametrize("cluster", [{"tensor": 2}, {"shard_base": True}])
def test_slices_and_shards_are_refused(cluster: dict[str, Any]) -> None:
    settings = ClusterSettings(processes=2, **cluster)
    with pytest.raises(ConfigError, match=r"model\.quantise=nf4 with cluster"):
        RunSettings(model=settings_of("nf4"), cluster=settings)
    assert RunSettings(model=settings_of("none"), cluster=settings).cluster == settings
    assert asdict(settings_of("nf4"))["quantise"] == "nf4"  # so it is part of a search's identity
