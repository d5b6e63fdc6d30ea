"""Stand-ins for what records work on a GPU, as :class:`plait_kernels.recordings.Recorder` asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


class Again:
    """Replays by running what was recorded once more.

    Attributes:
        said: "recorded", "replayed" or "forgotten", for each time.
    """

    def __init__(self) -> None:
        self.said: list[str] = []

    @property
    def recorded(self) -> int:
        """How often it recorded."""
        return self.said.count("recorded")

    @property
    def forgotten(self) -> int:
        """How often what it had recorded was let go of."""
        return self.said.count("forgotten")

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.said.append("recorded")

        def replay() -> Any:
            self.said.append("replayed")
            return run()

        return replay

    def forget(self) -> None:
        self.said.append("forgotten")


class Refusing(Again):
    """A device that waits somewhere, at the first so many times or always: then nothing is recorded."""

    def __init__(self, times: float = math.inf) -> None:
        super().__init__()
        self.times = times

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        if self.times > 0:
            self.times -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(run)
