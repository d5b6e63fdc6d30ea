"""The default model, for real: fetched, converted, run as blocks, and as exact as transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from generation import complete
from transformers import PreTrainedModel

from plait.core.errors import ModelError
from plait.core.settings import ModelSettings
from plait.cost.memory import MemoryModel
from plait.cost.probes import ProbeOptions, drawn_probe, observe_device, probe_grid
from plait.engine.devices import choose_dtype
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model, load_tokeniser, transformers_model
from plait.serve.folders import FolderAdapters
from plait.serve.requests import Request, Sampling
from plait.utils.paths import cache_dir
from plait_kernels.loss import CHUNK_LOGITS

FLOAT32 = ModelSettings(dtype="float32")
BFLOAT16 = ModelSettings(dtype="bfloat16")
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "One, two, three, four,",
)

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache() -> Path:
    try:
        load_tokeniser(FLOAT32, cache=cache_dir())
    except ModelError as error:
        if "cannot be downloaded" in error.value:
            pytest.skip(error.value)
        raise
    return cache_dir()


@pytest.fixture(scope="module")
def exact(cache: Path) -> PreTrainedModel:
    return transformers_model(FLOAT32, cache=cache)


@pytest.fixture(scope="module")
def base(cache: Path) -> BaseModel:
    return load_model(FLOAT32, cache=cache)


def test_peaks_here_are_predicted_within_two_percent(cache: Path) -> None:
    """Twelve small probes; held out: four ragged microbatches of several adapters, measured here too."""
    dtype = choose_dtype(torch.device("cpu"))
    model = load_model(ModelSettings(dtype=dtype), cache=cache)
    model.own = model.own[:8]  # of thirty layers, each of which takes as much as the others
    options = ProbeOptions(dtype=getattr(torch, dtype))
    rng = np.random.default_rng(3)
    grid, held = probe_grid(96), [drawn_probe(rng, 96) for _ in range(4)]
    observed = observe_device(model, [*grid, *held], options)
    fitted = MemoryModel.fitted(observed[: len(grid)], logit_rows=CHUNK_LOGITS // model.vocabulary)
    errors = np.abs(fitted.errors(observed[len(grid) :]))
    assert errors.mean() <= 0.02


def test_blocks_are_as_exact_as_transformers(cache: Path, exact: PreTrainedModel, base: BaseModel) -> None:
    samples = [torch.tensor(base.tokeniser(text).input_ids) for text in TEXTS]
    lengths = [len(sample) for sample in samples]
    rounded = transformers_model(BFLOAT16, cache=cache)
    context = MicrobatchContext.of(torch.cat(samples), (0, lengths[0], sum(lengths)))
    with torch.no_grad():
        wanted, theirs = (
            torch.cat([model(sample.unsqueeze(0), use_cache=False).logits[0] for sample in samples]).float()
            for model in (exact, rounded)
        )
        ours = base.logits(context)
        ours_rounded = load_model(BFLOAT16, cache=cache).logits(context).float()
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-5
    # bfloat16 rounds some 400 times on the way: what matters is that it does no worse than the original.
    assert float((ours_rounded - wanted).norm()) < 1.5 * float((theirs - wanted).norm())


def test_continuations_equal_those_of_transformers(exact: PreTrainedModel, base: BaseModel) -> None:
    greedy = Sampling(4, stop_tokens=frozenset())
    prompts = [Request(tuple(base.tokeniser(text).input_ids), None, greedy) for text in TEXTS]
    found = [each.tokens for each in complete(base, FolderAdapters(base), prompts)]
    assert base.tokeniser.decode(found[0]).startswith(" Rome")
    for prompt, new in zip(prompts, found, strict=True):
        given = torch.tensor([prompt.tokens])
        whole = exact.generate(given, max_new_tokens=4, min_new_tokens=4, do_sample=False)  # type: ignore[operator]
        assert list(new) == whole[0, len(prompt.tokens) :].tolist()
