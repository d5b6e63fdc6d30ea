"""The generation engine: one iteration gives every running request one token, whatever its adapter.

A seam: it knows requests and adapters of a bank, but no jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from plait.core.errors import InputError
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.serve.pages import PagedCache
from plait.serve.requests import Completion, GrowingText, Reason, Request, Score, Update
from plait.serve.sampling import choose_tokens, score_tokens
from plait.serve.scheduler import Demand, Scheduler
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

PAGE_TOKENS = 16


@dataclass(slots=True)
class _Running:
    """A request with its tokens so far.

    Attributes:
        stored: tokens whose keys and values are in the cache.
    """

    request: Request
    text: GrowingText
    ending: frozenset[int]
    stored: int = 0
    new: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens that go through the model next."""
        return self.request.tokens if not self.stored else (self.new[-1],)


class Engine:
    """Requests with any adapters of a bank over one base model; they join and leave at every token.

    Args:
        bank: None if no request has an adapter.
        pool_tokens: tokens whose keys and values the pool holds, rounded up to whole pages.
        most: requests that run at once.
        most_prompt_tokens: tokens of prompts that begin in one iteration; a longer one begins alone.
    """

    def __init__(
        self,
        base: BaseModel,
        bank: Bank | None,
        *,
        pool_tokens: int,
        most: int = 256,
        most_prompt_tokens: int = 2048,
    ) -> None:
        self._base = base
        self._bank = bank
        pages = -(-pool_tokens // PAGE_TOKENS)
        self.scheduler = Scheduler(pages, PAGE_TOKENS, most_prompt_tokens=most_prompt_tokens, most=most)
        self._cache = PagedCache(pages, PAGE_TOKENS, base.device)
        self._requests: dict[int, _Running] = {}
        self._next = 0

    @property
    def running(self) -> tuple[int, ...]:
        """Requests that have pages, in order of admission."""
        return tuple(self.scheduler.running)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._requests

    def add(self, request: Request) -> int:
        """Queue a request; its number names it in updates.

        Raises:
            InputError: its adapter is unknown, its prompt is empty or too long, or it never fits.
        """
        tokens = needed_tokens(request, self._base.max_length)
        if request.adapter is not None and (self._bank is None or request.adapter not in self._bank.blocks):
            raise InputError(f"adapter {request.adapter!r}", "A request's adapter must be loaded.")
        if self.scheduler.pages_for(tokens) > self.scheduler.pool.pages:
            raise InputError(
                f"a request of {tokens} tokens",
                f"Prompt and new tokens must fit into the pool of "
                f"{self.scheduler.pool.pages * PAGE_TOKENS} tokens.",
                "Ask for fewer new tokens, or give the pool more.",
            )
        number, self._next = self._next, self._next + 1
        stop_tokens = request.sampling.stop_tokens
        ending = frozenset(self._base.stop_tokens) if stop_tokens is None else stop_tokens
        text = GrowingText(self._decode, request.sampling.stop)
        self._requests[number] = _Running(request, text, ending)
        self.scheduler.add(Demand(number, len(request.tokens), tokens))
        return number

    def cancel(self, number: int) -> None:
        """Forget a request and free its pages; one that has ended is ignored."""
        if self._requests.pop(number, None) is not None:
            self.scheduler.remove(number)

    def run(self) -> Iterator[Update]:
        """Iterate until no request is left."""
        while not self.idle:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[Update]:
        """One iteration: admit requests, and give each that runs a token or its end."""
        self.scheduler.admit()
        numbers = sorted(self.scheduler.running, key=self._place)
        if not numbers:
            return []
        batch = [self._requests[number] for number in numbers]
        logits = self._logits(numbers, batch)
        samplings = [each.request.sampling for each in batch]
        finite = torch.isfinite(logits.amax(-1)).tolist()
        tokens = choose_tokens(logits, samplings, [len(each.new) for each in batch])
        scores = score_tokens(logits, samplings, tokens)
        given = zip(numbers, batch, tokens, scores, finite, strict=True)
        return [self._take(*each) for each in given]

    def _place(self, number: int) -> tuple[bool, str, int]:
        """Order of a request in the batch: new ones last, those of one adapter together."""
        each = self._requests[number]
        return (not each.stored, each.request.adapter or "", number)

    def _logits(self, numbers: Sequence[int], batch: Sequence[_Running]) -> Tensor:
        """Logits of each request's last row; keys and values of all rows are stored."""
        rows = [each.rows for each in batch]
        lengths = [len(each) for each in rows]
        starts = [each.stored for each in batch]
        offsets = (0, *accumulate(lengths))
        device = self._base.device
        spans = zip(starts, lengths, strict=True)
        positions = [position for start, length in spans for position in range(start, start + length)]
        context = MicrobatchContext(
            torch.tensor([token for own in rows for token in own], device=device),
            torch.tensor(positions, device=device),
            offsets,
            _routing(self._bank, [each.request.adapter for each in batch], offsets),
            cache=self._cache,
        )
        pages = [self.scheduler.pool.owned[number] for number in numbers]
        self._cache.place(pages, starts, lengths, sum(1 for start in starts if start))
        logits = self._base.logits(context, torch.tensor(offsets[1:], device=device) - 1)
        for each, length in zip(batch, lengths, strict=True):
            each.stored += length
        return logits

    def _take(self, number: int, each: _Running, token: int, score: Score | None, finite: bool) -> Update:
        """Give a request its token."""
        reason: Reason | None = None if finite else "not finite"
        if finite and token in each.ending:
            reason = "stop"
        elif finite:
            each.new.append(token)
            each.scores += [] if score is None else [score]
            room = min(each.request.sampling.max_new_tokens, self._base.max_length - len(each.request.tokens))
            if each.text.extend(each.new):
                reason = "stop"
            elif len(each.new) == room:
                reason = "length"
        piece = each.text.piece(last=reason is not None)
        if reason is None:
            return Update(number, piece)
        self.cancel(number)
        return Update(number, piece, Completion(tuple(each.new), each.text.text, reason, tuple(each.scores)))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._base.tokeniser.decode(list(tokens), skip_special_tokens=True))


