"""The generation engine: one iteration gives every running request one token, whatever its adapter.

A seam: it knows requests and adapters, but no jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, islice
from typing import TypeVar

import torch
from torch import Tensor

from plait.core.errors import InputError, PlaitError
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.serve.cells import Adapter, AdapterSource, CellLayout, CellStore, page_tokens
from plait.serve.pages import PagedCache, TokenSizes, pool_memory
from plait.serve.requests import Completion, GrowingText, Reason, Request, Score, Update
from plait.serve.sampling import Chosen, choose_tokens, score_rows
from plait.serve.scheduler import Demand, Need, Scheduler, Shared
from plait_kernels import RoutedSegment, Routing, RowCounters
from plait_kernels.loss import chunk_rows
from plait_kernels.pooled import AdapterPool, PooledAdapter, PooledRows
from plait_kernels.uploads import table, together

Named = TypeVar("Named")
READ_AHEAD = 8  # requests at the head of the queue whose adapters are read before they have room
AHEAD = 512  # requests that wait in the queue where all are known in advance


@dataclass(slots=True)
class _Running:
    """A request with its tokens so far.

    Attributes:
        adapter: None: the base model.
        demand: what it needs of the pool.
        stored: tokens whose keys and values are in the cache.
        placed: its adapter in the pool, once it runs.
        pages: those of its tokens, once it runs.
    """

    request: Request
    adapter: Adapter | None
    demand: Demand
    text: GrowingText
    ending: frozenset[int]
    stored: int = 0
    placed: PooledAdapter | None = None
    pages: tuple[int, ...] = ()
    new: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens that go through the model next."""
        last = -1 if self.request.scored else None  # no token follows the last scored one
        return (self.new[-1],) if self.new else self.request.tokens[self.stored : last]


