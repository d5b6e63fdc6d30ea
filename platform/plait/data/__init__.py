"""Data: turns a source's rows into tokenised samples.

``examples`` (rows as prompts, completions and messages) ← ``sources`` (what a source is) ← ``files`` (with
``formats``), ``hub``, ``tasks`` and ``mixture`` (the sources), ``tokenising`` (examples as text and as
samples), ``overlong`` (which of them are trained on), ``cache`` ← ``loading`` (what the rest of Plait calls).
"""
