"""What a saved state belongs to, and what is done with states of something else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.core.errors import CheckpointError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.messages import Cursor
from plait.engine.checkpoint_files import (
    TENSORS,
    Origin,
    OriginError,
    _seal,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from plait.engine.checkpoints import HEADER, checkpoint_name

JOB = JobSpec("job", AdapterSpec(rank=2), TrainSpec(seed=1, batch_size=2, accumulation=2))
ORIGIN = Origin.of(JOB, model="m", data="d")


def save(folder: Path, step: int, origin: Origin = ORIGIN) -> Path:
    directory = folder / checkpoint_name(step)
    write_checkpoint(directory, origin, Cursor(step), {"w": torch.ones(2)})
    return directory


@pytest.mark.parametrize("key", ["seed", "batch_size", "accumulation"])
def test_settings_that_choose_the_samples_are_part_of_the_origin(key: str) -> None:
    other = replace(JOB, train=replace(JOB.train, **{key: 4}))
    assert Origin.of(other, model="m", data="d") != ORIGIN
    longer = replace(JOB, train=replace(JOB.train, steps=99, lr=1.0))
    assert Origin.of(longer, model="m", data="d") == ORIGIN


def test_a_checkpoint_of_another_model_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, replace(ORIGIN, model="other"))
    with pytest.raises(OriginError, match="model"):
        newest_checkpoint(tmp_path, ORIGIN)


def test_a_checkpoint_of_another_version_is_not_read_however_whole_it_is(tmp_path: Path) -> None:
    directory = save(tmp_path, 2)
    header = json.loads((directory / HEADER).read_text()) | {"version": 99}
    del header["sha256"]
    (directory / HEADER).write_text(json.dumps(header | {"sha256": _seal(header)}))
    with pytest.raises(CheckpointError, match="version 99"):
        read_checkpoint(directory, ORIGIN)
    assert newest_checkpoint(tmp_path, ORIGIN).directory is None


@pytest.mark.parametrize("text", ["", '{"version": 3, "cur', '{"a": 1}', "[]", "\x00" * 90])
def test_a_damaged_header_is_named_and_not_the_error_of_the_program(text: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 2)
    (directory / HEADER).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{checkpoint_name(2)}: {HEADER} is not as it was written\n"):
        read_checkpoint(directory, ORIGIN)


@pytest.mark.parametrize("name", [HEADER, TENSORS])
def test_a_file_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 2)
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{checkpoint_name(2)}: {name}: No such file"):
        read_checkpoint(directory, ORIGIN)
