"""Data: from a source's rows to tokenised samples.

``examples`` (rows as prompts, completions and turns) ← ``sources`` (what a source is) ← ``jsonl``
and ``tasks`` (the sources), ``tokenising`` (examples as text and as samples) ← ``loading`` (what the rest of
Plait calls). ``lengths`` summarises for tracking.
"""

from plait.data.lengths import LengthSummary, summary
from plait.data.loading import check_data, generation_limit, load_data, score
from plait.data.sources import SOURCES, parse_options

__all__ = [
    "SOURCES",
    "LengthSummary",
    "check_data",
    "generation_limit",
    "load_data",
    "parse_options",
    "score",
    "summary",
]
