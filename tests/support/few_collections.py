"""Imported first by the process that forks: Python goes through all objects a tenth as often."""

import gc

gc.set_threshold(*gc.get_threshold()[:2], 100)
