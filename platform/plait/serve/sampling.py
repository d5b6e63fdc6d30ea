"""The next token of each request, chosen from its logits alone.

A seam: what a token is chosen by does not depend on the engine or on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from plait.serve.requests import Sampling, Score

SORTED = 1024  # likeliest tokens, which mostly have enough of the probability


def choose_tokens(logits: Tensor, samplings: Sequence[Sampling], counts: Sequence[int]) -> list[int]:
    """One token for each row of ``logits``; ``counts`` are the new tokens that its request has already."""
    chosen: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, each in enumerate(samplings) if each.temperature > 0]
    if drawn:
        own = [samplings[row] for row in drawn]
        values = [_uniform(each.seed, counts[row]) for each, row in zip(own, drawn, strict=True)]
        for row, token in zip(drawn, _draw(logits[drawn], own, values), strict=True):
            chosen[row] = token
    return chosen


def _uniform(seed: int, count: int) -> float:
    """A number in [0, 1) by a counter-based generator, so that it depends on nothing else."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=count << 64))
    return float(generator.random())


def _draw(logits: Tensor, samplings: Sequence[Sampling], values: Sequence[float]) -> list[int]:
    """The token at each value of the distribution function, in float64: over the vocabulary in its order, or
    over the likeliest tokens, for which it is sorted."""
    temperature = _column([each.temperature for each in samplings], logits)
    scaled = (logits.double() - logits.amax(-1, keepdim=True).double()) / temperature
    shares = torch.softmax(scaled, dim=-1)
    drawn = [0] * len(samplings)
    for likeliest in (False, True):
        rows = [row for row, each in enumerate(samplings) if (each.top_p < 1) == likeliest]
        if rows:
            own, wanted = shares[rows], _column([values[row] for row in rows], logits)
            top_p = _column([samplings[row].top_p for row in rows], logits)
            tokens = _likeliest(own, top_p, wanted) if likeliest else _place(own.cumsum(-1), wanted)
            for row, token in zip(rows, tokens.squeeze(1).tolist(), strict=True):
                drawn[row] = token
    return drawn


def _column(numbers: Sequence[float], logits: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1)


def _place(sums: Tensor, wanted: Tensor) -> Tensor:
    """Where sums exceed a share of the last one; the last place if none does."""
    return (sums <= wanted * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)


def _likeliest(shares: Tensor, top_p: Tensor, wanted: Tensor) -> Tensor:
    """The tokens drawn of the likeliest ones that together have at least ``top_p``; of equally likely ones
    the first come first, whichever way they are sorted: else other rows could change what is drawn."""
    tokens = shares.topk(min(SORTED, shares.shape[-1])).indices.sort(dim=-1).values
    ordered, places = shares.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, places)
    certain = ordered > ordered[:, -1:]  # others may be as likely as some that are left out
    if bool(((ordered * certain).sum(-1, keepdim=True) < top_p).any()):
        ordered, tokens = shares.sort(dim=-1, descending=True, stable=True)
    sums = ordered.cumsum(-1)
    kept = (sums - ordered) < top_p  # the first is always kept
    return tokens.gather(1, _place((ordered * kept).cumsum(-1), wanted))


def score_tokens(logits: Tensor, samplings: Sequence[Sampling], tokens: Sequence[int]) -> list[Score | None]:
    """The scores of the chosen tokens, for those rows that report them."""
    scores: list[Score | None] = [None] * len(tokens)
    for row, each in enumerate(samplings):
        if each.log_probabilities is not None:
            logs = torch.log_softmax(logits[row].float(), dim=-1)
            best = logs.topk(min(each.log_probabilities, len(logs)))
            top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            scores[row] = Score(float(logs[tokens[row]]), tuple(top))
    return scores


def score_rows(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Sequence[int], chunk: int
) -> list[Score]:
    """The scores of given tokens, with the likeliest one of each row; so many rows' logits exist at once."""
    scores: list[Score] = []
    wanted = torch.tensor(targets, device=hidden.device).unsqueeze(1)
    for rows, tokens in zip(torch.split(hidden, chunk), torch.split(wanted, chunk), strict=True):
        logs = torch.log_softmax(head(rows).float(), dim=-1)
        best, values = logs.argmax(-1, keepdim=True), logs.gather(1, tokens).squeeze(1).tolist()
        tops = zip(best.squeeze(1).tolist(), logs.gather(1, best).squeeze(1).tolist(), strict=True)
        scores += [Score(value, (top,)) for value, top in zip(values, tops, strict=True)]
    return scores
