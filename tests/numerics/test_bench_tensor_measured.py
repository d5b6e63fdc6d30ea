"""Sums of tensor parallelism are counted where the model asks for them."""

from __future__ import annotations

import pytest
from forked import FORKS

from plait.core.settings import ModelSettings
from plait_bench import gloo_processes
from plait_bench.tensor_measured import TensorOptions, count


def test_two_sums_a_layer_in_each_direction_and_those_of_embedding_and_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo_processes, "get_context", lambda _: FORKS)
    tokens = 16
    found = count(ModelSettings(kind="tiny", dtype="float32"), TensorOptions(slices=2, tokens=tokens))
    assert len(found) == 2
    assert found[0] == found[1]
    one = tokens * found[0].hidden * found[0].value
    layers = found[0].layers
    assert found[0].backward == (2 * layers - 1) * one  # the first layer's input needs no gradient
    assert found[0].forward == (2 * layers + 2) * one  # the loss makes the head's gradient
