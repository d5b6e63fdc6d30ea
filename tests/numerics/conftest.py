"""What the kernels' interpreter needs to be told before the first of them runs."""

from __future__ import annotations

import os

import without_gpu  # noqa: F401  # a folder given by its name has this read before the root's pytest_configure

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted_once import compute_only_what_counts, describe_once, prepare_once

    compute_only_what_counts()
    describe_once()
    prepare_once()
