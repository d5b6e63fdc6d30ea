"""Greedy generation with keys and values kept is transformers' own, and batching adapters changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.adapters.variants import attach
from plait.core.errors import InputError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.generate import Prompt, generate
from plait.models.load import load_model, transformers_model
from plait.models.targets import resolve_targets
from plait.models.tiny import FAMILIES
from plait_kernels import Bank

LENGTHS = (3, 11, 1, 20)
NEW = 12


def settings_of(family: str) -> ModelSettings:
    return ModelSettings(kind="tiny", family=family, dtype="float32", seed=2)


def prompts_of(base: BaseModel, adapters: list[str | None]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(8)
    return [
        Prompt(tuple(torch.randint(3, base.vocabulary, (length,), generator=generator).tolist()), adapter)
        for length, adapter in zip(LENGTHS, adapters, strict=True)
    ]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_continuations_are_transformers_own(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    prompts = prompts_of(base, [None] * len(LENGTHS))
    found = generate(base, prompts, None, max_new_tokens=NEW, stop=())
    plain = transformers_model(settings_of(family), cache=tmp_path)
    plain.set_attn_implementation("eager")
    for prompt, new in zip(prompts, found, strict=True):
        sequence = torch.tensor([prompt.tokens])
        with torch.no_grad():
            for _ in range(NEW):
                logits = plain(sequence, use_cache=False).logits[0, -1]
                sequence = torch.cat([sequence, logits.argmax().view(1, 1)], dim=1)
        assert list(new) == sequence[0, len(prompt.tokens) :].tolist()


def test_adapters_generate_together_as_alone(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    for seed, name in enumerate(("one", "two")):
        rank = 4 + seed
        spec = AdapterSpec(rank, alpha=4.0 * rank, dropout=0.5, target_modules="all-linear")
        sites = resolve_targets(spec.target_modules, base.linears)
        attach(bank, name, spec, sites, seed=seed, weight_of=base.frozen_weight)
        for _, b in bank.weights(name).values():
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
        bank.refresh([name])
    prompts = prompts_of(base, ["two", None, "one", "two"])
    together = generate(base, prompts, bank, max_new_tokens=NEW, stop=())
    alone = [generate(base, [prompt], bank, max_new_tokens=NEW, stop=())[0] for prompt in prompts]
    assert together == alone
    plain = [Prompt(prompt.tokens) for prompt in prompts]
    assert generate(base, plain, None, max_new_tokens=NEW, stop=())[0] != together[0]


def test_a_stop_token_ends_a_continuation_and_is_left_out(tmp_path: Path) -> None:
    base = load_model(settings_of("mistral"), cache=tmp_path)
    prompts = prompts_of(base, [None] * len(LENGTHS))
    free = generate(base, prompts, None, max_new_tokens=NEW, stop=())
    stop = free[1][4]
    stopped = generate(base, prompts, None, max_new_tokens=NEW, stop=(stop,))
    for whole, cut in zip(free, stopped, strict=True):
        assert cut == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(stopped[1]) <= 4


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    with pytest.raises(InputError, match="0 tokens"):
        generate(base, [Prompt(())], None, max_new_tokens=1)
