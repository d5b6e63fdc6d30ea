"""Launched and replayed microbatches compared, at a small size on a CPU with a stand-in for graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from plait.core.errors import ConfigError
from plait_bench import gpu_graphs as subject
from plait_kernels import recordings

SIZES: dict[str, Any] = {
    **{"layers": 1, "hidden": 32, "inner": 48, "heads": 4, "shared": 2, "vocabulary": 97},
    **{"adapters": 3, "length": 40, "rank": 4, "dropout": 0.1, "labelled": 0.5, "capacity": 128},
}


class Replays:
    """Runs again what was recorded; or changes what comes of it, or refuses."""

    def __init__(self, *, spoil: bool = False, refuse: bool = False) -> None:
        self.spoil, self.refuse = spoil, refuse
        self.side: Any = None

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        if self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replay() -> Any:
            found = run()
            if self.spoil:
                self.side.bank.block("1").state.mul_(1.001)
            return found

        return replay

    def forget(self) -> None:
        """Nothing is kept."""


@pytest.fixture(autouse=True)
def uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without flash kernels uploads its layout, which the stand-in does again at each replay."""
    monkeypatch.setattr(recordings, "refused", nullcontext)


def figures(**how: bool) -> dict[str, Any]:
    asked, recorder = subject.GraphOptions(**SIZES, repeats=2, sizes=(48,)), Replays(**how)
    torch.manual_seed(0)
    recorder.side = side = subject._Side(asked, "auto", torch.device("cpu"), torch.float32, recorder=recorder)
    return {figure.name: figure for figure in side.figures(48)}


def test_replays_are_compared_with_launches() -> None:
    found = figures()
    assert found["48 tokens: refused"].ours == 0
    assert found["48 tokens: replays with other gradients"].ours == 0
    assert float(found["48 tokens: replays with other gradients"].note.split()[-1]) < 1e-5
    assert found["48 tokens: replayed"].ours > 0


def test_other_gradients_and_refusals_are_seen() -> None:
    wrong = figures(spoil=True)["48 tokens: replays with other gradients"]
    assert (wrong.ours, wrong.within) == (3, False)
    refused = figures(refuse=True)["48 tokens: refused"]
    assert (refused.ours, refused.within) == (1, False)
    assert "stream is capturing" in refused.note


def test_sizes_that_no_samples_give_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bench\.options\.sizes=\[2, 50, 123\]") as refused:
        subject.GraphOptions(**SIZES, repeats=1, sizes=(2, 48, 50, 123))
    assert "Choose multiples of 3 up to 120." in str(refused.value)
