"""Data: from a source's rows to tokenised samples.

``examples`` (rows as prompts, completions and turns) ← ``sources`` (what a source is) ← ``jsonl``
and ``tasks`` (the sources), ``tokenising`` (examples as text and as samples) ← ``loading`` (what the rest of
Plait calls).
"""
