"""The grouped backend: torch's matrix products, segment by segment, on packed rows."""

from __future__ import annotations

from plait_kernels.reference import backward, forward

__all__ = ["backward", "forward"]