class Engine:
    """Requests with any adapters of a source over one base model; they join and leave at every token.

    Keys and values, and adapters' weights, lie in one pool of pages. Adapters come into it when a request
    needs them. Requests with the same adapter and prompt share the pages of its beginning.

    Args:
        pool_tokens: tokens whose keys and values the pool holds, rounded up to whole pages; for the source's
            lasting adapters it has room beside them.
        most: requests that run at once.
        most_prompt_tokens: tokens of prompts that begin in one iteration; a longer one begins alone.
        host_bytes: of adapters that are kept in host memory, ready for the pool.
        smallest_pages: so that more of a prompt's beginning is shared; adapters then waste more of them.
        reserve: take the pool's memory now, so that no request has to, of so many bytes that are free.

    Raises:
        CapacityError: there is not so much memory as the pool needs.
    """

    def __init__(
        self,
        base: BaseModel,
        adapters: AdapterSource,
        *,
        pool_tokens: int,
        most: int = 256,
        most_prompt_tokens: int = 2048,
        host_bytes: int = 0,
        smallest_pages: bool = False,
        reserve: int | None = None,
    ) -> None:
        self._base = base
        self._adapters = adapters
        layers = [base.sites_of(range(index, index + 1)) for index in range(base.layer_count)]
        lasting = adapters.lasting()
        token = TokenSizes.of(base)
        widest = max(max(site.in_features, site.out_features) for own in layers for site in own)
        cells = [(_largest_cell(each, base), each.rank) for each in lasting if not smallest_pages]
        self.page_tokens = page_tokens(token.elements, cells, widest)
        inputs = {name: number for number, (names, _) in enumerate(base.inputs) for name in names}
        self._layout = CellLayout(layers, self.page_tokens * token.elements, inputs)
        pages = -(-pool_tokens // self.page_tokens)
        pages += sum(self._layout.placement(each).pages for each in lasting)
        self.scheduler = Scheduler(pages, most_prompt_tokens=most_prompt_tokens, most=most)
        pool = pool_memory(len(layers), pages, self._layout.elements, base, reserve=reserve)
        self._cache = PagedCache(pool, self.page_tokens, base.backend, head=token.head)
        storage = [pool[index].view(-1) for index, own in enumerate(layers) for _ in own]
        self._pool = AdapterPool(base.sites, tuple(storage), self._layout.align)
        self.store = CellStore(self._layout, pool, self._pool, most_bytes=host_bytes, known=adapters.knows)
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
        adapter = None if request.adapter is None else self._adapters.find(request.adapter)
        number, self._next = self._next, self._next + 1
        demand = self._demand(number, request, adapter, tokens)
        if demand.most > self.scheduler.pool.pages:
            raise InputError(
                f"a request of {tokens} tokens",
                f"Prompt, new tokens and adapter must fit into the pool of "
                f"{self.scheduler.pool.pages * self.page_tokens} tokens.",
                "Ask for fewer new tokens, or give the pool more.",
            )
        stop_tokens = request.sampling.stop_tokens
        ending = frozenset(self._base.stop_tokens) if stop_tokens is None else stop_tokens
        text = GrowingText(self._decode, request.sampling.stop)
        self._requests[number] = _Running(request, adapter, demand, text, ending)
        self.scheduler.add(demand)
        return number

    def _demand(self, number: int, request: Request, adapter: Adapter | None, tokens: int) -> Demand:
        needs = []
        key = None if adapter is None else adapter.key
        if adapter is not None and adapter.pooled:
            needs.append(Need(("adapter", key), self._layout.placement(adapter).pages))
        # Whole pages; the rows from which tokens are chosen or scored always run.
        begun = (len(request.tokens) - 1 - request.scored) // self.page_tokens
        if begun:
            beginning = request.tokens[: begun * self.page_tokens]
            needs.append(Need(("prompt", key, beginning), begun))
        pages = -(-tokens // self.page_tokens) - begun
        return Demand(number, len(request.tokens), pages, tuple(needs))

    def cancel(self, number: int) -> None:
        """Forget a request and free its pages; one that has ended is ignored."""
        if self._requests.pop(number, None) is not None:
            self.scheduler.remove(number)

    def complete(self, requests: Iterable[Request]) -> list[Completion]:
        """The completions of requests, in their order; they are added as the queue empties.

        Raises:
            InputError: as :meth:`add`.
            PlaitError: the adapter of a request cannot be read.
        """
        ended: dict[int, Completion] = {}
        for place, update in self.fed(enumerate(requests)):
            if update.error is not None:
                raise update.error
            if update.ended is not None:
                ended[place] = update.ended
        return [ended[place] for place in sorted(ended)]

    def fed(self, requests: Iterable[tuple[Named, Request]]) -> Iterator[tuple[Named, Update]]:
        """The updates of requests, each with what came with the request; they are added as the queue empties.
        Those that have not ended when the caller stops are cancelled. Requests that were in the engine
        before run as well; their updates are not returned.

        Raises:
            InputError: as :meth:`add`.
        """
        left, known = iter(requests), dict[int, Named]()
        try:
            while True:
                for key, request in islice(left, max(0, AHEAD - self.scheduler.waiting)):
                    known[self.add(request)] = key
                if self.idle:
                    return
                for update in self.step():
                    if update.request in known:
                        yield known[update.request], update
        finally:
            for number in known:
                self.cancel(number)

    def run(self) -> Iterator[Update]:
        """Iterate until no request is left.

        Raises:
            PlaitError: the adapter of a request cannot be read.
        """
        while not self.idle:
            for update in self.step():
                if update.error is not None:
                    raise update.error
                yield update

    @torch.no_grad()
    def step(self) -> list[Update]:
        """One iteration: admit requests, and give each that runs a token, its scores or its end."""
        updates, beginnings = self._admit()
        self._expect()
        numbers = sorted(self.scheduler.running, key=self._place)
        if not numbers:
            return updates
        batch = [self._requests[number] for number in numbers]
        hidden, ends = self._hidden(batch)
        for each in beginnings:
            each.value = True
        rows = list(zip(numbers, batch, ends, strict=True))
        scored = [row for row in rows if row[1].request.scored]
        generated = [row for row in rows if not row[1].request.scored]
        if scored:
            updates += self._scored(hidden, scored)
        if generated:
            updates += self._generated(hidden, generated)
        return updates

    def _generated(self, hidden: Tensor, rows: Sequence[tuple[int, _Running, int]]) -> list[Update]:
        """A token for each request, from its last row."""
        numbers, batch, ends = zip(*rows, strict=True)
        last = table([end - 1 for end in ends], hidden.device)
        logits = self._base.head(hidden.index_select(0, last))
        samplings, counts = [each.request.sampling for each in batch], [len(each.new) for each in batch]
        chosen = choose_tokens(logits, samplings, counts)
        return [self._take(*each) for each in zip(numbers, batch, chosen, strict=True)]

    def _scored(self, hidden: Tensor, rows: Sequence[tuple[int, _Running, int]]) -> list[Update]:
        """The scores of requests' tokens, from the rows before them; these requests end."""
        chosen = [at for _, each, end in rows for at in range(end - each.request.scored, end)]
        targets = [token for _, each, _ in rows for token in each.request.tokens[-each.request.scored :]]
        picked = hidden.index_select(0, table(chosen, hidden.device))
        chunk = chunk_rows(self._base.vocabulary)
        scores = score_rows(self._base.head, picked, targets, chunk)
        updates, start = [], 0
        for number, each, _ in rows:
            own = tuple(scores[start : start + each.request.scored])
            start += each.request.scored
            finite = all(math.isfinite(score.log_probability) for score in own)
            self.cancel(number)
            updates.append(Update(number, "", Completion((), "", "scored" if finite else "not finite", own)))
        return updates

    def _admit(self) -> tuple[list[Update], list[Shared]]:
        """Give new requests their pages; returns failures, and beginnings of prompts to be filled."""
        updates: list[Update] = []
        beginnings: list[Shared] = []
        for number in self.scheduler.admit():
            each = self._requests[number]
            each.pages = self._pages(number)
            entries = {need.key: self.scheduler.pool.shared[need.key] for need in each.demand.needs}
            try:
                for key, entry in entries.items():
                    if key[0] == "adapter":
                        each.placed = self._placed(each, entry)
                    elif entry.value is None and not any(entry is other for other in beginnings):
                        beginnings.append(entry)
                    else:
                        each.stored = len(entry.pages) * self.page_tokens
            except PlaitError as error:
                self.cancel(number)
                updates.append(Update(number, "", error=error))
        return updates, beginnings

    def _expect(self) -> None:
        """Have the adapters read that the head of the queue needs and the pool does not have."""
        shared = self.scheduler.pool.shared
        ahead = [self._requests[each.request].adapter for each in self.scheduler.ahead(READ_AHEAD)]
        pooled = [each for each in ahead if each is not None and each.pooled]
        self.store.expect(each for each in pooled if ("adapter", each.key) not in shared)

    def _placed(self, each: _Running, entry: Shared) -> PooledAdapter:
        if entry.value is None and each.adapter is not None:
            entry.value = self.store.place(each.adapter, entry.pages)
        placed: PooledAdapter = entry.value
        return placed

    def _place(self, number: int) -> tuple[bool, str, int]:
        """Order of a request in the batch: new ones last, those of one adapter together."""
        each = self._requests[number]
        return (not each.stored, each.request.adapter or "", number)

    def _hidden(self, batch: Sequence[_Running]) -> tuple[Tensor, Sequence[int]]:
        """Hidden rows of all requests, and where each one's end; their keys and values are stored."""
        rows = [each.rows for each in batch]
        lengths = [len(each) for each in rows]
        starts = [each.stored for each in batch]
        offsets = (0, *accumulate(lengths))
        device = self._base.device
        spans = zip(starts, lengths, strict=True)
        positions = [position for start, length in spans for position in range(start, start + length)]
        tokens = [token for own in rows for token in own]
        sent = together([torch.tensor(tokens), torch.tensor(positions)], device)
        begun, answered = sum(1 for start in starts if start), [bool(each.new) for each in batch]
        placed = self._cache.placed([each.pages for each in batch], starts, lengths, begun, answered)
        routing = self._routing(batch, offsets)
        hidden = self._base.hidden(MicrobatchContext(sent[0], sent[1], offsets, routing, cache=placed))
        for each, length in zip(batch, lengths, strict=True):
            each.stored += length
        return hidden, offsets[1:]

    def _pages(self, number: int) -> tuple[int, ...]:
        """The pages of a request's tokens, in their order."""
        pool = self.scheduler.pool
        shared = [
            pool.shared[need.key].pages
            for need in self._requests[number].demand.needs
            if need.key[0] == "prompt"
        ]
        return (*(page for pages in shared for page in pages), *pool.owned[number])

    def _routing(self, batch: Sequence[_Running], offsets: Sequence[int]) -> PooledRows:
        """Which rows have which adapter: rows with earlier tokens singly, prompts of one adapter together."""
        single: list[tuple[int, PooledAdapter]] = []
        prompts: list[tuple[int, int, PooledAdapter]] = []
        others: list[RoutedSegment] = []
        ranges = zip(batch, offsets, offsets[1:], strict=False)
        for _, group in groupby(
            ranges, lambda one: (bool(one[0].stored), one[0].adapter and one[0].adapter.key)
        ):
            members = list(group)
            each, start, stop = members[0][0], members[0][1], members[-1][2]
            if each.adapter is None:
                continue
            if each.placed is None:
                others.append(RoutedSegment(each.request.adapter, start, stop))
            elif each.stored:
                single += [(row, each.placed) for row in range(start, stop)]
            else:
                prompts.append((start, stop, each.placed))
        routing = None
        if others and self._adapters.bank is not None:
            zero = torch.zeros(offsets[-1], dtype=torch.int64)
            counters = RowCounters(zero, zero, zero, zero)
            routing = Routing.build(self._adapters.bank, others, counters, training=False)
        return PooledRows(self._pool, tuple(single), tuple(prompts), routing)

    def _take(self, number: int, each: _Running, chosen: Chosen) -> Update:
        """Give a request its token."""
        token, score, finite = chosen.token, chosen.score, chosen.finite
        reason: Reason | None = None if finite else "not finite"
        new = finite and token not in each.ending
        if finite and not new:
            reason = "stop"
        elif new:
            each.new.append(token)
            each.scores += [] if score is None else [score]
            room = min(each.request.sampling.max_new_tokens, self._base.max_length - len(each.request.tokens))
            if each.text.extend(each.new):
                reason = "stop"
            elif len(each.new) == room:
                reason = "length"
        update = Update(
            number,
            each.text.piece(last=reason is not None),
            token=token if new else None,
            score=score if new else None,
        )
        if reason is None:
            return update
        self.cancel(number)
        ended = Completion(tuple(each.new), each.text.text, reason, tuple(each.scores))
        return replace(update, ended=ended)

    def _decode(self, tokens: Sequence[int]) -> str:
        options = {
            "skip_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        }  # later tokens change nothing
        return str(self._base.tokeniser.decode(list(tokens), **options))


def needed_tokens(request: Request, max_length: int) -> int:
    """Most tokens whose keys and values a request stores: all but the last one, new or scored.

    Raises:
        InputError: an empty prompt, one as long as the model's limit, or too many scored tokens.
    """
    prompt = len(request.tokens)
    if request.scored:
        if not request.scored < prompt <= max_length + 1:
            raise InputError(
                f"{request.scored} scored tokens of {prompt}",
                f"At least one token must come before them, and at most {max_length}, the model's limit, "
                "before the last.",
            )
        return prompt - 1
    if not 0 < prompt < max_length:
        raise InputError(
            f"a prompt of {prompt} tokens",
            f"A prompt has at least one token and fewer than {max_length}, the model's limit.",
        )
    return min(prompt + request.sampling.max_new_tokens, max_length) - 1


def _largest_cell(adapter: Adapter, base: BaseModel) -> int:
    """Elements of one rank of an adapter in the layer where it has most."""
    return max(
        sum(site.in_features + site.out_features for site in own if site.name in adapter.sites)
        for own in (base.sites_of(range(index, index + 1)) for index in range(base.layer_count))
    )
