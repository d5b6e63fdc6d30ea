"""Data: from a source's rows to tokenised samples.

``options`` (what may be asked for) ← ``examples`` (rows of any format as prompts, completions and turns) ←
``jsonl`` and ``tasks`` (the sources) ← ``rendering`` (text and where its loss counts) ← ``tokenising`` ←
``cache`` ← ``loading`` (what the rest of Plait calls). ``lengths`` summarises for tracking.
"""

from plait.data.lengths import LengthSummary, summary
from plait.data.loading import check_data, generation_limit, load_data, score
from plait.data.options import SOURCES, SourceOptions, parse_options

__all__ = [
    "SOURCES",
    "LengthSummary",
    "SourceOptions",
    "check_data",
    "generation_limit",
    "load_data",
    "parse_options",
    "score",
    "summary",
]
