"""What somebody meant by a name that there is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.utils.spelling import alike, did_you_mean, edits

WORDS = st.text("abc", max_size=6)
KEYS = ["mode", "model", "data", "train", "train.lr", "train.seed", "data.task", "data.seed", "model.id"]


@given(WORDS, WORDS)
def test_edits_are_a_distance_of_at_most_the_longer_word(one: str, other: str) -> None:
    count = edits(one, other)
    assert count == edits(other, one)
    assert (count == 0) == (one == other)
    assert abs(len(one) - len(other)) <= count <= max(len(one), len(other))


@given(WORDS, st.integers(0, 5), st.sampled_from("abc"))
def test_one_edit_has_distance_one(word: str, at: int, letter: str) -> None:
    at = min(at, len(word))
    assert edits(word, word[:at] + letter + word[at:]) == 1
    swapped = word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
    assert edits(word, swapped) == (0 if swapped == word else 1)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("modle", ["model"]),  # a swap before a letter too many
        ("moel", ["model"]),
        ("modee", ["mode"]),
        ("lr", ["train.lr"]),
        ("seed", ["train.seed", "data.seed"]),
        ("tarin", ["train"]),
        ("tarin.lr", ["train.lr"]),
        ("train.lrr", ["train.lr"]),
        ("tsk", ["data.task"]),
        ("MODEL", ["model"]),
        ("data.ta", ["data.task"]),
        ("train.see", ["train.seed"]),
        ("train.task", ["data.task"]),
        ("nonsense", []),
        ("", []),
    ],
)
def test_the_most_similar_names_are_suggested(word: str, meant: list[str]) -> None:
    assert alike(word, KEYS) == meant


def test_suggestions_are_written_as_a_question() -> None:
    assert did_you_mean("modle", KEYS) == "Did you mean model? "
    assert did_you_mean("seed", KEYS) == "Did you mean train.seed or data.seed? "
    assert did_you_mean("quick", ["quickstart"], before="sweeps=", cutoff=0.5) == (
        "Did you mean sweeps=quickstart? "
    )
    assert did_you_mean("nonsense", KEYS) == ""
