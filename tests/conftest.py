"""What must be set before any test module is imported."""

from __future__ import annotations

import os

import torch

# Triton decides at its own import whether its kernels are interpreted, and other libraries import it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
