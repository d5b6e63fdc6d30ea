"""Published losses of a sweep over learning rates and ranks, read from its tables as an oracle."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from plait.core.errors import DataError

HEADING = re.compile(r"^## (?P<model>\S+/\S+)\s*$", re.MULTILINE)
RATES = re.compile(r"^- Learning rates: \[(?P<values>[^\]]+)\]", re.MULTILINE)
RANKS = re.compile(r"^- LoRA ranks: \[(?P<values>[^\]]+)\]", re.MULTILINE)
ROW = re.compile(
    r"^\|\s*(?P<rate>[\d.]+e[+-]?\d+)\s*\|\s*(?P<rank>\d+)\s*\|\s*(?P<loss>[\d.]+)\s*\|", re.MULTILINE
)
COLUMNS = "| LR | LoRA Rank | Test NLL |"

Cell = tuple[float, int]  # learning rate, rank


@dataclass(frozen=True, slots=True)
class LossTable:
    """One model's losses.

    Attributes:
        model: its name.
        rates: all learning rates of the grid, rising.
        ranks: all ranks, rising.
        losses: by cell; what was run more than once counts with its mean, and what diverged or was not
            published is missing.
    """

    model: str
    rates: tuple[float, ...]
    ranks: tuple[int, ...]
    losses: Mapping[Cell, float]

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(self.losses.values())

    def good(self, within: float) -> set[Cell]:
        """Cells with a loss at most the share ``within`` above the best."""
        return {cell for cell, loss in self.losses.items() if loss <= self.best * (1 + within)}

    def nearest(self, rate: float, rank: float) -> Cell:
        """The cell of the grid that is nearest on logarithmic scales."""
        return (
            min(self.rates, key=lambda each: abs(math.log(each / rate))),
            min(self.ranks, key=lambda each: abs(math.log(each / rank))),
        )


def read_tables(path: Path) -> list[LossTable]:
    """The tables of all models, in the order of the file.

    Raises:
        DataError: the file cannot be read, or a table in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", "The published sweep is read from there.", "Give its path."
        ) from error
    starts = list(HEADING.finditer(text))
    if not starts:
        raise DataError(f"{path}", "It has no headings of models.")
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [
        _table(match["model"], text[match.end() : end], path) for match, end in zip(starts, ends, strict=True)
    ]


def _table(model: str, text: str, path: Path) -> LossTable:
    rates, ranks = RATES.search(text), RANKS.search(text)
    runs: dict[Cell, list[float]] = {}
    for row in ROW.finditer(text):
        runs.setdefault((float(row["rate"]), int(row["rank"])), []).append(float(row["loss"]))
    if rates is None or ranks is None or COLUMNS not in text or not runs:
        raise DataError(f"{path}: {model}", "It needs learning rates, ranks and a table of test losses.")
    table = LossTable(
        model,
        tuple(sorted(float(value) for value in rates["values"].split(","))),
        tuple(sorted(int(value) for value in ranks["values"].split(","))),
        {cell: fmean(losses) for cell, losses in runs.items()},
    )
    for rate, rank in table.losses:
        if rate not in table.rates or rank not in table.ranks:
            raise DataError(f"{path}: {model}: {rate:g}, rank {rank}", "It is not in the model's grid.")
    return table
