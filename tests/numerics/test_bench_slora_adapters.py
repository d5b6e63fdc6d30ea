"""The benchmark of many adapters: what PEFT's speed is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from plait_bench import slora_adapters as bench


class Side:
    """Generates two tokens for each request, all requests in two seconds."""

    def __init__(self, *_: object) -> None:
        pass

    def requests(self, names: Sequence[str]) -> list[str]:
        return [*names]

    def timed(self, requests: Sequence[str]) -> tuple[float, list[Any]]:
        return 2.0, [SimpleNamespace(tokens=(1, 2)) for _ in requests]


def test_pefts_speed_is_of_what_it_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_Side", Side)
    monkeypatch.setattr(bench, "_peft_texts", lambda *given: ([(1, 2)] * len(given[-1]), 4.0))
    names = ("few", "many", "files", "requests", "prompt_tokens", "pool_tokens", "rounds")
    sizes: Any = dict.fromkeys(names, 1)
    asked = bench.AdaptersOptions(**sizes, ranks=(4,), new_tokens=2, alone=3, timed_alone=8)
    any_one: Any = None
    figure = bench._beside_peft(any_one, any_one, [], asked)
    assert figure.target is not None
    assert figure.target.value == 3 * 2 / 4.0
