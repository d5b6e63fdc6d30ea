"""Launched and replayed microbatches compared, at a small size on a CPU with a stand-in for graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from recorders import Again, Refusing

from plait.core.errors import ConfigError
from plait_bench import gpu_graphs as subject
from plait_kernels import recordings

SIZES: dict[str, Any] = {
    **{"layers": 1, "hidden": 32, "inner": 48, "heads": 4, "shared": 2, "vocabulary": 97},
    **{"adapters": 3, "length": 40, "rank": 4, "dropout": 0.1, "labelled": 0.5, "capacity": 128},
}


class Spoiling(Again):
    """Changes the weights at each replay."""

    side: subject._Side

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        replay = super().record(run)

        def spoil() -> Any:
            found = replay()
            self.side.bank.block("1").state.mul_(1.001)
            return found

        return spoil


@pytest.fixture(autouse=True)
def uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without flash kernels uploads its layout, which the stand-in does again at each replay."""
    monkeypatch.setattr(recordings, "refused", nullcontext)


def side_of(*sizes: int, recorder: Again | None = None) -> subject._Side:
    asked = subject.GraphOptions(**SIZES, repeats=2, sizes=sizes)
    torch.manual_seed(0)
    recorder = recorder or Again()
    side = subject._Side(asked, "auto", torch.device("cpu"), torch.float32, recorder=recorder)
    if isinstance(recorder, Spoiling):
        recorder.side = side
    return side


def figures(size: int = 48, recorder: Again | None = None) -> dict[str, Any]:
    return {figure.name: figure for figure in side_of(size, recorder=recorder).figures(size)}


def test_replays_are_compared_with_launches() -> None:
    found = figures()
    assert found["48 tokens: refused"].ours == 0
    assert found["48 tokens: replays with other gradients"].ours == 0
    assert float(found["48 tokens: replays with other gradients"].note.split()[-1]) < 1e-5
    assert found["48 tokens: replayed"].ours > 0


def test_other_gradients_and_refusals_are_seen() -> None:
    wrong = figures(recorder=Spoiling())["48 tokens: replays with other gradients"]
    assert (wrong.ours, wrong.within) == (3, False)
    refused = figures(recorder=Refusing(1))["48 tokens: refused"]
    assert (refused.ours, refused.within) == (1, False)
    assert "stream is capturing" in refused.note


def test_a_size_is_not_blamed_for_another_ones_refusal() -> None:
    side = side_of(48, 96, recorder=Refusing(1))
    found = {figure.name: figure for size in (48, 96) for figure in side.figures(size)}
    assert [found[f"{size} tokens: refused"].ours for size in (48, 96)] == [1, 0]
    assert found["96 tokens: refused"].note == ""


def test_small_sizes_are_replayed_too() -> None:
    """They are filled up to 64 tokens; nothing at all was computed, and compared with itself."""
    found = figures(6)
    assert found["6 tokens: refused"].ours == 0
    assert float(found["6 tokens: replays with other gradients"].note.split()[-1]) < 1e-5


def test_memory_of_recordings_is_what_lies_in_their_own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's cache gives back what it does not use before each recording."""
    held = {"segment_pool_id": (0, 1), "total_size": 3 << 20}
    cache = [{"segment_pool_id": (0, 0), "total_size": size << 20} for size in (9, 1)]
    moments = iter([[cache[0]], [held, cache[1]]])  # before and after
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: next(moments))
    side, cpu = side_of(48), torch.device("cpu")

    def of_a_device() -> int:
        side.device = torch.device("cuda")
        found = real()
        side.device = cpu
        return found

    real = side._held
    monkeypatch.setattr(side, "_held", of_a_device)
    found = {figure.name: figure for figure in side.figures(48)}
    assert found["48 tokens: replayed"].note.endswith("; 3 MiB more")


def test_what_cannot_be_filled_up_is_refused() -> None:
    """Six tokens and 58 more in five samples, each longer than eight."""
    asked = subject.GraphOptions(**{**SIZES, "length": 8}, repeats=1, sizes=(6,))
    side = subject._Side(asked, "auto", torch.device("cpu"), torch.float32, recorder=Again())
    (found,) = side.figures(6)
    assert (found.name, found.ours, found.within) == ("6 tokens: refused", 1, False)
    assert "more than 8 tokens" in found.note


def test_sizes_that_no_samples_give_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bench\.options\.sizes=\[2, 50, 123\]") as refused:
        subject.GraphOptions(**SIZES, repeats=1, sizes=(2, 48, 50, 123))
    assert "Choose multiples of 3 up to 120." in str(refused.value)
    with pytest.raises(ConfigError, match="adapters must be at least 1"):
        subject.GraphOptions(**{**SIZES, "adapters": 0}, repeats=1, sizes=(48,))
