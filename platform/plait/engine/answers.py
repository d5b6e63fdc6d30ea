"""Greedy answers to validation prompts, of several adapters in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from plait.core.messages import Generate
from plait.core.samples import Split
from plait.engine.out_of_memory import attempt, give_back
from plait.models import BaseModel
from plait.models.generate import Prompt, batch_size, generate
from plait_kernels import Bank


@dataclass(frozen=True, slots=True)
class Answers:
    """One job's answers, in the order of the samples asked for, and the tokens that went through.

    ``trouble`` says why there are none.
    """

    texts: tuple[str, ...]
    tokens: int
    trouble: str = ""


def answer(
    command: Generate, splits: Mapping[str, Split], model: BaseModel, bank: Bank, *, capacity: int
) -> dict[str, Answers]:
    """Answers by job. Where memory runs out, fewer prompts are in work at a time, down to one; a job of which
    one alone is too much has no answers, and the others go on.

    Args:
        command: jobs and samples.
        splits: the samples of each job.
        model: the frozen base.
        bank: holds the jobs' adapters.
        capacity: most tokens in work at a time.
    """
    room = command.max_new_tokens
    prompts = [
        Prompt(_prompt(splits[each.job], sample), each.job)
        for each in command.jobs
        for sample in each.samples
    ]
    found: dict[int, tuple[int, ...]] = {}
    troubles: dict[str | None, str] = {}
    left, most = list(range(len(prompts))), len(prompts)
    while left:
        part = left[: min(most, batch_size([prompts[index] for index in left], room, capacity))]
        chosen = [prompts[index] for index in part]
        new, detail = attempt(partial(generate, model, chosen, bank, max_new_tokens=room, capacity=capacity))
        if new is not None:
            found |= dict(zip(part, new, strict=True))
            left = left[len(part) :]
            continue
        give_back(model.device)
        most = len(part) // 2
        if most == 0:
            most, job = 1, chosen[0].adapter
            troubles[job] = f"out of memory for a prompt of {len(chosen[0].tokens)} tokens alone: {detail}"
            left = [index for index in left if prompts[index].adapter != job]
    return _by_job(command, prompts, found, troubles, model)


def _by_job(
    command: Generate,
    prompts: Sequence[Prompt],
    found: Mapping[int, tuple[int, ...]],
    troubles: Mapping[str | None, str],
    model: BaseModel,
) -> dict[str, Answers]:
    made: dict[str, Answers] = {}
    start = 0
    for each in command.jobs:
        own = range(start, start + len(each.samples))
        start = own.stop
        tokens = sum(len(prompts[index].tokens) + len(found[index]) for index in own if index in found)
        if each.job in troubles:
            made[each.job] = Answers((), tokens, troubles[each.job])
            continue
        texts = [model.tokeniser.decode(list(found[index]), skip_special_tokens=True) for index in own]
        made[each.job] = Answers(tuple(map(str, texts)), tokens)
    return made


def _prompt(split: Split, sample: int) -> tuple[int, ...]:
    """What stands before the first label."""
    tokens, labels = split[sample]
    return tuple(tokens[: int(labels.argmax())].tolist())
