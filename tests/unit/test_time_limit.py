"""The limit of processor time of code from outside."""

from __future__ import annotations

import threading
import time

import pytest

from plait.utils.time_limit import time_limit


def spin(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_the_time_of_other_threads_does_not_count() -> None:
    other = threading.Thread(target=spin, args=(1.5,))
    with time_limit(0.1):
        other.start()
        while other.is_alive():  # signals are handled between lines of Python
            time.sleep(0.01)


def test_ones_own_time_counts_beside_that_of_others() -> None:
    other = threading.Thread(target=spin, args=(0.6,))
    began = time.thread_time()
    other.start()
    with pytest.raises(TimeoutError, match=r"0\.2 s of processor time"), time_limit(0.2):
        spin(60)
    assert time.thread_time() - began >= 0.2
    other.join()


def test_after_it_nothing_is_interrupted() -> None:
    with time_limit(0.05):
        pass
    spin(0.2)
