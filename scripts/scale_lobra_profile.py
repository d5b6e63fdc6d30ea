#!/usr/bin/env python3
"""Scales LobRA's 7B profile to its 32B and 70B models: the times of conf/cluster/a800_80g_*.yaml.

    python scripts/scale_lobra_profile.py

LobRA prints no times of these models. What the 7B profile takes on one device grows with a layer's weights
and is divided by tensor parallelism; what it takes beyond that share is sent, and grows with the features and
with the links' slowness. A degree of 16 crosses servers. Launches take as long as for the 7B model.

The sizes are those that LobRA's artifact runs (scripts/llama_lora_multi_task.sh): its attention has no
grouped queries, all models have 30,592 words, and its 32B model has 60 layers of 6,656 features, where the
Qwen2.5-32B of the paper has 64 of 5,120.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CLUSTERS = Path(__file__).resolve().parents[1] / "conf/cluster"
SMALL, SCALED = "a100_40g_llama2_7b", ("a800_80g_lobra_32b", "a800_80g_lobra_70b")
WIDEST = 8  # tensor-parallel degree of the 7B profile
Row = dict[str, float]


def options_of(name: str) -> dict[str, Any]:
    """``options`` of a described cluster."""
    options: dict[str, Any] = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())["options"]
    return options


def layer_weights(shape: dict[str, int]) -> float:
    """Weights of the linears of a decoder layer."""
    hidden, shared = shape["hidden_size"], shape["num_key_value_heads"] / shape["num_attention_heads"]
    return hidden * (2 * hidden * (1 + shared) + 3 * shape["intermediate_size"])


def scaled(name: str) -> tuple[list[Row], list[Row]]:
    """Rows of ``time.layer`` and ``time.head`` of a larger model."""
    small, large = options_of(SMALL), options_of(name)
    layer, head = ({row["tp"]: row for row in small["time"][kind]} for kind in ("layer", "head"))
    hidden = large["shape"]["hidden_size"] / small["shape"]["hidden_size"]
    weights = layer_weights(large["shape"]) / layer_weights(small["shape"])
    words = hidden  # all models have as many, and the 7B profile is of the same runs
    links = dict.fromkeys(layer, large["device"]["within_node_gb_per_s"])
    links[2 * WIDEST] = large["device"]["between_nodes_gb_per_s"]
    layers, heads = [], []
    for tp, link in links.items():
        like = min(tp, WIDEST)
        sent = layer[like]["token"] - layer[1]["token"] / like
        sent *= ((tp - 1) / tp) / ((like - 1) / like) if tp > 1 else 0.0  # of an all-reduce by a ring
        slower = small["device"]["within_node_gb_per_s"] / link
        layers.append({
            "tp": tp,
            "fixed": layer[like]["fixed"],
            "token": layer[1]["token"] * weights / tp + sent * hidden * slower,
            "square": layer[like]["square"] * hidden * like / tp,
        })  # fmt: skip
        heads.append(
            {"tp": tp, "fixed": head[like]["fixed"], "labelled": head[like]["labelled"] * words * like / tp}
        )
    return layers, heads


if __name__ == "__main__":
    for name in SCALED:
        print(name)
        for row in (row for rows in scaled(name) for row in rows):
            print("      - {" + ", ".join(f"{key}: {value:.6g}" for key, value in row.items()) + "}")
