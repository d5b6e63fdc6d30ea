"""Imported last by the process that forks: Python looks no more at the objects of libraries, which stay, and
does not take them apart at its end: that takes a second, and Triton's bindings report those that are left."""

import atexit
import gc
import os

gc.freeze()
atexit.register(os._exit, 0)  # registered last, it comes first; what is forked ends without it
