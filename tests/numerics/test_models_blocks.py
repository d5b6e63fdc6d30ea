"""The model run as blocks over packed samples is transformers' model run on each sample alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.blocks import find_parts
from plait.models.context import MicrobatchContext
from plait.models.load import load_model, transformers_model
from plait.models.tiny import FAMILIES

LENGTHS = (5, 19, 1, 12, 19, 11)


def settings_of(family: str) -> ModelSettings:
    return ModelSettings(kind="tiny", family=family, dtype="float32", seed=3)


def packed_tokens(vocabulary: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(5)
    offsets = [0]
    for length in LENGTHS:
        offsets.append(offsets[-1] + length)
    return torch.randint(3, vocabulary, (offsets[-1],), generator=generator), offsets


def alone(family: str, tokens: Tensor, offsets: list[int], tmp_path: Path) -> Tensor:
    """transformers' own logits, one sample at a time."""
    model = transformers_model(settings_of(family), cache=tmp_path)
    model.set_attn_implementation("eager")  # sdpa leaves the softcap out
    with torch.no_grad():
        parts = [
            model(tokens[low:high].unsqueeze(0), use_cache=False).logits[0] for low, high in pairwise(offsets)
        ]
    return torch.cat(parts)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_packed_blocks_equal_transformers_on_each_sample(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    tokens, offsets = packed_tokens(base.vocabulary)
    with torch.no_grad():
        found = base.logits(MicrobatchContext.of(tokens, offsets))
    expected = alone(family, tokens, offsets, tmp_path)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_cut_at_every_layer_gives_the_uncut_result(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    tokens, offsets = packed_tokens(base.vocabulary)
    with torch.no_grad():
        whole = base.logits(MicrobatchContext.of(tokens, offsets))
        for cut in range(base.layer_count + 1):
            first, second = MicrobatchContext.of(tokens, offsets), MicrobatchContext.of(tokens, offsets)
            hidden = base.embed(first)
            for index in range(cut):
                hidden = base.layer(index, hidden, first)
            handed_over = torch.from_numpy(hidden.numpy().copy())
            for index in range(cut, base.layer_count):
                handed_over = base.layer(index, handed_over, second)
            assert torch.equal(base.head(handed_over), whole)


def hidden_gradient(base: BaseModel, context: MicrobatchContext, weight: Tensor) -> Tensor:
    """Gradient of a weighted sum of the logits with respect to the embedded tokens."""
    start = base.embed(context).requires_grad_()
    hidden = start
    for index in range(base.layer_count):
        hidden = base.layer(index, hidden, context)
    (base.head(hidden) * weight).sum().backward()
    assert start.grad is not None
    return start.grad


def test_gradients_equal_transformers_on_each_sample(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    tokens, offsets = packed_tokens(base.vocabulary)
    weight = torch.randn(len(tokens), base.vocabulary, generator=torch.Generator().manual_seed(7))
    found = hidden_gradient(base, MicrobatchContext.of(tokens, offsets), weight)
    context = MicrobatchContext.of(tokens, offsets, checkpointing=True)
    assert torch.equal(hidden_gradient(base, context, weight), found)

    model = transformers_model(settings_of(family), cache=tmp_path).requires_grad_(False)
    model.set_attn_implementation("eager")
    entering: list[Tensor] = []  # what the first layer is given: Granite scales between it and the embedding

    def note(_module: object, given: tuple[Tensor, ...]) -> None:
        given[0].retain_grad()
        entering.append(given[0])

    find_parts(model).layers[0].register_forward_pre_hook(note)
    for low, high in pairwise(offsets):
        rows = model.get_input_embeddings()(tokens[low:high]).requires_grad_()
        logits = model(inputs_embeds=rows.unsqueeze(0), use_cache=False).logits[0]
        (logits * weight[low:high]).sum().backward()
        gradient = entering.pop().grad
        assert gradient is not None
        torch.testing.assert_close(found[low:high], gradient[0], rtol=1e-4, atol=1e-4)
