"""The known name that a mistyped one most likely means."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

ALIKE = 0.6  # least ratio of difflib, used if counting edits finds nothing
LETTERS_AN_EDIT = 4  # one letter may be wrong for so many letters of a word
LONGEST = 200  # most letters of a word that is looked up: time grows with them, and no typo is that long
LEAST_BEGUN = 3  # least letters of a name that identify it as a prefix


def edits(one: str, other: str) -> int:
    """The optimal string alignment distance of two words: letters inserted, deleted or changed, and
    neighbours swapped."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        earlier, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                best = min(best, earlier[j - 2] + 1)
            row.append(best)
    return row[-1]


def alike(word: str, known: Iterable[str], *, cutoff: float = ALIKE) -> list[str]:
    """The names that ``word`` most likely means: one if it stands out, else several.

    First come names that end in the word, with only their group left out (``lr``: ``train.lr``), all of them.
    Then those with the fewest edits; among equals, a swap of neighbours precedes a missing or extra letter
    (``modle``: ``model``, not ``mode``). If none is near enough, keys of that name in other groups
    (``train.rank``: ``adapter.rank``), names that begin with the word, and those that difflib finds.

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
    nearest = min(names, key=lambda name: _rank(word, name), default=None)
    if nearest is not None and _rank(word, nearest)[0] <= _allowed(word, nearest):
        return [nearest]
    if elsewhere := [name for name in names if _last(name) == _last(word)]:
        return elsewhere
    begun = [name for name in names if name.startswith(word) and len(_last(word)) >= LEAST_BEGUN]
    return begun[:1] or get_close_matches(word, names, n=1, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str], *, before: str = "", cutoff: float = ALIKE) -> str:
    """A sentence with the likely names, each preceded by ``before``, and a blank after it; "" if there are
    none."""
    found = [f"{before}{name}" for name in alike(word, known, cutoff=cutoff)]
    return f"Did you mean {' or '.join(found)}? " if found else ""


def _rank(word: str, name: str) -> tuple[int, bool, bool, float]:
    """A key that sorts the likeliest first, mainly by edits. A word without a group is also compared with the
    last word of a name, which counts as slightly less alike."""
    word, name = word.lower(), name.lower()
    texts = dict.fromkeys([name] if _last(word) != word else [name, _last(name)])
    return min(
        (edits(word, text), text != name, sorted(word) != sorted(text), -_ratio(word, text)) for text in texts
    )


def _allowed(word: str, name: str) -> int:
    """The most edits allowed between two names; a group that both share does not count."""
    own = word.removeprefix(f"{name.rpartition('.')[0]}.")
    return max(1, len(own) // LETTERS_AN_EDIT)


def _ratio(word: str, text: str) -> float:
    return SequenceMatcher(None, word, text).ratio()


def _last(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
