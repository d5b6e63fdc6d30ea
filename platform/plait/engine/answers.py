"""Greedy answers to validation prompts, of several adapters in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.engine.messages import Generate
from plait.models import BaseModel
from plait.models.generate import Prompt, generate
from plait.samples import Split
from plait_kernels import Bank


@dataclass(frozen=True, slots=True)
class Answers:
    """One job's answers, in the order of the samples asked for, and the tokens that went through."""

    texts: tuple[str, ...]
    tokens: int


def answer(
    command: Generate, splits: Mapping[str, Split], model: BaseModel, bank: Bank, *, capacity: int
) -> dict[str, Answers]:
    """Answers by job.

    Args:
        command: jobs and samples.
        splits: the samples of each job.
        model: the frozen base.
        bank: holds the jobs' adapters.
        capacity: most tokens in work at a time.
    """
    prompts = [
        Prompt(_prompt(splits[each.job], sample), each.job)
        for each in command.jobs
        for sample in each.samples
    ]
    found = generate(model, prompts, bank, max_new_tokens=command.max_new_tokens, capacity=capacity)
    made: dict[str, Answers] = {}
    start = 0
    for each in command.jobs:
        own = slice(start, start + len(each.samples))
        start = own.stop
        texts = tuple(str(model.tokeniser.decode(list(new), skip_special_tokens=True)) for new in found[own])
        made[each.job] = Answers(texts, sum(map(len, found[own])) + sum(len(p.tokens) for p in prompts[own]))
    return made


def _prompt(split: Split, sample: int) -> tuple[int, ...]:
    """What stands before the first label."""
    tokens, labels = split[sample]
    return tuple(tokens[: int(labels.argmax())].tolist())
