"""The program of one process of a run, ``python -m plait.distributed``: what it does is
``plait.distributed.process``, which is imported only once it is set how Python collects objects."""

from __future__ import annotations

import sys

from plait.utils.program import Ending, seldom_collected

if __name__ == "__main__":
    ending = Ending()
    with seldom_collected():
        from plait.distributed.process import main

        status = main()
    ending.leave(status)
    sys.exit(status)
