"""What an iteration of generation asks of a GPU, counted without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from plait.cost.fake_memory import fake_model
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext, Rotation
from plait.models.tiny import byte_tokeniser
from plait.serve.cells import BankAdapters
from plait.serve.engine import Engine
from plait.serve.requests import Request, Sampling
from plait_kernels import Bank, triton_backend
from plait_kernels.counting import counted

META = torch.device("meta")
LAYERS = 3


@pytest.fixture(scope="module")
def base() -> BaseModel:
    if not triton_backend.available(META):
        pytest.skip("Triton is not installed")
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    made = fake_model(config, layers=LAYERS, dtype=torch.bfloat16)
    made.tokeniser = byte_tokeniser()
    made.install(backend="triton")

    def rotation(_layer: int, context: MicrobatchContext) -> Rotation:  # a fake model cannot compute it
        own = torch.empty(1, len(context.token_ids), 16, dtype=torch.bfloat16, device=META)
        return Rotation((own, own), None)

    made._rotation = rotation  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def bank(base: BaseModel) -> Bank:
    made = Bank(base.sites, device=META, compute_dtype=torch.bfloat16)
    for number, rank in enumerate((4, 9)):
        made.attach(
            f"a{number}", rank=rank, scale=1.0, dropout=0.0, seed=0, sites=[site.name for site in base.sites]
        )
    return made


@pytest.mark.parametrize(
    ("options", "uploads"),
    [
        ({}, 5),
        ({"log_probabilities": 5}, 6),
        ({"temperature": 0.8}, 9),
        ({"temperature": 0.8, "top_p": 0.9, "log_probabilities": 2}, 11),
    ],
    ids=["greedy", "scored", "sampled", "likeliest"],
)
def test_an_iteration_waits_for_the_device_once(
    base: BaseModel, bank: Bank, options: dict[str, Any], uploads: int
) -> None:
    engine = Engine(base, BankAdapters(bank), pool_tokens=2000)
    sampling = Sampling(20, stop_tokens=frozenset(), **options)
    names = (None, "a0", "a1", "a1")
    for length, name in zip((70, 5, 18, 18), names, strict=True):
        engine.add(Request((7,) * length, name, sampling))
    for iteration in range(4):
        with counted() as counts:
            updates = engine.step()
        assert len(updates) == 4
        assert counts.waits == 1, "for the tokens"
        if iteration:
            # Tokens, places, tables, last rows; the adapters' rows with scales; how each token is chosen.
            assert counts.uploads == uploads


def test_scored_tokens_of_all_requests_are_fetched_at_once(base: BaseModel, bank: Bank) -> None:
    engine = Engine(base, BankAdapters(bank), pool_tokens=2000)
    for name in (None, "a0", "a1"):
        engine.add(Request((7,) * 40, name, scored=11))
    with counted() as counts:
        updates = engine.step()
    assert [len(each.ended.scores) for each in updates if each.ended] == [11] * 3
    assert counts.waits == 1


def test_layers_that_no_adapter_targets_ask_for_nothing(base: BaseModel) -> None:
    """Two launches for the adapters of each layer that has any: of four, those of q, k, v and of o."""
    launches = []
    for sites in (
        [site.name for site in base.sites],
        [site.name for site in base.sites if "attn" in site.name],
    ):
        bank = Bank(base.sites, device=META, compute_dtype=torch.bfloat16)
        bank.attach("own", rank=4, scale=1.0, dropout=0.0, seed=0, sites=sites)
        engine = Engine(base, BankAdapters(bank), pool_tokens=2000)
        for length in (20, 30):
            engine.add(Request((7,) * length, "own", Sampling(20, stop_tokens=frozenset())))
        for _ in range(3):  # prompts, what is made once, and one of those that follow
            with counted() as counts:
                engine.step()
        launches.append(counts.launches)
    assert launches[0] - launches[1] == 2 * 2 * LAYERS
