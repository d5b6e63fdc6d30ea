"""Texts that grow by tokens, and the choice of a token."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.serve import sampling
from plait.serve.bodies import Answer
from plait.serve.requests import Completion, GrowingText, Sampling, Score


def grown(tokens: Sequence[Any], decode: Any, stop: tuple[str, ...]) -> tuple[list[str], str, bool]:
    """The pieces of a text, the whole of it, and whether a stop text ended it."""
    text, pieces, ended = GrowingText(decode, stop), [], False
    for count in range(1, len(tokens) + 1):
        ended = text.extend(tokens[:count])
        pieces.append(text.piece(last=ended or count == len(tokens)))
        if ended:
            break
    return pieces, text.text, ended


def of_bytes(tokens: Sequence[bytes]) -> str:
    return b"".join(tokens).decode(errors="replace")


def with_blanks(tokens: Sequence[str]) -> str:
    """As SentencePiece: the blank before the first word is left out."""
    return "".join(tokens).replace("\u2581", " ").removeprefix(" ")


CUT = st.lists(st.integers(0, 40), max_size=30).map(sorted)
STOPS = st.lists(st.text("ab\u20ac\U0001f600", min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.text("ab \u20ac\U0001f600\ufffd", min_size=1, max_size=24), CUT, STOPS)
def test_pieces_are_the_whole_text_wherever_characters_are_cut(
    text: str, cut: list[int], stop: tuple[str, ...]
) -> None:
    data = text.encode()
    ends = [*(min(at, len(data)) for at in cut), len(data)]
    tokens = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    pieces, whole, ended = grown(tokens, of_bytes, stop)
    found = [at for at in map(text.find, stop) if at >= 0]
    assert "".join(pieces) == whole
    assert ended == bool(found)
    if not found:
        assert whole == text
    else:
        assert any(text.startswith(whole + each) for each in stop)


@given(st.lists(st.sampled_from(("\u2581a", "b", "\u2581", "\u2581c")), min_size=1, max_size=20))
def test_a_text_whose_first_blank_is_left_out_keeps_the_others(tokens: list[str]) -> None:
    pieces, whole, _ = grown(tokens, with_blanks, ())
    assert "".join(pieces) == whole == with_blanks(tokens)


def test_a_text_is_not_decoded_from_its_beginning_for_every_token() -> None:
    read = []

    def decode(tokens: Sequence[str]) -> str:
        read.append(len(tokens))
        return "".join(tokens)

    assert grown(["a"] * 1000, decode, ("b",))[1] == "a" * 1000
    assert sum(read) < 10 * 1000


def test_a_long_stop_text_costs_no_more_than_the_text() -> None:
    text = GrowingText("".join, ("x" * 1_000_000,))
    text.extend(["a"] * 10)
    began = time.process_time()
    assert text.piece(last=False) == "a" * 10
    assert time.process_time() - began < 1.0  # seconds; a comparison with each of its beginnings takes twenty


@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.2])
def test_tokens_are_drawn_as_often_as_they_are_likely(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    every = 20_000
    values = iter((torch.arange(every) + 0.5).div(every).tolist())
    monkeypatch.setattr(sampling, "_uniform", lambda *_: next(values))
    each = Sampling(temperature=0.8, top_p=top_p)
    drawn = sampling.choose_tokens(logits.expand(every, -1), [each] * every, [0] * every)
    shares = torch.softmax(logits[0].double() / 0.8, dim=0)
    ordered, tokens = shares.sort(descending=True)
    count = int((ordered.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else 40
    kept = tokens[:count]
    wanted = torch.zeros(40, dtype=torch.float64)
    wanted[kept] = shares[kept] / shares[kept].sum()
    found = torch.bincount(torch.tensor([each.token for each in drawn]), minlength=40).double() / every
    assert float((found - wanted).abs().max()) <= 1.01 / every


@pytest.mark.parametrize("sorted_first", [1, 3, 1000])
def test_what_is_drawn_does_not_depend_on_how_much_is_sorted(
    sorted_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(30, 40, generator=torch.Generator().manual_seed(4))
    settings = [
        Sampling(temperature=1.0, top_p=(0.05, 0.5, 0.99, 1.0)[row % 4], seed=row) for row in range(30)
    ]
    wanted = sampling.choose_tokens(logits, settings, range(30))
    monkeypatch.setattr(sampling, "SORTED", sorted_first)
    assert sampling.choose_tokens(logits, settings, range(30)) == wanted
    alone = [
        sampling.choose_tokens(logits[row : row + 1], settings[row : row + 1], [row])[0] for row in range(30)
    ]
    assert alone == wanted


def test_equally_likely_tokens_are_drawn_alike_whatever_else_is_in_the_batch() -> None:
    """Logits in bfloat16 have many that are equal; a flat row needs more than ``SORTED`` tokens."""
    made = torch.Generator().manual_seed(0)
    rows = (6 * torch.randn(100, 32_000, generator=made)).bfloat16().float()
    for seed, row in enumerate(rows):
        settings = [Sampling(temperature=1.0, top_p=0.9, seed=each) for each in (seed, 0)]
        alone = sampling.choose_tokens(row[None], settings[:1], [0])[0]
        beside = torch.stack([row, torch.zeros_like(row)])
        assert sampling.choose_tokens(beside, settings, [0, 0])[0] == alone


@pytest.mark.parametrize("seed", [5, 9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_what_is_drawn_does_not_depend_on_the_order_of_a_sum(
    top_p: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device adds up in parts, whose sizes depend on the batch. So at each place where one token follows
    another on the way from 0 to 1, the same one is drawn for any parts."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(seed))
    added = torch.Tensor.cumsum

    def in_parts(x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [added(part, dim) for part in x.split(7, dim)]
        before = torch.zeros_like(parts[0][:, -1:])
        for number, part in enumerate(parts):
            parts[number] = part + before
            before = parts[number][:, -1:]
        return torch.cat(parts, dim)

    shares = torch.softmax(logits[0].double(), 0)
    ordered = shares if top_p == 1 else shares.sort(descending=True).values
    whole = (
        float(shares.sum())
        if top_p == 1
        else float(ordered[: int((ordered.cumsum(0) < top_p).sum()) + 1].sum())
    )
    ends = [float(end) / whole for end in ordered.cumsum(0) if float(end) < whole]
    values = [math.nextafter(end, way) for end in ends for way in (0.0, end, 1.0)]
    settings = [Sampling(temperature=1.0, top_p=top_p)] * len(values)

    def drawn() -> list[int]:
        left = iter(values)
        monkeypatch.setattr(sampling, "_uniform", lambda *_: next(left))
        rows = logits.expand(len(values), -1)
        return [each.token for each in sampling.choose_tokens(rows, settings, [0] * len(values))]

    def softmax_in_parts(x: torch.Tensor, dim: int) -> torch.Tensor:
        powers = torch.exp(x - x.amax(dim, keepdim=True))
        return powers / in_parts(powers, dim)[:, -1:]

    at_once = drawn()
    monkeypatch.setattr(torch.Tensor, "cumsum", in_parts)
    monkeypatch.setattr(torch, "softmax", softmax_in_parts)
    assert drawn() == at_once


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sums_of_a_large_vocabulary_do_not_overflow(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens equally likely: the largest sum that there is."""
    values = [0.0, 0.5, math.nextafter(1.0, 0.0)]
    for count in (1, 2, 3, 1000, 262_144):
        monkeypatch.setattr(sampling, "_uniform", lambda seed, _: values[seed])
        settings = [Sampling(temperature=1.0, top_p=top_p, seed=seed) for seed in range(3)]
        found = sampling.choose_tokens(torch.zeros(3, count), settings, [0] * 3)
        kept = math.ceil(top_p * count)
        assert [each.token for each in found] == [0, kept // 2, kept - 1]


def test_a_part_of_a_character_has_no_bytes_of_its_own_text() -> None:
    scores = (Score(-1.0, ((1, -1.0),)), Score(-2.0, ((2, -2.0),)))
    words = {1: "\N{REPLACEMENT CHARACTER}", 2: "\u20ac"}
    answer = Answer("best", 1, words.__getitem__, chat=True).whole([Completion((1, 2), "", "stop", scores)])
    shown = answer["choices"][0]["logprobs"]
    assert [each["bytes"] for each in shown["content"]] == [None, [0xE2, 0x82, 0xAC]]
    assert [each["top_logprobs"][0]["bytes"] for each in shown["content"]] == [None, [0xE2, 0x82, 0xAC]]