def needed_tokens(request: Request, max_length: int) -> int:
    """Most tokens whose keys and values a request stores: all but the last new one.

    Raises:
        InputError: an empty prompt, or one as long as the model's limit.
    """
    prompt = len(request.tokens)
    if not 0 < prompt < max_length:
        raise InputError(
            f"a prompt of {prompt} tokens",
            f"A prompt has at least one token and fewer than {max_length}, the model's limit.",
        )
    return min(prompt + request.sampling.max_new_tokens, max_length) - 1


def complete(base: BaseModel, bank: Bank | None, requests: Sequence[Request]) -> list[Completion]:
    """The completions of requests in a pool that has room for all."""
    pages = [-(-needed_tokens(each, base.max_length) // PAGE_TOKENS) for each in requests]
    engine = Engine(base, bank, pool_tokens=sum(pages) * PAGE_TOKENS, most=max(1, len(requests)))
    order = [engine.add(each) for each in requests]
    ended = {update.request: update.ended for update in engine.run() if update.ended is not None}
    return [ended[number] for number in order]


def _routing(bank: Bank | None, adapters: Sequence[str | None], offsets: Sequence[int]) -> Routing | None:
    """The routing of each request's rows to its adapter; without dropout, so counters do not matter."""
    if bank is None:
        return None
    segments: list[RoutedSegment] = []
    for adapter, start, stop in zip(adapters, offsets, offsets[1:], strict=False):
        if segments and segments[-1].adapter == adapter:
            segments[-1] = RoutedSegment(adapter, segments[-1].start, stop)
        else:
            segments.append(RoutedSegment(adapter, start, stop))
    zero = torch.zeros(offsets[-1], dtype=torch.int64)
    return Routing.build(bank, segments, RowCounters(zero, zero, zero, zero), training=False)
