"""The next token of each request, chosen from its logits alone.

A seam: what a token is chosen by does not depend on the engine or on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from plait.serve.requests import MOST_LOG_PROBABILITIES, Sampling, Score
from plait_kernels.uploads import table

SORTED = 1024  # likeliest tokens, which mostly have enough of the probability
# Probabilities are whole numbers while they are drawn from: their sums are exact in any order, and a device's
# order depends on what else is in the batch. Those of a row are at most so many bits together.
_SUM_BITS = 62
_Drawn = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a row's logits give.

    Attributes:
        score: that of the token, if it is asked for.
        finite: whether the logits are.
    """

    token: int
    score: Score | None
    finite: bool


def choose_tokens(logits: Tensor, samplings: Sequence[Sampling], counts: Sequence[int]) -> list[Chosen]:
    """One token for each row of ``logits``; ``counts`` are the new tokens that its request has already.

    The host waits for the device once, or twice where the likeliest tokens of a row have too little.
    """
    finite, greedy = torch.isfinite(logits.amax(-1)), logits.argmax(-1)
    drawn = [row for row, each in enumerate(samplings) if each.temperature > 0]
    draw = partial(_drawn, logits, greedy, drawn, samplings, counts) if drawn else lambda _: (greedy, None)
    scored = [row for row, each in enumerate(samplings) if each.log_probabilities is not None]
    for most in (SORTED, logits.shape[-1]):
        tokens, enough = draw(most)
        logs = _scores(logits, tokens, scored) if scored else ()
        found = _fetched(tokens, finite, *logs, *(() if enough is None else (enough,)))
        if enough is None or found[-1].item():
            break
    scores: list[Score | None] = [None] * len(samplings)
    for place, row in enumerate(scored):
        own, values, names = (each[place] for each in found[2:5])
        asked = samplings[row].log_probabilities
        top = zip(names[:asked].long().tolist(), values[:asked].tolist(), strict=True)
        scores[row] = Score(float(own), tuple(top))
    given = zip(found[0].long().tolist(), scores, found[1].bool().tolist(), strict=True)
    return [Chosen(*each) for each in given]


def _fetched(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the host, sent as one, in float64: that holds every token and every float32."""
    whole = torch.cat([each.double().flatten() for each in tensors]).cpu()
    parts = torch.split(whole, [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _scores(logits: Tensor, tokens: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens of some rows; those of the likeliest ones, and which these are."""
    own = table(rows, logits.device)
    logs = torch.log_softmax(logits.index_select(0, own).float(), dim=-1)
    best = logs.topk(min(MOST_LOG_PROBABILITIES, logs.shape[-1]))
    taken = logs.gather(1, tokens.index_select(0, own).unsqueeze(1)).squeeze(1)
    return taken, best.values, best.indices


def _drawn(
    logits: Tensor,
    greedy: Tensor,
    drawn: Sequence[int],
    samplings: Sequence[Sampling],
    counts: Sequence[int],
    most: int,
) -> _Drawn:
    """The tokens of all rows, drawn or greedy, and whether ``most`` likeliest tokens were enough."""
    own, rows = [samplings[row] for row in drawn], table(drawn, logits.device)
    values = [_uniform(each.seed, counts[row]) for each, row in zip(own, drawn, strict=True)]
    tokens, enough = _draw(logits.index_select(0, rows), own, values, most)
    return greedy.index_copy(0, rows, tokens), enough


def _uniform(seed: int, count: int) -> float:
    """A number in [0, 1) by a counter-based generator, so that it depends on nothing else."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=count << 64))
    return float(generator.random())


def _draw(logits: Tensor, samplings: Sequence[Sampling], values: Sequence[float], most: int) -> _Drawn:
    """The token at each value of the distribution function: over the vocabulary in its order, or over the
    likeliest tokens, for which it is sorted."""
    temperature = _column([each.temperature for each in samplings], logits)
    scaled = (logits.double() - logits.amax(-1, keepdim=True).double()) / temperature
    # Not by a softmax, whose sum has an order. Of 128,256 tokens none is drawn that is 7e13 times less likely
    # than another.
    most_units = 2.0 ** (_SUM_BITS - (logits.shape[-1] - 1).bit_length())
    shares = (torch.exp(scaled) * most_units).round().long()
    drawn = torch.zeros(len(samplings), dtype=torch.int64, device=logits.device)
    enough = torch.ones((), dtype=torch.bool, device=logits.device)
    for likeliest in (False, True):
        rows = [row for row, each in enumerate(samplings) if (each.top_p < 1) == likeliest]
        if not rows:
            continue
        at = table(rows, logits.device)
        own, wanted = shares.index_select(0, at), _column([values[row] for row in rows], logits)
        if likeliest:
            top_p = _column([samplings[row].top_p for row in rows], logits)
            tokens, enough = _likeliest(own, top_p * own.sum(-1, keepdim=True), wanted, most)
        else:
            tokens = _place(own.cumsum(-1), wanted)
        drawn = drawn.index_copy(0, at, tokens.squeeze(1))
    return drawn, enough


def _column(numbers: Sequence[float], logits: Tensor) -> Tensor:
    return table(numbers, logits.device, torch.float64).unsqueeze(1)


def _place(sums: Tensor, wanted: Tensor) -> Tensor:
    """The first place where sums exceed a share of the last one, which is less than all of it; any place of
    sums that are not probabilities'."""
    last = sums[:, -1:]
    before = torch.minimum((wanted * last).long(), last - 1)  # a product may be rounded up to all of it
    return (sums <= before).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)


def _likeliest(shares: Tensor, top_p: Tensor, wanted: Tensor, most: int) -> _Drawn:
    """The tokens drawn of the likeliest ones that together have at least ``top_p`` units, and whether they
    are among the ``most`` likeliest in every row; of equally likely ones the first come first, whichever way
    they are sorted: else other rows could change what is drawn."""
    if most < shares.shape[-1]:
        tokens = shares.topk(most).indices.sort(dim=-1).values
        ordered, places = shares.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(1, places)
        certain = ordered > ordered[:, -1:]  # others may be as likely as some that are left out
        enough = ((ordered * certain).sum(-1, keepdim=True) >= top_p).all()
    else:
        ordered, tokens = shares.sort(dim=-1, descending=True, stable=True)
        enough = torch.ones((), dtype=torch.bool, device=shares.device)
    sums = ordered.cumsum(-1)
    kept = (sums - ordered) < top_p  # the first is always kept
    return tokens.gather(1, _place((ordered * kept).cumsum(-1), wanted)), enough


def score_rows(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Sequence[int], chunk: int
) -> list[Score]:
    """The scores of given tokens, with the likeliest one of each row; so many rows' logits exist at once."""
    found = []
    wanted = table(targets, hidden.device).unsqueeze(1)
    for rows, tokens in zip(torch.split(hidden, chunk), torch.split(wanted, chunk), strict=True):
        logs = torch.log_softmax(head(rows).float(), dim=-1)
        best = logs.argmax(-1, keepdim=True)
        own = logs.gather(1, tokens), best, logs.gather(1, best)
        found.append(torch.cat([each.double() for each in own], dim=1))
    return [Score(value, ((int(top), log),)) for value, top, log in torch.cat(found).tolist()]
