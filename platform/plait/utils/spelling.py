"""The known name that a mistyped one most likely means."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

ALIKE = 0.6  # least ratio of difflib
NEAR = 0.75  # the same, from which on no other guess is better
LONGEST = 200  # most letters of a word that is looked up: time grows with them, and no typo is that long
LEAST_BEGUN = 3  # least letters of a name that identify it as a prefix


def alike(word: str, known: Iterable[str], *, cutoff: float = ALIKE) -> list[str]:
    """The names that ``word`` most likely means: one if it stands out, else several.

    First come names that end in the word, with only their group left out (``lr``: ``train.lr``), all of them;
    then the most similar one. If that is not very similar, keys of that name in other groups (``train.rank``:
    ``adapter.rank``) and names that begin with the word come before it.

    Args:
        word: what was written.
        known: the existing names; a dot or a slash separates a group from its keys.
        cutoff: least ratio for difflib.
    """
    if len(word) > LONGEST:
        return []
    names = list(dict.fromkeys(known))
    if ends := [name for name in names if _last(name) == word]:
        return ends
    nearest = max(names, key=lambda name: _likeness(word, name), default="")
    if _likeness(*_own(word, nearest)) >= NEAR:
        return [nearest]
    if elsewhere := [name for name in names if _last(name) == _last(word)]:
        return elsewhere
    begun = [name for name in names if name.startswith(word) and len(_last(word)) >= LEAST_BEGUN]
    return begun[:1] or ([nearest] if nearest and _likeness(word, nearest) >= cutoff else [])


def did_you_mean(word: str, known: Iterable[str], *, before: str = "", cutoff: float = ALIKE) -> str:
    """A sentence with the likely names, each preceded by ``before``, and a blank after it; "" if there are
    none."""
    found = [f"{before}{name}" for name in alike(word, known, cutoff=cutoff)]
    return f"Did you mean {' or '.join(found)}? " if found else ""


def _likeness(word: str, name: str) -> float:
    """From 0 to 1, the latter also where only the order of the letters differs (``modle``: ``model``, not
    ``mode``). A word without a group is also compared with the last word of a name."""
    word, name = word.lower(), name.lower()
    texts = [name] if _last(word) != word else [name, _last(name)]
    same = any(sorted(word) == sorted(text) for text in texts)
    return 1.0 if same else max(SequenceMatcher(None, word, text).ratio() for text in texts)


def _own(word: str, name: str) -> tuple[str, str]:
    """Both without the group that they share, which says nothing about the rest (``train.rank`` is not
    ``train.lr``)."""
    group = f"{name.rpartition('.')[0]}."
    return (word.removeprefix(group), name.removeprefix(group)) if word.startswith(group) else (word, name)


def _last(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
