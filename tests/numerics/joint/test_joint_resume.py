"""A checkpoint resumes exactly, is independent of the layout, and is refused if it was altered."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import Kept, Laboratory, assert_same, assert_same_bits, stopping
from safetensors.torch import load_file

from plait.core.errors import CheckpointError
from plait.core.jobs import JobSpec
from plait.core.messages import Cursor, JobAdmitted, Notice
from plait.engine.checkpoint_files import TENSORS, Origin, read_checkpoint
from plait.engine.checkpoints import HEADER


def interrupted(
    lab: Any, jobs: Any, after: int, resume_from: dict[str, Path] | None = None, **options: Any
) -> tuple[Any, dict[str, Path]]:
    """Train ``after`` iterations, then stop as Ctrl-C does; the states by job."""
    history = lab.run(jobs, kernels="grouped", between=stopping(after), resume_from=resume_from, **options)
    return history, history.checkpoints


def test_an_interrupted_group_resumes_bit_for_bit(laboratory: Any) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=9)[:5]
    whole = lab.undisturbed(jobs, kernels="grouped")
    first, states = interrupted(lab, jobs, after=4)
    rest = lab.run(jobs, kernels="grouped", resume_from=states)
    assert [e.step for e in rest.events if isinstance(e, JobAdmitted)] == [4] * 5
    for job in jobs:
        assert first.ended(job.name).reason == "interrupted"
        assert rest.ended(job.name).tokens == whole.ended(job.name).tokens
        assert rest.ended(job.name).device_seconds > first.ended(job.name).device_seconds
    assert_same_bits(first.before(rest), whole, jobs)


def test_a_job_resumes_in_another_group(laboratory: Any) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=9)
    whole = lab.undisturbed(jobs[1:2], kernels="grouped")
    first, states = interrupted(lab, jobs[:3], after=5)
    name = jobs[1].name
    rest = lab.run(jobs[1:2] + jobs[4:6], kernels="grouped", resume_from={name: states[name]})
    assert_same(first.before(rest), whole, jobs[1:2])


def test_the_checkpoint_is_whole_tensors_under_peft_names(laboratory: Any) -> None:
    lab = laboratory("llama")
    job = lab.group(steps=3)[1]
    _, states = interrupted(lab, [job], after=2)
    tensors = load_file(states[job.name] / TENSORS)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for kind in ("", "exp_avg.", "exp_avg_sq."):
        assert tensors[kind + key].shape == (3, 64)
        assert tensors[kind + key].dtype == torch.float32
    assert tensors["exp_avg_sq." + key].abs().sum() > 0
    header = json.loads((states[job.name] / HEADER).read_text())
    assert header["cursor"]["step"] == 2


def damage(kind: str, state: Path) -> None:
    match kind:
        case "cut short":
            content = (state / TENSORS).read_bytes()
            (state / TENSORS).write_bytes(content[: len(content) // 2])
        case "altered":
            content = bytearray((state / TENSORS).read_bytes())
            content[-5] ^= 1
            (state / TENSORS).write_bytes(content)
        case "without tensors":
            (state / TENSORS).unlink()
        case "header not JSON":
            (state / HEADER).write_text("{")
        case "header without its keys":
            (state / HEADER).write_text("{}")
        case "header altered":
            header = json.loads((state / HEADER).read_text())
            header["cursor"]["tokens"] += 1
            (state / HEADER).write_text(json.dumps(header))
        case "another version":
            header = json.loads((state / HEADER).read_text())
            (state / HEADER).write_text(json.dumps(header | {"version": 99}))


DAMAGES = [
    "cut short",
    "altered",
    "without tensors",
    "header not JSON",
    "header without its keys",
    "header altered",
    "another version",
]


@dataclass(frozen=True)
class Stopped:
    """Two jobs that were stopped after two steps and after four, and what they would have come to."""

    jobs: list[JobSpec]
    whole: Any
    first: dict[str, Path]
    second: dict[str, Path]


@pytest.fixture(scope="module")
def stopped(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory, kept: Kept) -> Stopped:
    torch.set_num_threads(1)
    lab = Laboratory("llama", tiny_model("llama"), tmp_path_factory.mktemp("stopped"), kept)
    jobs = lab.group(dropout=0.1, steps=5)[:2]
    whole = lab.undisturbed(jobs, kernels="grouped")
    _, first = interrupted(lab, jobs, after=2)
    rest, second = interrupted(lab, jobs, after=2, resume_from=first)
    assert {state.name for state in second.values()} == {"step-00000004"}
    assert rest.losses(jobs[0].name) == whole.losses(jobs[0].name)[2:4]
    return Stopped(jobs, whole, first, second)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    laboratory: Any, stopped: Stopped, tmp_path: Path, kind: str
) -> None:
    """And it is said; nobody else is touched, and the losses are those of a run without any interruption."""
    name, other = (job.name for job in stopped.jobs)
    states = tmp_path / "states"
    shutil.copytree(stopped.second[name].parent, states)
    assert {state.name for state in states.iterdir()} == {stopped.first[name].name, "step-00000004"}
    damage(kind, states / "step-00000004")
    resume_from = {name: states, other: stopped.second[other]}
    again = laboratory("llama").run(stopped.jobs, kernels="grouped", resume_from=resume_from)
    assert {e.job.name: e.step for e in again.events if isinstance(e, JobAdmitted)} == {name: 2, other: 4}
    (notice,) = [event.text for event in again.events if isinstance(event, Notice)]
    assert "step-00000004" in notice
    assert "resumes from step 2" in notice
    assert again.losses(name) == pytest.approx(stopped.whole.losses(name)[2:], rel=1e-5)
    assert again.losses(other) == pytest.approx(stopped.whole.losses(other)[4:], rel=1e-5)


def test_without_any_whole_checkpoint_a_job_starts_afresh(laboratory: Any) -> None:
    lab = laboratory("llama")
    job = lab.group(dropout=0.1, steps=3)[0]
    whole = lab.undisturbed([job], kernels="grouped")
    _, states = interrupted(lab, [job], after=1)
    damage("altered", states[job.name])
    again = lab.run([job], kernels="grouped", resume_from=states)
    assert [event.text for event in again.events if isinstance(event, Notice)]
    assert_same_bits(again, whole, [job])


def test_a_checkpoint_of_another_job_is_refused_with_the_difference(laboratory: Any) -> None:
    lab = laboratory("llama")
    job = lab.group(steps=3)[0]
    _, states = interrupted(lab, [job], after=1)
    state = states[job.name]
    own = Origin.of(job, model=lab.model.identity.digest, data=lab.data(job).digest)
    cursor, _ = read_checkpoint(state, own)
    assert cursor.step == 1
    other = replace(job, train=replace(job.train, batch_size=7))
    with pytest.raises(CheckpointError, match=r"'batch_size': 1.*'batch_size': 7"):
        read_checkpoint(state, Origin.of(other, model=own.model, data=own.data))
    with pytest.raises(CheckpointError, match="model was"):
        read_checkpoint(state, replace(own, model="another"))
    assert Cursor() != cursor
