"""Imported last by the process that forks: Python looks no more at the objects of libraries, which stay."""

import gc

gc.freeze()
