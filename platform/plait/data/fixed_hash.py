"""A separate program that makes rows of a reasoning-gym task whose generator depends on Python's hash seed.

It is run with PYTHONHASHSEED=0, reads a pickled (task, settings, size) and writes the pickled rows. It does
not import plait, so it runs wherever reasoning-gym is installed.
"""

from __future__ import annotations

import contextlib
import pickle
import sys


def main() -> None:
    """Read the request from standard input, write the rows to standard output."""
    name, config, size = pickle.load(sys.stdin.buffer)
    with contextlib.redirect_stdout(sys.stderr):  # some generators print
        from reasoning_gym import factory

        dataset = factory.DATASETS[name][0](config=config)
        rows = tuple(dataset[index] for index in range(size))
    pickle.dump(rows, sys.stdout.buffer)


if __name__ == "__main__":
    main()
