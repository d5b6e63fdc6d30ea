"""A disk that is full when something is written: an error that names the file, and nothing half written."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.core.errors import StorageError
from plait.core.messages import Cursor
from plait.core.samples import Split, TokenisedData
from plait.data import loading
from plait.engine.checkpoint_files import Origin, write_checkpoint


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system finds no room when data has to reach the disk."""

    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)


def refused(error: StorageError, folder: Path) -> None:
    assert error.exit_status == 2
    assert str(folder) in error.value
    assert "No space left on device" in error.value
    assert error.rule
    assert error.remedy
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("full")
def test_a_full_disk_is_reported_for_tokenised_data(tmp_path: Path) -> None:
    empty = np.zeros(0, dtype=np.int32)
    split = Split(
        tokens=empty,
        labels=np.zeros(0, dtype=np.bool_),
        offsets=np.zeros(1, dtype=np.int64),
        rows=np.zeros(0, dtype=np.int64),
    )
    data = TokenisedData(loading.content_digest(split, split), split, split)
    with pytest.raises(StorageError) as caught:
        loading.write_cached(tmp_path / "data.npz", data)
    refused(caught.value, tmp_path)


@pytest.mark.usefixtures("full")
def test_a_full_disk_is_reported_for_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        write_checkpoint(tmp_path / "state", Origin({}, {}, "m", "d"), Cursor(1, 0), {"w": torch.zeros(2)})
    refused(caught.value, tmp_path)
