"""Imported before Triton, which decides at its import that its kernels are interpreted if there is no GPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
