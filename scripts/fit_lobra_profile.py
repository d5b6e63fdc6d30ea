#!/usr/bin/env python3
"""Fits LobRA's 7B profile to its published steps: the rows of conf/cluster/a100_40g_llama2_7b.yaml.

    python scripts/fit_lobra_profile.py

Fitted for each tensor-parallel degree, on relative errors: seconds of steps (Table 9) and of microbatches
(Table 3), without every third row, and the artifact's 250 layer times with little weight, which say how
seconds grow below 2,048 tokens. In a pipeline of equal stages the last one, with head and loss, is the
slowest. The profile leaves out the last of each three rows; fits without the first and without the second,
with which these rows are compared, are written to the benchmarks' data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from scipy.optimize import nnls

from plait_bench.inputs import DATA
from plait_bench.lobra import read_layer_times
from plait_bench.lobra_tables import PROFILE_LACKS, THIRDS

ROOT = Path(__file__).resolve().parents[1]
LAYER_WEIGHT = 0.1  # of a layer time beside a step


class Row(NamedTuple):
    """What one published figure says of a degree's coefficients: features · coefficients = seconds."""

    tp: int
    features: tuple[float, ...]
    seconds: float
    weight: float


def stage(layers: float, sequences: int, length: int, times: float = 1.0) -> tuple[float, ...]:
    """The features of the last stage for ``sequences`` of ``length`` tokens, ``times`` over."""
    tokens = sequences * length
    head = (1.0, tokens) if layers > 1 else (0.0, 0.0)
    return tuple(times * each for each in (layers, layers * tokens, layers * tokens * length, *head))


def published_rows(without: int) -> Iterator[Row]:
    """Those that are fitted to: all but one of each three."""
    options = yaml.safe_load((ROOT / "conf/cluster/a100_40g_llama2_7b.yaml").read_text())["options"]
    layers = options["time"]["layers"]
    most = {(tp, pp): tokens for tp, pp, tokens in options["max_tokens_tables"][options["max_tokens"]]}
    for place, (tp, pp, length, count) in _fitted("homogeneous", without):
        yield Row(tp, stage(layers / pp, 1, length, count + pp - 1), place["value"], 1.0)
    for place, (tp, pp, length) in _fitted("throughput", without):
        sequences = most[tp, pp] // length
        seconds = sequences * length / (1e3 * place["value"] * tp * pp)
        yield Row(tp, stage(layers / pp, sequences, length), seconds, 1.0)
    for each in read_layer_times(DATA / "lobra_layer_times.csv"):
        yield Row(each.tp, stage(1.0, each.samples, each.length), each.seconds, LAYER_WEIGHT)


def _fitted(name: str, without: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    file = yaml.safe_load((ROOT / f"sweeps/lobra/{name}.yaml").read_text())
    pairs = zip(file["published"], file["bench"]["options"]["rows"], strict=True)
    for number, pair in enumerate(pairs):
        if number % 3 != without:
            yield pair


def coefficients(without: int = PROFILE_LACKS) -> dict[int, tuple[float, ...]]:
    """By tensor-parallel degree: a layer's fixed, token and square, the head's fixed and labelled; none below
    0."""
    rows = list(published_rows(without))
    found = {}
    for tp in sorted({row.tp for row in rows}):
        own = [row for row in rows if row.tp == tp]
        weights = np.array([row.weight for row in own])
        relative = np.array([row.features for row in own]) * (weights / [row.seconds for row in own])[:, None]
        size = relative.max(axis=0)  # columns of equal size
        solved, _ = nnls(relative / size, weights)
        found[tp] = tuple((solved / size).tolist())
    return found


def thirds() -> list[dict[str, list[list[float]]]]:
    """The fits that leave out one of each three rows: rows of layer and head, degree first."""
    found = []
    for without in range(3):
        fit = coefficients(without).items()
        rows = [(tp, *(float(f"{each:.6e}") for each in own)) for tp, own in fit]
        found.append({
            "layer": [[tp, *layer] for tp, *layer, _, _ in rows],
            "head": [[tp, fixed, labelled] for tp, *_, fixed, labelled in rows],
        })  # fmt: skip
    return found


if __name__ == "__main__":
    for tp, (fixed, token, square, *_) in coefficients().items():
        print(f"      - {{tp: {tp}, fixed: {fixed:.6e}, token: {token:.6e}, square: {square:.6e}}}")
    for tp, (*_, fixed, labelled) in coefficients().items():
        print(f"      - {{tp: {tp}, fixed: {fixed:.6e}, labelled: {labelled:.6e}}}")
    (DATA / THIRDS).write_text(json.dumps(thirds()[:PROFILE_LACKS]) + "\n")
