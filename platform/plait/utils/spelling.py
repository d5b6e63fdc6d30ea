"""The known name that a mistyped one most likely means."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

ALIKE = 0.6  # of difflib's ratio, if letters alone do not tell
LETTERS_AN_EDIT = 4  # of a word, for each that may be wrong
LONGEST = 200  # letters of a word that is looked up: time grows with them, and no typing error is that long
LEAST_BEGUN = 3  # letters of a name that tell which is meant


def edits(one: str, other: str) -> int:
    """Letters put in, left out or changed, and neighbours swapped, that turn one word into the other: the
    optimal string alignment distance."""
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
    """The names that ``word`` most likely stands for, the likeliest alone wherever one is.

    A name that ends in the word is meant if only its group was left out (``lr``: ``train.lr``); of several
    such, all. Then come the fewest edits; of equally many, a swap of neighbours before a letter too many or
    too few (``modle``: ``model``, not ``mode``). Where that is too far, a name that begins with the word, and
    then whatever difflib finds.

    Args:
        word: what was written.
        known: what there is; a dot or a slash parts a group from its keys.
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
    begun = [name for name in names if name.startswith(word) and len(_last(word)) >= LEAST_BEGUN]
    return begun[:1] or get_close_matches(word, names, n=1, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str], *, before: str = "", cutoff: float = ALIKE) -> str:
    """A sentence with the names that are alike, each with ``before`` in front, and a blank after it; "" if
    none is."""
    found = [f"{before}{name}" for name in alike(word, known, cutoff=cutoff)]
    return f"Did you mean {' or '.join(found)}? " if found else ""


def _rank(word: str, name: str) -> tuple[int, bool, bool, float]:
    """Sorts the likeliest first, by edits before all. A word without a group is compared with the last word
    of a name, too, as a little less alike."""
    word, name = word.lower(), name.lower()
    texts = dict.fromkeys([name] if _last(word) != word else [name, _last(name)])
    return min(
        (edits(word, text), text != name, sorted(word) != sorted(text), -_ratio(word, text)) for text in texts
    )


def _allowed(word: str, name: str) -> int:
    """Edits that may lie between two names; the group that both have does not count."""
    own = word.removeprefix(f"{name.rpartition('.')[0]}.")
    return max(1, len(own) // LETTERS_AN_EDIT)


def _ratio(word: str, text: str) -> float:
    return SequenceMatcher(None, word, text).ratio()


def _last(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
