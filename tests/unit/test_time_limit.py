"""The limit of processor time of code from outside."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from plait.utils.time_limit import time_limit


def spin(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_the_time_of_other_threads_does_not_count() -> None:
    other = threading.Thread(target=spin, args=(0.3,))
    with time_limit(0.1):
        other.start()
        while other.is_alive():  # signals are handled between lines of Python
            time.sleep(0.01)


def test_ones_own_time_counts_beside_that_of_others() -> None:
    other = threading.Thread(target=spin, args=(0.3,))
    began = time.thread_time()
    other.start()
    with pytest.raises(TimeoutError, match=r"0\.2 s of processor time"), time_limit(0.2):
        spin(60)
    assert time.thread_time() - began >= 0.2
    other.join()


def test_another_thread_has_a_limit_of_its_own_and_keeps_its_trace() -> None:
    found: list[object] = []

    def trace(*_: object) -> None:
        """Another one's, as of a debugger."""

    def limited() -> None:
        sys.settrace(trace)
        began = time.thread_time()
        try:
            with time_limit(0.2):
                spin(60)
        except TimeoutError as error:
            found.extend([str(error), time.thread_time() - began, sys.gettrace()])

    thread = threading.Thread(target=limited)
    thread.start()
    spin(0.3)  # it does not count
    thread.join()
    text, seconds, left = found
    assert text == "not done after 0.2 s of processor time"
    assert isinstance(seconds, float)
    assert 0.2 <= seconds < 10
    assert left is trace


def test_after_it_nothing_is_interrupted() -> None:
    with time_limit(0.05):
        pass
    spin(0.2)
