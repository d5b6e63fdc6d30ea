"""What the views learn before an iteration."""

from types import SimpleNamespace

from plait.search.attend import Attend
from plait.search.claims import Departed
from plait.search.control.orders import Orders
from plait.search.workers import Owner
from plait.tracking.board import WAITING, Board, JobRecord
from plait.tracking.names import RUNNING


def test_what_is_taken_up_in_the_same_look_is_not_cut_short() -> None:
    """Its dead owner is told of after the trial went on here."""
    board = Board("minimize", 2)
    for number in (0, 1):
        board.add(JobRecord(f"trial-{number:04d}", number, {}, state=RUNNING))
    gone = Departed(Owner("w", "vm", "7-w"), {0: 3, 1: 5})
    source = SimpleNamespace(revision=0, total=2, own={0}, departed=lambda: [gone])
    said: list[str] = []
    Attend(source, board, said.append, Orders)()
    assert [record.state for record in board.jobs.values()] == [RUNNING, WAITING]
    assert len(said) == 1
