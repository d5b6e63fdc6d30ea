"""Imported before Triton, which decides at its import that its kernels are interpreted if there is no GPU."""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise ImportError("Triton was imported before without_gpu: its functions are not interpreted.")
    os.environ["TRITON_INTERPRET"] = "1"
