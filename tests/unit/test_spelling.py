"""What somebody meant by a name that there is not."""

import pytest

from plait.utils.spelling import alike, did_you_mean

KEYS = ["mode", "model", "data", "train", "train.lr", "train.seed", "data.task", "data.seed", "model.id"]


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
        ("train.id", ["model.id"]),  # not train.lr, with which it has only the group in common
        ("train.lt", ["train.lr"]),
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
