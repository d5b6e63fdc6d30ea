"""Completions of requests in a pool that has room for all."""

from __future__ import annotations

from collections.abc import Sequence

from plait.models.base import BaseModel
from plait.serve.cells import MOST_PAGE, AdapterSource
from plait.serve.engine import Engine, needed_tokens
from plait.serve.requests import Completion, Request


def complete(base: BaseModel, adapters: AdapterSource, requests: Sequence[Request]) -> list[Completion]:
    """The completions of requests, all of which run at once."""
    tokens = sum(needed_tokens(each, base.max_length) + MOST_PAGE for each in requests)
    return Engine(base, adapters, pool_tokens=tokens, most=len(requests)).complete(requests)
