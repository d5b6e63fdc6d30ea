"""`plait data`: the arguments of `plait sweep`; shows the text that would be trained on, and trains nothing.

A seam: only the tokeniser of the base model is loaded, none of its weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console

from plait.core.errors import EXIT_DONE
from plait.core.jobs import DataSpec
from plait.core.samples import Sample, TokenisedData
from plait.data.loading import describe_rows, load_data
from plait.engine.build import settle_dtype
from plait.search.checks import check_model
from plait.search.trials import SearchCommand
from plait.terminal.console import filled, plain, wide_console
from plait.utils.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JSON = "--json"
ROWS = 3  # rows of each source whose text is shown
SHOWN_FIRST, SHOWN_LAST = 1200, 300  # characters shown of a longer piece of text
FIGURES = ("shortest", "mean", "p50", "p95", "p99", "longest")
Piece = tuple[str, bool]


def run_data(command: SearchCommand, flags: Mapping[str, str]) -> int:
    """Show the data of every job of a command, and return the exit status.

    Raises:
        InputError: anything wrong with it, as in `plait sweep`.
    """
    from plait.models.load import load_tokeniser

    settings = settle_dtype(command.settings)  # a model is stored by its dtype
    longest = check_model(settings.model, command.probes).max_length
    tokeniser = load_tokeniser(settings.model, cache=cache_dir())
    found: list[dict[str, Any]] = []
    console = wide_console()
    for spec in dict.fromkeys(job.data for job in command.probes):
        data = load_data(
            spec,
            tokeniser,
            max_length=longest,
            capacity=settings.engine.capacity,
            cache=cache_dir(),
        )
        if JSON in flags:
            found.append(mapping(spec, data, tokeniser))
        else:
            show(spec, data, tokeniser, longest, console)
    if JSON in flags:
        print(json.dumps({"data": found}, indent=2))
    return EXIT_DONE


def mapping(spec: DataSpec, data: TokenisedData, tokeniser: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What is shown about a data set, for JSON."""
    rows = [
        {
            "row": row,
            "tokens": len(sample.tokens),
            "counted": int(sample.labels.sum()),
            "text": [{"text": text, "counted": counted} for text, counted in pieces(sample, tokeniser)],
        }
        for row, sample in _first(data)
    ]
    return {
        "source": spec.source,
        "options": spec.mapping(),
        "digest": data.digest,
        "train": data.train.summary(),
        "validation": data.validation.summary(),
        "rows": rows,
    }


def show(
    spec: DataSpec, data: TokenisedData, tokeniser: PreTrainedTokenizerBase, longest: int, console: Console
) -> None:
    """Print counts, lengths and the first rows of a data set."""
    headings = ("", "samples", "tokens", "in the loss", *FIGURES, "truncated", "dropped", "without labels")
    rows = []
    for name, split in (("training", data.train), ("validation", data.validation)):
        figures, counts = split.summary(), split.counts
        share = figures.get("labelled_share")
        rows.append(
            (
                name,
                f"{len(split):,}",
                f"{len(split.tokens):,}",
                "" if share is None else f"{100 * share:.1f} %",
                *(f"{figures[each]:,.0f}" if each in figures else "" for each in FIGURES),
                *(f"{each:,}" for each in (counts.truncated, counts.dropped, counts.unlabelled)),
            )
        )
    options = {key: value for key, value in spec.mapping().items() if value is not None}
    plain(console, f"data.source={spec.source} {json.dumps(options)}")
    console.print(filled("Samples and their lengths in tokens", headings, rows, left=("",)))
    if line := describe_rows(spec, data, longest):
        plain(console, line)
    for row, sample in _first(data):
        counted = int(sample.labels.sum())
        plain(console, f"\nrow {row}: {len(sample.tokens):,} tokens, {counted:,} of them count in the loss")
        for text, trained in pieces(sample, tokeniser):
            for line in lines(text, trained=trained):
                console.print(
                    line, markup=False, highlight=False, soft_wrap=True, style="bold" if trained else "dim"
                )


def _first(data: TokenisedData) -> Iterator[tuple[int, Sample]]:
    """The first rows that are trained on, from each source of a mixture, with their numbers."""
    begin = 0
    for count in [share.samples for share in data.train.shares] or [len(data.train)]:
        for place in range(begin, begin + min(ROWS, count)):
            yield int(data.train.rows[place]), data.train[place]
        begin += count


def pieces(sample: Sample, tokeniser: PreTrainedTokenizerBase) -> list[Piece]:
    """The text of a sample in pieces, and whether each one counts in the loss."""
    found: list[Piece] = []
    before, stop = "", 0
    for counted, run in groupby(sample.labels.tolist()):
        start, stop = stop, stop + len(list(run))
        whole = _decode(sample.tokens[:stop].tolist(), tokeniser)
        # A tokeniser may drop a leading blank, so a piece is not decoded alone, unless it begins in the
        # middle of a character.
        own = whole.startswith(before)
        text = whole[len(before) :] if own else _decode(sample.tokens[start:stop].tolist(), tokeniser)
        found.append((text, bool(counted)))
        before = whole
    return found


def _decode(tokens: list[int], tokeniser: PreTrainedTokenizerBase) -> str:
    return str(tokeniser.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def lines(text: str, *, trained: bool) -> Iterator[str]:
    """A piece of text as lines after "read" or "train"; line breaks and invisible characters are written with
    a backslash."""
    left_out = len(text) - SHOWN_FIRST - SHOWN_LAST
    if left_out > 0:
        text = f"{text[:SHOWN_FIRST]} ... ({left_out:,} characters) ... {text[-SHOWN_LAST:]}"
    head = "train" if trained else "read"
    for line in text.splitlines(keepends=True) or [""]:
        visible = "".join(each if each.isprintable() else _escaped(each) for each in line)
        yield f"  {head:<5} | {visible}"
        head = ""


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
